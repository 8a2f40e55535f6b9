/* SPDX-License-Identifier: MIT */
/*
 * tile_gradients_scalar.c: P and dS of backward, in loops without branches, which compilers turn into vectors.
 */
#include "../../format/format.h"
#include "tile_scalar.h"

static inline uint32_t mask_of(bool set)
{
    return 0u - (uint32_t)set;
}

/*
 * 2^x, about 2^-22 relative, 0 below 2^-126. Clamps are done on bits, without branches: comparisons of floats
 * may trap, which would keep the compiler from vectorising the callers. n is x rounded to an integer by
 * adding 1.5 * 2^23, whose low bits then are n; the series in f = x - n, |f| <= 1/2, is that of e^(f ln 2).
 */
static inline float exp2_near(float x)
{
    const uint32_t least = 0xC2FC0000u, most = 0x43000000u; /* -126, 128 */
    const float magic = 12582912.0f;
    uint32_t bits = fmlai_bits_of_f32(x);
    uint32_t low = mask_of((bits > least) & (bits <= 0xFF800000u));
    uint32_t high = mask_of((bits > most) & (bits <= 0x7F800000u));
    float c = fmlai_f32_of_bits((least & low) | (most & high) | (bits & ~low & ~high));
    float shifted = c + magic;
    float f = c - (shifted - magic);
    float y = 1.5252734e-5f;
    y = y * f + 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    y = y * fmlai_f32_of_bits((fmlai_bits_of_f32(shifted) << 23) + 0x3F800000u);
    return fmlai_f32_of_bits(fmlai_bits_of_f32(y) & ~low);
}

/* One token's lanes. */
static void weigh_token(float *restrict s, float *restrict ds, const float *restrict lse2, const float *restrict delta,
                        const int32_t *restrict visible, int32_t t, float scale2, int32_t lanes)
{
    for (int32_t r = 0; r < lanes; r++) {
        float weight = exp2_near(s[r] * scale2 - lse2[r]);
        float gradient = weight * (ds[r] - delta[r]);
        uint32_t seen = mask_of(t < visible[r]);
        s[r] = fmlai_f32_of_bits(fmlai_bits_of_f32(weight) & seen);
        ds[r] = fmlai_f32_of_bits(fmlai_bits_of_f32(gradient) & seen);
    }
}

void fmlak_tile_gradients_scalar(float *s, float *ds, float scale2, const float *lse2, const float *delta,
                                 bool by_token, const int32_t *visible, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    float same_lse2[FMLAI_TILE_ROWS], same_delta[FMLAI_TILE_ROWS];
    for (int32_t t = 0; t < tokens; t++) {
        for (int32_t r = 0; by_token && r < lanes; r++) {
            same_lse2[r] = lse2[t];
            same_delta[r] = delta[t];
        }
        weigh_token(s + t * lanes, ds + t * lanes, by_token ? same_lse2 : lse2, by_token ? same_delta : delta, visible,
                    t, scale2, lanes);
    }
}
