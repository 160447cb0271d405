/* groups.c - a counting sort of slots by expert. */
#include "groups.h"

#include <string.h>

#include "program.h"

size_t groups_bytes(int64_t experts, int64_t max_slots)
{
    size_t size = size_mul((size_t)max_slots * 2 + (size_t)experts * 2 + 1, sizeof(int32_t));
    return size_add(size, 63) / 64 * 64;
}

groups groups_at(void *memory, int64_t experts, int64_t max_slots)
{
    groups g = {.experts = experts, .active = memory};
    g.first = g.active + experts;
    g.token = g.first + experts + 1;
    g.gate = (float *)(void *)(g.token + max_slots);
    return g;
}

void group_slots(groups *g, const int32_t *ids, const float *gate, int64_t n_tokens, int64_t top_k)
{
    memset(g->first, 0, (size_t)(g->experts + 1) * sizeof *g->first);
    g->n_active = 0;
    for (int64_t s = 0; s < n_tokens * top_k; s++) {
        if (ids[s] >= 0 && ids[s] < g->experts)
            g->first[ids[s] + 1]++;
    }
    for (int64_t e = 0; e < g->experts; e++) {
        if (g->first[e + 1] > 0)
            g->active[g->n_active++] = (int32_t)e;
        g->first[e + 1] += g->first[e];
    }
    /* first[e] walks through its rows here; afterwards it stands at the next expert's first. */
    for (int64_t s = 0; s < n_tokens * top_k; s++) {
        if (ids[s] >= 0 && ids[s] < g->experts) {
            int32_t row = g->first[ids[s]]++;
            g->token[row] = (int32_t)(s / top_k);
            g->gate[row] = gate[s];
        }
    }
    memmove(g->first + 1, g->first, (size_t)g->experts * sizeof *g->first);
    g->first[0] = 0;
    g->n_slots = g->first[g->experts];
}

void groups_again(groups *g)
{
    g->n_slots = g->first[g->experts];
    g->n_active = 0;
    for (int64_t e = 0; e < g->experts; e++)
        g->n_active += g->first[e + 1] > g->first[e];
}
