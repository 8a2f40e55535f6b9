/* SPDX-License-Identifier: MIT */
/* tile_gradients_avx512bf16.c: P and dS of backward. Rows are the lanes, as in scores. */
#include "tile_avx512bf16.h"

void fmlak_tile_gradients_avx512bf16(float *s, float *ds, float scale2, const float *lse2, const float *delta,
                                     bool by_token, const int32_t *visible, int32_t rows, int32_t tokens)
{
    const __m512 scale = _mm512_set1_ps(scale2), most = _mm512_set1_ps(126.0f);
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += LANES) {
        __m512i sees = _mm512_loadu_si512(visible + r);
        __m512 lse = _mm512_setzero_ps(), mean = lse;
        if (!by_token) {
            lse = _mm512_loadu_ps(lse2 + r);
            mean = _mm512_loadu_ps(delta + r);
        }
        for (int32_t t = 0; t < tokens; t++) {
            float *p = s + t * lanes + r, *g = ds + t * lanes + r;
            __mmask16 seen = _mm512_cmpgt_epi32_mask(sees, _mm512_set1_epi32(t));
            if (by_token) {
                lse = _mm512_set1_ps(lse2[t]);
                mean = _mm512_set1_ps(delta[t]);
            }
            __m512 x = _mm512_fmsub_ps(_mm512_load_ps(p), scale, lse);
            __m512 w = exp2_avx512(_mm512_min_ps(most, x)); /* in this order NaN passes */
            __m512 d = _mm512_mul_ps(w, _mm512_sub_ps(_mm512_load_ps(g), mean));
            _mm512_store_ps(p, _mm512_maskz_mov_ps(seen, w));
            _mm512_store_ps(g, _mm512_maskz_mov_ps(seen, d));
        }
    }
}
