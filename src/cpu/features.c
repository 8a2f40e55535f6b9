/* SPDX-License-Identifier: MIT */
/*
 * features.c: what the processor, its operating system and this build offer. Tiers, not single CPUID bits: a
 * tier is usable if all its instructions are there, the operating system saves its registers (XGETBV), and
 * its folder was built.
 */
#include <ctype.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>

typedef struct x86_features {
    bool avx2, avx512bf16, amx;
} x86_features;

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static bool all_set(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

/* Linux hands out the AMX tile registers on request only; this asks whether it knows them, without requesting
 * them. */
static bool amx_known_to_linux(void)
{
    const int get_supported = 0x1021; /* ARCH_GET_XCOMP_SUPP */
    uint64_t supported = 0;
    return syscall(SYS_arch_prctl, get_supported, &supported) == 0 && ((supported >> 18) & 1) != 0;
}

static x86_features detect_x86(void)
{
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29; /* 1: ecx */
    const uint32_t avx2 = 1u << 5, avx512f = 1u << 16, avx512dq = 1u << 17, avx512bw = 1u << 30,
                   avx512vl = 1u << 31;                      /* 7.0: ebx */
    const uint32_t avx512vbmi = 1u << 1;                     /* 7.0: ecx */
    const uint32_t amx_bf16 = 1u << 22, amx_tile = 1u << 24; /* 7.0: edx */
    const uint32_t avx512bf16 = 1u << 5;                     /* 7.1: eax */
    x86_features found = {false, false, false};
    uint32_t a, b, c, d, a1, b1, c1, d1;
    uint64_t xcr0;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !all_set(c, osxsave | avx)) {
        return found;
    }
    xcr0 = read_xcr0();
    if ((xcr0 & 0x6) != 0x6) {
        return found;
    }
    bool fma_f16c = all_set(c, fma | f16c);
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        return found;
    }
    found.avx2 = fma_f16c && all_set(b, avx2);
    if (!found.avx2 || (xcr0 & 0xe6) != 0xe6 || a < 1 || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) {
        return found;
    }
    found.avx512bf16 = all_set(b, avx512f | avx512dq | avx512bw | avx512vl) && all_set(c, avx512vbmi) &&
                       all_set(a1, avx512bf16);
    found.amx = found.avx512bf16 && all_set(d, amx_bf16 | amx_tile) && (xcr0 & 0x60000) == 0x60000 &&
                amx_known_to_linux();
    return found;
}
#endif

bool fmlai_isa_offered(fmla_isa isa)
{
#if defined(__x86_64__)
    x86_features found = detect_x86();
    switch (isa) {
    case FMLA_ISA_SCALAR:
        return true;
    case FMLA_ISA_AVX2:
        return found.avx2;
    case FMLA_ISA_AVX512BF16:
        return found.avx512bf16;
    case FMLA_ISA_AMX:
        return found.amx;
    default:
        return false;
    }
#elif defined(__aarch64__)
    return isa == FMLA_ISA_SCALAR || isa == FMLA_ISA_NEON; /* Advanced SIMD is part of the baseline */
#else
    return isa == FMLA_ISA_SCALAR;
#endif
}

bool fmlai_isa_built(fmla_isa isa)
{
    switch (isa) {
    case FMLA_ISA_SCALAR:
        return true;
#if defined(FLASHMLA_HAVE_AVX2)
    case FMLA_ISA_AVX2:
        return true;
#endif
#if defined(FLASHMLA_HAVE_AVX512BF16)
    case FMLA_ISA_AVX512BF16:
        return true;
#endif
#if defined(FLASHMLA_HAVE_AMX)
    case FMLA_ISA_AMX:
        return true;
#endif
#if defined(FLASHMLA_HAVE_NEON)
    case FMLA_ISA_NEON:
        return true;
#endif
    default:
        return false;
    }
}

bool fmlai_isa_usable(fmla_isa isa)
{
#if defined(FLASHMLA_EMULATE_AVX512)
    if (isa == FMLA_ISA_AVX512BF16 || isa == FMLA_ISA_AMX) {
        return fmlai_isa_built(isa) && fmlai_isa_offered(FMLA_ISA_AVX2);
    }
#endif
    return fmlai_isa_built(isa) && fmlai_isa_offered(isa);
}

fmla_isa fmlai_isa_best(void)
{
    static const fmla_isa order[] = {FMLA_ISA_AMX, FMLA_ISA_AVX512BF16, FMLA_ISA_AVX2, FMLA_ISA_NEON};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        /* An emulated tier is for tests: never chosen by itself. */
        if (fmlai_isa_usable(order[i]) && fmlai_isa_offered(order[i])) {
            return order[i];
        }
    }
    return FMLA_ISA_SCALAR;
}

bool fmlai_amx_request(void)
{
#if defined(FLASHMLA_EMULATE_AVX512)
    return true;
#elif defined(__x86_64__)
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool fmlai_dot_bf16_pays(void)
{
#if defined(__x86_64__)
    uint32_t a, b, c, d;
    return !__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx;
#else
    return true;
#endif
}

/* Reads a small text file; false if there is none. */
static bool read_text(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    if (!file) {
        return false;
    }
    size_t n = fread(text, 1, size - 1, file);
    fclose(file);
    text[n] = '\0';
    return n > 0;
}

size_t fmlai_l2_bytes(void)
{
    const size_t usual = 1u << 20, least = 64u << 10;
    char path[96], text[64];
    for (int index = 0; index < 8; index++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", index);
        if (!read_text(path, text, sizeof text) || atoi(text) != 2) {
            continue;
        }
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        if (read_text(path, text, sizeof text)) {
            char *end;
            size_t bytes = strtoul(text, &end, 10);
            bytes <<= *end == 'K' ? 10 : *end == 'M' ? 20 : 0;
            if (bytes >= least) {
                return bytes;
            }
        }
    }
#if defined(_SC_LEVEL2_CACHE_SIZE)
    long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes >= (long)least) {
        return (size_t)bytes;
    }
#endif
    return usual;
}

static int32_t affinity_count(void)
{
    for (int possible = 1024; possible <= 1 << 18; possible *= 4) {
        cpu_set_t *set = CPU_ALLOC((size_t)possible);
        if (!set) {
            break;
        }
        size_t size = CPU_ALLOC_SIZE((size_t)possible);
        int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (count > 0) {
            return count;
        }
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

/* Processors that a quota of `quota` microseconds per `period` is worth, rounded up; 0: no limit. */
static int32_t quota_processors(const char *quota, const char *period)
{
    char *end;
    long long q = strtoll(quota, &end, 10);
    long long p = strtoll(period, NULL, 10);
    if (end == quota || q <= 0 || p <= 0 || q / p >= INT32_MAX) {
        return 0;
    }
    return (int32_t)((q + p - 1) / p);
}

static int32_t smaller_limit(int32_t a, int32_t b)
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* The smallest cpu.max on the way from this process's cgroup (version 2) to the root; 0: no limit. */
static int32_t cgroup2_limit(void)
{
    char text[4096], path[4200], value[64];
    int32_t limit = 0;
    if (!read_text("/proc/self/cgroup", text, sizeof text)) {
        return 0;
    }
    char *line = strncmp(text, "0::/", 4) == 0 ? text : strstr(text, "\n0::/");
    if (!line) {
        return 0;
    }
    char *group = strchr(line, '/');
    group[strcspn(group, "\n")] = '\0';
    for (;;) {
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        if (read_text(path, value, sizeof value)) {
            char *space = strchr(value, ' ');
            if (space && isdigit((unsigned char)value[0])) {
                limit = smaller_limit(limit, quota_processors(value, space + 1));
            }
        }
        char *slash = strrchr(group, '/');
        if (!slash) {
            return limit;
        }
        *slash = '\0';
    }
}

static int32_t cgroup1_limit(void)
{
    char quota[64], period[64];
    if (read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota, sizeof quota) &&
        read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period, sizeof period)) {
        return quota_processors(quota, period);
    }
    return 0;
}

int32_t fmlai_processors(void)
{
    int32_t limit = smaller_limit(affinity_count(), smaller_limit(cgroup2_limit(), cgroup1_limit()));
    return limit > 0 ? limit : 1;
}
