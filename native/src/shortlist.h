/* shortlist.h - which tokens of a row survive top-k, top-p and min-p. */
#ifndef KT_SHORTLIST_H
#define KT_SHORTLIST_H

#include "scores.h"

#define CHANCE_BUCKETS 8192

/* Whether top-k drops anything. */
static inline int is_cut(const scores *v)
{
    return v->c->top_k > 0 && v->c->top_k < v->vocab;
}

/* The tokens that survive where top-k drops some, ascending, to s->ids and s->chances, relative to the best token's;
 * returns how many, one at least. */
int64_t shortlist(const scores *v);
/* The same where it drops none: the blocks that hold them to s->order, ascending, the chances of each to s->spare, of
 * which those from *least on survive, and the sums of these to s->masses. Returns the number of blocks. The row has sums
 * unless top-p drops none. */
int64_t shortlist_blocks(const scores *v, float *least);
/* The sum of the chances of each block's tokens to s->masses; returns that of all. The row has sums. */
double weigh(const scores *v);
/* A value that k of x[0..n) reach, and no greater one does; n where there are no more. `spare` [n]. No NaN. */
float kth(const float *x, int64_t n, int64_t k, float *spare);

#endif
