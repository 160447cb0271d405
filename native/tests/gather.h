/* gather.h - matrices of one source, all its rows in order, for tests and benchmarks that have nothing to gather. */
#ifndef KT_GATHER_H
#define KT_GATHER_H

#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>

/* Rows 0, 1, 2 ... of source 0; to be freed. */
static inline int32_t *rows_in_order(int64_t n)
{
    int32_t *rows = calloc((size_t)n, 2 * sizeof *rows);
    if (!rows) {
        fprintf(stderr, "no memory for a test\n");
        exit(1);
    }
    for (int64_t i = 0; i < n; i++)
        rows[2 * i + 1] = (int32_t)i;
    return rows;
}

static inline kt_numbers floats_as_numbers(const float *x, int64_t n, int64_t k)
{
    return (kt_numbers){KT_F32, n, k * (int64_t)sizeof *x, sizeof *x, x, NULL};
}

static inline int decode_numbers(kt_pool *pool, const kt_numbers *numbers, int64_t k, float *dst, int64_t *bad_row)
{
    int32_t *rows = rows_in_order(numbers->n);
    kt_gathered all = {numbers->n, k, 1, numbers, rows, NULL};
    int result = kt_decode(pool, &all, KT_F32, dst, bad_row);
    free(rows);
    return result;
}

static inline int pack_floats(kt_pool *pool, const kt_format *format, int64_t n, int64_t k, const float *x,
                              const float *scales, void *dst, kt_pack_error *error)
{
    int32_t *rows = rows_in_order(n);
    int64_t bad_row;
    kt_numbers numbers = floats_as_numbers(x, n, k);
    kt_gathered all = {n, k, 1, &numbers, rows, NULL};
    int result = kt_pack(pool, format, &all, scales, NULL, dst, error, &bad_row);
    free(rows);
    return result;
}

/* Panel i of x [n][k]. */
static inline void encode_floats(const kt_kernels *kernels, const kt_format *format, int64_t n, int64_t k,
                                 const float *x, int64_t i, uint8_t *dst, kt_pack_error *error)
{
    const float *rows[KT_PANEL_ROWS];
    for (int64_t r = 0; r < KT_PANEL_ROWS; r++)
        rows[r] = KT_PANEL_ROWS * i + r < n ? x + (KT_PANEL_ROWS * i + r) * k : NULL;
    kernels->encode_panel(format, &(panel_rows){k, rows, NULL, NULL}, dst, error);
}

#endif
