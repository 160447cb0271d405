/* formats.h - number formats: the place of each byte in a packed panel, and how a panel is
 * encoded.
 *
 * This comment is the specification of the encoder; the Python oracle and every ISA row follow it to
 * the byte. All arithmetic is IEEE f32, round to nearest even, one rounding per operation written
 * below (no fused multiply-add), subnormals kept. Layout and decoding are specified in kt.h; here is
 * what kt.h leaves open:
 *
 *   decoded value = (float)code * scale, or (float)codebook[index] * scale: one f32 multiplication;
 *                   the float of an E4M3 code is exact
 *   bf16 scale    the upper half of an f32;  e8m0 scale b: 2^(b-127), except that b = 0 means 0
 *   e4m3 scale    kt_weights.h;  e4m3(x) rounds the size of x to nearest even in 3 bits of mantissa, and to the
 *                 nearest of the row's sizes; but 0 stays 0, which is stored as byte 0. The row's R is the least
 *                 with which its largest scale can be stored: with a = max |x| of the row and c = min(|cb[0]|,
 *                 |cb[last]|), the exponent field of the float (a / (c * 23/32)) * 16/15, less 15, within 1..239: so
 *                 the largest weight of a row may have become the third code from the end, and still be found again
 *   bf16(x)       rounds x to nearest even; NaN becomes the quiet NaN 0x7fc0 with x's sign
 *   columns k..k' and rows n..16*panels are encoded as if the source were 0 there
 *   bytes of a panel after its last scale are 0
 *
 * With a rotation, the source is the rotated row (kt.h), and importance the mean of each block: the sum of its k
 * columns in ascending order from 0, divided by their number.
 *
 * FEEDBACK, of bits 4 and 6 with a rotation of 64, groups of 32 or 64, and importance. Errors e of a rotated block
 * count as those of its columns before: e' M e, M = H diag(v) H. With M = L' D L, L lower triangular with a diagonal
 * of ones, that is the sum of D[i] (e[i] + sum of L[i][j] e[j], j < i)^2, so a column that makes up for the errors
 * before it leaves only D, whose product is that of the importances: it counts their geometric mean, not their mean
 * (as GPTQ's update by a Hessian, Frantar et al., 2022, here of 64 columns, known without an inverse). In f64:
 *   1. v[c] = the importance of column c; beyond k, the least of the block's; each + (their sum, c ascending) / 4096.
 *   2. w = v, for h = 1, 2, 4 ... 32, for each i without bit h: w[i], w[i+h] = w[i] + w[i+h], w[i] - w[i+h]; each
 *      / 64. A[i][j] = w[i xor j].
 *   3. For i = 63, 62 ... 0: L[i][j] = A[i][j] / A[i][i] for j < i; then A[j][c] = A[j][c] - A[i][j] * L[i][c] for
 *      c <= j < i.
 * Then each row, with the scales s of its groups, found as below: t = x; for i = 0 ... 63, index[i] = nearest(t[i] * inv),
 * e = cb[index[i]] * s - x[i], t[j] = t[j] - f32(L[j][i]) * e for j > i.
 *
 * ENCODING, bits 32 and 16: the value itself, or bf16(value).
 *
 * ENCODING, bits 8. For each row and group x[0..g) (g = k' when group is 0):
 *   1. amax = max |x[j]|.  If amax < 2^-60: scale 0 (all bytes of the scale 0), all codes 0. Done.
 *   2. s = amax / 127 (E4M3: amax / 448).  scale f32: as it is.  bf16: s = bf16(s).  e8m0: s = the least
 *      power of two >= s.
 *   3. inv = 1 / s;  code[j] = clamp(rint(x[j] * inv), -127, 127);  rint rounds halves to even.
 *      E4M3: code[j] = the code nearest to clamp(x[j] * inv, -448, 448), ties to the even code; the sign
 *      of a zero is kept.
 *   A given scale (kt_pack) of magnitude 2^-60..2^60 is s, in place of 1 and 2.
 *
 * ENCODING, bits 4 and 6. With cb[] the codebook as floats, 16 values, or for bits 6 the 64 from -32 to 31; `last` is
 * 15 or 63. For each row and group x[0..g):
 *   nearest(v) = how many i < last have v > (cb[i] + cb[i+1]) / 2      (ties go to the lower index)
 *   1. hi = max x[j], lo = min x[j]; m = hi if hi >= -lo, else lo.
 *      If |m| < 2^-60: scale 0, every index nearest(0). Done.
 *   2. Try candidate scales s in the order below. A candidate is skipped if its divisor or s is 0.
 *      For each: inv = 1 / s;  i[j] = nearest(x[j] * inv);  e[j] = x[j] - cb[i[j]] * s.
 *   3. Exact candidates (not of scale e8m0): s = round(m / cb[i]) for i = 0, 1, ... last, of bits 6 without 8..55,
 *      where round is the identity, bf16() or e4m3(). The first one with every e[j] == 0 is taken. Done.
 *   4. Searched candidates:
 *        scale f32 and bf16: for j = 26, 27, ... 48:  s = round(m / (cb[0] * (j / 32))), then
 *                                                     s = round(m / (cb[last] * (j / 32)))
 *        scale e4m3: s = e4m3(m / (cb[0] * 48/32)) and the seven sizes of a scale behind it, each no more than
 *                    the row's largest; then the same of cb[last]
 *        scale e8m0: with p = floor(log2 |m|), L = floor(log2 max(|cb[0]|, |cb[last]|)):
 *                    s = 2^p, 2^(p-1), ... 2^(p-L), those with exponents in -126..127
 *      If the codebook is linear, cb[i] = cb[0] + i, the errors that are added up here take
 *      clamp(rint(x[j] * inv), cb[0], cb[last]) for cb[i[j]]: of two as near the even one, which is no worse.
 *      error(s) = total of 16 partial sums, q[c] = q[c] + e[j] * e[j] for j = c, c+16, c+32, ... from 0
 *      (with importance: + (e[j] * e[j]) * v[j], v = 0 for columns k..k');
 *      total: q[c] += q[c+8] for c < 8, then q[c] += q[c+4] for c < 4, q[c] += q[c+2] for c < 2,
 *      q[0] + q[1].  The candidate with the least error wins, the first of equals. A NaN or infinite
 *      error never wins; if nothing wins, the group is encoded as in step 1.
 *   A given scale is s, in place of 1 to 4; i[j] as in 2.
 *
 * E4M3 weights c * s, decoded with one rounding to x, give back each c when s is given: as 2^-60 <= |s| <=
 * 2^60 and |c| >= 2^-9 or c = 0, nothing underflows or overflows, so x, inv and x * inv are each within a
 * factor 1 +- 2^-24 of what they would be without rounding, and v = x * inv within c (1 +- 2^-22). The codes
 * beside c are at least |c| / 16 away from it, so c is nearest to v. A zero has the sign of c * s and again
 * that of s, so c's. (s = amax / 448 would not do: the largest code of a group need not be 448.) The same holds for
 * integers c, which are further apart.
 *
 * Integer values that a bf16 or e8m0 format can hold exactly come back exactly (unless all of a group lies
 * under 2^-60, or it is cut by column k and the codebook has no 0 for the padding): for bf16 by step 3, for e8m0 because the exact scale is among the powers of two and has
 * error 0. m / cb[0] is negative for positive m: scales carry a sign, which gives int4 its -8 on either
 * side. The grid of 23 factors reaches within 0.5 % of the error of a search ten times as fine, on
 * Gaussian, heavy-tailed and outlier weights (relative error at g64: 9.05 against 9.00 % on Gaussian).
 */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kt.h"

#define SEARCH_FIRST 26     /* factors j / 32 of the scale search, see above */
#define SEARCH_LAST 48
#define GROUP_TINY 0x1p-60f /* a group below this encodes as zero: its squared errors would underflow */
#define ROTATION_UNIT 64    /* columns of the smallest block */
#define SMALLEST_GROUP 32
#define E4M3_MOST 448.0f    /* the largest code, 0x7e */
#define SCALE_E4M3_SIZES 8  /* that the search tries on either side of zero */
#define SCALE_E4M3_ROOM (23.0f / 32.0f)     /* of the codes, which the largest weight of a row reaches in any case */
#define SCALE_E4M3_TOP 15   /* the greatest exponent of one, above that of its row */
#define LEAST_6 (-32)       /* the code of index 0, bits 6 */

/* Sizes of one panel of a matrix with k columns. */
typedef struct layout {
    int64_t step, g;        /* columns of one step, and columns of one code line */
    int64_t k_padded;       /* k' */
    int64_t group, groups;  /* columns per scale (k' if the format says 0), scales per row */
    size_t step_bytes;      /* codes of one step, 16 rows */
    size_t scale_offset;    /* where the scales of a panel begin = bytes of its codes */
    size_t panel_bytes;
} layout;

static inline int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static inline size_t scale_bytes(int32_t scale)
{
    return scale == KT_SCALE_F32 ? 4 : scale == KT_SCALE_BF16 ? 2 : scale == KT_SCALE_E8M0 || scale == KT_SCALE_E4M3 ? 1 : 0;
}

/* Bytes before the first scale: e4m3, what those of a row have in common. */
static inline size_t scale_head(int32_t scale)
{
    return scale == KT_SCALE_E4M3 ? KT_PANEL_ROWS : 0;
}

static inline int format_is_valid(const kt_format *f)
{
    if (f->bits == 16 || f->bits == 32)
        return f->scale == KT_SCALE_NONE && f->group == 0 && f->codes == KT_CODE_INTEGER && f->rotation == 0;
    if (f->bits != 4 && f->bits != 6 && f->bits != 8)
        return 0;
    if (f->scale == KT_SCALE_E4M3 && f->bits == 4 &&
        (f->codebook[0] >= 0 || f->codebook[15] <= 0 || !memchr(f->codebook, 0, sizeof f->codebook)))
        return 0;
    if (f->codes != KT_CODE_INTEGER && (f->codes != KT_CODE_E4M3 || f->bits != 8))
        return 0;
    for (int i = 0; f->bits == 4 && i < 15; i++)
        if (f->codebook[i] > f->codebook[i + 1])
            return 0;
    if (f->rotation != 0 && f->rotation != 64 && f->rotation != 128 && f->rotation != 256)
        return 0;
    if (f->scale == KT_SCALE_E4M3 && (f->group == 0 || f->bits == 8))
        return 0;
    return scale_bytes(f->scale) && (f->group == 0 || f->group == 32 || f->group == 64 || f->group == 128);
}

/* Whether columns make up for each other's errors where their importance is known, see above. */
static inline int format_feeds_back(const kt_format *f)
{
    return f->bits < 8 && f->rotation == ROTATION_UNIT && f->group && f->group <= ROTATION_UNIT;
}

/* The layout of a valid format. */
static inline layout layout_of(const kt_format *f, int64_t k)
{
    layout l;
    l.g = f->bits == 32 ? 1 : f->bits == 16 ? 2 : 4;
    l.step = 16 * l.g;
    l.k_padded = round_up(k, f->group > l.step ? f->group : l.step);
    l.group = f->group ? f->group : l.k_padded;
    l.groups = l.k_padded / l.group;
    l.step_bytes = (size_t)(KT_PANEL_ROWS * l.step * f->bits / 8);
    l.scale_offset = (size_t)(l.k_padded / l.step) * l.step_bytes;
    size_t scales = scale_head(f->scale) + (size_t)l.groups * KT_PANEL_ROWS * scale_bytes(f->scale);
    l.panel_bytes = (l.scale_offset + scales + 63) / 64 * 64;
    return l;
}

/* Columns of a block that is rotated, of a matrix with k columns; 0: nothing is. */
static inline int64_t rotation_block(const kt_format *f, int64_t k)
{
    int64_t block = f->rotation, padded = round_up(k, ROTATION_UNIT);
    while (block && padded % block)
        block /= 2;
    return block;
}

/* Columns that a product reads: with a rotation those of whole blocks. */
static inline int64_t rotated_columns(const kt_format *f, int64_t k)
{
    return f->rotation ? round_up(k, ROTATION_UNIT) : k;
}

static inline uint32_t bits_of_float(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float float_of_bf16(uint16_t h)
{
    return float_of_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_of_float(float x)
{
    uint32_t u = bits_of_float(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16 & 0x8000u) | 0x7fc0u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline float float_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0)
        return float_of_bits(sign | bits_of_float((float)mantissa * 0x1p-24f));
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | mantissa << 13);
    return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Bits 6: where in a byte of the plane of 2 bits those of line `line` (of 16) of a step begin. */
static inline int two_bits(int64_t line)
{
    return 2 * (int)(line % 2) + (line < 8 ? 0 : 4);
}

/* Exponent and mantissa of an E4M3 byte lie in a float's place, 120 too low in exponent, subnormals too. */
static inline float float_of_e4m3(uint8_t code)
{
    if ((code & 127) == 127)
        return NAN;
    return float_of_bits((uint32_t)(code & 128) << 24 | (uint32_t)(code & 127) << 20) * 0x1p120f;
}

/* The nearest code, ties to the even one; v is not NaN. */
static inline uint8_t e4m3_of_float(float v)
{
    float a = fabsf(v) < E4M3_MOST ? fabsf(v) : E4M3_MOST;
    uint32_t sign = bits_of_float(v) >> 24 & 128, u = bits_of_float(a);
    if (a < 0x1p-6f)                                    /* multiples of 2^-9 */
        return (uint8_t)(sign | (uint32_t)rintf(a * 0x1p9f));
    return (uint8_t)(sign | (((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120 << 3)));
}

/* The least and the greatest size of the e4m3 scales of a row with this R. */
static inline float least_e4m3(uint8_t r)
{
    return float_of_bits((uint32_t)r << 23);
}

static inline float most_e4m3(uint8_t r)
{
    return float_of_bits(((uint32_t)r + SCALE_E4M3_TOP) << 23 | 0x700000u);
}

/* R of a row whose largest scale is that. */
static inline uint8_t row_e4m3(float largest)
{
    int r = (int)(bits_of_float(largest * (16.0f / 15.0f)) >> 23 & 255) - SCALE_E4M3_TOP;
    return (uint8_t)(r < 1 ? 1 : r > 254 - SCALE_E4M3_TOP ? 254 - SCALE_E4M3_TOP : r);
}

/* The e4m3 scale of such a row nearest to s; 0 of 0. */
static inline float scale_e4m3(float s, uint8_t r)
{
    uint32_t u = bits_of_float(fabsf(s));
    float size = float_of_bits((u + 0x7ffffu + (u >> 20 & 1)) & 0xfff00000u);
    size = fminf(fmaxf(size, least_e4m3(r)), most_e4m3(r));
    return s == 0.0f ? 0.0f : copysignf(size, s);
}

/* Scale number `index` (group * 16 + row) of the scales at `at`. */
static inline float scale_load(int32_t scale, const uint8_t *at, int64_t index)
{
    uint16_t half;
    uint32_t byte;
    float single;
    switch (scale) {
    case KT_SCALE_F32:
        memcpy(&single, at + 4 * index, 4);
        return single;
    case KT_SCALE_BF16:
        memcpy(&half, at + 2 * index, 2);
        return float_of_bf16(half);
    case KT_SCALE_E8M0:
        return float_of_bits((uint32_t)at[index] << 23);
    case KT_SCALE_E4M3:
        byte = at[KT_PANEL_ROWS + index];
        return float_of_bits(((byte & 128) << 24) + ((byte & 127) << 20) + ((uint32_t)at[index % KT_PANEL_ROWS] << 23));
    default:
        return 1.0f;
    }
}

/* Store a scale that was already rounded to its type; of e4m3 what its row has in common is there. */
static inline void scale_store(int32_t scale, float s, uint8_t *at, int64_t index)
{
    uint32_t u = bits_of_float(s);
    uint16_t half = (uint16_t)(u >> 16);
    if (scale == KT_SCALE_F32)
        memcpy(at + 4 * index, &u, 4);
    else if (scale == KT_SCALE_BF16)
        memcpy(at + 2 * index, &half, 2);
    else if (scale == KT_SCALE_E8M0)
        at[index] = (uint8_t)(u >> 23);
    else if (scale == KT_SCALE_E4M3)
        at[KT_PANEL_ROWS + index] =
            s == 0.0f ? 0 : (uint8_t)((u >> 24 & 128) | ((u & 0x7fffffffu) - ((uint32_t)at[index % KT_PANEL_ROWS] << 23)) >> 20);
}

#endif
