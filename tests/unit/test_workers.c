/* SPDX-License-Identifier: MIT */
/*
 * Threads of the CPU backend: every worker once a job, every task once a run, clean ends, refusals as
 * statuses. The same tests are worth running under a thread sanitizer.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support_cpu.h"

/* Threads that may still be started; -1: as many as the system gives. */
static int threads_left = -1;

typedef int (*create_thread)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

/* In place of the C library's, for the whole executable. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument)
{
    create_thread real;
    void *found = dlsym(RTLD_NEXT, "pthread_create");
    memcpy(&real, &found, sizeof real);
    if (threads_left == 0) {
        return EAGAIN;
    }
    threads_left -= threads_left > 0;
    return real(thread, attributes, start, argument);
}

#define WORKERS_MAX 16

typedef struct visits {
    int counts[WORKERS_MAX]; /* not atomic: a worker number is never in use twice at a time */
} visits;

static void count_visit(void *user, int32_t worker)
{
    ((visits *)user)->counts[worker]++;
}

static void jobs_visit_every_worker_once(void **state)
{
    const int32_t spins[] = {0, 50};
    (void)state;
    for (size_t s = 0; s < sizeof spins / sizeof spins[0]; s++) {
        for (int32_t threads = 1; threads <= 8; threads++) {
            fmlai_error error = {0};
            fmlai_workers *workers = NULL;
            visits v = {{0}};
            assert_int_equal(fmlai_workers_create(&cpu_allocator, threads, spins[s], &workers, &error),
                             FMLA_OK);
            for (int32_t i = 1; i <= 200; i++) {
                fmlai_workers_run(workers, count_visit, &v);
                for (int32_t w = 0; w < WORKERS_MAX; w++) {
                    assert_int_equal(v.counts[w], w < threads ? i : 0);
                }
            }
            fmlai_workers_destroy(workers);
        }
    }
}

/* Long pauses put workers and caller to sleep; both must wake. */
static void pause_worker(void *user, int32_t worker)
{
    struct timespec pause = {.tv_nsec = worker == 0 ? 0 : 2000000};
    nanosleep(&pause, NULL);
    count_visit(user, worker);
}

static void sleeping_workers_wake(void **state)
{
    struct timespec pause = {.tv_nsec = 2000000};
    fmlai_error error = {0};
    fmlai_workers *workers = NULL;
    visits v = {{0}};
    (void)state;
    assert_int_equal(fmlai_workers_create(&cpu_allocator, 4, 10, &workers, &error), FMLA_OK);
    for (int32_t i = 0; i < 30; i++) {
        nanosleep(&pause, NULL);
        fmlai_workers_run(workers, pause_worker, &v);
    }
    fmlai_workers_destroy(workers);
    for (int32_t w = 0; w < 4; w++) {
        assert_int_equal(v.counts[w], 30);
    }
}

static void pools_end_without_work(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 50; i++) {
        fmlai_error error = {0};
        fmlai_workers *workers = NULL;
        assert_int_equal(fmlai_workers_create(&cpu_allocator, 3, i % 2 * 20, &workers, &error), FMLA_OK);
        fmlai_workers_destroy(workers);
    }
    fmlai_workers_destroy(NULL);
}

static void refused_threads_are_a_status(void **state)
{
    (void)state;
    for (int started = 0; started < 5; started++) {
        fmlai_error error = {0};
        fmlai_workers *workers = (fmlai_workers *)&error;
        threads_left = started;
        fmla_status status = fmlai_workers_create(&cpu_allocator, 6, 100, &workers, &error);
        threads_left = -1;
        assert_int_equal(status, FMLA_ERROR_OUT_OF_MEMORY);
        assert_int_equal(error.status, status);
        assert_non_null(strstr(error.text, "of 6"));
        assert_null(workers);
    }
}

static void *no_memory(void *user, size_t size)
{
    (void)user;
    (void)size;
    return NULL;
}

static void refused_memory_is_a_status(void **state)
{
    fmlai_allocator none = cpu_allocator;
    fmlai_error error = {0};
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    void *opened = &error;
    fmlai_workers *workers = NULL;
    (void)state;
    none.alloc = no_memory;
    assert_int_equal(fmlai_workers_create(&none, 2, 0, &workers, &error), FMLA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(fmlai_cpu_backend.open(&config, &none, &opened, &error), FMLA_ERROR_OUT_OF_MEMORY);
    assert_null(opened);
}

/* ---- tasks ------------------------------------------------------------------------------------------- */

typedef struct tasks {
    int64_t count;
    unsigned char done[5000]; /* by task */
    int in_use[WORKERS_MAX];  /* by worker, not atomic */
    atomic_int faults;
    int32_t threads;
} tasks;

static void do_task(void *user, int64_t i, int32_t worker)
{
    tasks *t = user;
    if (worker < 0 || worker >= t->threads || i < 0 || i >= t->count || t->in_use[worker] != 0) {
        atomic_fetch_add(&t->faults, 1);
        return;
    }
    t->in_use[worker] = 1;
    t->done[i]++;
    t->in_use[worker] = 0;
}

static void run_all(const fmlai_cpu *cpu)
{
    const int64_t counts[] = {0, 1, 2, 3, 7, 64, 5000};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        static tasks t;
        memset(&t, 0, sizeof t);
        t.count = counts[c];
        t.threads = cpu->threads;
        fmlai_cpu_run(cpu, t.count, do_task, &t);
        assert_int_equal(atomic_load(&t.faults), 0);
        for (int64_t i = 0; i < 5000; i++) {
            assert_int_equal(t.done[i], i < t.count);
        }
    }
}

static void every_task_runs_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 5; threads++) {
        fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, threads);
        assert_int_equal(fmlai_cpu_backend.threads(cpu), threads);
        for (int32_t i = 0; i < 10; i++) {
            run_all(cpu);
        }
        cpu_close(cpu);
    }
}

/* A host's pool: backwards, on the calling thread. */
static void backwards(void *pool, int64_t count, fmla_parallel_body body, void *user)
{
    *(int64_t *)pool += count;
    for (int64_t i = count; i-- > 0;) {
        body(user, i);
    }
}

static void hosts_pool_runs_the_tasks(void **state)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmlai_error error = {0};
    int64_t calls = 0;
    void *opened = NULL;
    (void)state;
    config.isa = FMLA_ISA_SCALAR;
    config.threads = 4;
    config.parallel_for = backwards;
    config.parallel_for_pool = &calls;
    threads_left = 0;
    fmla_status status = fmlai_cpu_backend.open(&config, &cpu_allocator, &opened, &error);
    threads_left = -1;
    assert_int_equal(status, FMLA_OK);
    run_all(opened);
    assert_int_equal(calls, 0 + 0 + 2 + 3 + 4 + 4 + 4);
    fmlai_cpu_backend.close(opened);
}

/* ---- features ---------------------------------------------------------------------------------------- */

static void tiers_that_are_not_usable_are_refused(void **state)
{
    int32_t refused = 0;
    (void)state;
    for (int32_t isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        fmlai_error error = {0};
        void *opened = NULL;
        config.isa = isa;
        config.threads = 1;
        fmla_status status = fmlai_cpu_backend.open(&config, &cpu_allocator, &opened, &error);
        if (fmlai_isa_usable((fmla_isa)isa)) {
            assert_int_equal(status, FMLA_OK);
            assert_int_equal(fmlai_cpu_backend.isa(opened), isa);
            fmlai_cpu_backend.close(opened);
        } else {
            assert_int_equal(status, FMLA_ERROR_UNSUPPORTED);
            assert_non_null(strstr(error.text, fmla_isa_name((fmla_isa)isa)));
            assert_non_null(strstr(error.text, "usable here: "));
            assert_non_null(strstr(error.text, "scalar"));
            refused++;
        }
    }
    assert_true(refused > 0); /* no machine has both AVX2 and NEON */
    assert_true(fmlai_isa_usable(fmlai_isa_best()));
    assert_true(fmlai_isa_usable(FMLA_ISA_SCALAR));
    /* AMX is the other tier with some kernels replaced: nobody has it without that one. */
    assert_true(!fmlai_isa_built(FMLA_ISA_AMX) || fmlai_isa_built(FMLA_ISA_AVX512BF16));
    assert_true(!fmlai_isa_usable(FMLA_ISA_AMX) || fmlai_isa_usable(FMLA_ISA_AVX512BF16));
}

static void strict_contexts_keep_weights_in_f32(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        fmlai_error error = {0};
        void *opened = NULL;
        config.isa = *isa;
        config.threads = 1;
        config.strict = 1;
        assert_int_equal(fmlai_cpu_backend.open(&config, &cpu_allocator, &opened, &error), FMLA_OK);
        assert_int_equal(((fmlai_cpu *)opened)->tile_bf16.dtype, FMLA_F32);
        fmlai_cpu_backend.close(opened);
    }
}

static void device_info_describes_the_machine(void **state)
{
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    fmlai_error error = {0};
    (void)state;
    assert_int_equal(fmlai_cpu_backend.device_info(0, &info, &error), FMLA_OK);
    assert_int_equal(info.device, FMLA_DEVICE_CPU);
    assert_int_equal(info.compute_units, fmlai_processors());
    assert_true(info.compute_units >= 1);
    assert_int_equal(info.capability, fmlai_isa_best());
    assert_true(info.memory_bytes > 0);
    assert_true(info.shared_memory_bytes >= 64 << 10);
    assert_true(strlen(info.name) > 0);
    assert_non_null(strstr(info.kernels, "scalar"));
    assert_int_equal(fmlai_cpu_backend.device_info(1, &info, &error), FMLA_ERROR_NO_DEVICE);
    assert_int_equal(fmlai_cpu_backend.device_info(-1, &info, &error), FMLA_ERROR_NO_DEVICE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_visit_every_worker_once),
        cmocka_unit_test(sleeping_workers_wake),
        cmocka_unit_test(pools_end_without_work),
        cmocka_unit_test(refused_threads_are_a_status),
        cmocka_unit_test(refused_memory_is_a_status),
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(hosts_pool_runs_the_tasks),
        cmocka_unit_test(tiers_that_are_not_usable_are_refused),
        cmocka_unit_test(strict_contexts_keep_weights_in_f32),
        cmocka_unit_test(device_info_describes_the_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
