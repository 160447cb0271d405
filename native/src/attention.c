/* attention.c - how queries are combined with pages: blocks of queries, spans of pages, and the
 * merge. See attention.h for the idea; the arithmetic of one block and one page is the
 * kernel's.
 *
 * Many queries: a task is one block of queries and walks all spans. Few queries and a long context
 * (decode): a task is one block and one span, the partials lie in shared scratch and are merged after a
 * barrier. A context with more spans than the scratch holds goes in several waves.
 */
#include "attention_cut.h"

#include <math.h>
#include <string.h>

#define SHARED_PARTIALS ((size_t)4 << 20)   /* least bytes for partials: 128k keys of a usual GQA layer in one wave */
#define TASKS_PER_THREAD 4                  /* with fewer blocks than this, spans are shared out too */

typedef struct partial {
    float *max, *sum;       /* [n] */
    float *acc;             /* [n][dv] */
} partial;

/* ---- scratch ------------------------------------------------------------------------------------ */

static size_t partial_floats(int64_t rows, int64_t dv)
{
    return (size_t)(rows * (dv + 2) + 15) / 16 * 16;
}

static partial partial_at(float *memory, int64_t rows, int64_t dv)
{
    partial p = {.acc = memory};
    p.max = memory + rows * dv;
    p.sum = p.max + rows;
    return p;
}

/* Room for the partials of as many blocks as still have their spans shared out, with at least one span each: many
 * sequences of few blocks would otherwise leave threads of a large team idle. */
size_t attention_shared_bytes(const attention *a, int threads)
{
    size_t blocks = (size_t)threads * TASKS_PER_THREAD;
    size_t all = (blocks > 2 ? blocks : 2) * partial_floats(BLOCK_QUERIES, a->dv) * sizeof(float);
    return all > SHARED_PARTIALS ? all : SHARED_PARTIALS;
}

/* Local: queries, a page's keys in panels, what else of a page is decoded, then two partials. */
static size_t query_bytes(const attention *a)
{
    return BLOCK_QUERIES * (size_t)paired(a->dk) * (a->kv_f32 ? sizeof(float) : sizeof(uint16_t));
}

static size_t panel_bytes(const attention *a)
{
    return (a->pack && !a->kv_f32) || a->fp8 ? (size_t)page_keys(a->dk, 0) * sizeof(uint16_t) : 0;
}

/* Of an fp8 cache: rows that are packed, or values. */
static size_t decoded_bytes(const attention *a)
{
    return a->fp8 ? KT_PAGE_TOKENS * (size_t)(a->pack ? a->dk : a->dv) * sizeof(uint16_t) : 0;
}

static size_t page_bytes(const attention *a)
{
    return panel_bytes(a) + (decoded_bytes(a) + 63) / 64 * 64;
}

static partial local_partial(const attention *a, const worker *w, int n)
{
    float *memory = (float *)(void *)(local_scratch(w) + query_bytes(a) + page_bytes(a));
    return partial_at(memory + (size_t)n * partial_floats(BLOCK_QUERIES, a->dv), BLOCK_QUERIES, a->dv);
}

size_t attention_local_bytes(const attention *a)
{
    return query_bytes(a) + page_bytes(a) + 2 * partial_floats(BLOCK_QUERIES, a->dv) * sizeof(float);
}

/* ---- one block, one span ------------------------------------------------------------------------ */

/* The queries of a block to local scratch, as the kernel reads them. */
static void gather(const work *k, const cut *c, const block *b)
{
    const attention *a = k->a;
    const worker *w = k->w;
    head_rows q = k->q;
    const float *first = q.data + (c->row + b->token) * q.token_stride +
                         (b->kv_head * a->group + b->head) * q.head_stride;
    int64_t width = paired(a->dk);
    for (int64_t i = 0; i < b->n; i++) {
        const float *x = first + i / b->n_heads * q.token_stride + i % b->n_heads * q.head_stride;
        if (a->kv_f32)
            memcpy((float *)(void *)local_scratch(w) + i * width, x, (size_t)a->dk * sizeof *x);
        else
            w->kernels->to_bf16(x, a->dk, width, (uint16_t *)(void *)local_scratch(w) + i * width);
    }
}

/* What the queries of a run chose; NULL: they attend to all that they see. */
static const selection *chosen_by(const attention *a, const worker *w, const kt_run *run)
{
    const selection *s = a->choice ? &w->program->selections.at[a->choice - 1] : NULL;
    return s && !selection_is_all(s, run) ? s : NULL;
}

/* The first page from `page` on that the token of a row attends to with this kv head; INT64_MAX: none. */
static int64_t next_chosen(const selection *s, int64_t row, int64_t kv_head, int64_t page)
{
    int32_t count;
    const int32_t *places = selection_row(s, row, kv_head, &count);
    int64_t pages = s->block / KT_PAGE_TOKENS;
    for (int32_t i = 0; i < count; i++)
        if ((places[i] + 1) * pages > page)
            return max64(page, places[i] * pages);
    return INT64_MAX;
}

/* The first page from `page` on that some query of the block attends to. */
static int64_t next_page(const selection *s, const cut *c, const block *b, int64_t page)
{
    int64_t next = s ? INT64_MAX : page;
    for (int64_t t = 0; t < b->n_tokens && s; t++)
        next = min64(next, next_chosen(s, c->step_row + b->token + t, b->kv_head, page));
    return next;
}

/* Query i sees the keys [from[i], limit[i]) of the page; returns the largest limit. */
static int32_t set_limits(const attention *a, const selection *s, const cut *c, const block *b, int64_t page,
                          int32_t *from, int32_t *limit)
{
    int64_t most = 0, position = c->run->start + b->token, row = c->step_row + b->token;
    for (int64_t t = 0; t < b->n_tokens; t++) {
        int64_t seen = position + t + 1 - page * KT_PAGE_TOKENS, last = max64(0, min64(KT_PAGE_TOKENS, seen));
        int64_t first = max64(0, first_seen(a, position + t) - page * KT_PAGE_TOKENS);
        last = first < last && (!s || next_chosen(s, row + t, b->kv_head, page) == page) ? last : 0;
        most = max64(most, last);
        for (int64_t h = t * b->n_heads; h < (t + 1) * b->n_heads; h++) {
            from[h] = (int32_t)min64(first, last);
            limit[h] = (int32_t)last;
        }
    }
    return (int32_t)most;
}

/* Where K, or V, of a head's page lies. */
static const uint8_t *page_part(const work *k, const kt_run *run, int64_t page, size_t offset, int64_t head)
{
    const attention *a = k->a;
    return attention_page(a, k->w, run, page) + offset + (size_t)head * cached_bytes(a);
}

void decode_rows(const attention *a, const worker *w, const uint8_t *page, int64_t n, uint16_t *out)
{
    const uint8_t *codes = page + a->k_offset, *scales = page + a->k_scales;
    int64_t heads = row_heads(a), first = a->row_heads[0];
    for (int64_t j = 0; j < n; j++, codes += a->dk, scales += heads, out += a->dk) {
        w->kernels->from_fp8(codes, first, scales[0], NULL, out);
        if (heads > 1)
            w->kernels->from_fp8(codes + first, a->row_heads[1], scales[1], NULL, out + first);
    }
}

/* Let k read what a kv head's codes of a page mean. */
static void decode_page(const attention *a, const worker *w, const uint8_t *page, int64_t head, int32_t keys,
                        page_attention *k)
{
    uint8_t *panels = local_scratch(w) + query_bytes(a);
    uint16_t *rows = (uint16_t *)(void *)(panels + panel_bytes(a));
    if (a->pack) {
        decode_rows(a, w, page, keys, rows);
        k->k = k->v = rows;
        return;
    }
    const uint8_t *scales = page + a->v_scales + head, *codes = k->v, *next = k->next_v;
    w->kernels->panels_fp8(k->k, keys, a->dk, page + a->k_scales + head, a->kv_heads, k->next_k,
                           (uint16_t *)(void *)panels);
    for (int32_t j = 0; j < keys; j++)
        w->kernels->from_fp8(codes + j * a->dv, a->dv, scales[j * a->kv_heads], next ? next + j * a->dv : NULL,
                             rows + j * a->dv);
    k->k = panels;
    k->v = rows;
}

static void attend_one(const attention *a, const worker *w, page_attention *k, int32_t keys)
{
    if (a->kv_f32) {
        w->kernels->attend_f32(k);
        return;
    }
    if (a->pack) {
        uint16_t *panels = (uint16_t *)(void *)(local_scratch(w) + query_bytes(a));
        w->kernels->pack_keys(k->k, a->k_stride, keys, a->dk, panels);
        k->k = panels;
        k->next_k = NULL;
    }
    w->kernels->attend_bf16(k);
}

/* A page of a run and kv head that will be needed soon; page -1: none is known. */
typedef struct place {
    const kt_run *run;
    int64_t page, kv_head;
} place;

/* The gathered queries of a block against one span; `then`: the page this thread reads afterwards. */
static void attend_span(const work *to_do, const cut *c, const block *b, int64_t span, place then, partial to)
{
    const attention *a = to_do->a;
    const worker *w = to_do->w;
    const kt_run *run = c->run;
    int32_t limit[BLOCK_QUERIES], from[BLOCK_QUERIES];
    int64_t position = run->start + b->token, last = (position + b->n_tokens - 1) / KT_PAGE_TOKENS;
    page_attention k = {.n_queries = b->n, .dk = a->dk, .dv = a->dv, .q = local_scratch(w),
                        .q_stride = paired(a->dk), .k_stride = a->k_stride, .v_stride = a->v_stride, .limit = limit,
                        .from = a->window ? from : NULL, .scale = a->scale, .max = to.max, .sum = to.sum,
                        .acc = to.acc, .acc_stride = a->dv};
    for (int64_t i = 0; i < b->n; i++) {
        to.max[i] = -INFINITY;
        to.sum[i] = 0;
    }
    memset(to.acc, 0, (size_t)(b->n * a->dv) * sizeof(float));
    last = min64(last, (span + 1) * SPAN_PAGES - 1);
    const selection *s = chosen_by(a, w, run);
    int64_t page = next_page(s, c, b, max64(span * SPAN_PAGES, first_page(a, position)));
    for (int64_t after; page <= last; page = after) {
        after = next_page(s, c, b, page + 1);
        place next = after <= last ? (place){run, after, b->kv_head} : s ? (place){run, -1, 0} : then;
        int32_t keys = set_limits(a, s, c, b, page, from, limit);
        k.k = page_part(to_do, run, page, a->k_offset, b->kv_head * a->k_head);
        k.v = page_part(to_do, run, page, a->v_offset, b->kv_head * a->v_head);
        k.next_k = next.page < 0 ? NULL : page_part(to_do, next.run, next.page, a->k_offset, next.kv_head * a->k_head);
        k.next_v = next.page < 0 ? NULL : page_part(to_do, next.run, next.page, a->v_offset, next.kv_head * a->v_head);
        if (a->fp8) {
            decode_page(a, w, attention_page(a, w, run, page), b->kv_head, keys, &k);
            k.next_k = k.next_v = NULL;     /* they are other bytes than are read here */
        }
        attend_one(a, w, &k, keys);
    }
}

/* Row i of `to` += row i of `more`, which comes from later keys. */
static void merge_row(partial to, partial more, int64_t i, int64_t dv)
{
    float *x = to.acc + i * dv;
    const float *y = more.acc + i * dv;
    if (more.sum[i] == 0)
        return;
    float max = more.max[i] > to.max[i] ? more.max[i] : to.max[i];
    float keep = expf(to.max[i] - max), add = expf(more.max[i] - max);
    to.max[i] = max;
    to.sum[i] = to.sum[i] * keep + more.sum[i] * add;
    for (int64_t c = 0; c < dv; c++)
        x[c] = x[c] * keep + y[c] * add;
}

/* What the weighted values of a row are multiplied with: 1 / sum. A sink is one more score, of a value 0. */
static float row_scale(const attention *a, partial from, int64_t i, int64_t head)
{
    if (!a->sinks)
        return 1 / from.sum[i];
    float sink = a->sinks[head], max = sink > from.max[i] ? sink : from.max[i], keep = expf(from.max[i] - max);
    return keep / (from.sum[i] * keep + expf(sink - max));
}

static void write_row(const work *k, const cut *c, const block *b, partial from, int64_t i)
{
    const attention *a = k->a;
    int64_t row = c->row + b->token + i / b->n_heads, head = b->kv_head * a->group + b->head + i % b->n_heads;
    float *to = k->out.data + row * k->out.token_stride + head * k->out.head_stride;
    float scale = row_scale(a, from, i, head);
    for (int64_t c = 0; c < a->dv; c++)
        to[c] = from.acc[i * a->dv + c] * scale;
}

/* ---- the two ways ------------------------------------------------------------------------------- */

/* A task is a block with all its spans. */
static void attend_blocks(const work *k)
{
    const attention *a = k->a;
    partial all = local_partial(a, k->w, 0), one = local_partial(a, k->w, 1);
    place_in at = first_place(k);
    for (int64_t i; (i = worker_take(k->w, 1)) < k->blocks;) {
        walk_to_block(k, &at, i);
        const cut *c = &at.c;
        block b = block_at(a, c, i - at.before);
        int64_t first = block_first(a, &b, c->run), end = block_end(&b, c->run);
        gather(k, c, &b);
        for (int64_t span = first; span < end; span++) {
            place then = {c->run, span + 1 < end ? (span + 1) * SPAN_PAGES : -1, b.kv_head};
            attend_span(k, c, &b, span, then, span > first ? one : all);
            for (int64_t row = 0; row < b.n && span > first; row++)
                merge_row(all, one, row, a->dv);
        }
        for (int64_t row = 0; row < b.n; row++)
            write_row(k, c, &b, all, row);
    }
}

/* The partial of a block and the n-th span of a wave; number 0 gathers the merged result. */
static partial shared_partial(const work *k, int64_t n, int64_t block)
{
    float *memory = (float *)(void *)(shared_scratch(k->w) + k->a->shared_offset);
    return partial_at(memory + (size_t)(n * k->blocks + block) * partial_floats(k->rows, k->a->dv), k->rows, k->a->dv);
}

/* Spans [done, done + n) of each run, counted from its first: to partials first, first + 1, ... */
typedef struct wave {
    int64_t done, n, first;
} wave;

static void merge_wave(const work *k, const wave *v)
{
    place_in at = first_place(k);
    for (int64_t i; (i = worker_take(k->w, 1)) < k->blocks * k->rows;) {
        int64_t number = i / k->rows, row = i % k->rows;
        walk_to_block(k, &at, number);
        const cut *c = &at.c;
        block b = block_at(k->a, c, number - at.before);
        int64_t n = v->first + min64(v->n, c->spans - v->done);
        if (row >= b.n || c->spans <= v->done)
            continue;
        partial all = shared_partial(k, 0, number);
        for (int64_t j = 1; j < n; j++)
            merge_row(all, shared_partial(k, j, number), row, k->a->dv);
        if (c->spans <= v->done + v->n)
            write_row(k, c, &b, all, row);
    }
}

/* Task i of a wave: of its run the block j % blocks and the span j / blocks, j = i less the tasks of the runs before.
 * A thread takes a task ahead, so that it knows what to fetch at the end of the one before. */
static void attend_wave(const work *k, const wave *v)
{
    place_in at = first_place(k), ahead;
    int64_t i = worker_take(k->w, 1), next;
    for (int more = walk_to(k, &at, i, v->done, v->n); more; i = next, at = ahead) {
        const cut *c = &at.c;
        int64_t j = i - at.before, span = v->done + j / c->blocks;
        block b = block_at(k->a, c, j % c->blocks);
        next = worker_take(k->w, 1);
        ahead = at;
        more = walk_to(k, &ahead, next, v->done, v->n);
        place then = {.page = -1};
        if (more) {
            int64_t soon = next - ahead.before;
            int64_t page = (ahead.c.first_span + v->done + soon / ahead.c.blocks) * SPAN_PAGES;
            then = (place){ahead.c.run, max64(page, first_page(k->a, ahead.c.run->start)),
                           block_at(k->a, &ahead.c, soon % ahead.c.blocks).kv_head};
        }
        gather(k, c, &b);
        attend_span(k, c, &b, c->first_span + span, then,
                    shared_partial(k, v->first + j / c->blocks, at.blocks_before + j % c->blocks));
    }
}

/* A task is a block and one span. */
static void attend_spans(const work *k, int64_t capacity)
{
    for (int64_t done = 0; done < k->spans;) {
        /* Number 0 holds the first span in the first wave, and what is merged so far from then on. */
        int64_t first = done > 0;
        wave v = {done, min64(k->spans - done, capacity - first), first};
        attend_wave(k, &v);
        worker_barrier(k->w);
        done += v.n;
        merge_wave(k, &v);
        if (done < k->spans)
            worker_barrier(k->w);
    }
}

void attend(const attention *a, const worker *w, run_range runs, head_rows q, head_rows out)
{
    work k = {.a = a, .w = w, .runs = runs, .q = q, .out = out};
    cut_work(&k);
    size_t bytes = (size_t)k.blocks * partial_floats(k.rows, a->dv) * sizeof(float);
    int64_t capacity = (int64_t)(attention_shared_bytes(a, w->threads) / bytes);
    if (k.blocks < (int64_t)w->threads * TASKS_PER_THREAD && k.spans > 1 && capacity > 1)
        attend_spans(&k, capacity);
    else
        attend_blocks(&k);
}
