/* SPDX-License-Identifier: MIT */
/*
 * peak.c: this machine's limits: independent chains of multiply-adds (and bf16 dot products, where there are any)
 * in registers, and sums over memory that no cache holds.
 */
#include "bench/bench.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CHAINS     12 /* enough for 6 cycles of latency on two ports, if they take turns evenly; */
#define DOT_CHAINS 20 /* Zen 5 with 12 chains of VDPBF16PS: 93 %, with 16 and more 100 % */
#define ROUNDS     20000
#define READ_BYTES ((size_t)96 << 20) /* per thread */

/* Runs ROUNDS rounds of CHAINS instructions; returns FLOP. sink keeps the result alive. */
typedef double (*chain_kernel)(volatile float *sink);

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) static double fma_avx2(volatile float *sink)
{
    __m256 x[CHAINS], a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f), sum;
    for (int i = 0; i < CHAINS; i++) {
        x[i] = _mm256_set1_ps((float)i);
    }
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            x[i] = _mm256_fmadd_ps(x[i], a, b);
        }
    }
    sum = x[0];
    for (int i = 1; i < CHAINS; i++) {
        sum = _mm256_add_ps(sum, x[i]);
    }
    *sink = _mm256_cvtss_f32(sum);
    return 2.0 * 8 * CHAINS * ROUNDS;
}

__attribute__((target("avx512f"))) static double fma_avx512(volatile float *sink)
{
    __m512 x[CHAINS], a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f), sum;
    for (int i = 0; i < CHAINS; i++) {
        x[i] = _mm512_set1_ps((float)i);
    }
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            x[i] = _mm512_fmadd_ps(x[i], a, b);
        }
    }
    sum = x[0];
    for (int i = 1; i < CHAINS; i++) {
        sum = _mm512_add_ps(sum, x[i]);
    }
    *sink = _mm512_cvtss_f32(sum);
    return 2.0 * 16 * CHAINS * ROUNDS;
}

__attribute__((target("avx512f,avx512bf16"))) static double dot_avx512(volatile float *sink)
{
    __m512 x[DOT_CHAINS], sum;
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3F803F80), b = (__m512bh)_mm512_set1_epi32(0x3A803A80);
    for (int i = 0; i < DOT_CHAINS; i++) {
        x[i] = _mm512_set1_ps((float)i);
    }
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 20
        for (int i = 0; i < DOT_CHAINS; i++) {
            x[i] = _mm512_dpbf16_ps(x[i], a, b);
        }
    }
    sum = x[0];
    for (int i = 1; i < DOT_CHAINS; i++) {
        sum = _mm512_add_ps(sum, x[i]);
    }
    *sink = _mm512_cvtss_f32(sum);
    return 2.0 * 32 * DOT_CHAINS * ROUNDS;
}

/* Products of tiles in registers. The context has asked the operating system for them. */
static double dot_amx(volatile float *sink)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
    for (int r = 0; r < ROUNDS; r++) {
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::
                             : "memory");
    }
    __asm__ volatile("tilerelease" ::: "memory");
    *sink = 0;
    return 2.0 * 16 * 16 * 32 * 4 * ROUNDS;
}

static chain_kernel amx_kernel(void)
{
    unsigned a, b, c, d; /* a library for tests offers the tier on any processor */
    bool offered = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) != 0;
    return offered && fmla_isa_available(FMLA_ISA_AMX) ? dot_amx : NULL;
}

static chain_kernel fma_avx2_kernel(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? fma_avx2 : NULL;
}

static chain_kernel fma_kernel(void)
{
    return __builtin_cpu_supports("avx512f") ? fma_avx512 : fma_avx2_kernel();
}

static chain_kernel dot_kernel(void)
{
    return fmla_isa_available(FMLA_ISA_AVX512BF16) && __builtin_cpu_supports("avx512f") ? dot_avx512 : NULL;
}

#elif defined(__aarch64__)

static double fma_neon(volatile float *sink)
{
    float32x4_t x[CHAINS], a = vdupq_n_f32(0.999f), b = vdupq_n_f32(0.001f);
    for (int i = 0; i < CHAINS; i++) {
        x[i] = vdupq_n_f32((float)i);
    }
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            x[i] = vfmaq_f32(b, x[i], a);
        }
    }
    for (int i = 1; i < CHAINS; i++) {
        x[0] = vaddq_f32(x[0], x[i]);
    }
    *sink = vgetq_lane_f32(x[0], 0);
    return 2.0 * 4 * CHAINS * ROUNDS;
}

static chain_kernel fma_avx2_kernel(void)
{
    return NULL;
}

static chain_kernel fma_kernel(void)
{
    return fma_neon;
}

static chain_kernel dot_kernel(void)
{
    return NULL;
}

static chain_kernel amx_kernel(void)
{
    return NULL;
}

#else

static chain_kernel fma_avx2_kernel(void)
{
    return NULL;
}

static chain_kernel fma_kernel(void)
{
    return NULL;
}

static chain_kernel dot_kernel(void)
{
    return NULL;
}

static chain_kernel amx_kernel(void)
{
    return NULL;
}

#endif

/* Without vector instructions: one product and one sum at a time. */
static double fma_plain(volatile float *sink)
{
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) {
        x[i] = (float)i;
    }
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < CHAINS; i++) {
            x[i] = x[i] * 0.999f + 0.001f;
        }
    }
    for (int i = 1; i < CHAINS; i++) {
        x[0] += x[i];
    }
    *sink = x[0];
    return 2.0 * CHAINS * ROUNDS;
}

typedef uint64_t words __attribute__((vector_size(32)));

static double read_memory(const uint8_t *from, volatile uint64_t *sink)
{
    words a = {0}, b = {0}, c = {0}, d = {0};
    const words *p = (const words *)(const void *)from;
    for (size_t i = 0; i < READ_BYTES / sizeof(words); i += 4) {
        a ^= p[i];
        b ^= p[i + 1];
        c ^= p[i + 2];
        d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    *sink = a[0] ^ a[1] ^ a[2] ^ a[3];
    return (double)READ_BYTES;
}

/* What one thread does: repeats its kernel for a while, between barriers. */
typedef struct job {
    pthread_t thread;
    pthread_barrier_t *barrier;
    chain_kernel kernel; /* NULL: reads memory */
    uint8_t *memory;
    double rate;
} job;

static void *work(void *user)
{
    job *j = user;
    volatile float sink = 0;
    volatile uint64_t bits = 0;
    double done = 0;
    if (j->kernel == NULL) {
        memset(j->memory, 1, READ_BYTES); /* by the thread that reads it: its own memory node */
    }
    pthread_barrier_wait(j->barrier);
    double start = bench_now(), end;
    do {
        done += j->kernel ? j->kernel(&sink) : read_memory(j->memory, &bits);
        end = bench_now();
    } while (end - start < 0.06);
    j->rate = done / (end - start);
    pthread_barrier_wait(j->barrier);
    return NULL;
}

/* Sum of the threads' rates; the better of two goes. */
static double measure(chain_kernel kernel, int32_t threads)
{
    double best = 0;
    for (int go = 0; go < 2; go++) {
        pthread_barrier_t barrier;
        job *jobs = xcalloc((size_t)threads, sizeof *jobs);
        double sum = 0;
        pthread_barrier_init(&barrier, NULL, (unsigned)threads);
        int32_t started = 0;
        for (int32_t i = 0; i < threads; i++) {
            jobs[i].barrier = &barrier;
            jobs[i].kernel = kernel;
            if (kernel == NULL) {
                jobs[i].memory = aligned_alloc((size_t)2 << 20, READ_BYTES);
                if (jobs[i].memory == NULL) {
                    break;
                }
                madvise(jobs[i].memory, READ_BYTES, MADV_HUGEPAGE);
            }
            started++;
        }
        if (started == threads) {
            for (int32_t i = 1; i < threads; i++) {
                if (pthread_create(&jobs[i].thread, NULL, work, &jobs[i]) != 0) {
                    fprintf(stderr, "flashmla: cannot start %d threads\n", (int)threads);
                    exit(CLI_ERROR);
                }
            }
            work(&jobs[0]);
            for (int32_t i = 0; i < threads; i++) {
                if (i > 0) {
                    pthread_join(jobs[i].thread, NULL);
                }
                sum += jobs[i].rate;
            }
        }
        for (int32_t i = 0; i < threads; i++) {
            free(jobs[i].memory);
        }
        free(jobs);
        pthread_barrier_destroy(&barrier);
        best = sum > best ? sum : best;
    }
    return best;
}

bench_limit bench_peak(int32_t threads, fmla_isa isa)
{
    bench_limit limit = {0};
    chain_kernel fma = fma_kernel(), narrow = fma_avx2_kernel(), dot = dot_kernel();
    chain_kernel tiles = isa == FMLA_ISA_AMX ? amx_kernel() : NULL;
    limit.fma = measure(fma ? fma : fma_plain, threads) * 1e-9;
    limit.fma_avx2 = narrow == fma ? (narrow ? limit.fma : 0) : measure(narrow, threads) * 1e-9;
    limit.dot_bf16 = dot ? measure(dot, threads) * 1e-9 : 0;
    limit.dot_amx = tiles ? measure(tiles, threads) * 1e-9 : 0;
    limit.read = measure(NULL, threads) * 1e-9;
    return limit;
}

double bench_compute_limit(const bench_limit *limit, fmla_isa isa)
{
    if (limit->gemm > 0) {
        return limit->gemm;
    }
    if (isa == FMLA_ISA_AMX && limit->dot_amx > 0) {
        return limit->dot_amx;
    }
    if (isa == FMLA_ISA_AVX512BF16 && limit->dot_bf16 > limit->fma) {
        return limit->dot_bf16;
    }
    return isa == FMLA_ISA_AVX2 && limit->fma_avx2 > 0 ? limit->fma_avx2 : limit->fma;
}
