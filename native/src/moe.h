/* moe.h - the routed experts as they are recorded (experts.c) and run (moe.c). */
#ifndef KT_MOE_H
#define KT_MOE_H

#include "groups.h"
#include "lowrank.h"

#define BLOCK_TOKENS 240                /* most rows of gate and up that a task holds at once, */
#define BLOCK_FLOATS 65536              /* and most values: 256 kB, a part of a usual second cache */

/* What one node has of the experts; its scratch holds, behind one another, hidden values f32, the same as down
 * reads them, and, where there are several nodes, its sums. */
typedef struct part {
    matrices gate_up, down;
    int64_t width;                      /* hidden columns; 0: none */
    int64_t rotated;                    /* the same in whole blocks of down's rotation */
    int64_t h_stride;                   /* floats of a row of hidden values */
    int64_t column;                     /* the first of them among those of all nodes */
    size_t act_offset, sum_offset, inner_offset;
    const float *gate_up_bias;          /* of expert 0, from the node's first row on; or NULL */
    const float *down_bias;             /* [experts][hidden], with the first node that has columns; else NULL */
} part;

typedef struct moe {
    kt_view out;
    source in;
    kt_view x;
    int32_t routing, domain;
    int32_t nodes, kind;                /* kind: what down reads, ACT_* */
    int64_t top_k, experts, max_slots, width;   /* width: hidden columns of all nodes */
    int64_t sum_stride;
    int64_t bias_stride;                /* floats of an expert's gate_up_bias */
    int64_t per_pair;                   /* panels of gate_up for one of hidden columns: 2, or 1 without a gate */
    kt_glu glu;
    int32_t gate_up_updates, down_updates;  /* lowrank_product */
    part *parts;                        /* [nodes] */
    const matrices *gate_up, *down;     /* of the first node that has some: all are like them */
    _Atomic uint32_t *largest;          /* [max_slots] bits of the largest hidden value of a row; 0 between steps.
                                         * NULL: one node, or down does not ask for it */
} moe;

static inline size_t groups_size(const moe *o)
{
    return groups_bytes(o->experts, o->max_slots);
}

static inline const part *own_part(const moe *o, const worker *w)
{
    return &o->parts[w->own.node];
}

/* In the thread's local scratch, from its beginning on. */
static inline groups own_groups(const moe *o, const worker *w)
{
    return groups_at(local_scratch(w), o->experts, o->max_slots);
}

static inline float *hidden(const worker *w)
{
    return (float *)(void *)node_scratch(w, w->own.node);
}

/* Rows [row, last_row) of one expert and hidden columns [16 * pair, 16 * last_pair). */
typedef struct piece {
    int32_t expert;
    int64_t row, last_row, pair, last_pair;
    const uint8_t *next;                /* weights this thread will read after it */
} piece;

/* y = gate and up of a piece, with bias and updates. */
void gate_up_product(const moe *o, const worker *w, const groups *g, const piece *b, float *y);
/* The slots [row, last_row) of an expert, in sorted order, as a product that adapters update. */
adapted_rows updated_rows(const moe *o, const worker *w, const groups *g, int32_t product, int32_t expert, int64_t row,
                          int64_t last_row);
/* The experts that an operation computes, checked: of each node its part, and what is in `moe` but the source. */
int moe_make(kt_program *p, kt_view out, kt_view x, const kt_experts *given, moe **made);

/* The phases of kt_program_experts, in this order. */
void gate_up_inner_run(const void *arg, worker *w); /* if adapters may update the products */
void gate_up_run(const void *arg, worker *w);
void down_inner_run(const void *arg, worker *w);    /* likewise */
void rotate_run(const void *arg, worker *w);        /* if down has a rotation */
void quantize_run(const void *arg, worker *w);      /* unless down reads f32 */
void down_run(const void *arg, worker *w);
void reduce_run(const void *arg, worker *w);        /* with several nodes */

#endif
