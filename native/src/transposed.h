/* transposed.h - products with the transpose of packed weights: columns of a matrix, transposed
 * in the thread's scratch memory, are the weight of a forward product.
 *
 * Results are columns of all rows, and where nodes share a weight's rows, or a weight is rotated, they are sums that lie
 * in the node's scratch memory until all are there.
 */
#ifndef KT_TRANSPOSED_H
#define KT_TRANSPOSED_H

#include "lowrank.h"

#define TURNED_COLUMNS 64               /* at once: what has one scale in most formats, */
#define TURNED_PANELS 128               /* of so many panels: 256 kB in bf16 */

/* How x W is computed: as sums of x V^T, V [TURNED_COLUMNS, 16 * TURNED_PANELS] being a piece of W. */
typedef struct transpose {
    matrices as;                        /* V; no data */
    int64_t columns;                    /* of W as it is packed, in whole blocks of its rotation */
    int64_t run;                        /* columns of a task: TURNED_COLUMNS, or a block of the rotation */
    int32_t before;                     /* panels of zeros before W's first: x begins in the middle of a pair of panels */
    const float *ones;                  /* [rows] */
} transpose;

/* How up to `rows` rows are multiplied with m, whose first row is row `row` of the whole matrix, from its other side;
 * in_f32: without rounding. Reserves the scratch of these products. */
int transpose_of(kt_program *p, const matrices *m, int64_t row, int32_t in_f32, int64_t rows, transpose *t);
/* Local scratch that transpose_multiply needs. */
static inline size_t transpose_bytes(const transpose *t)
{
    return t->as.bytes;
}
/* y = x W, or y += x W with add, for columns [column, column + TURNED_COLUMNS) of matrix `index` of m, the first `most` of
 * them. q says which rows, and where x and y of that column are; `memory` is for the pieces of W. */
void transpose_multiply(const worker *w, const matrices *m, const transpose *t, int64_t index, int64_t column,
                        int64_t most, int add, void *memory, product *q);

/* The rows of a view, as sums over nodes. */
typedef struct sums {
    kt_view out;
    int32_t domain, nodes;
    int32_t direct;                     /* 1: they lie in the view itself */
    int64_t stride;                     /* of a row of sums, with all columns of its weight as packed */
    size_t *offset;                     /* [nodes] in each node's scratch */
    const int32_t *given;               /* [nodes] 1: the node has some; NULL: all have */
} sums;

static inline float *sums_row(const sums *s, const worker *w, int node, int64_t row)
{
    if (s->direct)
        return view_row(w, s->out, row);
    return (float *)(void *)(node_scratch(w, node) + s->offset[node]) + row * s->stride;
}

static inline int64_t sums_stride(const sums *s, const worker *w)
{
    return s->direct ? view_stride(w, s->out) : s->stride;
}

/* The view's rows = the nodes' sums, added up in their order; nothing where they lie there already. */
void sums_finish(const sums *s, worker *w);
/* A block of columns of so many rows, rotated in place. */
void rotate_block(const worker *w, int64_t block, float *x, int64_t stride, int64_t rows);

#endif
