/* SPDX-License-Identifier: MIT */
/* Contexts in many threads: independent ones do not disturb each other; a shared one takes one call at a time. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

#define THREADS 4
#define ROUNDS  6

static unsigned char *expected; /* outputs of all operations, from one thread */

static calls *new_calls(void)
{
    calls *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    if (c != NULL) {
        memset(c, 0, sizeof *c);
    }
    return c;
}

static bool create(fmla_context **context, int32_t threads)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    config.device = FMLA_DEVICE_CPU;
    config.threads = threads;
    return fmla_context_create(&config, context) == FMLA_OK;
}

static bool run_all(calls *c)
{
    calls_reset(c);
    for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
        if (calls_run(c, (fmla_operation)op) != FMLA_OK) {
            return false;
        }
    }
    return true;
}

static int set_up(void **state)
{
    (void)state;
    calls *c = new_calls();
    assert_non_null(c);
    assert_true(create(&c->context, 1));
    assert_true(run_all(c));
    expected = malloc(sizeof c->outputs);
    assert_non_null(expected);
    memcpy(expected, c->outputs, sizeof c->outputs);
    fmla_context_destroy(c->context);
    free(c);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(expected);
    return 0;
}

/* Runs in a thread of its own, where a failed assertion must not jump: what went wrong is returned. */
static void *own_contexts(void *number)
{
    calls *c = new_calls();
    const char *wrong = NULL;
    for (int32_t round = 0; c != NULL && wrong == NULL && round < ROUNDS; round++) {
        int32_t threads = 1 + (*(int32_t *)number + round) % 3;
        if (!create(&c->context, threads)) {
            wrong = "no context";
        } else if (!run_all(c)) {
            wrong = fmla_status_string(FMLA_ERROR_INVALID_ARGUMENT);
        } else if (memcmp(expected, c->outputs, sizeof c->outputs) != 0) {
            wrong = "other bits";
        }
        /* Each thread has its own sentence about its own failed creation. */
        fmla_context_config bad = FMLA_CONTEXT_CONFIG_INIT;
        fmla_context *none;
        char words[64];
        bad.cuda_kernels = 10 + *(int32_t *)number;
        snprintf(words, sizeof words, "cuda_kernels: %d;", (int)bad.cuda_kernels);
        if (fmla_context_create(&bad, &none) != FMLA_ERROR_INVALID_ARGUMENT ||
            strstr(fmla_last_create_error(), words) == NULL) {
            wrong = "another thread's words";
        }
        fmla_context_destroy(c->context);
        c->context = NULL;
    }
    free(c);
    return (void *)(uintptr_t)wrong;
}

static void promise_10_contexts_in_many_threads(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    int32_t numbers[THREADS];
    for (int32_t i = 0; i < THREADS; i++) {
        numbers[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, own_contexts, &numbers[i]), 0);
    }
    for (int32_t i = 0; i < THREADS; i++) {
        void *wrong;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        if (wrong != NULL) {
            fail_msg("thread %d: %s", (int)i, (const char *)wrong);
        }
    }
}

typedef struct shared {
    fmla_context *context;
    atomic_int ok, busy, other;
} shared;

static void *hammer(void *user)
{
    shared *s = user;
    calls *c = new_calls();
    if (c == NULL) {
        s->other++;
        return NULL;
    }
    c->context = s->context;
    calls_reset(c);
    for (int32_t i = 0; i < 200; i++) {
        fmla_operation op = (fmla_operation)(i % FMLA_OP_COUNT);
        fmla_status status = calls_run(c, op);
        *(status == FMLA_OK ? &s->ok : status == FMLA_ERROR_BUSY ? &s->busy : &s->other) += 1;
    }
    free(c);
    return NULL;
}

/* Whoever comes second gets BUSY, or his turn: nothing else, and never two at a time. */
static void promise_10_a_shared_context_takes_one_call_at_a_time(void **state)
{
    (void)state;
    shared s = {.context = NULL};
    pthread_t threads[THREADS];
    assert_true(create(&s.context, 2));
    for (int32_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, hammer, &s), 0);
    }
    for (int32_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    assert_int_equal(s.other, 0);
    assert_true(s.ok > 0);
    assert_int_equal(s.ok + s.busy, THREADS * 200);
    fmla_context_destroy(s.context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_10_contexts_in_many_threads),
        cmocka_unit_test(promise_10_a_shared_context_takes_one_call_at_a_time),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
