/* blocks.h - number formats of GGUF files: blocks of codes with their scales inside. */
#ifndef KT_BLOCKS_H
#define KT_BLOCKS_H

#include <stdint.h>

/* One row of blocks.c. `decode` writes `elements` floats from one block of `bytes` bytes, which need not be
 * aligned. */
typedef struct block_format {
    int32_t dtype, elements, bytes;
    void (*decode)(const uint8_t *block, float *dst);
} block_format;

/* The row of a kt_dtype; NULL if its numbers do not come in blocks. */
const block_format *block_format_of(int32_t dtype);

#endif
