/* groups.h - the slots of a routing by expert. A *slot* is one (token, k) pair, number t * top_k + k. */
#ifndef KT_GROUPS_H
#define KT_GROUPS_H

#include <stddef.h>
#include <stdint.h>

typedef struct groups {
    int64_t experts;
    int32_t n_active, n_slots;
    int32_t *active;        /* [n_active] experts that have slots, ascending */
    int32_t *first;         /* [experts + 1] expert e has sorted rows first[e]..first[e+1] */
    int32_t *token;         /* [n_slots] of each sorted row, */
    float *gate;            /* [n_slots] and its weight */
} groups;

/* Memory that groups of so many slots need: a multiple of 64; SIZE_MAX where that is more than there can be. */
size_t groups_bytes(int64_t experts, int64_t max_slots);
/* The arrays in such memory, which holds anything yet. */
groups groups_at(void *memory, int64_t experts, int64_t max_slots);

/* Sort the slots of n_tokens tokens (ids, gate [n_tokens][top_k]) by expert, and by token within one; slots whose
 * id is no expert are left out. */
void group_slots(groups *g, const int32_t *ids, const float *gate, int64_t n_tokens, int64_t top_k);
/* What group_slots left in the memory of g. */
void groups_again(groups *g);

#endif
