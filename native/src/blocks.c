/* blocks.c - decoders of the blocks that GGUF files consist of.
 *
 * d is an f16 scale, m an f16 minimum; codes are little-endian. Blocks of 32 with one scale:
 *
 *   Q8_0   d, 32 x int8                               d * q
 *   Q4_0   d, 16 bytes                                d * (q - 8)
 *   Q4_1   d, m, 16 bytes                             d * q + m
 *   Q5_0   d, 4 bytes of fifth bits, 16 bytes         d * (q - 16)
 *   Q5_1   d, m, 4 bytes of fifth bits, 16 bytes      d * q + m
 *   MXFP4  e8m0 scale, 16 bytes                       2^(e - 127) * E2M1
 *
 * A byte of 4-bit codes i holds element i in its low half and element i + 16 in its high one; bit i of the
 * fifth bits belongs to element i. Blocks of 256 ("K"), with a second level of 6-bit scales:
 *
 *   Q4_K   d, m, 12 bytes of scales, 128 bytes                            (d * s) * q - (m * t), 8 groups of 32
 *   Q5_K   d, m, 12 bytes of scales, 32 bytes of fifth bits, 128 bytes    the same
 *   Q6_K   128 bytes of low codes, 64 of high, 16 x int8 s, d             (d * s) * (q - 32), 16 groups of 16
 *
 * What is written is what gguf.quants.dequantize gives, to the last bit: products before sums, none fused.
 * Sources: ggml's description of the formats in the gguf package, version 0.19.
 */
#include "blocks.h"

#include <string.h>

#include "kernels/formats.h"
#include "kt.h"

static float half_at(const uint8_t *at)
{
    return float_of_f16((uint16_t)(at[0] | at[1] << 8));
}

/* ---- blocks of 32 ------------------------------------------------------------------------------ */

static void decode_q8_0(const uint8_t *block, float *dst)
{
    const float d = half_at(block);
    for (int i = 0; i < 32; i++)
        dst[i] = (float)(int8_t)block[2 + i] * d;
}

static void decode_q4_0(const uint8_t *block, float *dst)
{
    const float d = half_at(block);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)((block[2 + i] & 15) - 8);
        dst[i + 16] = d * (float)((block[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *block, float *dst)
{
    const float d = half_at(block), m = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)(block[4 + i] & 15) + m;
        dst[i + 16] = d * (float)(block[4 + i] >> 4) + m;
    }
}

/* The 32 codes of five bits: 4 from `low`, the fifth from the 4 bytes before it. */
static void codes_of_q5(const uint8_t *low, int32_t codes[32])
{
    uint32_t fifth;
    memcpy(&fifth, low - 4, sizeof fifth);
    for (int i = 0; i < 16; i++) {
        codes[i] = (int32_t)((low[i] & 15) | (fifth >> i & 1) << 4);
        codes[i + 16] = (int32_t)((uint32_t)(low[i] >> 4) | (fifth >> (i + 16) & 1) << 4);
    }
}

static void decode_q5_0(const uint8_t *block, float *dst)
{
    const float d = half_at(block);
    int32_t codes[32];
    codes_of_q5(block + 6, codes);
    for (int i = 0; i < 32; i++)
        dst[i] = d * (float)(codes[i] - 16);
}

static void decode_q5_1(const uint8_t *block, float *dst)
{
    const float d = half_at(block), m = half_at(block + 2);
    int32_t codes[32];
    codes_of_q5(block + 8, codes);
    for (int i = 0; i < 32; i++)
        dst[i] = d * (float)codes[i] + m;
}

static void decode_mxfp4(const uint8_t *block, float *dst)
{
    /* Twice the values of E2M1, so that they are whole; the scale is half of 2^(e - 127). */
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint32_t e = block[0];
    const float d = float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)values[block[1 + i] & 15];
        dst[i + 16] = d * (float)values[block[1 + i] >> 4];
    }
}

/* ---- blocks of 256 ----------------------------------------------------------------------------- */

/* Scale and minimum of group j of 8: six bits each, the upper groups' two highest bits above the lower ones'. */
static void scales_of_k(const uint8_t *packed, int j, float *scale, float *minimum)
{
    const uint8_t *low = packed + (j & 3), *high = packed + 8 + (j & 3);
    const int s = j < 4 ? low[0] & 63 : (high[0] & 15) | (low[0] >> 2 & 48);
    const int m = j < 4 ? low[4] & 63 : high[0] >> 4 | (low[4] >> 2 & 48);
    *scale = (float)s;
    *minimum = (float)m;
}

/* Q4_K and Q5_K: 32 bytes of codes hold a group of 32 in their low halves and the next one in their high
 * halves; bit j of fifth[i] belongs to element i of group j (fifth NULL: there are none). */
static void decode_k(const uint8_t *block, const uint8_t *fifth, const uint8_t *codes, float *dst)
{
    const float d = half_at(block), m = half_at(block + 2);
    for (int j = 0; j < 8; j++) {
        const uint8_t *q = codes + j / 2 * 32;
        float scale, minimum;
        scales_of_k(block + 4, j, &scale, &minimum);
        scale = d * scale;
        minimum = m * minimum;
        for (int i = 0; i < 32; i++) {
            const int high = fifth ? (fifth[i] >> j & 1) << 4 : 0;
            dst[j * 32 + i] = scale * (float)((q[i] >> (j & 1) * 4 & 15) | high) - minimum;
        }
    }
}

static void decode_q4_k(const uint8_t *block, float *dst)
{
    decode_k(block, NULL, block + 16, dst);
}

static void decode_q5_k(const uint8_t *block, float *dst)
{
    decode_k(block, block + 16, block + 48, dst);
}

/* Each half of 128: 64 bytes of low codes (elements 0-63 in low halves, 64-127 in high ones) and 32 bytes of
 * high codes (two bits for elements i, i + 32, i + 64, i + 96). */
static void decode_q6_k(const uint8_t *block, float *dst)
{
    const float d = half_at(block + 208);
    for (int j = 0; j < 8; j++) {
        const uint8_t *low = block + j / 4 * 64 + j % 2 * 32, *high = block + 128 + j / 4 * 32;
        const int shift = j % 4 / 2 * 4;
        const float scales[2] = {d * (float)(int8_t)block[192 + 2 * j], d * (float)(int8_t)block[193 + 2 * j]};
        for (int i = 0; i < 32; i++) {
            const int q = (low[i] >> shift & 15) | (high[i] >> j % 4 * 2 & 3) << 4;
            dst[j * 32 + i] = scales[i / 16] * (float)(q - 32);
        }
    }
}

const block_format *block_format_of(int32_t dtype)
{
    static const block_format formats[] = {
        {KT_Q4_0, 32, 18, decode_q4_0},   {KT_Q4_1, 32, 20, decode_q4_1},    {KT_Q5_0, 32, 22, decode_q5_0},
        {KT_Q5_1, 32, 24, decode_q5_1},   {KT_Q8_0, 32, 34, decode_q8_0},    {KT_Q4_K, 256, 144, decode_q4_k},
        {KT_Q5_K, 256, 176, decode_q5_k}, {KT_Q6_K, 256, 210, decode_q6_k},  {KT_GGUF_MXFP4, 32, 17, decode_mxfp4},
    };
    for (unsigned i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].dtype == dtype)
            return &formats[i];
    return NULL;
}
