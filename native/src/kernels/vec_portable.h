/* vec_portable.h - the operations of vec.h as plain loops of 16: no intrinsics, any CPU. Slow
 * where the baseline has no FMA instruction, and the reference the other rows are tested
 * against. */
#include <math.h>

typedef struct { float v[LANES]; } vf;
typedef struct { int32_t v[LANES]; } vi;
typedef struct { int8_t v[4 * LANES]; } vb;
typedef struct { int8_t v[4]; } vx;

/* One statement per lane; `r` is the result. */
#define EACH(type, statement)              \
    type r;                                \
    for (int i = 0; i < LANES; i++)        \
        statement;                         \
    return r

INLINE vf vf_set1(float x) { EACH(vf, r.v[i] = x); }
INLINE vf vf_load(const float *p) { EACH(vf, r.v[i] = p[i]); }
INLINE void vf_store(float *p, vf a) { memcpy(p, a.v, sizeof a.v); }
INLINE vf vf_load_n(const float *p, int n) { EACH(vf, r.v[i] = i < n ? p[i] : 0.0f); }
INLINE void vf_store_n(float *p, int n, vf a) { memcpy(p, a.v, (size_t)n * sizeof a.v[0]); }
INLINE vf vf_add(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] + b.v[i]); }
INLINE vf vf_sub(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] - b.v[i]); }
INLINE vf vf_mul(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] * b.v[i]); }
INLINE vf vf_div(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] / b.v[i]); }
INLINE vf vf_fma(vf a, vf b, vf c) { EACH(vf, r.v[i] = fmaf(a.v[i], b.v[i], c.v[i])); }
INLINE vf vf_min(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE vf vf_max(vf a, vf b) { EACH(vf, r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE vf vf_abs(vf a) { EACH(vf, r.v[i] = fabsf(a.v[i])); }
INLINE vf vf_rint(vf a) { EACH(vf, r.v[i] = rintf(a.v[i])); }
INLINE vf vf_fix_tie(vf c, vf v) { EACH(vf, r.v[i] = c.v[i] - v.v[i] == 0.5f ? c.v[i] - 1.0f : c.v[i]); }
INLINE vf vf_swap(vf a, int d) { EACH(vf, r.v[i] = a.v[i ^ d]); }
INLINE vf vf_load_twice(const float *p) { EACH(vf, r.v[i] = p[i / 2]); }

INLINE float vf_sum(vf a)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.v[i] += a.v[i + half];
    return a.v[0];
}

INLINE void vf_sum4(const vf *a, float *out)
{
    for (int i = 0; i < 4; i++)
        out[i] = vf_sum(a[i]);
}

INLINE float vf_top(vf a)
{
    for (int i = 1; i < LANES; i++)
        a.v[0] = a.v[0] > a.v[i] ? a.v[0] : a.v[i];
    return a.v[0];
}

INLINE vf vf_bf16_even(vi a) { EACH(vf, r.v[i] = float_of_bits((uint32_t)a.v[i] << 16)); }
INLINE vf vf_bf16_odd(vi a) { EACH(vf, r.v[i] = float_of_bits((uint32_t)a.v[i] & 0xffff0000u)); }
INLINE vi vi_load_int8(const uint8_t *p) { EACH(vi, r.v[i] = (int8_t)p[i]); }
INLINE vi vi_load8(const uint8_t *p) { EACH(vi, r.v[i] = p[i]); }
INLINE vf vf_from_bf16(const uint16_t *p) { EACH(vf, r.v[i] = float_of_bf16(p[i])); }
INLINE vf vf_from_f16(const uint16_t *p) { EACH(vf, r.v[i] = float_of_f16(p[i])); }
INLINE void vf_store_bf16(uint16_t *p, vf a)
{
    for (int i = 0; i < LANES; i++)
        p[i] = bf16_of_float(a.v[i]);
}

INLINE vi vi_set1(int32_t x) { EACH(vi, r.v[i] = x); }
INLINE vi vi_load(const void *p)
{
    vi r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
INLINE void vi_store(void *p, vi a) { memcpy(p, a.v, sizeof a.v); }
INLINE vi vi_add(vi a, vi b) { EACH(vi, r.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
INLINE int32_t vi_sum(vi a)
{
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += (uint32_t)a.v[i];
    return (int32_t)sum;
}
INLINE vi vi_shl(vi a, int n) { EACH(vi, r.v[i] = (int32_t)((uint32_t)a.v[i] << n)); }
INLINE vi vi_sar(vi a, int n) { EACH(vi, r.v[i] = a.v[i] >> n); }
INLINE vi vi_shr(vi a, int n) { EACH(vi, r.v[i] = (int32_t)((uint32_t)a.v[i] >> n)); }
INLINE vi vi_and(vi a, int32_t mask) { EACH(vi, r.v[i] = a.v[i] & mask); }
INLINE vi vi_bits(vf a) { EACH(vi, r.v[i] = (int32_t)bits_of_float(a.v[i])); }
INLINE vf vf_bits(vi a) { EACH(vf, r.v[i] = float_of_bits((uint32_t)a.v[i])); }
INLINE vf vf_of_vi(vi a) { EACH(vf, r.v[i] = (float)a.v[i]); }
INLINE vi vi_of_vf(vf a) { EACH(vi, r.v[i] = (int32_t)a.v[i]); }
INLINE void vi_store8(void *p, vi a)
{
    for (int i = 0; i < LANES; i++)
        ((int8_t *)p)[i] = (int8_t)a.v[i];
}
INLINE vf vf_lookup(const float *table, vi at) { EACH(vf, r.v[i] = table[at.v[i]]); }
INLINE vf vf_exp2i(vf n) { EACH(vf, r.v[i] = float_of_bits((uint32_t)((int32_t)n.v[i] + 127) << 23)); }

INLINE vi vi_lookup32(const int32_t *t, vi at) { EACH(vi, r.v[i] = t[at.v[i]]); }
INLINE vi vi_add_above(vi at, vf a, vf b) { EACH(vi, r.v[i] = at.v[i] + (a.v[i] > b.v[i])); }

INLINE vi vf_nearest(vf v, const float *mid)
{
    vi n = vi_set1(0);
    for (int m = 0; m < 15; m++)
        for (int i = 0; i < LANES; i++)
            n.v[i] += v.v[i] > mid[m];
    return n;
}

#define SEARCH_UNROLLED 0
#define GEMV_TOKENS 2
enum { BF16_TOKENS = 4, BF16_PANELS = 1, BF16_STREAM = 4 };
enum { SCORE_QUERIES = 4, SCORE_PANELS = 1, VALUE_QUERIES = 2, VALUE_BLOCKS = 1 };
enum { LOWRANK_ROWS = 2, LOWRANK_RANKS = 2, LOWRANK_PANELS = 2 };
enum { EXACT_QUERIES = 2, EXACT_VECTORS = 2, DELTA_VECTORS = 2 };
enum { STREAM_MOST_INT4 = 2, STREAM_MOST_INT8 = 2 };
enum { GEMM_TOKENS = 2, GEMM_PANELS = 1, DOT_LINEAR4 = 0, SHORT_SUMS = 0 };
enum { SHORT_SUMS_6 = 0, BLOCKS_BOOK4 = 0, BLOCKS_LINEAR4 = 0, BLOCKS_LINEAR6 = 0 };
static const load_kind STREAM_LOADS = LOADS_NEAR;
#define DOT_BIAS_INT8 0
#define DOT_BIAS_BOOK4(codebook) 0

INLINE vb vb_load(const uint8_t *p)
{
    vb r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}

INLINE vb vb_load_now(const uint8_t *p) { return vb_load(p); }
INLINE void vb_store(uint8_t *p, vb a) { memcpy(p, a.v, sizeof a.v); }
INLINE vb vb_int8(vb raw) { return raw; }

INLINE vb vb_table(const int8_t *codebook)
{
    vb r = {{0}};
    memcpy(r.v, codebook, 16);
    return r;
}

INLINE vb vb_signed(const int8_t *codebook) { return vb_table(codebook); }

INLINE vb vb_low_bits(vb raw)
{
    for (int i = 0; i < 4 * LANES; i++)
        raw.v[i] &= 15;
    return raw;
}

INLINE vb vb_high_bits(vb raw)
{
    for (int i = 0; i < 4 * LANES; i++)
        raw.v[i] = (int8_t)((uint8_t)raw.v[i] >> 4);
    return raw;
}

INLINE vb vb_six(vb four, vb two, int n)
{
    for (int i = 0; i < 4 * LANES; i++)
        four.v[i] = (int8_t)(four.v[i] | ((uint8_t)two.v[i] >> n & 3) << 4);
    return four;
}

INLINE vb vb_less_32(vb x)
{
    for (int i = 0; i < 4 * LANES; i++)
        x.v[i] = (int8_t)(x.v[i] - 32);
    return x;
}

INLINE vb vb_low(vb raw, vb table)
{
    raw = vb_low_bits(raw);
    for (int i = 0; i < 4 * LANES; i++)
        raw.v[i] = table.v[raw.v[i]];
    return raw;
}

INLINE vb vb_high(vb raw, vb table)
{
    return vb_low(vb_high_bits(raw), table);
}

INLINE vx vx_load(const void *p)
{
    vx r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}

INLINE vi vi_dot(vi acc, vb w, vx x)
{
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++)
            acc.v[i] += w.v[4 * i + j] * x.v[j];
    return acc;
}

INLINE vi short_dot(vi acc, vb w, vx x) { return vi_dot(acc, w, x); }
INLINE vi short_total(vi acc) { return acc; }
INLINE vi vi_dot_at(vi acc, vb w, const int8_t *x) { return vi_dot(acc, w, vx_load(x)); }

INLINE vf vf_dot_bf16(vf acc, vi w, vx x)
{
    uint16_t h[2];
    memcpy(h, x.v, sizeof h);
    vf odd = vf_fma(vf_bf16_odd(w), vf_set1(float_of_bf16(h[1])), acc);
    return vf_fma(vf_bf16_even(w), vf_set1(float_of_bf16(h[0])), odd);
}

INLINE vf vf_scale2(vf a, vf n) { return vf_mul(a, vf_exp2i(n)); }

INLINE vf vf_less(vf a, vf b, vf x, vf y) { EACH(vf, r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
INLINE int vf_any_above(vf a, vf b)
{
    int any = 0;
    for (int i = 0; i < LANES; i++)
        any |= a.v[i] > b.v[i];
    return any;
}

INLINE void vf_store_bf16_normal(uint16_t *p, vf a) { vf_store_bf16(p, a); }

/* Runs of 4 alternate, as the interleaving instructions of the other rows have it. */
INLINE void vi_pairs(vi a, vi b, vi *out)
{
    uint16_t x[2 * LANES], y[2 * LANES];
    memcpy(x, a.v, sizeof x);
    memcpy(y, b.v, sizeof y);
    for (int i = 0; i < 2 * LANES; i++)
        out[i / 4 % 2].v[i / 8 * 4 + i % 4] = (int32_t)((uint32_t)x[i] | (uint32_t)y[i] << 16);
}

INLINE void vf_load_pairs(const float *p, vf *a)
{
    for (int i = 0; i < 2 * LANES; i++)
        a[i / 4 % 2].v[i / 8 * 4 + i % 4] = p[i];
}

INLINE void vf_store_pairs(float *p, const vf *a)
{
    for (int i = 0; i < 2 * LANES; i++)
        p[i] = a[i / 4 % 2].v[i / 8 * 4 + i % 4];
}

INLINE void transpose16(const uint8_t *const rows[16], uint8_t *out) { transpose16_plain(rows, out); }

INLINE void vb_turn(const vb *codes, vi *out)
{
    for (int p = 0; p < LANES / 2; p++)
        for (int c = 0; c < LANES; c++) {
            const int8_t *row = codes[c / 4].v + 8 * p + c % 4;
            out[p].v[c] = (int32_t)((uint32_t)(uint8_t)row[0] << 8 | (uint32_t)(uint8_t)row[4] << 24);
        }
}

INLINE void vb_turn_words(const vb *words, vi *out)
{
    for (int p = 0; p < LANES / 2; p++)
        for (int c = 0; c < LANES; c++) {
            uint16_t two[2];
            memcpy(two, words[c / 2].v + 8 * p + 2 * (c % 2), 2);
            memcpy(two + 1, words[c / 2].v + 8 * p + 2 * (c % 2) + 4, 2);
            out[p].v[c] = (int32_t)((uint32_t)two[0] | (uint32_t)two[1] << 16);
        }
}
