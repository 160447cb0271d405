/* kt_weights.h - number formats and packed weights.
 *
 * A weight matrix [n, k] (n outputs, k inputs) is padded with zeros to n' (multiple of 16) and k'
 * (multiple of `step`) and cut into panels of 16 rows. One panel, contiguous, 64-byte aligned:
 *
 *     codes    [k'/step][step/g][16][g]     scales  [groups][16], then padding to 64 bytes
 *
 *   bits 16: bf16 values,                     g = 2, step = 32, no scales (group 0, KT_SCALE_NONE)
 *   bits  8: signed codes in -127..127, or    g = 4, step = 64
 *            E4M3 bytes (KT_CODE_E4M3): OCP 8-bit floating point, bias 7, no infinities; the NaNs 0x7f
 *            and 0xff are no codes
 *   bits  4: indices 0..15 into codebook,     g = 4, step = 64; the line i (of 8) of a step holds in
 *            byte [r][j] the index of column 4i+j in its low and of column 32+4i+j in its high nibble
 *   bits  6: indices 0..63 of the codes -32..31, g = 4, step = 64, in planes of 4 and of 2 bits: 8 lines of a
 *            step as those of bits 4 are, of the lower 4 bits; then 4 lines of the upper 2: line i (of 4) holds
 *            in byte [r][j], from its lowest bits on, those of columns 8i+j, 8i+4+j, 32+8i+j, 32+8i+4+j
 *
 * value = code (or codebook[code]) * scale; one scale per row and per `group` columns, ascending;
 * group 0 = one scale for the whole row. groups = group ? k' / group : 1; group divides k' after k'
 * is rounded up to a multiple of max(step, group).
 * Scales are f32, bf16, e8m0 (a byte b: 2^(b - 127), but 0 of 0) or e4m3: before the scales lie 16 bytes, one for each
 * row, R in 1..239; a scale is a byte: sign, 4 bits of exponent e, 3 of mantissa m: 2^(R + e - 127) (1 + m / 8). There
 * is no 0.
 * bits 32: f32 values, g = 1, step = 16: for what must stay exact.
 *
 * rotation R: the rows of W are multiplied by a block-diagonal Hadamard matrix H before they are encoded, and
 * activations before they are rounded: (W H)(H x) = W x. H spreads a large column over its whole block, so that
 * one scale serves a row. A block has B columns: the largest power of two <= R that divides k rounded up to 64.
 * H of a block x[0..B): for h = 1, 2, 4, ... B/2, for each i without bit h: x[i], x[i+h] = x[i] + x[i+h],
 * x[i] - x[i+h]; then each times (float)(1 / sqrt(B)). It is its own inverse, but for rounding.
 */
#ifndef KT_API_WEIGHTS_H
#define KT_API_WEIGHTS_H

#include "kt_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kt_scale_type { KT_SCALE_NONE = 0, KT_SCALE_F32 = 1, KT_SCALE_BF16 = 2, KT_SCALE_E8M0 = 3, KT_SCALE_E4M3 = 4 };
enum kt_code_type { KT_CODE_INTEGER = 0, KT_CODE_E4M3 = 1 };

typedef struct kt_format {
    int32_t bits;           /* 4, 6, 8, 16 or 32 */
    int32_t group;          /* columns per scale: 0 (whole row), 32, 64 or 128 */
    int32_t scale;          /* enum kt_scale_type */
    int8_t codebook[16];    /* 4 bits only: ascending; linear int4 is -8..7 */
    int32_t codes;          /* enum kt_code_type; KT_CODE_E4M3 with 8 bits only */
    int32_t rotation;       /* R: 0 (none), 64, 128 or 256; with 4, 6 and 8 bits only */
} kt_format;

/* `count` packed matrices of one shape, one behind the other. */
typedef struct kt_weight {
    kt_format format;
    int64_t n, k, count;
    const void *data;
    const kt_format *input; /* NULL, or another format: products that read f32 round their activations as those of a
                             * weight of that format do, and multiply what is left of them as f32 */
} kt_weight;

/* Bytes of one packed matrix; 0 if the format or the shape is not valid. */
KT_API size_t kt_packed_bytes(const kt_format *format, int64_t n, int64_t k);

/* From 16 on: blocks of GGUF files, see blocks.c. A row has a whole number of them. */
enum kt_dtype {
    KT_F32 = 0, KT_BF16 = 1, KT_F16 = 2, KT_CODES = 3,
    KT_Q4_0 = 16, KT_Q4_1 = 17, KT_Q5_0 = 18, KT_Q5_1 = 19, KT_Q8_0 = 20,
    KT_Q4_K = 21, KT_Q5_K = 22, KT_Q6_K = 23, KT_GGUF_MXFP4 = 24
};

/* What codes of a quantized checkpoint mean: (table[code] - zero) * scale, with one scale for each block of them. */
typedef struct kt_codes {
    int32_t bits;           /* 8: a byte each; 4: two in a byte, the first in its low nibble. Rows begin at bytes */
    int64_t block_rows, block_columns;
    int64_t row;            /* how many rows of the first block lie above row 0 */
    const float *table;     /* [1 << bits] */
    const float *scale;     /* [ceil((row + n) / block_rows)][ceil(k / block_columns)] */
    const float *zero;      /* as many, or NULL: all 0 */
} kt_codes;

/* Rows of numbers as a checkpoint stores them. */
typedef struct kt_numbers {
    int32_t dtype;          /* enum kt_dtype */
    int64_t n;              /* rows there are */
    int64_t row_bytes;      /* from one row to the next */
    int64_t column_bytes;   /* KT_F32, KT_BF16, KT_F16: from one column to the next, of a matrix that may be transposed */
    const void *data;       /* row 0; these types are aligned to their size */
    const kt_codes *codes;  /* KT_CODES: what they mean */
} kt_numbers;

/* A matrix [n, k] gathered from rows of sources: its row i is row rows[i][1] of sources[rows[i][0]], or zeros where
 * rows[i][0] is negative. Its columns are divided by divisors [k], where those are not NULL. */
typedef struct kt_gathered {
    int64_t n, k, n_sources;
    const kt_numbers *sources;
    const int32_t *rows;    /* [n][2] */
    const float *divisors;
} kt_gathered;

/* dst[n][k] = the matrix, row major, as KT_F32 or as KT_BF16, rounded to nearest even. KT_ERR_VALUE if a source's number
 * is NaN or Inf, KT_ERR_RANGE if one is too large for dtype; *bad_row is then the least row with one. */
KT_API int kt_decode(kt_pool *pool, const kt_gathered *src, int32_t dtype, void *dst, int64_t *bad_row);

typedef struct kt_pack_error {
    double sum_sq_error;    /* sum over the matrix of (value - source)^2 */
    double sum_sq;          /* sum of source^2 */
    double out_error;       /* the same two weighted by the importance of the columns, and the sum of value^2: what */
    double out_sq;          /* is to be expected of the products' error and size, and of their size as stored, for */
    double out_stored;      /* inputs with independent columns. Without importance each column counts 1 */
} kt_pack_error;

/* Encode the matrix and write its panels to dst, one behind the other. `error` may be NULL, else it is added to. The
 * bytes do not depend on the row, the threads or the machine. KT_ERR_VALUE if a source's number is NaN or Inf; *bad_row
 * is then the least row with one, and negative for other errors.
 * scales [n][groups] f32, for 4 and 8 bits with f32 scales: used instead of those that the encoder would choose,
 * except where one is outside 2^-60..2^60 in magnitude (0: choose); NULL: it chooses all. With the scales
 * that E4M3 values or integers were decoded with, these come back bit for bit: see kernels/formats.h.
 * importance [k] f32: how much the squared error of each column counts when scales are searched, 2^-20..2^20; of a
 * format with rotation, every column of a block counts the block's mean. NULL: all count the same. */
KT_API int kt_pack(kt_pool *pool, const kt_format *format, const kt_gathered *src, const float *scales,
                   const float *importance, void *dst, kt_pack_error *error, int64_t *bad_row);

/* dst[n][k] f32 = matrix `index` of w, decoded, and rotated back. */
KT_API int kt_unpack(kt_pool *pool, const kt_weight *w, int64_t index, float *dst);

/* Nodes share a weight by rows or by columns. A slice is a weight of its own in the same format: rows
 * [first, last) or columns [first, last) of each matrix, packed; empty where first = last, and then data is
 * not used. Rows are cut at multiples of 16, columns at multiples of kt_cut_columns. */
enum kt_cut { KT_CUT_ROWS = 0, KT_CUT_COLUMNS = 1 };
typedef struct kt_slice {
    int64_t first, last;
    void *data;
} kt_slice;

/* Where columns can be cut: every 64, in bf16 every 32, in f32 every 16, and never inside a group or a rotation R.
 * Columns are cut of weights whose R is their block B, so that slices of any width have the same blocks. */
KT_API int64_t kt_cut_columns(const kt_format *format);

/* Fill slices[0..nodes of the pool), which follow one another from 0 to the end, with w's bytes: those of the
 * file from `offset`, or w's data if fd is negative. Each byte of the file is read once; pages that nobody
 * touched are first touched by the threads of their node. KT_ERR_IO if the file is shorter. */
KT_API int kt_place(kt_pool *pool, int32_t fd, uint64_t offset, const kt_weight *w, int32_t cut,
                    const kt_slice *slices);

/* Random codes and scales, values of mean 0 and rms about 1/sqrt(k), for benchmarks without a checkpoint. */
KT_API int kt_fill_random(kt_pool *pool, const kt_weight *w, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
