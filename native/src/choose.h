/* choose.h - the best of a stream of scored positions. */
#ifndef KT_CHOOSE_H
#define KT_CHOOSE_H

#include "attention.h"

/* The greatest `most` of the keys pushed, which are distinct. */
typedef struct top {
    uint64_t *keys;         /* [capacity], in no order */
    int64_t n, most, capacity;
    uint64_t above;         /* keys up to here are not among them */
} top;

/* A place by its score: greater is better, of equals the lower place. */
uint64_t top_key(float score, int64_t place);
void top_push(top *t, uint64_t key);
/* Leave at most `most` keys. */
void top_trim(top *t);
/* Its places, ascending, to out; spare [n] */
void top_places(const top *t, int32_t *out, int32_t *spare);

#endif
