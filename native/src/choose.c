/* choose.c - which cached positions each token attends to (a "lightning indexer"): the step's
 * index keys are appended to their pages, small heads score every position, and the best are
 * kept.
 *
 * A place is a position, or a block of positions that is worth its best one. Which places are best does not
 * depend on how the work was shared out (top.c): with many tokens each thread takes some and looks at all keys,
 * with few the keys are shared out too, and what the threads found is put together after a barrier.
 * Sources: DeepSeek-V3.2 report, section 2.1; transformers 5.23 (deepseek_v32, minimax_m3_vl).
 */
#include "choose.h"

#include <math.h>
#include <string.h>

#define TOGETHER 4              /* tokens that go through a page of keys together, at most */
#define MOST_CHOSEN 65536
#define SCORED_KEYS 1024        /* at least so many new keys between two trims */

typedef struct choose {
    kt_view q, key, weight;     /* weight.width 0: none */
    kt_choose s;
    int32_t number, lists, kv_f32;
    int64_t span_pages;         /* keys of one task: whole blocks */
    /* Local scratch: keys of each list, queries and weights of each token, scores, and places to sort. */
    size_t query_offset, weight_offset, score_offset, sort_offset, local_bytes;
} choose;

static const selection *selection_of(const choose *o, const worker *w)
{
    return &w->program->selections.at[o->number];
}

static int64_t block_pages(const choose *o)
{
    return max64(1, o->s.block / KT_PAGE_TOKENS);
}

/* Keys of a page. */
static int64_t page_places(const kt_choose *s)
{
    return KT_PAGE_TOKENS / s->every;
}

static int64_t capacity(const choose *o)
{
    return 2 * (int64_t)o->s.top_k + SCORED_KEYS;
}

static size_t query_stride(const choose *o)     /* bytes of one head */
{
    return (size_t)paired(o->s.dim) * (o->kv_f32 ? sizeof(float) : sizeof(uint16_t));
}

/* ---- append ------------------------------------------------------------------------------------- */

static void append_run(const void *arg, worker *w)
{
    const choose *o = arg;
    int64_t t, last, dim = o->s.dim;
    uint16_t *row = (uint16_t *)(void *)local_scratch(w);
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t position = position_of(w, t), key = position % KT_PAGE_TOKENS / o->s.every;
        if ((position + 1) % o->s.every)
            continue;
        uint8_t *to = cache_page(w, run_of(w, t), position / KT_PAGE_TOKENS) + o->s.layer_offset;
        const float *x = view_row(w, o->key, t);
        if (o->kv_f32) {
            memcpy((float *)(void *)to + key * dim, x, (size_t)dim * sizeof *x);
            continue;
        }
        uint16_t *lane = (uint16_t *)(void *)to + key / 16 * 16 * dim + key % 16 * 2;   /* as gqa.c has them */
        w->kernels->to_bf16(x, dim, dim, row);
        for (int64_t c = 0; c < dim; c += 2)
            memcpy(lane + 16 * c, row + c, 2 * sizeof *row);
    }
}

/* ---- scores ------------------------------------------------------------------------------------- */

/* Rows [first, first + n) of a run in local scratch: queries as the kernel reads them, weights, empty lists. */
typedef struct group {
    const kt_run *run;
    int64_t first, n;
    top tops[];                 /* [n][lists] */
} group;

static group *gather(const choose *o, const worker *w, int64_t first, int64_t n)
{
    group *g = (group *)(void *)local_scratch(w);
    uint64_t *keys = (uint64_t *)(void *)(g->tops + TOGETHER * o->lists);
    *g = (group){.run = run_of(w, first), .first = first, .n = n};
    for (int64_t i = 0; i < n * o->lists; i++)
        g->tops[i] = (top){.keys = keys + i * capacity(o), .most = o->s.top_k, .capacity = capacity(o)};
    for (int64_t t = 0; t < n; t++) {
        const float *x = view_row(w, o->q, first + t);
        float *weight = (float *)(void *)(local_scratch(w) + o->weight_offset) + t * o->s.heads;
        uint8_t *to = local_scratch(w) + o->query_offset + (size_t)(t * o->s.heads) * query_stride(o);
        for (int64_t h = 0; h < o->s.heads; h++, x += o->s.dim, to += query_stride(o)) {
            if (o->kv_f32)
                memcpy(to, x, (size_t)o->s.dim * sizeof *x);
            else
                w->kernels->to_bf16(x, o->s.dim, o->s.dim, (uint16_t *)(void *)to);
            weight[h] = o->weight.width ? view_row(w, o->weight, first + t)[h] * o->s.scale : 0;
        }
    }
    return g;
}

/* Scores of token t of the group for the keys of a page, to local scratch: [64], or [heads][64] without weights. */
static const float *score_page(const choose *o, const worker *w, const group *g, int64_t t, int64_t page, int64_t keys)
{
    float *out = (float *)(void *)(local_scratch(w) + o->score_offset);
    const float *weights = (const float *)(const void *)(local_scratch(w) + o->weight_offset);
    page_index k = {.n_heads = o->s.heads, .dim = o->s.dim, .n_keys = keys, .k_stride = o->s.dim,
                    .q = local_scratch(w) + o->query_offset + (size_t)(t * o->s.heads) * query_stride(o),
                    .q_stride = paired(o->s.dim), .k = cache_page(w, g->run, page) + o->s.layer_offset,
                    .weight = o->weight.width ? weights + t * o->s.heads : NULL, .out = out};
    (o->kv_f32 ? w->kernels->index_f32 : w->kernels->index_bf16)(&k);
    return out;
}

/* Keys of the page that the token at `position` sees. */
static int64_t keys_seen(const choose *o, int64_t position, int64_t page)
{
    int64_t most = page_places(&o->s);
    return max64(0, min64(most, (position + 1) / o->s.every - page * most));
}

static void take_positions(top *t, const float *score, int64_t first, int64_t keys)
{
    for (int64_t j = 0; j < keys; j++)
        top_push(t, top_key(score[j], first + j));
}

/* What one block is worth in every list; the token's own block and the ones right before it always are the best. */
static void take_block(const choose *o, const worker *w, group *g, int64_t t, int64_t block)
{
    int64_t position = position_of(w, g->first + t), first = block * block_pages(o);
    int64_t last = min64(first + block_pages(o), position / KT_PAGE_TOKENS + 1);
    int is_local = position / o->s.block - block < o->s.local;
    float *best = (float *)(void *)(local_scratch(w) + o->sort_offset);
    for (int64_t list = 0; list < o->lists; list++)
        best[list] = is_local ? INFINITY : -INFINITY;
    for (int64_t page = first; page < last && !is_local; page++) {
        int64_t keys = keys_seen(o, position, page);
        const float *score = score_page(o, w, g, t, page, keys);
        for (int64_t i = 0; i < o->lists; i++, score += KT_PAGE_TOKENS)
            for (int64_t j = 0; j < keys; j++)
                best[i] = score[j] > best[i] ? score[j] : best[i];
    }
    for (int64_t i = 0; i < o->lists; i++)
        top_push(&g->tops[t * o->lists + i], top_key(best[i], block));
}

/* The group against pages [page, last). */
static void score_pages(const choose *o, const worker *w, group *g, int64_t page, int64_t last)
{
    for (; page < last; page += block_pages(o))
        for (int64_t t = 0; t < g->n; t++) {
            int64_t keys = keys_seen(o, position_of(w, g->first + t), page);
            if (keys && o->s.block > 1)
                take_block(o, w, g, t, page / block_pages(o));
            else if (keys)
                take_positions(&g->tops[t], score_page(o, w, g, t, page, keys), page * page_places(&o->s), keys);
        }
}

/* List i of the group to its row of the choice. */
static void write_row(const choose *o, const worker *w, const group *g, int64_t i, top *t)
{
    const selection *c = selection_of(o, w);
    int64_t row = g->first * o->lists + i;
    top_trim(t);
    top_places(t, c->at + row * c->top_k, (int32_t *)(void *)(local_scratch(w) + o->sort_offset));
    c->count[row] = (int32_t)t->n;
}

/* ---- the two ways ------------------------------------------------------------------------------- */

static int64_t pages_seen(const worker *w, int64_t last_row)
{
    return position_of(w, last_row) / KT_PAGE_TOKENS + 1;
}

/* Rows of a run that must choose; 0: it attends to all. */
static int64_t choosing(const choose *o, const worker *w, int64_t run)
{
    const kt_run *r = &w->batch->runs[run];
    return selection_is_all(selection_of(o, w), r) ? 0 : r->n_tokens;
}

/* A task is some tokens of a run with all their keys. */
static void by_tokens(const choose *o, const worker *w, int64_t rows)
{
    int64_t each = max64(1, min64(TOGETHER, rows / (2 * w->threads))), run = 0, before = 0;
    for (int64_t i; (i = worker_take(w, 1)) >= 0;) {
        int64_t tasks = 0;
        for (; run < w->batch->n_runs; run++, before += tasks) {
            tasks = (choosing(o, w, run) + each - 1) / each;
            if (i - before < tasks)
                break;
        }
        if (run == w->batch->n_runs)
            return;
        int64_t token = (tasks - 1 - (i - before)) * each;      /* the last see the most keys */
        int64_t first = w->batch->first[run] + token;
        group *g = gather(o, w, first, min64(each, w->batch->runs[run].n_tokens - token));
        score_pages(o, w, g, 0, pages_seen(w, first + g->n - 1));
        for (int64_t list = 0; list < g->n * o->lists; list++)
            write_row(o, w, g, list, &g->tops[list]);
    }
}

/* What a thread found, in shared scratch: for each list of the group its number of keys, then the keys. */
static uint64_t *found(const choose *o, const worker *w, int64_t thread, int64_t list)
{
    uint64_t *all = (uint64_t *)(void *)shared_scratch(w);
    return all + (thread * TOGETHER * o->lists + list) * (o->s.top_k + 1);
}

static void share_found(const choose *o, const worker *w, group *g)
{
    for (int64_t i = 0; i < g->n * o->lists; i++) {
        top_trim(&g->tops[i]);
        uint64_t *to = found(o, w, w->thread, i);
        *to = (uint64_t)g->tops[i].n;
        memcpy(to + 1, g->tops[i].keys, (size_t)g->tops[i].n * sizeof *to);
    }
}

static void join_found(const choose *o, const worker *w, group *g)
{
    for (int64_t i; (i = worker_take(w, 1)) < g->n * o->lists;) {
        top all = g->tops[i];
        all.n = 0;
        all.above = 0;
        for (int64_t thread = 0; thread < w->threads; thread++) {
            const uint64_t *keys = found(o, w, thread, i);
            for (uint64_t k = 1; k <= keys[0]; k++)
                top_push(&all, keys[k]);
        }
        write_row(o, w, g, i, &all);
    }
}

/* Some tokens of a run after the other; a task is a span of their keys. */
static void by_keys(const choose *o, const worker *w)
{
    int again = 0;
    for (int64_t run = 0; run < w->batch->n_runs; run++) {
        int64_t last = w->batch->first[run] + choosing(o, w, run);
        for (int64_t first = w->batch->first[run]; first < last; first += TOGETHER) {
            if (again++)
                worker_barrier(w);
            group *g = gather(o, w, first, min64(TOGETHER, last - first));
            int64_t pages = pages_seen(w, first + g->n - 1);
            for (int64_t i; (i = worker_take(w, 1)) * o->span_pages < pages;)
                score_pages(o, w, g, i * o->span_pages, min64(pages, (i + 1) * o->span_pages));
            share_found(o, w, g);
            worker_barrier(w);
            join_found(o, w, g);
        }
    }
}

static void choose_run(const void *arg, worker *w)
{
    const choose *o = arg;
    int64_t rows = 0;
    for (int64_t run = 0; run < w->batch->n_runs; run++)
        rows += choosing(o, w, run);
    rows < w->threads ? by_keys(o, w) : by_tokens(o, w, rows);
}

/* ---- recording ---------------------------------------------------------------------------------- */

static int check(kt_program *p, kt_view q, kt_view key, kt_view weight, const kt_choose *s)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "choose q", q, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "choose key", key, KT_ROWS_TOKENS);
    if (!failed && weight.width)
        failed = program_check_view(p, "choose weight", weight, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    if (p->options.cache == KT_CACHE_FP8)
        return program_fail(p, KT_ERR_RANGE, "choose: index keys in an fp8 cache");
    if (s->heads < 1 || s->dim < 2 || s->dim % 2 || s->heads * (int64_t)s->dim != q.width || s->dim != key.width ||
        (weight.width && weight.width != s->heads))
        return program_fail(p, KT_ERR_SHAPE, "choose: %d heads of %d columns (an even number), but q has %d columns, "
                            "key %d, weight %d", s->heads, s->dim, q.width, key.width, weight.width);
    int is_blocks = s->block % KT_PAGE_TOKENS == 0 && s->block >= KT_PAGE_TOKENS && s->block <= MOST_CHOSEN;
    if (weight.width ? s->block != 1 || s->local : !is_blocks || s->local < 0)
        return program_fail(p, KT_ERR_RANGE, "choose: blocks of %d positions, %d of them local; weighted heads choose "
                            "single positions, others blocks of a multiple of %d", s->block, s->local, KT_PAGE_TOKENS);
    if (s->every < 1 || KT_PAGE_TOKENS % s->every || (s->every > 1 && s->block != 1))
        return program_fail(p, KT_ERR_RANGE, "choose: windows of %d positions; a divisor of %d is possible, for weighted "
                            "heads", s->every, KT_PAGE_TOKENS);
    if (s->top_k < 1 || s->top_k > MOST_CHOSEN)
        return program_fail(p, KT_ERR_RANGE, "choose: %d places; 1..%d are possible", s->top_k, MOST_CHOSEN);
    if (s->layer_offset % 64 != 0 || s->layer_offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "choose: layer_offset %zu is not a multiple of 64", s->layer_offset);
    return KT_OK;
}

/* The number of the choice of this shape: one for the whole program, since each is read before the next is made. */
static int32_t find_selection(kt_program *p, const kt_choose *s, int32_t lists)
{
    int32_t i = 0;
    for (; i < p->selections.n; i++) {
        const selection *c = &p->selections.at[i];
        if (c->top_k == s->top_k && c->block == s->block && c->every == s->every && c->lists == lists)
            return i;
    }
    if (!ROOM(p, p->selections))
        return KT_ERR_MEMORY;
    p->selections.at[i] = (selection){.top_k = s->top_k, .block = s->block, .every = s->every,
                                .lists = lists, .resource = program_resource(p)};
    return p->selections.n++;
}

static size_t align64(size_t size)
{
    return size_add(size, 63) / 64 * 64;
}

static void reserve(kt_program *p, choose *o)
{
    size_t lists = (size_t)TOGETHER * (size_t)o->lists, heads = (size_t)o->s.heads;
    size_t places = (size_t)max64(o->s.top_k, o->lists);
    o->query_offset = align64(sizeof(group) + lists * (sizeof(top) + (size_t)capacity(o) * sizeof(uint64_t)));
    o->weight_offset = align64(size_add(o->query_offset, TOGETHER * heads * query_stride(o)));
    o->score_offset = align64(size_add(o->weight_offset, TOGETHER * heads * sizeof(float)));
    o->sort_offset = align64(size_add(o->score_offset, heads * KT_PAGE_TOKENS * sizeof(float)));
    size_t shared = size_mul(lists * ((size_t)o->s.top_k + 1) * sizeof(uint64_t), (size_t)kt_pool_threads(p->pool));
    program_reserve(p, shared, size_add(o->sort_offset, places * sizeof(int32_t)));
}

int32_t kt_program_choose(kt_program *p, kt_view q, kt_view key, kt_view weight, const kt_choose *given)
{
    kt_choose with = *given, *shape = &with;
    with.every = given->every ? given->every : 1;
    int failed = check(p, q, key, weight, shape);
    choose *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    int32_t kv_f32 = p->options.cache == KT_CACHE_F32, lists = weight.width ? 1 : shape->heads;
    int64_t pages = max64(1, shape->block / KT_PAGE_TOKENS);
    size_t keys = (size_t)(page_places(shape) + 15) / 16 * 16;
    size_t bytes = (size_t)shape->dim * keys * (kv_f32 ? sizeof(float) : sizeof(uint16_t));
    *o = (choose){.q = q, .key = key, .weight = weight, .s = *shape, .lists = lists, .kv_f32 = kv_f32,
                  .span_pages = (SPAN_PAGES + pages - 1) / pages * pages, .number = find_selection(p, shape, lists)};
    if (o->number < 0)
        return o->number;
    p->page_bytes = p->page_bytes > shape->layer_offset + bytes ? p->page_bytes : shape->layer_offset + bytes;
    reserve(p, o);
    program_operation(p);
    program_phase(p, append_run, o);
    program_touch_view(p, key, OWN_ROWS);
    program_touch_cache(p, shape->layer_offset, bytes, ANY_ROWS | WRITES);
    program_phase(p, choose_run, o);
    program_touch_view(p, q, ANY_ROWS);
    if (weight.width)
        program_touch_view(p, weight, ANY_ROWS);
    program_touch_cache(p, shape->layer_offset, bytes, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    program_touch(p, p->selections.at[o->number].resource, 0, 1, ANY_ROWS | WRITES);
    return o->number + 1;
}

const int32_t *kt_program_choice(kt_program *p, int32_t number, const int32_t **count)
{
    if (!p->finished || number < 1 || number > p->selections.n)
        return NULL;
    if (count)
        *count = p->selections.at[number - 1].count;
    return p->selections.at[number - 1].at;
}
