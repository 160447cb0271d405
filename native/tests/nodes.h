/* nodes.h - pools of several pretended nodes, and weights cut between them. */
#ifndef KT_NODES_H
#define KT_NODES_H

#include "check.h"

static inline kt_pool *make_nodes(const char *isa, int32_t nodes, int32_t threads_of_first)
{
    char error[256] = "";
    int32_t threads[8] = {threads_of_first, 1, 1, 1, 1, 1, 1, 1};
    kt_pool_options o = {.isa = isa, .n_threads = threads_of_first + nodes - 1, .spin_us = 20, .n_nodes = nodes,
                         .node_threads = threads};
    kt_pool *pool = kt_pool_create(&o, error, sizeof error);
    if (!pool) {
        fprintf(stderr, "no pool: %s\n", error);
        exit(1);
    }
    CHECK(kt_pool_nodes(pool) == nodes && kt_pool_node_threads(pool, 0) == threads_of_first, "%d nodes", nodes);
    return pool;
}

/* A weight cut between the nodes of a pool. */
typedef struct sliced {
    kt_weight w[8];
    kt_slice slices[8];
    int32_t nodes;
} sliced;

/* Where node i ends of `units`: shares grow with i, and the first ones may get nothing. */
static inline int64_t cut_at(int64_t units, int32_t i, int32_t nodes)
{
    return units * (i + 1) * (i + 2) / ((int64_t)nodes * (nodes + 1));
}

static inline sliced cut(kt_pool *pool, const kt_weight *whole, int32_t axis, int64_t unit, int fd)
{
    sliced s = {.nodes = kt_pool_nodes(pool)};
    int64_t end = axis == KT_CUT_ROWS ? whole->n : whole->k, units = (end + unit - 1) / unit, at = 0;
    for (int32_t i = 0; i < s.nodes; i++) {
        int64_t last = i + 1 == s.nodes ? end : cut_at(units, i, s.nodes) * unit;
        last = last < end ? last : end;
        kt_weight *w = &s.w[i];
        *w = *whole;
        *(axis == KT_CUT_ROWS ? &w->n : &w->k) = last - at;
        size_t bytes = last > at ? kt_packed_bytes(&w->format, w->n, w->k) * (size_t)w->count : 0;
        s.slices[i] = (kt_slice){at, last, bytes ? need(bytes) : NULL};
        w->data = s.slices[i].data;
        at = last;
    }
    OK(kt_place(pool, fd, 0, whole, axis, s.slices), kt_pool_error(pool));
    return s;
}

static inline void free_sliced(sliced *s)
{
    for (int32_t i = 0; i < s->nodes; i++)
        free(s->slices[i].data);
}

#endif
