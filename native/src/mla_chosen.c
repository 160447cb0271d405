/* mla_chosen.c - latent attention over chosen positions: the chosen rows of some tokens are
 * gathered to separate pages (gathered.c), and the absorbed form attends over those. */
#include "gathered.h"
#include "mla.h"

#include <string.h>

static size_t row_bytes(const mla *o)
{
    return (size_t)o->a.dk * (o->a.kv_f32 ? sizeof(float) : sizeof(uint16_t));
}

/* Of the places chosen, and those behind the last window. */
int64_t mla_chosen_keys(const selection *s)
{
    return selection_reach(s) + s->every - 1;
}

/* Where a token attends: the positions of its places, then those behind its last window. */
typedef struct attended {
    const int32_t *places;
    int64_t every, in_places, behind, count;    /* behind: the first of those */
} attended;

static attended attended_by(const selection *s, const worker *w, int64_t row)
{
    int32_t count;
    int64_t seen = position_of(w, row) + 1;
    attended a = {.places = selection_row(s, row, 0, &count), .every = s->every};
    a.in_places = count * a.every;
    a.behind = seen - seen % a.every;
    a.count = a.in_places + seen % a.every;
    return a;
}

static int64_t position_at(const attended *a, int64_t i)
{
    return i < a->in_places ? a->places[i / a->every] * a->every + i % a->every : a->behind + i - a->in_places;
}

size_t mla_chosen_page(const mla *o)
{
    return KT_PAGE_TOKENS * row_bytes(o);
}

/* Chosen rows to their pages; shared out among the threads. */
static void gather(const mla *o, const worker *w, const gathered *g)
{
    const selection *s = &w->program->selections.at[o->selection];
    for (int64_t i, n; (i = worker_take(w, 1)) < g->n * g->pages;) {
        int64_t row = g->first + i % g->n, first = i / g->n * KT_PAGE_TOKENS;
        attended a = attended_by(s, w, row);
        uint8_t *to = gathered_page(g, i % g->n, i / g->n, &n);
        for (int64_t j = 0; j < n; j++, to += row_bytes(o)) {
            int64_t at = position_at(&a, first + j);
            const uint8_t *from = cache_page(w, run_of(w, row), at / KT_PAGE_TOKENS) + o->a.k_offset;
            memcpy(to, from + (size_t)(at % KT_PAGE_TOKENS) * row_bytes(o), row_bytes(o));
        }
    }
}

void mla_chosen(const mla *o, const worker *w, mla_rows r)
{
    const selection *s = &w->program->selections.at[o->selection];
    attention a = o->a;
    a.k_offset = a.v_offset = 0;
    gathered g = {.memory = shared_scratch(w) + o->chosen_offset, .identity = o->identity,
                  .page_bytes = mla_chosen_page(o), .first = r.first};
    for (int64_t last = r.first + r.n; g.first < last; g.first += g.n) {
        if (g.first > r.first)
            worker_barrier(w);
        g.n = g.pages = 0;
        for (int64_t t = g.first; t < last && gathered_add(&g, o->chosen_bytes, attended_by(s, w, t).count);)
            t++;
        gather(o, w, &g);
        worker_barrier(w);
        head_rows q = mla_queries(o, w), out = mla_results_at(o, w);
        q.data += (g.first - r.first) * q.token_stride;
        out.data += (g.first - r.first) * out.token_stride;
        attend_gathered(&a, w, &g, q, out);
    }
}
