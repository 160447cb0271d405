/* attention_cut.c - see attention_cut.h. */
#include "attention_cut.h"

#define FEWEST_QUERIES 8                    /* a block is not cut further to give every thread one */

int64_t first_seen(const attention *a, int64_t position)
{
    if (a->chunked)
        return position - position % a->window;
    return a->window ? max64(0, position + 1 - a->window) : 0;
}

int64_t first_page(const attention *a, int64_t position)
{
    return first_seen(a, position) / KT_PAGE_TOKENS;
}

static cut cut_run(const work *k, int64_t number)
{
    const attention *a = k->a;
    const batch *b = k->w->batch;
    const kt_run *run = &b->runs[number];
    cut c = {.run = run, .row = b->first[number] - b->first[k->runs.first], .step_row = b->first[number],
             .heads_each = min64(a->group, k->queries)};
    c.tokens_each = min64(k->queries / c.heads_each, run->n_tokens);
    c.token_blocks = (run->n_tokens + c.tokens_each - 1) / c.tokens_each;
    c.head_blocks = (a->group + c.heads_each - 1) / c.heads_each;
    c.blocks = a->kv_heads * c.token_blocks * c.head_blocks;
    c.rows = c.tokens_each * c.heads_each;
    int64_t pages = (run_end(run) + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
    c.first_span = first_page(a, run->start) / SPAN_PAGES;
    c.spans = (pages + SPAN_PAGES - 1) / SPAN_PAGES - c.first_span;
    return c;
}

/* Cut the runs into blocks of so many queries; returns how many spans their blocks have together. */
static int64_t cut_into(work *k, int64_t queries)
{
    int64_t parts = 0;
    k->queries = queries;
    k->blocks = k->rows = k->spans = 0;
    for (int64_t i = k->runs.first; i < k->runs.last; i++) {
        cut c = cut_run(k, i);
        if (i == k->runs.first)
            k->first = c;
        k->blocks += c.blocks;
        k->rows = max64(k->rows, c.rows);
        k->spans = max64(k->spans, c.spans);
        parts += c.blocks * c.spans;
    }
    return parts;
}

/* Large blocks, since queries of a block share what is read; smaller ones where threads would have none
 * (one token of MLA is a single block). How queries are grouped does not change a bit of any. */
void cut_work(work *k)
{
    int64_t queries = BLOCK_QUERIES;
    while (cut_into(k, queries) < k->w->threads && queries > FEWEST_QUERIES)
        queries /= 2;
}

place_in first_place(const work *k)
{
    return (place_in){.run = k->runs.first, .c = k->first};
}

/* Tasks of a run in a wave over spans [done, done + n) of each, counted from its first. */
static int64_t tasks_in(const cut *c, int64_t done, int64_t n)
{
    return c->blocks * max64(0, min64(n, c->spans - done));
}

int walk_to(const work *k, place_in *at, int64_t i, int64_t done, int64_t n)
{
    for (int64_t tasks; i - at->before >= (tasks = tasks_in(&at->c, done, n));) {
        if (at->run + 1 == k->runs.last)
            return 0;
        at->before += tasks;
        at->blocks_before += at->c.blocks;
        at->c = cut_run(k, ++at->run);
    }
    return 1;
}

void walk_to_block(const work *k, place_in *at, int64_t i)
{
    for (; i - at->before >= at->c.blocks; at->c = cut_run(k, ++at->run))
        at->before += at->c.blocks;
}

block block_at(const attention *a, const cut *c, int64_t i)
{
    block b = {.kv_head = i % a->kv_heads};
    i /= a->kv_heads;
    b.head = i % c->head_blocks * c->heads_each;
    b.token = (c->token_blocks - 1 - i / c->head_blocks) * c->tokens_each;
    b.n_heads = min64(c->heads_each, a->group - b.head);
    b.n_tokens = min64(c->tokens_each, c->run->n_tokens - b.token);
    b.n = b.n_heads * b.n_tokens;
    return b;
}

int64_t block_first(const attention *a, const block *b, const kt_run *run)
{
    return first_page(a, run->start + b->token) / SPAN_PAGES;
}

int64_t block_end(const block *b, const kt_run *run)
{
    int64_t keys = run->start + b->token + b->n_tokens;
    return (keys + SPAN_PAGES * KT_PAGE_TOKENS - 1) / (SPAN_PAGES * KT_PAGE_TOKENS);
}
