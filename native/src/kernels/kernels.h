/* kernels.h - the interface between the drivers (plain C, written once) and the kernels (one
 * body per lane width, compiled once per ISA row; the rows above avx512 compile only what
 * differs).
 *
 * A driver decides who does which panel of which matrix for which tokens; a kernel does it. Kernels
 * know no threads, allocate nothing and check nothing. For integer formats each output is the same
 * sequence of float operations in every row, at every token count: over *parts* in ascending k, which are
 * columns with one scale of the weights and one of x,
 *   acc = fma((float)int32_sum * weight_scale, x_scale, acc)
 * so rows, thread counts and the choice between them never change a bit. Weights with a scale per group have
 * parts of 64 columns, or of 32 in groups of 32; a row of weights with one scale is one part, or where x has a scale per
 * 64 columns, parts of 64, whose sum is scaled in the end:
 *   acc = fma((float)int32_sum, x_scale, acc), then acc * weight_scale
 */
#ifndef KT_KERNELS_H
#define KT_KERNELS_H

#include "kt.h"

#define KT_ACT_GROUP 64     /* columns of x that have one scale, where weights have a scale per group */

/* Activation rows as the integer products read them. */
typedef struct act8 {
    int8_t *q;              /* [rows][stride], -127..127, zero from k to k' */
    float *scale;           /* [rows][scales]; amax / 127 of the columns, 0 where all are zero */
    int32_t *sum;           /* [rows][stride/32]: sum of q over each 32 columns */
    int64_t scales;         /* of a row: 1, or stride/64 */
    int64_t stride;         /* k' : multiple of 128 */
} act8;

/* How streams load the lines of a step; a row has those up to its STREAM_LOADS. */
typedef enum load_kind {
    LOADS_NEAR,         /* each where it is used, while one further ahead is fetched into L1 */
    LOADS_FAR,          /* the same, and one that is still further ahead is fetched into L2 */
    LOADS_IN_ORDER,     /* of one or two tokens and 4 or 6 bits, all before one is used; else LOADS_NEAR */
} load_kind;

/* What suits a CPU among ways that compute the same bits: cpu_tuned. */
typedef struct cpu_tuning {
    int64_t ahead;              /* bytes of weights that streams fetch ahead of those that they read */
    load_kind loads;
    int near;                   /* tiles fetch the panels that come next into L1, not L2 */
    int stream_int4;            /* most tokens of a stream of 4 linear bits, and of 8 bits, where a row has no fewer: */
    int stream_int8;            /* STREAM_MOST_* */
    int blocks_book4;           /* block_int8.inc.c for 4 bits of a codebook, where a row has it */
} cpu_tuning;

/* y[y_row(t)][r] = v, v = sum over k of W[r][k] * x[x_row(t)][k] + bias[r], for panels [first_panel, last_panel)
 * of one matrix and t in [0, n_tokens); with y_gate, y[y_row(t)][r] = fma(y_gate[t], v, y[y_row(t)][r]) instead,
 * and then no y row may occur twice. x_row(t) = x_rows ? x_rows[t] : t, likewise y. */
typedef struct product {
    const kt_format *format;
    int64_t n, k;               /* of the matrix, unpadded: rows >= n are computed but not stored */
    const uint8_t *w;           /* panel 0 */
    size_t panel_bytes;
    int64_t first_panel, last_panel;
    int64_t n_tokens;
    const act8 *x8;             /* product_int8 */
    const uint16_t *xh;         /* product_bf16: bf16 rows, zero from k to k' */
    const float *xf;            /* product_f32: f32 rows; may be read only up to k */
    int64_t x_stride;           /* elements, of xh or xf */
    const int32_t *x_rows;
    float *y;
    int64_t y_stride;
    const int32_t *y_rows;
    const float *y_gate;        /* [n_tokens] or NULL */
    const float *bias;          /* [n] or NULL, added last */
    void *scratch;              /* this thread's, product_scratch_bytes() */
    int64_t tile_min;           /* rows with tiles: fewest tokens that use them */
    const uint8_t *next;        /* panels this thread will read next, or NULL: fetched while the last ones are used */
    cpu_tuning tuning;
} product;

/* One block of queries against the keys of one page, flash style: updates running maximum, sum and
 * weighted values. Query i sees keys [from[i], limit[i]).
 *   attend_f32    q, k and v are f32 rows; key j at k + j * k_stride. Nothing beyond the largest limit is read.
 *   attend_bf16   q and v are bf16 rows, those of q zero at column dk where dk is odd; k is panels of keys,
 *                 [4][(dk + 1) / 2][16][2]: lane j of panel i is key 16 i + j (what pack_keys makes of rows).
 *                 Of v nothing beyond the largest limit is used; keys there may be anything.
 * The same operations in every row, so rows agree to the bit as long as no product or sum is subnormal.
 * With e the rounding of bf16, 2^-9: a weight p is off by the rounding of q (the caller's), by that of the
 * f32 sums and by 1.01 e of its own; the same p is summed and used. */
typedef struct page_attention {
    int64_t n_queries, dk, dv;
    const void *q;              /* [n_queries][q_stride] */
    int64_t q_stride;
    const void *k, *v;          /* value j at v + j * v_stride elements */
    int64_t k_stride, v_stride;
    const void *next_k, *next_v;    /* bf16: the page that comes next, fetched meanwhile; or NULL */
    const int32_t *limit;       /* [n_queries], 0..64 */
    const int32_t *from;        /* [n_queries], below limit where that is not 0; NULL: 0 for all */
    float scale;
    float *max, *sum;           /* [n_queries], start -INF and 0 */
    float *acc;                 /* [n_queries][acc_stride], start 0; divide by sum at the end */
    int64_t acc_stride;
} page_attention;

/* The gated delta rule for some columns of one head's values, over the tokens of a step (kt_program_delta).
 * Row t of each operand begins t strides after the pointer. The state is [dk][width] with width = columns rounded
 * up to 16; what is beyond `columns` is zero and stays so. */
typedef struct delta_block {
    int64_t n_tokens, dk, columns, width;
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const float *decay, *beta;      /* decay of key j at decay[j * decay_step]; decay_step 0: one for all keys, or 1 */
    int64_t decay_stride, decay_step, beta_stride;
    const float *state;             /* of before the step; NULL: zeros */
    float *next;                    /* after it; elsewhere */
    float *out;
    int64_t out_stride;
    float *scratch;                 /* [2 * dk] */
} delta_block;

/* The state space model for some columns of one head's values, over the tokens of a step (kt_program_scan), with the
 * rows and the state of a delta_block. */
typedef struct scan_block {
    int64_t n_tokens, state_dim, columns, width;
    const float *x, *b, *c, *dt;
    int64_t x_stride, b_stride, c_stride, dt_stride;
    float rate, skip;
    const float *state;             /* of before the step; NULL: zeros */
    float *next;                    /* after it; elsewhere */
    float *out;
    int64_t out_stride;
} scan_block;

/* By what a row is multiplied: one value for all columns, or one each; KT_GATE_*. */
typedef struct gate_by {
    int32_t one, kind;
} gate_by;

/* Scores of one token's index heads for the keys of a page, whose layout is that of attend_*; dim is even.
 *   weight      out[j] = sum over heads, ascending, of weight[h] * max(0, q[h] . key[j])      [64]
 *   NULL        out[h][j] = q[h] . key[j]                                                     [n_heads][64]
 * What is written for keys from n_keys on means nothing. The same bits for any order of calls. */
typedef struct page_index {
    int64_t n_heads, dim, n_keys;
    const void *q;              /* [n_heads][q_stride]: f32 rows for index_f32, bf16 for index_bf16 */
    int64_t q_stride;
    const void *k;
    int64_t k_stride;           /* index_f32: elements from one key to the next */
    const float *weight;
    float *out;
} page_index;

/* The products of an update of low rank (kt_adapters.h) and of its gradient. Row t of x, of t and of y: x_row, t itself,
 * y_row. Rows of x and of y are read and written in runs of 16 columns that lie `step` columns apart, as far as there are
 * columns. Number 16 j + c of rank i of a factor lies at i * rank_stride + j * panel_stride + c. */
typedef struct inner_product {  /* out[t][i] = scale * sum over c of x[t][c] * a[i][c], i < ranks, c < 16 * panels */
    int64_t n_rows, ranks, panels;
    const float *x;             /* rows x_rows[t], or t where that is NULL */
    int64_t x_stride, step, columns;
    const int32_t *x_rows;
    const void *a;
    int64_t rank_stride, panel_stride;
    int32_t in_f32;
    float scale;
    float *out;
    int64_t out_stride;
} inner_product;

typedef struct outer_product {  /* y[t][c] += gate[t] * sum over i of x[t][i] * b[i][c], c < 16 * panels */
    int64_t n_rows, ranks, panels;
    const float *x;             /* [n_rows][x_stride] */
    int64_t x_stride;
    const void *b;
    int64_t rank_stride, panel_stride;
    int32_t in_f32;
    float *y;
    int64_t y_stride, step, columns;
    const int32_t *y_rows;
    const float *gate;          /* NULL: 1 */
} outer_product;

typedef struct factor_sums {    /* sums[i][c] += scale * sum over rows, ascending, of gate[t] * x[t][i] * y[t][c] */
    int64_t n_rows, ranks, panels;
    const float *x;             /* [n_rows][x_stride] */
    int64_t x_stride;
    const float *y;
    int64_t y_stride, step, columns;
    const int32_t *y_rows;
    const float *gate;
    float scale;
    float *sums;
    int64_t rank_stride, panel_stride;
} factor_sums;

/* Columns of a packed matrix, decoded, as a packed matrix of their own: its row i is column `column` + i. */
typedef struct turn {
    const kt_format *format;
    int64_t k;                  /* columns of the matrix, unpadded */
    const uint8_t *w;           /* its panel 0 */
    size_t panel_bytes;
    int64_t panels;
    int64_t column, columns;    /* multiples of 64 and of 16, within what is packed */
    int32_t in_f32;             /* what is made: f32, or bf16 rounded once */
    int32_t before;             /* of bf16: so many panels of zeros come before the first, 0 or 1 */
    uint8_t *out;               /* panels of 16 columns, with a number for each row of the matrix */
} turn;

/* The activation of experts of one row, backwards. */
typedef struct glu_backward {
    const float *gate_up;       /* runs of 16 alternate, as for swiglu */
    int64_t width;
    const kt_glu *glu;
    float weight;               /* of the slot */
    float *h;                   /* [width] the gradient of the activated values; becomes these values themselves */
    float *out;                 /* the gradient of gate_up, times the weight, in its order; zeros behind the width */
} glu_backward;

/* Sixteen rows to be encoded as one panel. */
typedef struct panel_rows {
    int64_t k;
    const float *const *x;      /* [16], of k columns each, rotated already; NULL: a row of zeros */
    const float *scales;        /* [16][groups] of a given row, or NULL: see kt_pack */
    const float *importance;    /* [k] or NULL: see kt_pack */
    const float *feedback;      /* [k / 64][64][64], see formats.h, or NULL: each column is encoded by itself */
    const float *counts;        /* with feedback: the importance of the columns before they were rotated */
    int64_t columns;            /* how many these are */
} panel_rows;

/* The chances of a block as two limits split them. */
typedef struct chance_split {
    double below, above;        /* the sums of those less than the lower one, and of those not less than the higher one */
    int between;                /* bit i: whether one of columns 16 i … 16 i + 15 lies between them and is not 0 */
} chance_split;

typedef struct kt_kernels {
    const char *name;
    const struct kt_kernels *others;    /* the row whose kernels stand where this one has none; NULL: it has all */
    /* A thread runs products, and the arithmetic ceilings, between enter and leave: enter makes the CPU's tiles
     * ready for this thread, leave gives their state back. NULL in a row without tiles. */
    void (*enter)(void);
    void (*leave)(void);
    size_t (*product_scratch_bytes)(const kt_format *format, int64_t k);
    void (*product_int8)(const product *p);     /* 4- and 8-bit weights, int8 activations */
    void (*product_bf16)(const product *p);     /* bf16 weights and activations, f32 sums */
    void (*product_f32)(const product *p);      /* any format, f32 activations: exact mode, router, E4M3 */
    void (*inner)(const inner_product *p);
    void (*outer)(const outer_product *p);
    void (*factor_sums)(const factor_sums *p);
    void (*turn)(const turn *t);
    float (*glu_backward)(const glu_backward *g);   /* the sum of h as given times the activated values */
    float (*largest)(const float *x, int64_t n);    /* magnitude */
    /* q, scales and sums of row `row` from x[0..k); amax: the largest magnitude if x is a part of a longer row with
     * one scale, else negative */
    void (*quantize)(const float *x, int64_t k, float amax, const act8 *out, int64_t row);
    /* the same, and to row + 1 what that leaves over */
    void (*quantize_wide)(const float *x, int64_t k, const act8 *out, int64_t row);
    void (*to_bf16)(const float *x, int64_t k, int64_t k_padded, uint16_t *out);   /* round to nearest even */
    void (*from_bf16)(const uint16_t *x, int64_t k, float *out);
    void (*from_f16)(const uint16_t *x, int64_t k, float *out);
    /* Rows of an fp8 cache, see kt_program.h; the same bytes in every row of the table. To codes: returns the scale
     * byte of x[0..n). To bf16, exactly: a row of codes; and panels of keys [4][dk / 2][16][2], dk even, of which those
     * that hold the first n_keys are made, for attend_bf16. The scale of key j is scales[j * stride]. Codes at `next`, if
     * it is not NULL, are fetched: as many columns, or a whole page's. */
    uint8_t (*to_fp8)(const float *x, int64_t n, uint8_t *codes);
    void (*from_fp8)(const uint8_t *codes, int64_t columns, uint8_t scale, const uint8_t *next, uint16_t *out);
    void (*panels_fp8)(const uint8_t *codes, int64_t n_keys, int64_t dk, const uint8_t *scales, int64_t stride,
                       const uint8_t *next, uint16_t *out);
    void (*norm)(const float *x, const float *gain, int64_t n, float eps, float *out);
    /* cos, sin [dim/2]; x points at the first rotated column */
    void (*rope)(float *x, const float *cosine, const float *sine, int64_t dim, int32_t interleaved);
    /* runs of 16 alternate, or there is no gate; the limit may be infinite */
    void (*swiglu)(const float *gate_up, int64_t width, const kt_glu *glu, float *out);
    void (*gate)(const float *x, const float *by, int64_t n, const gate_by *how, float *out);   /* kt_program_gate */
    void (*cap)(const float *x, int64_t n, float by, float limit, float *out);      /* kt_program_scale with a limit */
    void (*add)(const float *a, const float *b, int64_t n, float *out);
    void (*divide)(const float *a, const float *b, int64_t n, float *out);     /* out may be a */
    /* peaks and sums of ceil(n / 64) blocks of x[0..n), as kt_program_summary has them */
    void (*summarize)(const float *x, int64_t n, float temperature, float *peaks, float *sums);
    /* out[i] = e^((x[i] - top) / temperature), no x above top; the same bits in every row */
    void (*chances)(const float *x, int64_t n, float top, float temperature, float *out);
    chance_split (*split)(const float *x, float low, float high);       /* x [64]; the same bits in every row */
    /* out[i] = x[i] where bit i of the mask is set, else -Inf; n <= 64; out may be x */
    void (*masked)(const float *x, int64_t n, uint64_t mask, float *out);
    void (*attend_f32)(const page_attention *a);
    void (*attend_bf16)(const page_attention *a);
    /* out[c] = silu(bias[c] + sum over i of rows[i][c] * weight[i][c]), i < width and c < n; weight [width][n] */
    void (*conv)(const float *const *rows, const float *weight, const float *bias, int64_t width, int64_t n, float *out);
    void (*delta_rule)(const delta_block *d);
    void (*scan)(const scan_block *s);
    void (*index_f32)(const page_index *a);
    void (*index_bf16)(const page_index *a);
    /* Panels of keys, for attend_bf16, of n_keys rows of dk columns; lanes beyond n_keys are undefined. */
    void (*pack_keys)(const uint16_t *rows, int64_t stride, int64_t n_keys, int64_t dk, uint16_t *panels);
    /* Encode rows as one panel at dst; adds to *error. Same bytes in every row of the table. */
    void (*encode_panel)(const kt_format *format, const panel_rows *rows, uint8_t *dst, kt_pack_error *error);
    /* out[0..k rounded up to 64) = x[0..k) rotated in blocks of 64, 128 or 256 columns, see kt.h; out may be x. */
    void (*rotate)(const float *x, int64_t k, int64_t block, float *out);
    /* Plain loops for the ceilings; return something that depends on all work done. */
    uint64_t (*read_bytes)(const void *data, size_t size);
    uint64_t (*int8_ops)(uint64_t rounds, uint64_t *operations);
    uint64_t (*bf16_ops)(uint64_t rounds, uint64_t *operations);
} kt_kernels;

/* A stub's table is kernels_<its KT_ISA>, called by that name. */
#define KT_CONCAT(a, b) a##b
#define NAME(isa) KT_CONCAT(kernels_, isa)
#define KT_TEXT(isa) #isa
#define NAME_TEXT(isa) KT_TEXT(isa)

/* The rows built into this library, complete, best first, NULL at the end, and what each needs of the CPU. */
typedef struct kt_row {
    const kt_kernels *kernels;
    uint64_t needs;             /* KT_CPU_* bits, cpu.h */
} kt_row;
extern const kt_row kt_rows[];

#endif
