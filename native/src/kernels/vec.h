/* vec.h - the vector operations in which the kernels are written.
 *
 * Every row has the same logical width, 16 lanes (one weight panel): one zmm, two ymm, or a loop. So a
 * kernel is the same sequence of operations in every row, and f32 results agree to the bit as well.
 *
 *   vf  16 floats        vi  16 int32        vb  64 bytes: a line of weights, ready for a dot product
 *   vx  4 int8 or 2 bf16 of an activation row, the same for all lanes
 *
 * The file named by KT_VEC defines them and
 *   vf_set1 vf_load vf_store vf_load_n vf_store_n    _n: only the first n of 16, the rest reads as 0
 *   vf_add vf_sub vf_mul vf_div vf_fma(a, b, c) = a * b + c
 *   vf_min vf_max (a < b ? a : b, as x86: b if either is NaN)   vf_abs vf_rint (halves to even)
 *   vf_fix_tie(c, v)    c - 1 where c - v is exactly 0.5, else c
 *   vf_lookup(t, i)     t[i] of 16 floats, i in 0..15
 *   vf_swap(v, d)  lane i is lane i ^ d, d = 1, 2, 4 or 8   vf_load_twice (8 floats, each two times)
 *   vf_sum vf_top       over the lanes: q[c] += q[c+8], then +4, +2, +1; the greatest;  vf_sum4 of four
 *   vf_from_bf16 vf_from_f16 (16 values) vf_bf16_even vf_bf16_odd (of 32)   vf_store_bf16
 *   vf_exp2i(n)         2^n for integral n in -126..127
 *   vi_set1 vi_load vi_store vi_add vi_sum vi_shl vi_sar vi_shr vi_and   vf_of_vi  vi_of_vf (integral values)
 *   vi_bits vf_bits     the same 16 words of 32 bits
 *   vi_load8 vi_store8  lanes from bytes, 0..255, and to them; vi_load_int8 from -128..127
 *   vf_nearest(v, mid)  how many of the 15 mid are < v       vi_add_above(i, a, b)  i + 1 where a > b, else i
 *   vi_lookup32(t, i)   t[i] of 32 int32, i in 0..31
 *   vb_load_now         vb_load that is not moved behind other loads
 *   vb_load vb_store vb_int8 vb_table vb_low vb_high vb_low_bits vb_high_bits  weights to dot operands
 *   vb_six(four, two, n)    4 bits, and above them the bits n and n + 1 of each byte of two, n = 0, 2, 4 or 6
 *   vb_less_32          each byte less 32
 *   vi_dot vi_dot_at (x in memory) DOT_BIAS_* DOT_LINEAR4 GEMV_TOKENS GEMM_*  see product_int8.inc.c
 *   short_dot short_total   the same for codes 0..15, in a form that holds SHORT_SUMS of them (0: any number); of
 *                       codes 0..63 SHORT_SUMS_6
 *   STREAM_LOADS        the greatest load_kind that streams have, where cpu_tuning says so
 *   BLOCKS_BOOK4 BLOCKS_LINEAR4 BLOCKS_LINEAR6     whether block_int8.inc.c is faster for such codes
 *   vf_dot_bf16         acc + products of pairs, the odd one first: fma(even, even, fma(odd, odd, acc)), as
 *                       the instruction has it (found by trial on Zen 4); it flushes subnormals     vx_load
 *   vf_store_bf16_normal    of values that are 0 or normal     vf_scale2(a, n)  a * 2^n, both normal
 *   vf_any_above(a, b)  a > b in any lane               vf_less(a, b, x, y)  x where a < b, else y
 *   vi_pairs(a, b, out) 32 columns each of two bf16 rows as pairs (a[c], b[c]): out[0] columns 0-3, 8-11,
 *                       16-19, 24-27, out[1] the rest;   vf_load_pairs vf_store_pairs  32 floats in that order
 *   transpose16(rows, out)  word j of line c of out = word c of row j, 16 by 16 words of 32 bits
 *   vb_signed(codebook) a table of its values, for vb_low and vb_high
 *   vb_turn(codes, out) four lines of codes, 4 columns of 16 rows each, turned: word c of out[p], p < 8, is 2^8 times the
 *                       code of row 2 p and column c, and in its upper half that of row 2 p + 1
 *   vb_turn_words(words, out)   the same of eight lines of words, 2 columns of 16 rows each: the words as they are
 *   prefetch            SEARCH_UNROLLED: groups of one piece have code of their own
 *   GEMV_TOKENS GEMM_* STREAM_MOST_* BF16_* SCORE_* VALUE_* LOWRANK_* EXACT_* DELTA_*    shapes of tiles in registers
 */
#ifndef KT_VEC_H
#define KT_VEC_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline, unused))
#define ALIGNED __attribute__((aligned(64)))

INLINE void prefetch(const void *p)
{
    __builtin_prefetch(p, 0, 3);
}

INLINE void prefetch_l2(const void *p)
{
    __builtin_prefetch(p, 0, 2);
}

INLINE void transpose16_plain(const uint8_t *const rows[16], uint8_t *out)
{
    for (int c = 0; c < 16; c++)
        for (int j = 0; j < 16; j++)
            memcpy(out + 64 * c + 4 * j, rows[j] + 4 * c, 4);
}

#include KT_VEC

/* x[c..c+16) where only x[0..n) exists; the rest reads as 0. */
INLINE vf vf_load_upto(const float *x, int64_t c, int64_t n)
{
    if (c + LANES <= n)
        return vf_load(x + c);
    return c < n ? vf_load_n(x + c, (int)(n - c)) : vf_set1(0.0f);
}

INLINE void vf_store_upto(float *x, int64_t c, int64_t n, vf value)
{
    if (c + LANES <= n)
        vf_store(x + c, value);
    else if (c < n)
        vf_store_n(x + c, (int)(n - c), value);
}

/* e^x within 1.1 ulp on -87.3..88.3; below the least normal result, above the greatest of that range.
 * x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts (Cody and Waite), then the polynomial of
 * degree 6 that the Cephes library uses for expf (exp.c, S. Moshier, netlib.org/cephes). */
INLINE vf vf_exp(vf x)
{
    x = vf_min(vf_max(x, vf_set1(-87.3f)), vf_set1(88.3f));
    vf n = vf_rint(vf_mul(x, vf_set1(1.44269504088896341f)));
    vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), r);
    return vf_mul(vf_add(p, vf_set1(1.0f)), vf_exp2i(n));
}

/* 2^x within 3e-6 of it (bf16 keeps 2e-3), for x up to 127; 2^-126 below -126. Polynomial: least relative
 * error on -1/2..1/2 among those of degree 4 that are 1 at 0. */
INLINE vf vf_exp2_short(vf x)
{
    x = vf_max(x, vf_set1(-126.0f));
    vf n = vf_rint(x), r = vf_sub(x, n);
    vf p = vf_fma(vf_set1(9.582852944731712e-3f), r, vf_set1(5.5906426161527634e-2f));
    p = vf_fma(p, r, vf_set1(2.4024099111557007e-1f));
    p = vf_fma(p, r, vf_set1(6.931241750717163e-1f));
    return vf_scale2(vf_fma(p, r, vf_set1(1.0f)), n);
}

#endif
