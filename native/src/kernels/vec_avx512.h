/* vec_avx512.h - the operations of vec.h in zmm registers (F, BW, DQ, VL, VNNI; BF16 if it is
 * enabled). */
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;
typedef __m512i vx;

INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1u); }

INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void vf_store_n(float *p, int n, vf a) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_rint(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_swap(vf a, int d)
{
    return d == 1   ? _mm512_permute_ps(a, 0xB1)
           : d == 2 ? _mm512_permute_ps(a, 0x4E)
           : d == 4 ? _mm512_shuffle_f32x4(a, a, 0xB1)
                    : _mm512_shuffle_f32x4(a, a, 0x4E);
}

INLINE vf vf_fix_tie(vf c, vf v)
{
    __mmask16 tie = _mm512_cmp_ps_mask(_mm512_sub_ps(c, v), _mm512_set1_ps(0.5f), _CMP_EQ_OQ);
    return _mm512_mask_sub_ps(c, tie, c, _mm512_set1_ps(1.0f));
}

INLINE vf vf_load_twice(const float *p)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

INLINE float vf_sum(vf a)
{
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* out[i] = vf_sum(a[i]): halves of the register, then quarters, gathered four sums to a register. */
INLINE void vf_sum4(const vf *a, float *out)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44), _mm512_shuffle_f32x4(a[0], a[1], 0xEE));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44), _mm512_shuffle_f32x4(a[2], a[3], 0xEE));
    __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0x4E));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0xB1));
    q = _mm512_permutexvar_ps(_mm512_set4_epi32(12, 8, 4, 0), q);
    _mm_storeu_ps(out, _mm512_castps512_ps128(q));
}

INLINE float vf_top(vf a) { return _mm512_reduce_max_ps(a); }

INLINE vf vf_bf16_even(vi a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
INLINE vf vf_bf16_odd(vi a)
{
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE vf vf_from_bf16(const uint16_t *p)
{
    return vf_bf16_even(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)));
}

INLINE vi vi_load_int8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi vi_load8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

INLINE vf vf_from_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* Round to nearest even; NaN becomes 0x7fc0 with its sign (vcvtneps2bf16 would flush subnormals). */
INLINE void vf_store_bf16(uint16_t *p, vf a)
{
    __m512i u = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i nan = _mm512_or_si512(_mm512_and_si512(u, _mm512_set1_epi32((int)0x80000000)),
                                  _mm512_set1_epi32(0x7fc00000));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE int32_t vi_sum(vi a)
{
    __m256i e = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}
INLINE vi vi_shl(vi a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vi vi_sar(vi a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vi vi_shr(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vi vi_and(vi a, int32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
INLINE vi vi_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf vf_bits(vi a) { return _mm512_castsi512_ps(a); }
INLINE vf vf_of_vi(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_of_vf(vf a) { return _mm512_cvtps_epi32(a); }
INLINE void vi_store8(void *p, vi a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(a)); }
INLINE vf vf_lookup(const float *table, vi i) { return _mm512_permutexvar_ps(i, _mm512_loadu_ps(table)); }
INLINE vf vf_exp2i(vf n)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(vi_of_vf(n), vi_set1(127)), 23));
}

INLINE vi vi_lookup32(const int32_t *t, vi i)
{
    return _mm512_permutex2var_epi32(_mm512_loadu_si512(t), i, _mm512_loadu_si512(t + 16));
}
INLINE vi vi_add_above(vi i, vf a, vf b)
{
    return _mm512_mask_add_epi32(i, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), i, vi_set1(1));
}

/* Binary search; `mid` has 16 entries, the last unused. */
INLINE vi vf_nearest(vf v, const float *mid)
{
    __m512 table = _mm512_loadu_ps(mid);
    __m512i i = _mm512_setzero_si512();
    for (int half = 8; half; half /= 2) {
        __m512 at = _mm512_permutexvar_ps(_mm512_add_epi32(i, vi_set1(half - 1)), table);
        i = _mm512_mask_add_epi32(i, _mm512_cmp_ps_mask(v, at, _CMP_GT_OQ), i, vi_set1(half));
    }
    return i;
}

/* vpdpbusd multiplies unsigned by signed: weights are made unsigned by an offset, and the sum begins at
 * -offset * sum of x. */
#define SEARCH_UNROLLED 1
#define GEMV_TOKENS 8
enum { BF16_TOKENS = 8, BF16_PANELS = 2, BF16_STREAM = 8 };
enum { SCORE_QUERIES = 4, SCORE_PANELS = 4, VALUE_QUERIES = 8, VALUE_BLOCKS = 2 };
enum { LOWRANK_ROWS = 6, LOWRANK_RANKS = 4, LOWRANK_PANELS = 4 };
enum { EXACT_QUERIES = 4, EXACT_VECTORS = 4, DELTA_VECTORS = 4 };
enum { STREAM_MOST_INT4 = 4, STREAM_MOST_INT8 = 8 };
enum { GEMM_TOKENS = 6, GEMM_PANELS = 2, DOT_LINEAR4 = 1, SHORT_SUMS = 0 };
enum { SHORT_SUMS_6 = 0, BLOCKS_BOOK4 = 1, BLOCKS_LINEAR4 = 0, BLOCKS_LINEAR6 = 1 };
static const load_kind STREAM_LOADS = LOADS_IN_ORDER;
#define DOT_BIAS_INT8 (-128)
#define DOT_BIAS_BOOK4(codebook) ((codebook)[0])

INLINE vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE vb vb_load_now(const uint8_t *p)
{
    vb x = vb_load(p);
    __asm__ volatile("" : "+v"(x));
    return x;
}
INLINE void vb_store(uint8_t *p, vb a) { _mm512_store_si512(p, a); }
INLINE vb vb_int8(vb raw) { return _mm512_xor_si512(raw, _mm512_set1_epi8((char)0x80)); }

INLINE vb vb_table(const int8_t *codebook)
{
    __m128i t = _mm_loadu_si128((const __m128i *)codebook);
    return _mm512_broadcast_i32x4(_mm_sub_epi8(t, _mm_set1_epi8(codebook[0])));
}

INLINE vb vb_signed(const int8_t *codebook)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codebook));
}

INLINE vb vb_low_bits(vb raw) { return _mm512_and_si512(raw, _mm512_set1_epi8(15)); }
INLINE vb vb_high_bits(vb raw) { return vb_low_bits(_mm512_srli_epi32(raw, 4)); }
INLINE vb vb_six(vb four, vb two, int n)
{
    vb moved = n < 4 ? _mm512_slli_epi32(two, (unsigned)(4 - n)) : _mm512_srli_epi32(two, (unsigned)(n - 4));
    return _mm512_or_si512(four, _mm512_and_si512(moved, _mm512_set1_epi8(48)));
}
INLINE vb vb_less_32(vb x) { return _mm512_sub_epi8(x, _mm512_set1_epi8(32)); }
INLINE vb vb_low(vb raw, vb table) { return _mm512_shuffle_epi8(table, vb_low_bits(raw)); }
INLINE vb vb_high(vb raw, vb table) { return _mm512_shuffle_epi8(table, vb_high_bits(raw)); }

INLINE vx vx_load(const void *p)
{
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

/* Assembly, since gcc 12 copies the accumulator of the dot product intrinsics before and after each one
 * in a loop: tiles ran at 1,200 GOP/s with _mm512_dpbusd_epi32 and at 1,650 so (Zen 5, two threads). */
INLINE vi vi_dot(vi acc, vb w, vx x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
}

INLINE vi short_dot(vi acc, vb w, vx x) { return vi_dot(acc, w, x); }
INLINE vi short_total(vi acc) { return acc; }

/* The same with x from memory: the broadcast is part of the instruction. */
INLINE vi vi_dot_at(vi acc, vb w, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int8_t(*)[4])x));
    return acc;
}

INLINE vf vf_dot_bf16(vf acc, vi w, vx x)
{
#ifdef __AVX512BF16__
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
#else
    return vf_fma(vf_bf16_even(w), vf_bf16_even(x), vf_fma(vf_bf16_odd(w), vf_bf16_odd(x), acc));
#endif
}

INLINE vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
INLINE vf vf_less(vf a, vf b, vf x, vf y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
INLINE int vf_any_above(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

INLINE void vf_store_bf16_normal(uint16_t *p, vf a)
{
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a));
#else
    vf_store_bf16(p, a);
#endif
}

INLINE void vi_pairs(vi a, vi b, vi *out)
{
    out[0] = _mm512_unpacklo_epi16(a, b);
    out[1] = _mm512_unpackhi_epi16(a, b);
}

INLINE void vf_load_pairs(const float *p, vf *a)
{
    __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 16);
    a[0] = _mm512_shuffle_f32x4(low, high, 0x88);
    a[1] = _mm512_shuffle_f32x4(low, high, 0xDD);
}

INLINE void vf_store_pairs(float *p, const vf *a)
{
    __m512 low = _mm512_shuffle_f32x4(a[0], a[1], 0x44), high = _mm512_shuffle_f32x4(a[0], a[1], 0xEE);
    _mm512_storeu_ps(p, _mm512_shuffle_f32x4(low, low, 0xD8));
    _mm512_storeu_ps(p + 16, _mm512_shuffle_f32x4(high, high, 0xD8));
}

/* Four vectors whose quarters l are of rows 4 l ..: quarters by columns, of pairs of rows 2 l + h to out[2 l + h]. */
INLINE void quarters_by_columns(const __m512i *x, int h, vi *out)
{
    __m512i ab = _mm512_shuffle_i32x4(x[0], x[1], 0x44), cd = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    out[h] = _mm512_shuffle_i32x4(ab, cd, 0x88);
    out[2 + h] = _mm512_shuffle_i32x4(ab, cd, 0xDD);
    ab = _mm512_shuffle_i32x4(x[0], x[1], 0xEE);
    cd = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
    out[4 + h] = _mm512_shuffle_i32x4(ab, cd, 0x88);
    out[6 + h] = _mm512_shuffle_i32x4(ab, cd, 0xDD);
}

/* Within a quarter, which has 4 rows of 4 columns, bytes of a pair of rows beside each other; then quarters by columns. */
INLINE void vb_turn(const vb *codes, vi *out)
{
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    __m512i half[2][4], zero = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        __m512i pairs = _mm512_shuffle_epi8(codes[i], order);
        half[0][i] = _mm512_unpacklo_epi8(zero, pairs);
        half[1][i] = _mm512_unpackhi_epi8(zero, pairs);
    }
    quarters_by_columns(half[0], 0, out);
    quarters_by_columns(half[1], 1, out);
}

/* The same of words, 4 rows of 2 columns in a quarter: two lines have 4 columns. */
INLINE void vb_turn_words(const vb *words, vi *out)
{
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i half[2][4];
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_epi8(words[2 * i], order), b = _mm512_shuffle_epi8(words[2 * i + 1], order);
        half[0][i] = _mm512_unpacklo_epi64(a, b);
        half[1][i] = _mm512_unpackhi_epi64(a, b);
    }
    quarters_by_columns(half[0], 0, out);
    quarters_by_columns(half[1], 1, out);
}

/* Rows 0, 4, 8, 12 beside each other, and so on: then four by four within the quarters. */
INLINE void transpose16(const uint8_t *const rows[16], uint8_t *out)
{
    for (int c = 0; c < 16; c += 4) {
        __m512i x[4];
        for (int m = 0; m < 4; m++) {
            x[m] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[m] + 4 * c)));
            x[m] = _mm512_inserti32x4(x[m], _mm_loadu_si128((const __m128i *)(rows[4 + m] + 4 * c)), 1);
            x[m] = _mm512_inserti32x4(x[m], _mm_loadu_si128((const __m128i *)(rows[8 + m] + 4 * c)), 2);
            x[m] = _mm512_inserti32x4(x[m], _mm_loadu_si128((const __m128i *)(rows[12 + m] + 4 * c)), 3);
        }
        __m512i ab = _mm512_unpacklo_epi32(x[0], x[1]), cd = _mm512_unpacklo_epi32(x[2], x[3]);
        _mm512_storeu_si512(out + 64 * c, _mm512_unpacklo_epi64(ab, cd));
        _mm512_storeu_si512(out + 64 * c + 64, _mm512_unpackhi_epi64(ab, cd));
        ab = _mm512_unpackhi_epi32(x[0], x[1]);
        cd = _mm512_unpackhi_epi32(x[2], x[3]);
        _mm512_storeu_si512(out + 64 * c + 128, _mm512_unpacklo_epi64(ab, cd));
        _mm512_storeu_si512(out + 64 * c + 192, _mm512_unpackhi_epi64(ab, cd));
    }
}
