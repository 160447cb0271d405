/* vec_avx2.h - the operations of vec.h in pairs of ymm registers (AVX2, FMA). */
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef struct { __m256i a, b; } vb;
typedef __m256i vx;

#define BOTH(type, op, x) ((type){op((x).a), op((x).b)})
#define BOTH2(type, op, x, y) ((type){op((x).a, (y).a), op((x).b, (y).b)})

INLINE vf vf_set1(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_add(vf x, vf y) { return BOTH2(vf, _mm256_add_ps, x, y); }
INLINE vf vf_sub(vf x, vf y) { return BOTH2(vf, _mm256_sub_ps, x, y); }
INLINE vf vf_mul(vf x, vf y) { return BOTH2(vf, _mm256_mul_ps, x, y); }
INLINE vf vf_div(vf x, vf y) { return BOTH2(vf, _mm256_div_ps, x, y); }
INLINE vf vf_min(vf x, vf y) { return BOTH2(vf, _mm256_min_ps, x, y); }
INLINE vf vf_max(vf x, vf y) { return BOTH2(vf, _mm256_max_ps, x, y); }
INLINE vf vf_fma(vf x, vf y, vf z)
{
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

INLINE __m256i first_lanes(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE vf vf_load_n(const float *p, int n)
{
    __m256 b = n > 8 ? _mm256_maskload_ps(p + 8, first_lanes(n - 8)) : _mm256_setzero_ps();
    return (vf){_mm256_maskload_ps(p, first_lanes(n)), b};
}

INLINE void vf_store_n(float *p, int n, vf x)
{
    _mm256_maskstore_ps(p, first_lanes(n), x.a);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.b);
}

INLINE vf vf_abs(vf x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

INLINE vf vf_rint(vf x)
{
    return (vf){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

INLINE vf vf_swap(vf x, int d)
{
    return d == 1   ? (vf){_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)}
           : d == 2 ? (vf){_mm256_permute_ps(x.a, 0x4E), _mm256_permute_ps(x.b, 0x4E)}
           : d == 4 ? (vf){_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)}
                    : (vf){x.b, x.a};
}

INLINE __m256 fix_tie(__m256 c, __m256 v)
{
    __m256 tie = _mm256_cmp_ps(_mm256_sub_ps(c, v), _mm256_set1_ps(0.5f), _CMP_EQ_OQ);
    return _mm256_sub_ps(c, _mm256_and_ps(tie, _mm256_set1_ps(1.0f)));
}

INLINE vf vf_fix_tie(vf c, vf v) { return BOTH2(vf, fix_tie, c, v); }

INLINE __m256 load_twice(const float *p)
{
    __m256 four = _mm256_castps128_ps256(_mm_loadu_ps(p));
    return _mm256_permutevar8x32_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

INLINE vf vf_load_twice(const float *p) { return (vf){load_twice(p), load_twice(p + 4)}; }

INLINE float vf_sum(vf x)
{
    __m256 e = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE void vf_sum4(const vf *a, float *out)
{
    for (int i = 0; i < 4; i++)
        out[i] = vf_sum(a[i]);
}

INLINE float vf_top(vf x)
{
    __m256 e = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

INLINE __m256 shift16(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE __m256 keep16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vf vf_bf16_even(vi x) { return BOTH(vf, shift16, x); }
INLINE vf vf_bf16_odd(vi x) { return BOTH(vf, keep16, x); }

INLINE vf vf_from_bf16(const uint16_t *p)
{
    return (vf){shift16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p))),
                shift16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8))))};
}

INLINE vi vi_load8(const uint8_t *p)
{
    return (vi){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}

INLINE vi vi_load_int8(const uint8_t *p)
{
    return (vi){_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}

INLINE vf vf_from_f16(const uint16_t *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

/* The bf16 of each lane in its low half; NaN becomes 0x7fc0 with its sign. */
INLINE __m256i round_bf16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32((int)0x80000000)),
                                  _mm256_set1_epi32(0x7fc00000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, nan, is_nan), 16);
}

INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

INLINE vi vi_set1(int32_t x) { return (vi){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE vi vi_load(const void *p)
{
    return (vi){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE void vi_store(void *p, vi x)
{
    _mm256_storeu_si256(p, x.a);
    _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
INLINE vi vi_add(vi x, vi y) { return BOTH2(vi, _mm256_add_epi32, x, y); }
INLINE vi vi_shl(vi x, int n)
{
    return (vi){_mm256_sll_epi32(x.a, _mm_cvtsi32_si128(n)), _mm256_sll_epi32(x.b, _mm_cvtsi32_si128(n))};
}
INLINE vi vi_sar(vi x, int n)
{
    return (vi){_mm256_sra_epi32(x.a, _mm_cvtsi32_si128(n)), _mm256_sra_epi32(x.b, _mm_cvtsi32_si128(n))};
}
INLINE vi vi_shr(vi x, int n)
{
    return (vi){_mm256_srl_epi32(x.a, _mm_cvtsi32_si128(n)), _mm256_srl_epi32(x.b, _mm_cvtsi32_si128(n))};
}
INLINE vi vi_and(vi x, int32_t mask)
{
    __m256i m = _mm256_set1_epi32(mask);
    return (vi){_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
INLINE vi vi_bits(vf x) { return BOTH(vi, _mm256_castps_si256, x); }
INLINE vf vf_bits(vi x) { return BOTH(vf, _mm256_castsi256_ps, x); }
INLINE vf vf_of_vi(vi x) { return BOTH(vf, _mm256_cvtepi32_ps, x); }
INLINE vi vi_of_vf(vf x) { return BOTH(vi, _mm256_cvtps_epi32, x); }

INLINE int32_t vi_sum(vi x)
{
    __m256i e = _mm256_add_epi32(x.a, x.b);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}

/* The low byte of each lane; lanes lie in -128..127. */
INLINE void vi_store8(void *p, vi x)
{
    __m256i half = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    _mm_storeu_si128(p, _mm_packs_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

INLINE __m256 lookup(const float *t, __m256i i)
{
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t), i);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t + 8), i);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}

INLINE vf vf_lookup(const float *table, vi i) { return (vf){lookup(table, i.a), lookup(table, i.b)}; }

INLINE __m256 exp2i(__m256 n)
{
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

INLINE vf vf_exp2i(vf n) { return BOTH(vf, exp2i, n); }

INLINE vi vi_lookup32(const int32_t *t, vi i)
{
    return (vi){_mm256_i32gather_epi32(t, i.a, 4), _mm256_i32gather_epi32(t, i.b, 4)};
}
INLINE vi vi_add_above(vi i, vf a, vf b)
{
    return (vi){_mm256_sub_epi32(i.a, _mm256_castps_si256(_mm256_cmp_ps(a.a, b.a, _CMP_GT_OQ))),
                _mm256_sub_epi32(i.b, _mm256_castps_si256(_mm256_cmp_ps(a.b, b.b, _CMP_GT_OQ)))};
}

INLINE vi vf_nearest(vf v, const float *mid)
{
    vi n = vi_set1(0);
    for (int i = 0; i < 15; i++) {
        __m256 m = _mm256_set1_ps(mid[i]);
        n.a = _mm256_sub_epi32(n.a, _mm256_castps_si256(_mm256_cmp_ps(v.a, m, _CMP_GT_OQ)));
        n.b = _mm256_sub_epi32(n.b, _mm256_castps_si256(_mm256_cmp_ps(v.b, m, _CMP_GT_OQ)));
    }
    return n;
}

/* vpmaddubsw multiplies unsigned by signed and saturates at 16 bits: |w| <= 128 times sign(x, w) keeps
 * each pair within 2 * 128 * 127 = 32512, so weights stay signed and sums need no bias. */
#define SEARCH_UNROLLED 1
#define GEMV_TOKENS 2
enum { BF16_TOKENS = 4, BF16_PANELS = 1, BF16_STREAM = 4 };
enum { SCORE_QUERIES = 4, SCORE_PANELS = 1, VALUE_QUERIES = 2, VALUE_BLOCKS = 1 };
enum { LOWRANK_ROWS = 2, LOWRANK_RANKS = 2, LOWRANK_PANELS = 2 };
enum { EXACT_QUERIES = 2, EXACT_VECTORS = 2, DELTA_VECTORS = 2 };
enum { STREAM_MOST_INT4 = 2, STREAM_MOST_INT8 = 2 };
enum { GEMM_TOKENS = 4, GEMM_PANELS = 1, DOT_LINEAR4 = 1, SHORT_SUMS = 8 };
enum { SHORT_SUMS_6 = 2, BLOCKS_BOOK4 = 0, BLOCKS_LINEAR4 = 1, BLOCKS_LINEAR6 = 1 };
static const load_kind STREAM_LOADS = LOADS_FAR;
#define DOT_BIAS_INT8 0
#define DOT_BIAS_BOOK4(codebook) 0

INLINE vb vb_load(const uint8_t *p)
{
    return (vb){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}

INLINE vb vb_load_now(const uint8_t *p) { return vb_load(p); }
INLINE void vb_store(uint8_t *p, vb x)
{
    _mm256_store_si256((__m256i *)p, x.a);
    _mm256_store_si256((__m256i *)p + 1, x.b);
}
INLINE vb vb_int8(vb raw) { return raw; }

INLINE vb vb_table(const int8_t *codebook)
{
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codebook));
    return (vb){t, t};
}

INLINE vb vb_signed(const int8_t *codebook) { return vb_table(codebook); }

INLINE vb vb_low_bits(vb raw)
{
    const __m256i low = _mm256_set1_epi8(15);
    return (vb){_mm256_and_si256(raw.a, low), _mm256_and_si256(raw.b, low)};
}
INLINE vb vb_high_bits(vb raw)
{
    return vb_low_bits((vb){_mm256_srli_epi32(raw.a, 4), _mm256_srli_epi32(raw.b, 4)});
}
INLINE vb lookup8(vb i, vb table) { return BOTH2(vb, _mm256_shuffle_epi8, table, i); }
INLINE vb vb_low(vb raw, vb table) { return lookup8(vb_low_bits(raw), table); }
INLINE vb vb_high(vb raw, vb table) { return lookup8(vb_high_bits(raw), table); }

INLINE __m256i six(__m256i four, __m256i two, int n)
{
    __m256i moved = n < 4 ? _mm256_slli_epi32(two, 4 - n) : _mm256_srli_epi32(two, n - 4);
    return _mm256_or_si256(four, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
}
INLINE vb vb_six(vb four, vb two, int n) { return (vb){six(four.a, two.a, n), six(four.b, two.b, n)}; }
INLINE vb vb_less_32(vb x)
{
    const __m256i by = _mm256_set1_epi8(32);
    return (vb){_mm256_sub_epi8(x.a, by), _mm256_sub_epi8(x.b, by)};
}

INLINE __m256i dot8(__m256i acc, __m256i w, __m256i x)
{
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE vx vx_load(const void *p)
{
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

INLINE vi vi_dot(vi acc, vb w, vx x) { return (vi){dot8(acc.a, w.a, x), dot8(acc.b, w.b, x)}; }

/* Codes 0..15 need no sign, and SHORT_SUMS of their products, 2 * 15 * 127 each, fit 16 bits; so do SHORT_SUMS_6 of
 * 2 * 63 * 127. Without the assembly, gcc 12 adds them up in a tree, for which all products of a step wait in memory. */
INLINE vi short_dot(vi acc, vb w, vx x)
{
    acc.a = _mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, x));
    acc.b = _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, x));
    __asm__("" : "+x"(acc.a), "+x"(acc.b));
    return acc;
}
INLINE vi short_total(vi acc)
{
    const __m256i one = _mm256_set1_epi16(1);
    return (vi){_mm256_madd_epi16(acc.a, one), _mm256_madd_epi16(acc.b, one)};
}

INLINE vi vi_dot_at(vi acc, vb w, const int8_t *x) { return vi_dot(acc, w, vx_load(x)); }

INLINE vf vf_dot_bf16(vf acc, vi w, vx x)
{
    vi both = {x, x};
    return vf_fma(vf_bf16_even(w), vf_bf16_even(both), vf_fma(vf_bf16_odd(w), vf_bf16_odd(both), acc));
}

INLINE vf vf_scale2(vf x, vf n) { return vf_mul(x, vf_exp2i(n)); }

INLINE vf vf_less(vf a, vf b, vf x, vf y)
{
    return (vf){_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
                _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
INLINE int vf_any_above(vf x, vf y)
{
    vf above = {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
    return _mm256_movemask_ps(_mm256_or_ps(above.a, above.b)) != 0;
}

INLINE void vf_store_bf16_normal(uint16_t *p, vf x) { vf_store_bf16(p, x); }

INLINE void vi_pairs(vi x, vi y, vi *out)
{
    out[0] = BOTH2(vi, _mm256_unpacklo_epi16, x, y);
    out[1] = BOTH2(vi, _mm256_unpackhi_epi16, x, y);
}

INLINE void vf_load_pairs(const float *p, vf *x)
{
    vf low = vf_load(p), high = vf_load(p + 16);
    x[0] = (vf){_mm256_permute2f128_ps(low.a, low.b, 0x20), _mm256_permute2f128_ps(high.a, high.b, 0x20)};
    x[1] = (vf){_mm256_permute2f128_ps(low.a, low.b, 0x31), _mm256_permute2f128_ps(high.a, high.b, 0x31)};
}

INLINE void vf_store_pairs(float *p, const vf *x)
{
    vf_store(p, (vf){_mm256_permute2f128_ps(x[0].a, x[1].a, 0x20), _mm256_permute2f128_ps(x[0].a, x[1].a, 0x31)});
    vf_store(p + 16, (vf){_mm256_permute2f128_ps(x[0].b, x[1].b, 0x20), _mm256_permute2f128_ps(x[0].b, x[1].b, 0x31)});
}

INLINE void transpose16(const uint8_t *const rows[16], uint8_t *out) { transpose16_plain(rows, out); }

/* Quarters of rows 4 q .. of a line. */
INLINE void quarters_of(vb line, __m128i *out)
{
    out[0] = _mm256_castsi256_si128(line.a);
    out[1] = _mm256_extracti128_si256(line.a, 1);
    out[2] = _mm256_castsi256_si128(line.b);
    out[3] = _mm256_extracti128_si256(line.b, 1);
}

INLINE vi of_quarters(const __m128i *x)
{
    return (vi){_mm256_set_m128i(x[1], x[0]), _mm256_set_m128i(x[3], x[2])};
}

/* Within a quarter, which has 4 rows of 4 columns, bytes of a pair of rows beside each other; then quarters by columns. */
INLINE void vb_turn(const vb *codes, vi *out)
{
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), zero = _mm_setzero_si128();
    __m128i quarters[8][4], of[4];
    for (int i = 0; i < 4; i++) {
        quarters_of(codes[i], of);
        for (int q = 0; q < 4; q++) {
            __m128i pairs = _mm_shuffle_epi8(of[q], order);
            quarters[2 * q][i] = _mm_unpacklo_epi8(zero, pairs);
            quarters[2 * q + 1][i] = _mm_unpackhi_epi8(zero, pairs);
        }
    }
    for (int p = 0; p < 8; p++)
        out[p] = of_quarters(quarters[p]);
}

/* The same of words, 4 rows of 2 columns in a quarter: two lines have 4 columns. */
INLINE void vb_turn_words(const vb *words, vi *out)
{
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    __m128i quarters[8][4], of[2][4];
    for (int i = 0; i < 4; i++) {
        quarters_of(words[2 * i], of[0]);
        quarters_of(words[2 * i + 1], of[1]);
        for (int q = 0; q < 4; q++) {
            __m128i a = _mm_shuffle_epi8(of[0][q], order), b = _mm_shuffle_epi8(of[1][q], order);
            quarters[2 * q][i] = _mm_unpacklo_epi64(a, b);
            quarters[2 * q + 1][i] = _mm_unpackhi_epi64(a, b);
        }
    }
    for (int p = 0; p < 8; p++)
        out[p] = of_quarters(quarters[p]);
}
