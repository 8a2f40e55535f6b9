/* SPDX-License-Identifier: MIT */
/*
 * workers.c: the library's own threads. One job at a time: every worker (the calling thread is worker 0) runs
 * job(user, worker) once, and fmlai_workers_run returns when all have. Idle workers spin for a while, because
 * the next call of a decoding step comes within microseconds and waking a sleeper costs tens of them, then
 * sleep on a condition.
 *
 * Sleeping is a handshake on two atomics: a worker adds itself to `sleepers`, then looks at `generation`; the
 * caller advances `generation`, then looks at `sleepers`. Both are sequentially consistent, so one of them
 * sees the other. `waiting` and `running` do the same for the caller at the end of a job.
 *
 * The threads do not survive fork(): a child process must make its own context.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "cpu.h"

typedef struct member {
    fmlai_workers *workers;
    pthread_t thread;
    int32_t number;
} member;

struct fmlai_workers {
    fmlai_allocator allocator;
    int32_t threads; /* the caller included */
    int64_t spin_ns;
    pthread_mutex_t mutex;
    pthread_cond_t wake; /* workers: a new generation */
    pthread_cond_t done; /* caller: running is 0 */
    void (*job)(void *user, int32_t worker);
    void *user;
    bool stop; /* with job, user: written before generation is advanced, read after it was seen */
    _Alignas(64) atomic_uint generation;
    atomic_int sleepers;
    _Alignas(64) atomic_int running;
    atomic_int waiting;
    _Alignas(64) member members[]; /* threads - 1: workers 1.. */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* True as soon as *value differs from `from`, false when the time is up. */
static bool spin_until_changed(atomic_uint *value, unsigned from, int64_t spin_ns)
{
    if (atomic_load_explicit(value, memory_order_acquire) != from) {
        return true;
    }
    if (spin_ns <= 0) {
        return false;
    }
    int64_t end = now_ns() + spin_ns;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != from) {
                return true;
            }
            relax();
        }
    } while (now_ns() < end);
    return false;
}

static unsigned wait_for_job(fmlai_workers *w, unsigned seen)
{
    if (!spin_until_changed(&w->generation, seen, w->spin_ns)) {
        pthread_mutex_lock(&w->mutex);
        atomic_fetch_add(&w->sleepers, 1);
        while (atomic_load(&w->generation) == seen) {
            pthread_cond_wait(&w->wake, &w->mutex);
        }
        atomic_fetch_sub(&w->sleepers, 1);
        pthread_mutex_unlock(&w->mutex);
    }
    return seen + 1; /* no generation is skipped: the next starts only when this worker has finished */
}

static void *worker_main(void *argument)
{
    member *self = argument;
    fmlai_workers *w = self->workers;
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_job(w, seen);
        if (w->stop) {
            return NULL;
        }
        w->job(w->user, self->number);
        if (atomic_fetch_sub(&w->running, 1) == 1 && atomic_load(&w->waiting)) {
            pthread_mutex_lock(&w->mutex);
            pthread_cond_signal(&w->done);
            pthread_mutex_unlock(&w->mutex);
        }
    }
}

/* Publishes what was written to job, user and stop. */
static void advance(fmlai_workers *w)
{
    atomic_fetch_add(&w->generation, 1);
    if (atomic_load(&w->sleepers) > 0) {
        pthread_mutex_lock(&w->mutex);
        pthread_cond_broadcast(&w->wake);
        pthread_mutex_unlock(&w->mutex);
    }
}

static void wait_for_members(fmlai_workers *w)
{
    int64_t end = w->spin_ns > 0 ? now_ns() + w->spin_ns : 0;
    while (atomic_load_explicit(&w->running, memory_order_acquire) != 0) {
        if (w->spin_ns > 0 && now_ns() < end) {
            relax();
            continue;
        }
        pthread_mutex_lock(&w->mutex);
        atomic_store(&w->waiting, 1);
        while (atomic_load(&w->running) != 0) {
            pthread_cond_wait(&w->done, &w->mutex);
        }
        atomic_store(&w->waiting, 0);
        pthread_mutex_unlock(&w->mutex);
    }
}

void fmlai_workers_run(fmlai_workers *w, void (*job)(void *user, int32_t worker), void *user)
{
    w->job = job;
    w->user = user;
    atomic_store_explicit(&w->running, w->threads - 1, memory_order_relaxed);
    advance(w);
    job(user, 0);
    wait_for_members(w);
}

/* Ends and frees a pool of which members 1..threads-1 were started. */
static void end_members(fmlai_workers *w)
{
    w->stop = true;
    advance(w);
    for (int32_t i = 0; i < w->threads - 1; i++) {
        pthread_join(w->members[i].thread, NULL);
    }
    pthread_cond_destroy(&w->done);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->mutex);
    w->allocator.release(w->allocator.user, w);
}

fmla_status fmlai_workers_create(const fmlai_allocator *allocator, int32_t threads, int32_t spin_us,
                                 fmlai_workers **workers, fmlai_error *error)
{
    size_t size = sizeof(fmlai_workers) + (size_t)(threads - 1) * sizeof(member);
    fmlai_workers *w = allocator->alloc(allocator->user, size);
    sigset_t all, before;
    int failure = 0;

    *workers = NULL;
    if (!w) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for %d CPU threads (%zu bytes)",
                          threads, size);
    }
    memset(w, 0, size);
    w->allocator = *allocator;
    w->spin_ns = (int64_t)spin_us * 1000;
    w->threads = 1;
    atomic_init(&w->generation, 0);
    atomic_init(&w->sleepers, 0);
    atomic_init(&w->running, 0);
    atomic_init(&w->waiting, 0);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->wake, NULL);
    pthread_cond_init(&w->done, NULL);

    /* The host's signals are for the host's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int32_t i = 1; i < threads && failure == 0; i++) {
        member *m = &w->members[i - 1];
        m->workers = w;
        m->number = i;
        failure = pthread_create(&m->thread, NULL, worker_main, m);
        w->threads += failure == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure != 0) {
        int32_t started = w->threads;
        end_members(w);
        return fmlai_fail(
            error, FMLA_ERROR_OUT_OF_MEMORY,
            "the operating system refused CPU thread %d of %d (errno %d); config.threads may ask for fewer",
            started + 1, threads, failure);
    }
    *workers = w;
    return FMLA_OK;
}

void fmlai_workers_destroy(fmlai_workers *workers)
{
    if (workers) {
        end_members(workers);
    }
}
