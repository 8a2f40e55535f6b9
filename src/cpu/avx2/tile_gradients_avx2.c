/* SPDX-License-Identifier: MIT */
/* tile_gradients_avx2.c: P and dS of backward. Rows are the lanes, as in scores. */
#include "tile_avx2.h"

void fmlak_tile_gradients_avx2(float *s, float *ds, float scale2, const float *lse2, const float *delta, bool by_token,
                               const int32_t *visible, int32_t rows, int32_t tokens)
{
    const __m256 scale = _mm256_set1_ps(scale2), most = _mm256_set1_ps(126.0f);
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += 8) {
        __m256i sees = _mm256_loadu_si256((const __m256i *)(visible + r));
        __m256 lse = _mm256_setzero_ps(), mean = lse;
        if (!by_token) {
            lse = _mm256_loadu_ps(lse2 + r);
            mean = _mm256_loadu_ps(delta + r);
        }
        for (int32_t t = 0; t < tokens; t++) {
            float *p = s + t * lanes + r, *g = ds + t * lanes + r;
            __m256 seen = _mm256_castsi256_ps(_mm256_cmpgt_epi32(sees, _mm256_set1_epi32(t)));
            if (by_token) {
                lse = _mm256_broadcast_ss(lse2 + t);
                mean = _mm256_broadcast_ss(delta + t);
            }
            __m256 x = _mm256_fmsub_ps(_mm256_load_ps(p), scale, lse);
            __m256 w = exp2_avx2(_mm256_min_ps(most, x)); /* in this order NaN passes */
            __m256 d = _mm256_mul_ps(w, _mm256_sub_ps(_mm256_load_ps(g), mean));
            _mm256_store_ps(p, _mm256_and_ps(w, seen));
            _mm256_store_ps(g, _mm256_and_ps(d, seen));
        }
    }
}
