/* SPDX-License-Identifier: MIT */
/*
 * mha_forward.cu: dense attention over packed sequences. Block: 128 queries of one head, 8 warps of 16 rows; 64 keys a
 * step, two steps in flight. Q lives in registers; weights go from the scores' accumulators straight into A fragments.
 *
 * Shared memory: two stages of K [64][row_bytes of d_qk] and V [64][row_bytes of d_v]; Q passes through it first.
 */
#include "mha.cuh"

#define ROWS    128
#define KEYS    64
#define WARPS   8
#define NT      (KEYS / 8)
#define NV      16 /* 128 value columns */
#define Q_STEPS 12 /* 192 dims */

/* Scores of 16 queries in registers against a key tile. */
template <int F16>
static __device__ __forceinline__ void query_scores(float acc[NT][4], const uint32_t q[Q_STEPS][4], uint32_t tile,
                                                    uint32_t row_bytes)
{
    int lane = threadIdx.x % 32;
    uint32_t at = tile + (lane % 8) * row_bytes;
    uint32_t chunk = ((lane / 8) ^ (lane & 7)) << 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < Q_STEPS; k += 2) { /* 32 dims */
        if (k * 32 < (int)row_bytes) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint32_t b[4];
                ptx_ldmatrix_x4(b, at + n * 8 * row_bytes + k / 4 * 128 + (chunk ^ (k % 4 * 32)));
                multiply<F16>(acc[n], q[k], b[0], b[1]);
                multiply<F16>(acc[n], q[k + 1], b[2], b[3]);
            }
        }
    }
}

/* Whether a tile holds a value that is not finite in rows from `first` on. */
static __device__ __noinline__ bool odd_values(uint32_t tile, uint32_t row_bytes, int first, uint32_t exponent)
{
    bool odd = false;
    for (int t = first; t < KEYS; t++) {
        for (uint32_t word = threadIdx.x % 32; word < row_bytes / 4; word += 32) {
            uint32_t x = ptx_load_shared_u32(tile + t * row_bytes + word * 4);
            odd = odd || (x & exponent) == exponent || (x >> 16 & exponent) == exponent;
        }
    }
    return __any_sync(0xFFFFFFFFu, odd);
}

/* out += weights x V without the tensor cores: a weight of 0 adds nothing, whatever the value is. */
template <int F16>
static __device__ __forceinline__ void add_values_slowly(float out[NV][4], const float acc[NT][4], uint32_t tile,
                                                         uint32_t row_bytes)
{
    int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int i = 0; i < NT * 2; i++) {
#pragma unroll 1
        for (int other = 0; other < 4; other++) {
            int t = i / 2 * 8 + other * 2 + i % 2;
            float low = __shfl_sync(0xFFFFFFFFu, acc[i / 2][i % 2], (lane & 28) + other);
            float high = __shfl_sync(0xFFFFFFFFu, acc[i / 2][2 + i % 2], (lane & 28) + other);
#pragma unroll
            for (int n = 0; n < NV; n++) {
                if (n * 16 < (int)row_bytes) {
                    uint32_t pair = ptx_load_shared_u32(tile + swizzled(t, n, row_bytes) + q * 4);
                    float x = F16 ? ptx_float_of_f16(pair & 0xFFFF) : float_of_bf16(pair & 0xFFFF);
                    float y = F16 ? ptx_float_of_f16(pair >> 16) : float_of_bf16(pair >> 16);
                    out[n][0] = low != 0.0f ? out[n][0] + low * x : out[n][0];
                    out[n][1] = low != 0.0f ? out[n][1] + low * y : out[n][1];
                    out[n][2] = high != 0.0f ? out[n][2] + high * x : out[n][2];
                    out[n][3] = high != 0.0f ? out[n][3] + high * y : out[n][3];
                }
            }
        }
    }
}

template <int F16> static __device__ __forceinline__ void forward_block(const fmlac_mha &p)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    uint32_t k_bytes = (p.d_qk + 63) / 64 * 128, v_bytes = (p.d_v + 63) / 64 * 128;
    uint32_t base = ptx_shared_address(ptx_shared());
    uint32_t stage_bytes = KEYS * (k_bytes + v_bytes);
    mha_work w;
    if (!mha_locate(p, true, ROWS, p.h_q, &w)) {
        return;
    }
    int32_t kv_head = w.head / (p.h_q / p.h_kv);
    int64_t end_q = w.first_q + w.count_q, end_k = w.first_k + w.count_k;
    int64_t last_row = w.row0 + ROWS < w.count_q ? w.row0 + ROWS - 1 : w.count_q - 1;
    int64_t all_see = keys_seen(p, w, w.row0), most = keys_seen(p, w, last_row);
    int64_t steps = ceil_quotient(most, KEYS);

    uint32_t q[Q_STEPS][4];
    copy_rows<ROWS, WARPS>(base, k_bytes, p.q, w.head, w.first_q + w.row0, end_q, p.d_qk);
    ptx_copy_async_commit();
    ptx_copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Q_STEPS; k++) {
        uint32_t chunk = 2 * k + lane / 16;
        q[k][0] = q[k][1] = q[k][2] = q[k][3] = 0;
        if (k * 32 < (int)k_bytes) {
            ptx_ldmatrix_x4(q[k], base + swizzled(warp * 16 + lane % 16, chunk, k_bytes));
        }
    }
    __syncthreads();

    float out[NV][4], max[2], sum[2];
    int32_t seen[2];
#pragma unroll
    for (int n = 0; n < NV; n++) {
        out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int64_t row = w.row0 + warp * 16 + g + 8 * h;
        seen[h] = (int32_t)keys_seen(p, w, row < w.count_q ? row : w.count_q - 1);
        max[h] = -FMLAC_INFINITY;
        sum[h] = 0.0f;
    }
    float scale = p.scale * LOG2_E;
    for (int64_t i = 0; i < 1 && steps > 0; i++) {
        copy_rows<KEYS, WARPS>(base, k_bytes, p.k, kv_head, w.first_k, end_k, p.d_qk);
        copy_rows<KEYS, WARPS>(base + KEYS * k_bytes, v_bytes, p.v, kv_head, w.first_k, end_k, p.d_v);
    }
    ptx_copy_async_commit();
#pragma unroll 1
    for (int64_t i = 0; i < steps; i++) {
        uint32_t keys = base + (i & 1) * stage_bytes, values = keys + KEYS * k_bytes;
        uint32_t next = base + (~i & 1) * stage_bytes;
        ptx_copy_async_wait<0>();
        __syncthreads();
        if (i + 1 < steps) {
            copy_rows<KEYS, WARPS>(next, k_bytes, p.k, kv_head, w.first_k + (i + 1) * KEYS, end_k, p.d_qk);
            copy_rows<KEYS, WARPS>(next + KEYS * k_bytes, v_bytes, p.v, kv_head, w.first_k + (i + 1) * KEYS, end_k,
                                   p.d_v);
        }
        ptx_copy_async_commit();
        float acc[NT][4];
        query_scores<F16>(acc, q, keys, k_bytes);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int limit = (int)clamped(seen[h] - i * KEYS, 0, KEYS) - lane % 4 * 2;
            float top = max[h];
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float x = n * 8 + e < limit ? acc[n][2 * h + e] * scale : -FMLAC_INFINITY;
                    acc[n][2 * h + e] = x;
                    top = fmaxf(top, x);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
            float reference = top == -FMLAC_INFINITY ? 0.0f : top;
            float alpha = ptx_exp2(max[h] - reference);
            max[h] = top;
            sum[h] *= alpha;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    acc[n][2 * h + e] = ptx_exp2(acc[n][2 * h + e] - reference);
                    sum[h] += acc[n][2 * h + e];
                }
            }
#pragma unroll
            for (int n = 0; n < NV; n++) {
                out[n][2 * h] *= alpha;
                out[n][2 * h + 1] *= alpha;
            }
        }
        bool border = all_see < (i + 1) * KEYS && all_see < most;
        if (border && odd_values(values, v_bytes, (int)clamped(all_see - i * KEYS, 0, KEYS), F16 ? 0x7C00u : 0x7F80u)) {
            add_values_slowly<F16>(out, acc, values, v_bytes);
        } else {
            uint32_t a[NT / 2][4];
            pack_rows<NT, F16>(a, acc);
            accumulate<NT / 2, NV, F16>(out, a, values, v_bytes, v_bytes / 2);
        }
    }
    ptx_copy_async_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xFFFFFFFFu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xFFFFFFFFu, sum[h], 2);
        int64_t row = w.row0 + warp * 16 + g + 8 * h;
        int64_t token = w.first_q + row;
        bool lonely = sum[h] == 0.0f;
        float factor = lonely ? 0.0f : 1.0f / sum[h];
        if (row >= w.count_q) {
            continue;
        }
        if (lane % 4 == 0 && p.lse.data) {
            ((float *)p.lse.data)[token * p.lse.stride[0] + w.head * p.lse.stride[1]] =
                lonely ? p.empty_lse : (max[h] + log2f(sum[h])) * LN_2;
        }
        int64_t at = token * p.out.stride[0] + w.head * p.out.stride[1];
#pragma unroll
        for (int n = 0; n < NV; n++) {
            store_two(p.out, at, n * 8 + lane % 4 * 2, p.d_v, out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    fmlak_mha_forward_bf16_sm80(const __grid_constant__ fmlac_mha p)
{
    forward_block<0>(p);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    fmlak_mha_forward_f16_sm80(const __grid_constant__ fmlac_mha p)
{
    forward_block<1>(p);
}
