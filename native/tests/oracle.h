/* oracle.h - slow and obvious versions of what the kernels do, one value at a time, straight from the
 * specifications in kt.h, kernels.h and formats.h. Shares only the layout arithmetic with the library.
 */
#ifndef KT_ORACLE_H
#define KT_ORACLE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cpu.h"
#include "gather.h"
#include "kernels/formats.h"
#include "kernels/kernels.h"

#define NL4 {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}
#define LINEAR4 {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}
#define E2M1 {-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12}
/* With a 0, which scales without one need. */
#define NL4_0 {-127, -91, -69, -52, -39, -27, -17, -8, 0, 8, 17, 28, 40, 55, 73, 98}
#define WIDE4 {-128, -90, -64, -40, -20, -10, -5, -2, 3, 7, 12, 30, 50, 80, 100, 127}

typedef struct named_format {
    const char *name;
    kt_format format;
} named_format;

static const named_format all_formats[] = {
    {"f32", {32, 0, KT_SCALE_NONE, {0}}},
    {"bf16", {16, 0, KT_SCALE_NONE, {0}}},
    {"int8", {8, 0, KT_SCALE_F32, {0}}},
    {"int8-g32", {8, 32, KT_SCALE_BF16, {0}}},
    {"int8-g128-e8m0", {8, 128, KT_SCALE_E8M0, {0}}},
    {"fp8", {8, 128, KT_SCALE_F32, {0}, KT_CODE_E4M3}},
    {"int4", {4, 64, KT_SCALE_BF16, LINEAR4}},
    {"int4-g32", {4, 32, KT_SCALE_BF16, LINEAR4}},
    {"int4-g128", {4, 128, KT_SCALE_BF16, LINEAR4}},
    {"int4-row-f32", {4, 0, KT_SCALE_F32, LINEAR4}},
    {"nl4", {4, 64, KT_SCALE_BF16, NL4}},
    {"nl4-g32-f32", {4, 32, KT_SCALE_F32, NL4}},
    {"mxfp4", {4, 32, KT_SCALE_E8M0, E2M1}},
    {"wide4", {4, 128, KT_SCALE_BF16, WIDE4}},
    {"int4-s8", {4, 32, KT_SCALE_E4M3, LINEAR4}},
    {"nl4-s8", {4, 32, KT_SCALE_E4M3, NL4_0}},
    {"int6", {6, 64, KT_SCALE_BF16, {0}}},
    {"int6-g32-s8", {6, 32, KT_SCALE_E4M3, {0}}},
    {"int6-row-f32", {6, 0, KT_SCALE_F32, {0}}},
};
enum { N_FORMATS = sizeof all_formats / sizeof all_formats[0] };

/* ---- random numbers ---- */

static inline uint32_t next_u32(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

static inline float next_float(uint64_t *state)      /* about Gaussian, with some outliers */
{
    float sum = 0.0f;
    for (int i = 0; i < 6; i++)
        sum += (float)(next_u32(state) >> 8) * 0x1p-24f - 0.5f;
    return next_u32(state) % 50 ? sum : 6.0f * sum;
}

static inline void *allocate(size_t size)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, size ? size : 1))
        exit(2);
    memset(p, 0, size);
    return p;
}

static inline float *random_floats_of(size_t n, uint64_t *state)
{
    float *x = allocate(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = next_float(state);
    return x;
}

/* Values of a half-width float read digit by digit. */
static inline double minifloat(unsigned bits, int exponent_bits, int mantissa_bits)
{
    int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double fraction = (double)(bits & ((1u << mantissa_bits) - 1u)) / (double)(1 << mantissa_bits);
    double value = exponent ? ldexp(1.0 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

static inline kt_pool *make_pool(const char *isa, int32_t n_threads)
{
    char error[256] = "";
    kt_pool_options options = {isa, n_threads, NULL, 0};
    kt_pool *pool = kt_pool_create(&options, error, sizeof error);
    if (!pool) {
        printf("FAIL no pool: %s\n", error);
        exit(1);
    }
    return pool;
}

/* ---- one packed matrix ---- */

/* Its products take f32 activations only. */
static inline int reads_f32(const kt_format *f)
{
    return f->bits == 32 || f->codes == KT_CODE_E4M3;
}

/* The stored code of row r, column c: the bits of a plain value, the signed code or codebook value. */
static inline int32_t oracle_code(const kt_format *f, const uint8_t *matrix, int64_t k, int64_t r, int64_t c)
{
    layout l = layout_of(f, k);
    const uint8_t *panel = matrix + (size_t)(r / 16) * l.panel_bytes;
    int64_t step = c / l.step, line = c % l.step / l.g, j = c % l.g, row = r % 16;
    if (f->bits == 8)
        return (int8_t)panel[step * 1024 + line * 64 + row * 4 + j];
    const uint8_t *at = panel + step * l.step_bytes + row * 4 + j;
    uint8_t both = at[line % 8 * 64];
    int low = line < 8 ? both & 15 : both >> 4;
    if (f->bits == 4)
        return f->codebook[low];
    /* lines 0, 1 and 8, 9 of a step share the first line of two bits, and so on */
    return low + 16 * (at[512 + line % 8 / 2 * 64] >> (line / 8 * 4 + line % 2 * 2) & 3) - 32;
}

static inline float oracle_scale(const kt_format *f, const uint8_t *matrix, int64_t k, int64_t r, int64_t c)
{
    layout l = layout_of(f, k);
    const uint8_t *scales = matrix + (size_t)(r / 16) * l.panel_bytes + l.scale_offset;
    int64_t i = c / l.group * 16 + r % 16;
    if (f->scale == KT_SCALE_E4M3) {
        uint8_t byte = scales[16 + i];
        double size = ldexp(1.0 + byte % 8 / 8.0, byte % 128 / 8 + scales[r % 16] - 127);
        return (float)(byte & 128 ? -size : size);
    }
    return scale_load(f->scale, scales, c / l.group * 16 + r % 16);
}

static inline float oracle_value(const kt_format *f, const uint8_t *matrix, int64_t k, int64_t r, int64_t c)
{
    layout l = layout_of(f, k);
    const uint8_t *panel = matrix + (size_t)(r / 16) * l.panel_bytes;
    float value;
    uint16_t half;
    if (f->bits == 32) {
        memcpy(&value, panel + c * 64 + r % 16 * 4, 4);
        return value;
    }
    if (f->bits == 16) {
        memcpy(&half, panel + c / 2 * 64 + r % 16 * 4 + c % 2 * 2, 2);
        return float_of_bf16(half);
    }
    int32_t code = oracle_code(f, matrix, k, r, c);
    value = f->codes == KT_CODE_E4M3 ? (float)minifloat((uint8_t)code, 4, 3) : (float)code;
    return value * oracle_scale(f, matrix, k, r, c);
}

/* ---- the encoder of formats.h, for one group ---- */

/* The values of a format's indices. */
typedef struct oracle_book {
    float value[64];
    int last;
} oracle_book;

static inline oracle_book oracle_book_of(const kt_format *f)
{
    oracle_book b = {{0}, f->bits == 4 ? 15 : 63};
    for (int i = 0; i <= b.last; i++)
        b.value[i] = f->bits == 4 ? f->codebook[i] : (float)i - 32.0f;
    return b;
}

static inline int oracle_nearest(const oracle_book *b, float v)
{
    int n = 0;
    for (int i = 0; i < b->last; i++)
        n += v > (b->value[i] + b->value[i + 1]) / 2.0f;
    return n;
}

/* Of a row: what its scales have in common. */
static inline uint8_t oracle_row_e4m3(const oracle_book *b, const float *x, int64_t k)
{
    float amax = 0.0f, least = fminf(fabsf(b->value[0]), fabsf(b->value[b->last]));
    for (int64_t c = 0; c < k; c++)
        amax = fmaxf(amax, fabsf(x[c]));
    float most = amax / (least * (23.0f / 32.0f)) * (16.0f / 15.0f);
    int r = most > 0.0f ? (int)floor(log2((double)most)) + 127 - 15 : 1;
    return (uint8_t)(r < 1 ? 1 : r > 239 ? 239 : r);
}

/* The nearest of all 128 sizes, of two as near the one with the even byte. */
static inline float oracle_scale_e4m3(float s, uint8_t r)
{
    double best = 0, size = fabs((double)s);
    for (int byte = 0; byte < 128 && s != 0.0f; byte++) {
        double value = ldexp(1.0 + byte % 8 / 8.0, byte / 8 + r - 127), closer = fabs(size - best) - fabs(size - value);
        if (byte == 0 || closer > 0 || (closer == 0 && byte % 2 == 0))
            best = value;
    }
    return (float)copysign(best, (double)s);
}

static inline float oracle_round_scale(int32_t type, float s, uint8_t r)
{
    if (type == KT_SCALE_E4M3)
        return oracle_scale_e4m3(s, r);
    return type == KT_SCALE_BF16 ? float_of_bf16(bf16_of_float(s)) : s;
}

static inline float oracle_error(const oracle_book *b, const float *x, int64_t g, float s, int *exact)
{
    float q[16] = {0}, inv = 1.0f / s;
    *exact = 1;
    for (int64_t j = 0; j < g; j++) {
        float decoded = b->value[oracle_nearest(b, x[j] * inv)] * s;
        float e = x[j] - decoded, square = e * e;
        q[j % 16] = q[j % 16] + square;
        *exact &= e == 0.0f;
    }
    for (int half = 8; half; half /= 2)
        for (int c = 0; c < half; c++)
            q[c] += q[c + half];
    return q[0];
}

/* The scales that the search tries. */
static inline int oracle_candidates(const kt_format *f, const oracle_book *b, float m, uint8_t r, float *candidates)
{
    float ends[2] = {b->value[0], b->value[b->last]};
    int n = 0;
    if (f->scale == KT_SCALE_E8M0) {
        int p = (int)floor(log2(fabs((double)m)));
        int l = (int)floor(log2(fmax(fabs((double)ends[0]), fabs((double)ends[1]))));
        for (int e = p; e >= p - l; e--)
            candidates[n++] = ldexpf(1.0f, e);
    }
    for (int end = 0; f->scale == KT_SCALE_E4M3 && end < 2; end++) {
        float s = oracle_scale_e4m3(m / (ends[end] * 1.5f), r);
        for (int i = 0; ends[end] != 0.0f && i < 8; i++) {
            candidates[n++] = s;
            float next = oracle_scale_e4m3(s * 1.0625f + s / 256.0f, r);      /* past the middle to the next size */
            s = fabsf(next) > fabsf(s) ? next : s;
        }
    }
    for (int j = 26; (f->scale == KT_SCALE_F32 || f->scale == KT_SCALE_BF16) && j <= 48; j++)
        for (int end = 0; end < 2; end++)
            if (ends[end] != 0.0f)
                candidates[n++] = oracle_round_scale(f->scale, m / (ends[end] * ((float)j / 32.0f)), r);
    return n;
}

static inline float oracle_scale_searched(const kt_format *f, const float *x, int64_t g, uint8_t r)
{
    oracle_book b = oracle_book_of(f);
    float hi = x[0], lo = x[0], best = INFINITY, chosen = 0.0f, candidates[64];
    int exact;
    for (int64_t j = 0; j < g; j++) {
        hi = x[j] > hi ? x[j] : hi;
        lo = x[j] < lo ? x[j] : lo;
    }
    float m = hi >= -lo ? hi : lo;
    if (fabsf(m) < GROUP_TINY)
        return 0.0f;
    for (int i = 0; f->scale != KT_SCALE_E8M0 && i <= b.last; i++) {
        float s = b.value[i] != 0.0f ? oracle_round_scale(f->scale, m / b.value[i], r) : 0.0f;
        if (s != 0.0f && (i < 8 || i > b.last - 8) && (oracle_error(&b, x, g, s, &exact), exact))
            return s;
    }
    int n = oracle_candidates(f, &b, m, r, candidates);
    for (int i = 0; i < n; i++) {
        float error = candidates[i] == 0.0f ? INFINITY : oracle_error(&b, x, g, candidates[i], &exact);
        if (error < best) {
            best = error;
            chosen = candidates[i];
        }
    }
    return chosen;
}

static inline float oracle_scale_8(const kt_format *f, const float *x, int64_t g)
{
    float amax = 0.0f, most = f->codes == KT_CODE_E4M3 ? 448.0f : 127.0f;
    for (int64_t j = 0; j < g; j++)
        amax = fabsf(x[j]) > amax ? fabsf(x[j]) : amax;
    if (amax < GROUP_TINY)
        return 0.0f;
    if (f->scale == KT_SCALE_E8M0)
        return ldexpf(1.0f, (int)ceil(log2((double)(amax / most))));
    return oracle_round_scale(f->scale, amax / most, 0);
}

/* Of all codes that are not NaN the nearest, of two the even one; v of the range. */
static inline uint8_t oracle_e4m3(float v)
{
    static double value[127];           /* of each code; the first call fills it, from the end */
    int best = 0;
    for (unsigned code = 0; value[1] == 0 && code < 127; code++)
        value[126 - code] = minifloat(126 - code, 4, 3);
    for (int code = 1; code < 127; code++) {
        double closer = fabs((double)fabsf(v) - value[best]) - fabs((double)fabsf(v) - value[code]);
        if (closer > 0 || (closer == 0 && code % 2 == 0))
            best = code;
    }
    return (uint8_t)(best | (signbit(v) ? 128 : 0));
}

static inline int oracle_has_zero(const kt_format *f)
{
    return f->bits == 6 || memchr(f->codebook, 0, sizeof f->codebook) != NULL;
}

/* A whole matrix [n, k] to panels; scales: NULL, or [n][groups] that are used. */
static inline void oracle_encode_scaled(const kt_format *f, int64_t n, int64_t k, const float *src,
                                        const float *scales, uint8_t *dst)
{
    layout l = layout_of(f, k);
    oracle_book book = oracle_book_of(f);
    float *x = allocate((size_t)l.k_padded * sizeof *x);
    memset(dst, 0, (size_t)((n + 15) / 16) * l.panel_bytes);
    for (int64_t r = 0; r < (n + 15) / 16 * 16; r++) {
        uint8_t *panel = dst + (size_t)(r / 16) * l.panel_bytes;
        int64_t row = r % 16;
        for (int64_t c = 0; c < l.k_padded; c++)
            x[c] = r < n && c < k ? src[r * k + c] : 0.0f;
        for (int64_t c = 0; c < l.k_padded && f->bits >= 16; c++) {
            uint16_t half = bf16_of_float(x[c]);
            if (f->bits == 32)
                memcpy(panel + c * 64 + row * 4, &x[c], 4);
            else
                memcpy(panel + c / 2 * 64 + row * 4 + c % 2 * 2, &half, 2);
        }
        uint8_t in_common = oracle_row_e4m3(&book, x, l.k_padded);
        if (f->scale == KT_SCALE_E4M3)
            panel[l.scale_offset + (size_t)row] = in_common;
        for (int64_t g = 0; g < l.groups && f->bits < 16; g++) {
            const float *from = x + g * l.group;
            float s = f->bits == 8 ? oracle_scale_8(f, from, l.group) : oracle_scale_searched(f, from, l.group, in_common);
            s = scales && r < n ? scales[r * l.groups + g] : s;
            float inv = s == 0.0f ? 0.0f : 1.0f / s;
            scale_store(f->scale, s, panel + l.scale_offset, 16 * g + row);
            for (int64_t c = g * l.group; c < (g + 1) * l.group; c++) {
                int64_t line = c % 64 / 4;
                float v = x[c] * inv;
                if (f->codes == KT_CODE_E4M3) {
                    panel[c / 64 * 1024 + line * 64 + row * 4 + c % 4] = oracle_e4m3(v);
                } else if (f->bits == 8) {
                    float code = rintf(v) > 127.0f ? 127.0f : rintf(v) < -127.0f ? -127.0f : rintf(v);
                    panel[c / 64 * 1024 + line * 64 + row * 4 + c % 4] = (uint8_t)(int8_t)code;
                } else {
                    int index = oracle_nearest(&book, v);
                    uint8_t *at = panel + (size_t)(c / 64) * l.step_bytes + row * 4 + c % 4;
                    at[line % 8 * 64] |= (uint8_t)((index & 15) << (line < 8 ? 0 : 4));
                    if (f->bits == 6)
                        at[512 + line % 8 / 2 * 64] |= (uint8_t)(index >> 4 << (line / 8 * 4 + line % 2 * 2));
                }
            }
        }
    }
    free(x);
}

static inline void oracle_encode(const kt_format *f, int64_t n, int64_t k, const float *src, uint8_t *dst)
{
    oracle_encode_scaled(f, n, k, src, NULL, dst);
}

/* ---- results ---- */

static int failures;

/* Print one line per law and count the broken ones. */
static inline void law(const char *row, const char *name, int64_t cases, int64_t broken)
{
    printf("%s %-12s %s (%lld cases)\n", broken ? "FAIL" : "ok  ", row, name, (long long)cases);
    failures += broken != 0;
}

/* 1 if got is further from want than the tolerance, or not a number. */
static inline int64_t far(double got, double want, double tolerance)
{
    return !(fabs(got - want) <= tolerance);
}

/* Test every row that this CPU can run. */
static inline void for_each_row(void (*test)(const kt_kernels *kernels))
{
    uint64_t have = cpu_features();
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        if (row->needs & ~have)
            printf("skip %-12s this CPU lacks what it needs\n", row->kernels->name);
        else {
            if (row->kernels->enter)
                row->kernels->enter();
            test(row->kernels);
            if (row->kernels->leave)
                row->kernels->leave();
        }
    }
}

#endif
