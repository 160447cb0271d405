/* feedback.h - how the columns of rotated blocks make up for each other's errors. */
#ifndef KT_FEEDBACK_H
#define KT_FEEDBACK_H

#include <stdint.h>

#include "pool.h"

/* feedback[ceil(k / 64)][64][64] = the L of each block of columns with this importance [k], as formats.h specifies it,
 * below its diagonal; what lies on and above it is undefined. The threads of the pool share the blocks. */
void feedback_fill(kt_pool *pool, const float *importance, int64_t k, float *feedback);

#endif
