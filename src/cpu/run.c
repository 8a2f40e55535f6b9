/* SPDX-License-Identifier: MIT */
/*
 * run.c: tasks over workers. Tasks are handed out in order from one counter; who runs what is left to chance,
 * so results must not depend on it.
 */
#include <stdatomic.h>

#include "cpu.h"

typedef struct run {
    _Alignas(64) atomic_llong next;
    _Alignas(64) int64_t count;
    void (*body)(void *user, int64_t i, int32_t worker);
    void *user;
} run;

static void run_worker(void *user, int32_t worker)
{
    run *r = user;
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed);
        if (i >= r->count) {
            return;
        }
        r->body(r->user, i, worker);
    }
}

/* One call of the caller's parallel_for is one worker: its index is the worker's number. */
static void run_hosted(void *user, int64_t i)
{
    run_worker(user, (int32_t)i);
}

void fmlai_cpu_run(const fmlai_cpu *cpu, int64_t count, void (*body)(void *user, int64_t i, int32_t worker),
                   void *user)
{
    if (count <= 1 || cpu->threads <= 1 || (!cpu->parallel_for && !cpu->workers)) {
        for (int64_t i = 0; i < count; i++) {
            body(user, i, 0);
        }
        return;
    }
    run r = {.count = count, .body = body, .user = user};
    atomic_init(&r.next, 0);
    if (cpu->parallel_for) {
        cpu->parallel_for(cpu->parallel_for_pool, count < cpu->threads ? count : cpu->threads, run_hosted,
                          &r);
    } else {
        fmlai_workers_run(cpu->workers, run_worker, &r);
    }
}
