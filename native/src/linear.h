/* linear.h - one matrix, divided by rows between nodes: its product (linear.c) and that of its
 * transpose. */
#ifndef KT_LINEAR_H
#define KT_LINEAR_H

#include "lowrank.h"

/* The rows of W that one node has. */
typedef struct linear_part {
    matrices weight;                    /* no panels: none */
    int64_t column;                     /* of the output of x W^T, where its rows begin */
} linear_part;

/* Check the nodes' parts of W [n, k] and fill them; *common: the first one, which all are like. */
int linear_make_parts(kt_program *p, const kt_weight *w, int64_t n, int64_t k, int32_t reads, linear_part *parts,
                      const matrices **common);

#endif
