/* scores.h - one row of logits from which a token is chosen: with its bias, its penalties and
 * its mask.
 *
 * The row itself stays as it is. A block with changes is written anew when somebody looks into it; its peak is known
 * before, and what is neither looked into nor summed up is never written. Scratch belongs to a thread.
 */
#ifndef KT_SCORES_H
#define KT_SCORES_H

#include "pool.h"

typedef struct weighted {
    double chance;
    int32_t id;
} weighted;

/* What one thread needs for rows of a vocabulary; `columns` is that of all blocks. */
typedef struct scratch {
    float *values;          /* [columns], blocks written anew */
    int32_t *written;       /* [blocks]: which of `values`, or what is known of a block that is not there */
    int32_t n_written;
    int32_t *last;          /* [blocks]: the last change of a block; -1: none */
    int32_t *before;        /* [2 * columns]: the change of the same block before; -1: none */
    float *peaks, *sums;    /* [blocks] */
    float *spare;           /* [columns] */
    double *masses;         /* [blocks] */
    double *sorted;         /* [CHANCE_BUCKETS], zeros */
    float *likely;          /* [blocks]: the chance of each peak */
    int32_t *order;         /* [blocks]: the blocks that are looked into */
    float *chances;         /* [columns] of the ids that stay */
    int32_t *ids;           /* [columns] */
    double *wide;           /* [columns] */
    weighted *some;         /* [columns] */
} scratch;

typedef struct scores {
    const kt_choice *c;
    const kt_kernels *kernels;
    scratch *s;
    int64_t vocab, blocks;
    const float *peaks, *sums;  /* of the row with its changes; sums at `temperature`, where they are needed */
    float top;                  /* its greatest value */
    float temperature;
} scores;

static inline int columns_of(const scores *v, int64_t block)
{
    int64_t left = v->vocab - block * KT_BLOCK_COLUMNS;
    return left < KT_BLOCK_COLUMNS ? (int)left : KT_BLOCK_COLUMNS;
}

/* Find peaks, top and, if `summed`, sums of a row with its changes. */
void scores_look(scores *v, int summed);
/* The values of a block with its changes; -Infinity: may not be taken. */
const float *scores_block(const scores *v, int64_t block);
/* The first id with the greatest value. */
int32_t scores_best(const scores *v);

#endif
