/* kt_adapters.h - adapters: low-rank updates that a program computes in addition to its
 * products.
 *
 * Beside each linear product, both of the experts and those of latent attention, y = W x of a row whose run names an adapter, the program adds
 *     y[rows] += scale * B (A x)        A [rank, k], B [rows, rank]
 * for each of the adapter's updates of that product, in their order: A x as f32 dot products of 16 lanes in ascending
 * columns, times the scale, then the sum over the ranks, ascending. x is what the product is given, in f32, whatever the
 * product rounds it to. So nothing of a row depends on other rows, on threads, or on the row of kernels.
 * For experts the updates of gate and up are added before the activation, and those of down before the slot's weight.
 */
#ifndef KT_API_ADAPTERS_H
#define KT_API_ADAPTERS_H

#include "kt_program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An update of rows of one product. They lie in panels of 16 rows as the weight is packed, so that of gate and up, which
 * alternate there, one update can have every second panel. */
typedef struct kt_update {
    int32_t rank;           /* 1 or more */
    int32_t first_panel;    /* panels first_panel, first_panel + panel_step, ... `panels` of them */
    int32_t panel_step;
    int32_t panels;
    float scale;            /* finite */
    int32_t in_f32;         /* 1: a and b are f32, 0: bf16 */
    int32_t one_a, one_b;   /* 1: a, or b, is one matrix for all: [1] instead of [count] */
    const void *a;          /* [count][rank][k'], k' = k rounded up to 16, zeros behind k; count: experts, heads, or 1 */
    const void *b;          /* [count][panels][rank][16], zeros for rows that it does not change */
} kt_update;

/* Called before operations are recorded: runs may name adapters 1..most; `ranks`: the most that the updates of one product
 * by one adapter have together. Without this call no product is any different from what it would be. */
KT_API int kt_program_adapters(kt_program *program, int32_t most, int32_t ranks);
/* Adapter 1..most has these n updates of a product from the next step on; 0: none, as at first. What was there is
 * forgotten. operation: its number in recording order; part: 0, or 1 for down of experts; of latent attention
 * 0, 1 and 2 for uk_in, uk_out and uv. a and b must live until then,
 * the structs are copied. Not while a step runs. */
KT_API int kt_program_adapt(kt_program *program, int32_t adapter, int32_t operation, int32_t part,
                            const kt_update *updates, int32_t n);
/* Rows of this adapter are normed with this gain from the next step on, of as many elements as the operation's own; NULL:
 * with that, as at first. operation: a norm or a layer_norm that has a gain. Not while a step runs. */
KT_API int kt_program_adapt_gain(kt_program *program, int32_t adapter, int32_t operation, const float *gain);

/* A factor of a kt_update in the layout of a file, [count][rows][columns]: a number of matrix i, row r and column c lies
 * at data + i * matrix_bytes + r * row_bytes + c * column_bytes. */
typedef struct kt_factor {
    int32_t dtype;          /* KT_F32, KT_BF16 or KT_F16 */
    int64_t count, rows, columns;
    int64_t matrix_bytes, row_bytes, column_bytes;
    const void *data;
} kt_factor;

/* out, which holds zeros, gets A as kt_update has it: rows are ranks. In bf16 numbers are rounded to nearest even.
 * KT_ERR_VALUE: one is NaN or Inf. KT_ERR_SHAPE: there are none, or of another type. These two run on the caller's thread
 * alone, beside any step of a program that does not read `out` yet. */
KT_API int kt_factor_a(const kt_factor *a, int32_t in_f32, void *out);
/* The same for B: columns are ranks. lanes [panels][16]: the row of the factor that each row of the panels is, or -1. */
KT_API int kt_factor_b(const kt_factor *b, const int32_t *lanes, int32_t panels, int32_t in_f32, void *out);

#ifdef __cplusplus
}
#endif
#endif
