/* mla_chosen.c - latent attention over chosen positions: the chosen rows of some tokens are gathered to pages of
 * their own, where each token is what a kv head is elsewhere, and the absorbed form attends over those.
 *
 * All heads of a token share its rows, so what is gathered is read by many. Tokens that see fewer positions than
 * are chosen go one by one: those of a batch have the same number of rows. So do tokens whose windows are chosen,
 * as each has another number of positions behind its last window.
 */
#include "mla.h"

#include <string.h>

#define GATHERED_BYTES ((size_t)16 << 20)   /* of a batch; one token at least */

static size_t row_bytes(const mla *o)
{
    return (size_t)o->a.dk * (o->a.kv_f32 ? sizeof(float) : sizeof(uint16_t));
}

/* Pages of a token's rows: of the places chosen, and those behind its last window. */
static int64_t chosen_pages(const selection *s)
{
    return (selection_reach(s) + s->every - 1 + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
}

/* Where a token attends: the positions of its places, then those behind its last window. */
typedef struct attended {
    const int32_t *places;
    int64_t every, in_places, behind, count;    /* behind: the first of those */
} attended;

static attended attended_by(const selection *s, const kt_step *step, int64_t token)
{
    int32_t count;
    int64_t seen = step->start + token + 1;
    attended a = {.places = selection_row(s, token, 0, &count), .every = s->every};
    a.in_places = count * a.every;
    a.behind = seen - seen % a.every;
    a.count = a.in_places + seen % a.every;
    return a;
}

static int64_t position_at(const attended *a, int64_t i)
{
    return i < a->in_places ? a->places[i / a->every] * a->every + i % a->every : a->behind + i - a->in_places;
}

/* Tokens of a batch, at most. */
static int64_t batch_tokens(const mla *o, int64_t max_tokens, const selection *s)
{
    size_t token = (size_t)chosen_pages(s) * KT_PAGE_TOKENS * row_bytes(o);
    return max64(1, min64(min64(MLA_ABSORBED, max_tokens), (int64_t)(GATHERED_BYTES / token)));
}

size_t mla_chosen_bytes(const mla *o, int64_t max_tokens, const selection *s)
{
    size_t token = (size_t)chosen_pages(s) * KT_PAGE_TOKENS * row_bytes(o);
    return size_mul((size_t)batch_tokens(o, max_tokens, s), token);
}

int32_t *mla_chosen_pages(kt_program *p, const selection *s)
{
    int64_t n = chosen_pages(s);
    int32_t *pages = program_new(p, (size_t)n * sizeof *pages);
    for (int64_t i = 0; pages && i < n; i++)
        pages[i] = (int32_t)i;
    return pages;
}

/* Chosen rows of tokens [first, first + n), `count` of each, to pages [n][64][dk]. */
static void gather(const mla *o, const worker *w, int64_t first, int64_t n, int64_t count)
{
    const selection *s = &w->program->selections.at[o->selection];
    uint8_t *pages = shared_scratch(w) + o->chosen_offset;
    int64_t n_pages = (count + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
    for (int64_t i; (i = worker_take(w, 1)) < n * n_pages;) {
        int64_t page = i / n, token = i % n;
        attended a = attended_by(s, w->step, first + token);
        uint8_t *to = pages + (size_t)(i * KT_PAGE_TOKENS) * row_bytes(o);
        for (int64_t j = 0; j < min64(KT_PAGE_TOKENS, count - page * KT_PAGE_TOKENS); j++, to += row_bytes(o)) {
            int64_t at = position_at(&a, page * KT_PAGE_TOKENS + j);
            const uint8_t *from = cache_page(w, at / KT_PAGE_TOKENS) + o->a.k_offset;
            memcpy(to, from + (size_t)(at % KT_PAGE_TOKENS) * row_bytes(o), row_bytes(o));
        }
    }
}

/* Attention of n tokens from `first` of r on, over their gathered rows. */
static void attend_gathered(const mla *o, const worker *w, mla_rows r, int64_t first, int64_t n, int64_t count)
{
    attention a = o->a;
    a.kv_heads = (int32_t)n;
    a.k_head = a.v_head = KT_PAGE_TOKENS * (int64_t)a.dk;
    a.k_offset = a.v_offset = 0;
    kt_step step = *w->step;
    step.start = count - 1;             /* one position that sees them all */
    step.n_tokens = 1;
    step.pages = o->identity;
    step.cache = shared_scratch(w) + o->chosen_offset;
    step.page_bytes = (size_t)(n * KT_PAGE_TOKENS) * row_bytes(o);
    worker over = *w;
    over.step = &step;
    head_rows q = mla_queries(o, w), out = mla_results_at(o, w);
    q.data += (first - r.first) * q.token_stride;
    out.data += (first - r.first) * out.token_stride;
    attend(&a, &over, q, out);
}

/* Queries of r against their chosen rows. */
static void attend_rows(const mla *o, const worker *w, mla_rows r)
{
    const selection *s = &w->program->selections.at[o->selection];
    int64_t most = batch_tokens(o, w->program->options.max_tokens, s), last = r.first + r.n;
    for (int64_t t = r.first, n; t < last; t += n) {
        int64_t count = attended_by(s, w->step, t).count;
        for (n = 1; n < most && t + n < last && attended_by(s, w->step, t + n).count == count;)
            n++;
        gather(o, w, t, n, count);
        worker_barrier(w);
        attend_gathered(o, w, r, t, n, count);
        worker_barrier(w);
    }
}

void mla_chosen(const mla *o, const worker *w)
{
    int64_t tokens = w->step->n_tokens;
    for (int64_t first = 0; first < tokens; first += MLA_ABSORBED) {
        mla_rows r = {first, min64(MLA_ABSORBED, tokens - first)};
        for (int64_t i; (i = worker_take(w, 1)) < r.n;)
            mla_split(o, w, r, i, i + 1);
        worker_barrier(w);
        mla_absorb(o, w, r);
        pool_next_loop(w->pool, w->thread);
        attend_rows(o, w, r);
        if (o->uv.kind != ACT_F32) {
            mla_results(o, w, r);
            worker_barrier(w);
        }
        mla_values(o, w, r);
        if (first + MLA_ABSORBED < tokens)
            worker_barrier(w);
    }
}
