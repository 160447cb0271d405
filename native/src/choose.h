/* choose.h - the top of a stream of scored places, and what others read of a choice. */
#ifndef KT_CHOOSE_H
#define KT_CHOOSE_H

#include "attention.h"

/* The most places that a token attends to; what sees no more is not scored. */
static inline int64_t selection_reach(const selection *c)
{
    return (int64_t)c->top_k * c->block;
}

/* Whether every token of the step attends to all that it sees. */
static inline int selection_is_all(const selection *c, const kt_step *s)
{
    return s->start + s->n_tokens <= selection_reach(c);
}

static inline const int32_t *selection_row(const selection *c, int64_t token, int64_t list, int32_t *count)
{
    int64_t row = token * c->lists + list;
    *count = c->count[row];
    return c->at + row * c->top_k;
}

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
