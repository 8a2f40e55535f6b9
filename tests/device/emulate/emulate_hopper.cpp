/* SPDX-License-Identifier: MIT */
/*
 * emulate_hopper.cpp: what sm_90a adds: barriers in shared memory, named barriers, bulk copies, products of warpgroups.
 *
 * Asynchronous things happen late or early, by chance: a bulk copy in a later round, a product when it is issued or
 * when it is waited for. Whoever reads or overwrites too early sees wrong numbers.
 */
#include "emulate.h"

#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <vector>

#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

static uint32_t chance_state = emu_seed(12345);
static bool progress;

static uint32_t chance(uint32_t n)
{
    chance_state = chance_state * 1664525u + 1013904223u;
    return (chance_state >> 8) % n;
}

void emu_fail(const char *what)
{
    fprintf(stderr, "emulated block: %s (thread %d)\n", what, emu_thread_id());
    abort();
}

static void fail(const char *what)
{
    emu_fail(what);
}

/* ---- barriers in shared memory ----------------------------------------------------------------------------------- */

struct mbarrier {
    int16_t count, pending;
    int32_t bytes_phase; /* bytes * 2 + phase */
};

static mbarrier *barrier_in(unsigned char *block, uint32_t address)
{
    if (address % 8) {
        fail("misaligned mbarrier");
    }
    return (mbarrier *)(block + address);
}

static mbarrier *barrier_at(uint32_t address)
{
    return barrier_in(emu_shared(), address);
}

static void settle(mbarrier *b)
{
    if (b->pending < 0) {
        fail("too many arrivals");
    }
    if (b->pending == 0 && b->bytes_phase >> 1 == 0) {
        b->pending = b->count;
        b->bytes_phase ^= 1;
    }
    progress = true;
}

void ptx_mbarrier_init(uint32_t barrier, uint32_t count)
{
    *barrier_at(barrier) = {(int16_t)count, (int16_t)count, 0};
}

static void arrive(mbarrier *b)
{
    b->pending--;
    settle(b);
}

void ptx_mbarrier_arrive(uint32_t barrier)
{
    arrive(barrier_at(barrier));
}

void ptx_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    barrier_at(barrier)->bytes_phase += (int32_t)bytes * 2;
    ptx_mbarrier_arrive(barrier);
}

static void complete(mbarrier *b, int bytes)
{
    b->bytes_phase -= bytes * 2;
    settle(b);
}

bool ptx_mbarrier_try(uint32_t barrier, uint32_t parity)
{
    if ((uint32_t)(barrier_at(barrier)->bytes_phase & 1) != parity) {
        return true;
    }
    emu_yield();
    return (uint32_t)(barrier_at(barrier)->bytes_phase & 1) != parity;
}

/* ---- named barriers ---------------------------------------------------------------------------------------------- */

static struct named {
    int arrived, threads;
    unsigned generation;
    bool yes, any; /* of those that wait for this generation, of the one before */
} named[16][16];

void ptx_barrier_arrive(int id, int threads)
{
    struct named *b = &named[emu_rank()][id];
    if (id < 1 || id > 15 || (b->arrived > 0 && b->threads != threads)) {
        fail("named barrier with two counts");
    }
    b->threads = threads;
    if (++b->arrived == threads) {
        b->arrived = 0;
        b->any = b->yes;
        b->yes = false;
        b->generation++;
    }
    progress = true;
}

bool ptx_barrier_any(int id, int threads, bool yes)
{
    struct named *b = &named[emu_rank()][id];
    b->yes |= yes;
    ptx_barrier_sync(id, threads);
    return b->any; /* the next generation ends once all have left this one */
}

void ptx_barrier_sync(int id, int threads)
{
    const struct named *b = &named[emu_rank()][id];
    unsigned generation = b->generation;
    ptx_barrier_arrive(id, threads);
    while (b->generation == generation) {
        emu_yield();
    }
}

/* ---- copies that complete on a barrier --------------------------------------------------------------------------- */

struct piece_of_copy {
    uint32_t to;
    const void *from;
    int size, bytes;
};

struct late_copy {
    std::vector<piece_of_copy> pieces; /* empty: `words` to `to` */
    uint32_t barrier;
    int complete_bytes;   /* 0: an arrival instead */
    unsigned char *block; /* shared memory of all of it */
    uint32_t to;
    float words[4];
};

static std::deque<late_copy> late;
static late_copy taken;

static void perform(const late_copy &c)
{
    for (const piece_of_copy &x : c.pieces) {
        memset(c.block + x.to, 0, (size_t)x.size);
        memcpy(c.block + x.to, x.from, (size_t)x.bytes);
    }
    if (c.pieces.empty() && c.complete_bytes) {
        memcpy(c.block + c.to, c.words, 16);
    }
    if (c.complete_bytes) {
        complete(barrier_in(c.block, c.barrier), c.complete_bytes);
    } else {
        arrive(barrier_in(c.block, c.barrier));
    }
}

static void take(uint32_t to, const void *from, int size, int bytes)
{
    taken.pieces.push_back({to, from, size, bytes});
}

void ptx_mbarrier_arrive_copies(uint32_t barrier)
{
    taken.pieces.clear();
    emu_copy_take(take);
    taken.barrier = barrier;
    taken.complete_bytes = 0;
    taken.block = emu_shared();
    late.push_back(taken);
}

/* row: bytes of a row, 128 or 64. */
static uint32_t swizzled(uint32_t address, uint32_t row)
{
    return address ^ ((address >> 7 & (row / 16 - 1)) << 4);
}

static void load_box(unsigned char *block, uint32_t shared, const void *map, uint32_t barrier, int32_t x, int32_t y,
                     int32_t z, int32_t w)
{
    const emu_tensor_map *m = (const emu_tensor_map *)map;
    if (shared % 1024) {
        fail("box of a tensor map: misaligned shared address");
    }
    late_copy c = {};
    c.barrier = barrier;
    c.block = block;
    c.complete_bytes = (int)(m->box[0] * 2 * m->box[1]);
    for (uint32_t row = 0; row < m->box[1]; row++) {
        for (uint32_t chunk = 0; chunk < m->box[0] / 8; chunk++) {
            uint64_t at[4] = {(uint64_t)x + chunk * 8, (uint64_t)y + row, (uint64_t)z, (uint64_t)w};
            const unsigned char *from = (const unsigned char *)m->data + at[0] * 2;
            int bytes = at[0] + 8 <= m->dims[0] ? 16 : at[0] < m->dims[0] ? (int)(m->dims[0] - at[0]) * 2 : 0;
            for (int i = 1; i < 4; i++) {
                bytes = at[i] < m->dims[i] ? bytes : 0;
                from += at[i] * m->strides[i - 1];
            }
            c.pieces.push_back({swizzled(shared + row * m->row + chunk * 16, m->row), from, 16, bytes});
        }
    }
    late.push_back(c);
}

void ptx_tma_load_4d(uint32_t shared, const void *map, uint32_t barrier, int32_t x, int32_t y, int32_t z, int32_t w,
                     uint64_t)
{
    load_box(emu_shared(), shared, map, barrier, x, y, z, w);
}

void ptx_bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    if (shared % 16 || (uintptr_t)global % 16 || bytes % 16) {
        fail("misaligned bulk copy");
    }
    late.push_back({{{shared, global, (int)bytes, (int)bytes}}, barrier, (int)bytes, emu_shared(), 0, {0}});
}

/* Boxes on their way out: shared memory is read at last when their thread waits for that. */
struct late_store {
    const emu_tensor_map *map;
    unsigned char *block;
    int thread;
    long group; /* of its thread */
    uint32_t shared;
    int32_t at[4];
};

static std::deque<late_store> stores;
static long store_groups[2][1024];

static long *own_groups(void)
{
    return &store_groups[emu_rank()][emu_thread_id()];
}

static void perform_store(const late_store &s)
{
    const emu_tensor_map *m = s.map;
    for (uint32_t row = 0; row < m->box[1]; row++) {
        for (uint32_t dim = 0; dim < m->box[0]; dim++) {
            uint64_t at[4] = {(uint64_t)s.at[0] + dim, (uint64_t)s.at[1] + row, (uint64_t)s.at[2], (uint64_t)s.at[3]};
            unsigned char *to = (unsigned char *)m->data + at[0] * 2;
            bool inside = at[0] < m->dims[0];
            for (int i = 1; i < 4; i++) {
                inside = inside && at[i] < m->dims[i];
                to += at[i] * m->strides[i - 1];
            }
            if (inside) {
                memcpy(to, s.block + swizzled(s.shared + row * m->row + dim * 2, m->row), 2);
            }
        }
    }
}

void ptx_tma_store_4d(const void *map, uint32_t shared, int32_t x, int32_t y, int32_t z, int32_t w)
{
    if (shared % 1024) {
        fail("box of a tensor map: misaligned shared address");
    }
    stores.push_back({(const emu_tensor_map *)map, emu_shared(), emu_thread_id(), *own_groups(), shared, {x, y, z, w}});
}

void ptx_tma_commit(void)
{
    (*own_groups())++;
}

void emu_tma_wait_read(int pending)
{
    size_t count = stores.size();
    for (size_t i = 0; i < count; i++) {
        late_store s = stores.front();
        stores.pop_front();
        if (s.thread == emu_thread_id() && s.block == emu_shared() && s.group < *own_groups() - pending) {
            perform_store(s);
        } else {
            stores.push_back(s);
        }
    }
}

/* ---- clusters: a remote address holds the block's rank + 1 in its upper byte ----------------------------------------
 */

static struct {
    int arrived;
    unsigned generation;
} cluster_barrier;

uint32_t ptx_cluster_rank(void)
{
    return emu_rank();
}

uint32_t ptx_cluster_address(uint32_t address, uint32_t rank)
{
    (void)emu_shared_of(rank);
    return address | (rank + 1) << 24;
}

static unsigned char *remote_block(uint32_t remote)
{
    if (remote >> 24 == 0) {
        fail("not an address of another block");
    }
    return emu_shared_of((remote >> 24) - 1);
}

void ptx_cluster_sync(void)
{
    unsigned generation = cluster_barrier.generation;
    if (++cluster_barrier.arrived == emu_cluster_threads()) {
        cluster_barrier.arrived = 0;
        cluster_barrier.generation++;
    }
    progress = true;
    while (cluster_barrier.generation == generation) {
        emu_yield();
    }
}

void ptx_mbarrier_arrive_remote(uint32_t remote)
{
    arrive(barrier_in(remote_block(remote), remote & 0xFFFFFF));
}

float ptx_load_remote(uint32_t remote)
{
    float x;
    memcpy(&x, remote_block(remote) + (remote & 0xFFFFFF), sizeof x);
    return x;
}

void ptx_load_remote_128(float x[4], uint32_t remote)
{
    if (remote % 16) {
        fail("misaligned remote load");
    }
    memcpy(x, remote_block(remote) + (remote & 0xFFFFFF), 16);
}

void ptx_store_remote_128(uint32_t remote, const float x[4], uint32_t remote_barrier)
{
    if (remote_block(remote) != remote_block(remote_barrier) || remote % 16) {
        fail("remote store: barrier of another block, or misaligned");
    }
    late_copy c = {};
    c.barrier = remote_barrier & 0xFFFFFF;
    c.complete_bytes = 16;
    c.block = remote_block(remote);
    c.to = remote & 0xFFFFFF;
    memcpy(c.words, x, 16);
    late.push_back(c);
}

/* ---- products of warpgroups -------------------------------------------------------------------------------------- */

/* A warp's share of a product: its 16 rows. */
struct product {
    float *d[32];
    uint32_t a[32][4];
    uint64_t a_descriptor, b_descriptor;
    int columns, accumulate;
    bool f16, a_in_registers, b_is_wide;
    long group;
};

static std::vector<product> products[256];
static long groups[256];

static float number(uint32_t bits, bool f16)
{
    return f16 ? ptx_float_of_f16(bits) : __uint_as_float(bits << 16);
}

static uint32_t shared_16(uint32_t address, uint32_t row)
{
    uint16_t x;
    memcpy(&x, emu_shared() + swizzled(address, row), 2);
    return x;
}

static void multiply(const product &p, int warp)
{
    static float a[16][16], b[16][256];
    uint32_t a_at = (uint32_t)(p.a_descriptor & 0x3FFF) << 4, b_at = (uint32_t)(p.b_descriptor & 0x3FFF) << 4;
    uint32_t a_row = p.a_descriptor >> 63 ? 64 : 128, b_row = p.b_descriptor >> 63 ? 64 : 128;
    bool a_columns = (p.a_descriptor >> 62 & 1) != 0;
    uint32_t leading = (uint32_t)(p.b_descriptor >> 16 & 0x3FFF) << 4;
    for (int r = 0; r < 16; r++) {
        for (int k = 0; k < 16; k++) {
            uint32_t bits;
            if (p.a_in_registers) {
                uint32_t pair = p.a[r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2];
                bits = pair >> (16 * (k % 2)) & 0xFFFF;
            } else {
                uint32_t row = (uint32_t)(warp % 4 * 16 + r);
                uint32_t at = a_columns ? (uint32_t)k * 128 + row * 2 : row * a_row + (uint32_t)k * 2;
                bits = shared_16(a_at + at, a_row);
            }
            a[r][k] = number(bits, p.f16);
        }
    }
    for (uint32_t k = 0; k < 16; k++) {
        for (uint32_t n = 0; n < (uint32_t)p.columns; n++) {
            uint32_t at = p.b_is_wide ? n / 64 * leading + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2 : n * b_row + k * 2;
            b[k][n] = number(shared_16(b_at + at, b_row), p.f16);
        }
    }
    for (int r = 0; r < 16; r++) {
        static float sum[256];
        for (int n = 0; n < p.columns; n++) {
            sum[n] = p.accumulate ? p.d[r % 8 * 4 + n % 8 / 2][n / 8 * 4 + r / 8 * 2 + n % 2] : 0.0f;
        }
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < p.columns; n++) {
                sum[n] += a[r][k] * b[k][n];
            }
        }
        for (int n = 0; n < p.columns; n++) {
            p.d[r % 8 * 4 + n % 8 / 2][n / 8 * 4 + r / 8 * 2 + n % 2] = sum[n];
        }
    }
}

struct issue {
    float *d;
    const uint32_t *a;
    uint64_t a_descriptor, b_descriptor;
    int columns, accumulate;
    bool f16;
};

static void step_issue(void **lanes)
{
    int warp = emu_thread_id() / 32;
    product p;
    const issue *first = (const issue *)lanes[0];
    for (int l = 0; l < 32; l++) {
        const issue *i = (const issue *)lanes[l];
        if (i->a_descriptor != first->a_descriptor || i->b_descriptor != first->b_descriptor ||
            i->accumulate != first->accumulate) {
            fail("lanes disagree on a product");
        }
        p.d[l] = i->d;
        if (i->a) {
            memcpy(p.a[l], i->a, 16);
        }
    }
    p.a_descriptor = first->a_descriptor;
    p.b_descriptor = first->b_descriptor;
    p.columns = first->columns;
    p.accumulate = first->accumulate;
    p.f16 = first->f16;
    p.a_in_registers = first->a != NULL;
    p.b_is_wide = first->columns > 64;
    p.group = groups[warp];
    products[warp].push_back(p);
}

void emu_product(float *d, const uint32_t *a, uint64_t a_descriptor, uint64_t b_descriptor, int columns, int accumulate,
                 bool f16)
{
    issue i = {d, a, a_descriptor, b_descriptor, columns, accumulate, f16};
    emu_meet(step_issue, &i);
}

/* Products of a warp that belong to groups before `group` happen. */
static void finish_products(int warp, long group)
{
    std::vector<product> &list = products[warp];
    size_t done = 0;
    while (done < list.size() && list[done].group < group) {
        multiply(list[done++], warp);
    }
    list.erase(list.begin(), list.begin() + (long)done);
}

static void step_commit(void **)
{
    int warp = emu_thread_id() / 32;
    groups[warp]++;
    if (chance(2)) {
        finish_products(warp, groups[warp]); /* early */
    }
}

void ptx_wgmma_commit(void)
{
    emu_meet(step_commit, NULL);
}

static int wait_pending;

static void step_wait(void **)
{
    int warp = emu_thread_id() / 32;
    finish_products(warp, groups[warp] - wait_pending);
}

/* Products may be late: others run before they happen. */
void emu_product_wait(int pending)
{
    for (uint32_t rounds = threadIdx.x % 32 == 0 && chance(4) == 0 ? chance(10) : 0; rounds > 0; rounds--) {
        emu_yield();
    }
    wait_pending = pending;
    emu_meet(step_wait, NULL);
}

/* ---- a block ----------------------------------------------------------------------------------------------------- */

void emu_hopper_begin(void)
{
    if (!stores.empty()) {
        fail("a block has ended whose boxes were on their way out");
    }
    late.clear();
    memset(named, 0, sizeof named);
    cluster_barrier = {};
    for (int i = 0; i < 256; i++) {
        products[i].clear();
        groups[i] = 0;
    }
}

bool emu_hopper_round(void)
{
    bool happened = progress;
    progress = false;
    size_t count = late.size() ? 1 + chance((uint32_t)late.size()) : 0;
    for (; count > 0; count--) {
        late_copy c = late.front();
        late.pop_front();
        perform(c);
        happened = true;
    }
    if (!stores.empty() && chance(4) == 0) {
        perform_store(stores.front());
        stores.pop_front();
        happened = true;
    }
    return happened;
}
