/* SPDX-License-Identifier: MIT */
/* emulate.cpp: fibres, warp instructions and the part of the CUDA runtime that the plugin's host side calls. */
#include "emulate.h"

#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "ptx/math.cuh"
#include "ptx/matrix.cuh"

uint32_t emu_seed(uint32_t which)
{
    const char *text = getenv("FLASHMLA_EMULATE_SEED");
    return which + 2654435761u * (text ? (uint32_t)strtoul(text, NULL, 10) : 0);
}

enum state { READY, IN_WARP, IN_BARRIER, YIELDED, DONE };

struct copy {
    uint32_t to;
    const void *from;
    int size, bytes;
    long group;
};

struct fibre {
    emu_thread index;
    void *stack_pointer;
    unsigned char *stack;
    state at;
    std::vector<copy> copies;
    long group;
};

struct warp {
    void *inputs[32];
    int arrived, asleep; /* asleep: rounds that go on without it */
};

#define STACK_BYTES  (256 * 1024)
#define SHARED_BYTES (232448)

static fibre fibres[8192];
static warp warps[256];
static int thread_count, block_threads; /* of the cluster, of a block */
static struct block_barrier {
    int arrived, sum, result;
} block_barriers[16];
static void *scheduler_stack;
static void (*entry)(void);
static fibre *running;
alignas(1024) static unsigned char shared[16][SHARED_BYTES];
static uint32_t seed = emu_seed(1);

emu_thread *emu_current;

extern "C" void emu_switch(void **save, void *load);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

static void leave(state at)
{
    running->at = at;
    emu_switch(&running->stack_pointer, scheduler_stack);
}

static void start_fibre(void)
{
    entry();
    leave(DONE);
}

static void enter(fibre *f)
{
    running = f;
    emu_current = &f->index;
    f->at = READY;
    emu_switch(&scheduler_stack, f->stack_pointer);
}

static void make(fibre *f)
{
    if (!f->stack) {
        f->stack = (unsigned char *)aligned_alloc(64, STACK_BYTES);
    }
    void **top = (void **)(f->stack + STACK_BYTES - 64);
    *--top = NULL;
    *--top = (void *)start_fibre;
    for (int i = 0; i < 6; i++) {
        *--top = NULL;
    }
    f->stack_pointer = top;
    f->at = READY;
    f->copies.clear();
    f->group = 0;
    f->index.impl = f;
}

unsigned emu_rank(void)
{
    return (unsigned)((int)(running - fibres) / block_threads);
}

int emu_cluster_threads(void)
{
    return thread_count;
}

unsigned char *emu_shared_of(unsigned rank)
{
    if ((int)rank >= thread_count / block_threads) {
        fprintf(stderr, "emulated cluster: no block of rank %u\n", rank);
        abort();
    }
    return shared[rank];
}

unsigned char *emu_shared(void)
{
    return shared[emu_rank()];
}

/* Runs a warp until none of its lanes can go on. */
static bool run_warp(int w)
{
    bool moved = false;
    for (bool again = true; again;) {
        again = false;
        for (int lane = 0; lane < 32 && w * 32 + lane < thread_count; lane++) {
            fibre *f = &fibres[w * 32 + lane];
            if (f->at == READY) {
                enter(f);
                again = moved = true;
            }
        }
    }
    return moved;
}

static void release_barrier(int block)
{
    block_barrier *b = &block_barriers[block];
    int alive = 0, first = block * block_threads;
    for (int i = first; i < first + block_threads; i++) {
        alive += fibres[i].at != DONE;
    }
    if (alive > 0 && b->arrived == alive) {
        b->arrived = 0;
        b->result = b->sum;
        b->sum = 0;
        for (int i = first; i < first + block_threads; i++) {
            if (fibres[i].at == IN_BARRIER) {
                fibres[i].at = READY;
            }
        }
    }
}

/* Fibres that found nothing new go on in the next round. */
static int wake_yielded(void)
{
    int woken = 0;
    for (int i = 0; i < thread_count; i++) {
        if (fibres[i].at == YIELDED) {
            fibres[i].at = READY;
            woken++;
        }
    }
    return woken;
}

static uint32_t random_number(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 16;
}

/* Now and then a warp stands still for a while, as on a card: so the others get as far ahead of it as barriers let them,
 * and who only looks on may find one two phases further. */
#define SLEEP_EVERY 64
#define SLEEP_MOST  64

static bool sleeps(warp *w)
{
    if (w->asleep == 0 && random_number() % SLEEP_EVERY == 0) {
        w->asleep = 1 + (int)(random_number() % SLEEP_MOST);
    }
    w->asleep -= w->asleep > 0;
    return w->asleep > 0;
}

static void run_block(void)
{
    int idle = 0; /* rounds in which fibres only looked */
    int count = (thread_count + 31) / 32;
    for (;;) {
        bool moved = false, done = true;
        int first = (int)random_number() % count;
        for (int i = 0; i < count; i++) {
            const int next = (first + i) % count;
            moved = sleeps(&warps[next]) || run_warp(next) || moved;
        }
        for (int block = 0; block < thread_count / block_threads; block++) {
            release_barrier(block);
        }
        for (int i = 0; i < thread_count; i++) {
            done = done && fibres[i].at == DONE;
            moved = moved || fibres[i].at == READY;
        }
        if (done) {
            return;
        }
        bool late = emu_hopper_round();
        idle = late ? 0 : idle + 1;
        moved = (wake_yielded() > 0 && idle < 10000) || moved;
        if (!moved) {
            fprintf(stderr, "emulated block hangs: threads wait for fellows that never come\n");
            abort();
        }
    }
}

void emu_yield(void)
{
    leave(YIELDED);
}

int emu_thread_id(void)
{
    return (int)(running - fibres);
}

/* Takes a thread's copies that were not waited for. */
void emu_copy_take(void (*each)(uint32_t to, const void *from, int size, int bytes))
{
    for (const copy &c : running->copies) {
        each(c.to, c.from, c.size, c.bytes);
    }
    running->copies.clear();
}

void emu_barrier(void)
{
    emu_barrier_count(0);
}

int emu_barrier_count(int predicate)
{
    block_barrier *b = &block_barriers[emu_rank()];
    b->arrived++;
    b->sum += predicate != 0;
    leave(IN_BARRIER);
    return b->result;
}

void emu_meet(void (*step)(void **lanes), void *mine)
{
    int id = (int)(running - fibres);
    warp *w = &warps[id / 32];
    w->inputs[id % 32] = mine;
    if (++w->arrived < 32) {
        leave(IN_WARP);
        return;
    }
    w->arrived = 0;
    step(w->inputs);
    for (int i = id / 32 * 32; i < id / 32 * 32 + 32; i++) {
        if (fibres[i].at == IN_WARP) {
            fibres[i].at = READY;
        }
    }
}

/* ---- asynchronous copies ----------------------------------------------------------------------------------------- */

void emu_copy_async(uint32_t to, const void *from, int size, int bytes)
{
    if (to % (unsigned)size || (bytes > 0 && (uintptr_t)from % (unsigned)size) || to + (unsigned)size > SHARED_BYTES) {
        fprintf(stderr, "misaligned asynchronous copy\n");
        abort();
    }
    running->copies.push_back({to, from, size, bytes, running->group});
}

void emu_copy_commit(void)
{
    running->group++;
}

void emu_copy_wait(int pending)
{
    size_t kept = 0;
    std::vector<copy> &list = running->copies;
    for (const copy &c : list) {
        if (c.group >= running->group - pending) {
            list[kept++] = c;
            continue;
        }
        memset(emu_shared() + c.to, 0, (size_t)c.size);
        memcpy(emu_shared() + c.to, c.from, (size_t)c.bytes);
    }
    list.resize(kept);
}

/* ---- warp instructions ------------------------------------------------------------------------------------------- */

struct shuffle {
    uint32_t value, result;
    int lane;
};

static void step_shuffle(void **lanes)
{
    for (int i = 0; i < 32; i++) {
        shuffle *s = (shuffle *)lanes[i];
        s->result = ((shuffle *)lanes[s->lane])->value;
    }
}

uint32_t emu_shuffle(uint32_t x, int lane)
{
    shuffle s = {x, 0, lane & 31};
    emu_meet(step_shuffle, &s);
    return s.result;
}

static void step_ballot(void **lanes)
{
    uint32_t mask = 0;
    for (int i = 0; i < 32; i++) {
        mask |= (uint32_t)(((shuffle *)lanes[i])->value != 0) << i;
    }
    for (int i = 0; i < 32; i++) {
        ((shuffle *)lanes[i])->result = mask;
    }
}

uint32_t __ballot_sync(uint32_t mask, int p)
{
    shuffle s = {(uint32_t)(p != 0), 0, 0};
    if (mask != 0xFFFFFFFFu) {
        abort();
    }
    emu_meet(step_ballot, &s);
    return s.result;
}

struct matrix_load {
    uint32_t *r;
    uint32_t address;
};

static uint16_t element(void **lanes, int matrix, int row, int column)
{
    uint32_t at = ((matrix_load *)lanes[matrix * 8 + row])->address;
    uint16_t x;
    if (at % 16 || at + 16 > SHARED_BYTES) {
        fprintf(stderr, "ldmatrix: bad address\n");
        abort();
    }
    memcpy(&x, emu_shared() + at + 2 * column, 2);
    return x;
}

static void step_load(void **lanes)
{
    for (int l = 0; l < 32; l++) {
        for (int m = 0; m < 4; m++) {
            uint32_t low = element(lanes, m, l / 4, l % 4 * 2), high = element(lanes, m, l / 4, l % 4 * 2 + 1);
            ((matrix_load *)lanes[l])->r[m] = low | high << 16;
        }
    }
}

static void step_load_trans(void **lanes)
{
    for (int l = 0; l < 32; l++) {
        for (int m = 0; m < 4; m++) {
            uint32_t low = element(lanes, m, l % 4 * 2, l / 4), high = element(lanes, m, l % 4 * 2 + 1, l / 4);
            ((matrix_load *)lanes[l])->r[m] = low | high << 16;
        }
    }
}

void ptx_ldmatrix_x4(uint32_t r[4], uint32_t address)
{
    matrix_load m = {r, address};
    emu_meet(step_load, &m);
}

void ptx_ldmatrix_x4_trans(uint32_t r[4], uint32_t address)
{
    matrix_load m = {r, address};
    emu_meet(step_load_trans, &m);
}

static float of_bf16(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

struct product {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
};

static void multiply(void **lanes, float (*number)(uint32_t))
{
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
        const product *p = (const product *)lanes[l];
        int g = l / 4, q = l % 4;
        for (int i = 0; i < 4; i++) {
            for (int e = 0; e < 2; e++) {
                a[g + i % 2 * 8][2 * q + e + i / 2 * 8] = number(p->a[i] >> (16 * e) & 0xFFFF);
            }
        }
        for (int i = 0; i < 2; i++) {
            for (int e = 0; e < 2; e++) {
                b[2 * q + e + 8 * i][g] = number(p->b[i] >> (16 * e) & 0xFFFF);
            }
        }
    }
    float sum[16][8] = {{0}};
    for (int r = 0; r < 16; r++) {
        for (int k = 0; k < 16; k++) {
            for (int c = 0; c < 8; c++) {
                sum[r][c] += a[r][k] * b[k][c];
            }
        }
    }
    for (int l = 0; l < 32; l++) {
        float *d = ((product *)lanes[l])->d;
        for (int i = 0; i < 4; i++) {
            d[i] += sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
        }
    }
}

static void step_mma_bf16(void **lanes)
{
    multiply(lanes, of_bf16);
}

static void step_mma_f16(void **lanes)
{
    multiply(lanes, ptx_float_of_f16);
}

void ptx_mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    product p = {d, a, {b0, b1}};
    emu_meet(step_mma_bf16, &p);
}

void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    product p = {d, a, {b0, b1}};
    emu_meet(step_mma_f16, &p);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* Kernels take one struct by value, which the calling convention puts on the stack: a larger struct with the same
 * beginning looks the same to them. */
template <int BYTES> struct parameters {
    alignas(64) unsigned char bytes[BYTES];
};

static const void *kernel, *argument;
static bool kernel_is_large;

static void call_kernel(void)
{
    if (kernel_is_large) {
        ((void (*)(parameters<32760>))kernel)(*(const parameters<32760> *)argument);
    } else {
        ((void (*)(parameters<2048>))kernel)(*(const parameters<2048> *)argument);
    }
}

static void run_cluster(unsigned first, emu_index grid, emu_index block, unsigned cluster, size_t shared_bytes)
{
    emu_hopper_begin();
    memset(block_barriers, 0, sizeof block_barriers);
    for (unsigned i = 0; i < (unsigned)thread_count; i++) {
        fibre *f = &fibres[i];
        f->index.thread = {i % block.x, 0, 0};
        f->index.block = {first + i / block.x, 0, 0};
        f->index.block_dim = block;
        f->index.grid_dim = grid;
        make(f);
    }
    for (unsigned i = 0; i < cluster; i++) {
        memset(shared[i], 0xFF, shared_bytes);
    }
    memset(warps, 0, sizeof warps);
    run_block();
}

/* Blocks run one after another, from any of them on, forwards or backwards: whoever counts on an order is found. */
extern "C" void emu_launch(const void *function, const void *params, bool large, emu_index grid, emu_index block,
                           unsigned cluster, size_t shared_bytes)
{
    static unsigned char copy_of_params[32768];
    memcpy(copy_of_params, params, large ? 32760 : 2048);
    kernel = function;
    argument = copy_of_params;
    kernel_is_large = large;
    entry = call_kernel;
    block_threads = (int)block.x;
    thread_count = block_threads * (int)cluster;
    unsigned count = grid.x / cluster, begin = random_number() % count;
    bool backwards = random_number() % 2;
    for (unsigned i = 0; i < count; i++) {
        run_cluster((begin + (backwards ? count - i : i)) % count * cluster, grid, block, cluster, shared_bytes);
    }
}
