/* numbers.h - the rows of a matrix as f32, one at a time, for every type in a checkpoint. */
#ifndef KT_NUMBERS_H
#define KT_NUMBERS_H

#include "pool.h"

/* KT_OK, or an error whose sentence says what of the matrix is not valid. */
int gathered_check(kt_pool *pool, const kt_gathered *m);

/* Row i before it is divided: [k] in `buffer` or where it lies, or NULL for a row of zeros. */
const float *gathered_row(const kt_kernels *kernels, const kt_gathered *m, int64_t i, float *buffer);

/* Index of the first NaN or Inf of x[0..k), k if all are finite. */
int64_t first_bad(const float *x, int64_t k);

#endif
