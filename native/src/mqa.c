/* mqa.c - attention of many heads over one key, which is also its value: that of the last
 * positions, stored in the sequence's state, and pooled rows of the windows before (pooling.c),
 * stored in pages.
 *
 * What a token attends to is gathered to pages of its own (gathered.c).
 * Source: DeepSeek-V4 report, section 2.3; transformers 5.23 (deepseek_v4).
 */
#include "gathered.h"

#include <string.h>

typedef struct mqa {
    kt_view out, q, kv, pooled;             /* pooled.width 0: none */
    kt_mqa s;
    attention a;                            /* over gathered rows */
    const int32_t *identity;                /* numbers of their pages */
    size_t gathered_offset, gathered_bytes; /* into the shared scratch */
} mqa;

static size_t row_bytes(const mqa *o)
{
    return (size_t)o->s.dim * (o->a.kv_f32 ? sizeof(float) : sizeof(uint16_t));
}

/* Pooled rows of a page; where a window is longer than a page the one that ends in it, if any. */
static int64_t page_rows(const kt_mqa *s)
{
    return max64(1, KT_PAGE_TOKENS / s->every);
}

static uint8_t *pooled_row(const mqa *o, const worker *w, const kt_run *run, int64_t number)
{
    int64_t last = (number + 1) * o->s.every - 1, row = last % KT_PAGE_TOKENS / o->s.every;
    return cache_page(w, run, last / KT_PAGE_TOKENS) + o->s.layer_offset + (size_t)row * row_bytes(o);
}

/* x as the cache has it. */
static void put_row(const mqa *o, const worker *w, const float *x, uint8_t *to)
{
    if (o->a.kv_f32)
        memcpy(to, x, row_bytes(o));
    else
        w->kernels->to_bf16(x, o->s.dim, o->s.dim, (uint16_t *)(void *)to);
}

/* The key of a position of a run, whose first row is `first`, or of the window before it. */
static const float *window_row(const mqa *o, const worker *w, const kt_run *run, int64_t first, int64_t position)
{
    if (position >= run->start)
        return view_row(w, o->kv, first + position - run->start);
    return state_before(w, run, o->s.state_offset) + position % o->s.window * o->s.dim;
}

/* ---- what is kept ------------------------------------------------------------------------------- */

static void append_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t end = position_of(w, t) + 1;
        if (end % o->s.every == 0)
            put_row(o, w, view_row(w, o->pooled, t), pooled_row(o, w, run_of(w, t), end / o->s.every - 1));
    }
}

/* The next state of each run: of each place of the ring the last position that has it. */
static void keep_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    int64_t window = o->s.window;
    for (int64_t i = w->thread; i < w->batch->n_runs * window; i += w->threads) {
        int64_t number = i / window, place = i % window;
        const kt_run *run = &w->batch->runs[number];
        int64_t last = run_end(run) - 1, position = last - (last + window - place) % window;
        float *to = state_after(w, run, o->s.state_offset) + place * o->s.dim;
        if (position < 0)
            memset(to, 0, (size_t)o->s.dim * sizeof *to);
        else
            memcpy(to, window_row(o, w, run, w->batch->first[number], position), (size_t)o->s.dim * sizeof *to);
    }
}

/* ---- attention ---------------------------------------------------------------------------------- */

/* What a token attends to: `window` positions from `first` on, then so many pooled rows, all of the first ones
 * where `places` is NULL. */
typedef struct keys {
    int64_t first, window, pooled;
    const int32_t *places;
} keys;

static keys keys_of(const mqa *o, const worker *w, int64_t token)
{
    const selection *s = o->s.choice ? &w->program->selections.at[o->s.choice - 1] : NULL;
    int64_t end = position_of(w, token) + 1;
    keys k = {.window = min64(end, o->s.window)};
    k.first = end - k.window;
    k.pooled = o->s.every ? end / o->s.every : 0;
    if (s && !selection_is_all(s, run_of(w, token))) {
        int32_t count;
        k.places = selection_row(s, token, 0, &count);
        k.pooled = count;
    }
    return k;
}

static int64_t keys_count(const mqa *o, const worker *w, int64_t token)
{
    keys k = keys_of(o, w, token);
    return k.window + k.pooled;
}

static size_t page_bytes(const mqa *o)
{
    return KT_PAGE_TOKENS * row_bytes(o);
}

/* The keys of all rows of g to their pages; shared out among the threads. */
static void gather(const mqa *o, const worker *w, const gathered *g)
{
    for (int64_t i, n; (i = worker_take(w, 1)) < g->n * g->pages;) {
        int64_t row = g->first + i % g->n, at = i / g->n * KT_PAGE_TOKENS;
        const kt_run *run = run_of(w, row);
        int64_t first = row - (position_of(w, row) - run->start);
        uint8_t *to = gathered_page(g, i % g->n, i / g->n, &n);
        keys k = keys_of(o, w, row);
        for (int64_t last = at + n; at < last; at++, to += row_bytes(o)) {
            int64_t number = at - k.window;
            if (number < 0)
                put_row(o, w, window_row(o, w, run, first, k.first + at), to);
            else
                memcpy(to, pooled_row(o, w, run, k.places ? k.places[number] : number), row_bytes(o));
        }
    }
}

static head_rows rows_at(const mqa *o, const worker *w, kt_view v, int64_t token)
{
    return (head_rows){view_row(w, v, token), view_stride(w, v), o->s.dim};
}

static void attend_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    gathered g = {.memory = shared_scratch(w) + o->gathered_offset, .identity = o->identity,
                  .page_bytes = page_bytes(o)};
    for (; g.first < w->batch->rows; g.first += g.n) {
        if (g.first)
            worker_barrier(w);
        g.n = g.pages = 0;
        for (int64_t t = g.first; t < w->batch->rows && gathered_add(&g, o->gathered_bytes, keys_count(o, w, t));)
            t++;
        gather(o, w, &g);
        worker_barrier(w);
        attend_gathered(&o->a, w, &g, rows_at(o, w, o->q, g.first), rows_at(o, w, o->out, g.first));
    }
}

/* ---- recording ---------------------------------------------------------------------------------- */

/* Pooled rows that a token can see. */
static int64_t most_pooled(const kt_mqa *s)
{
    return s->every ? s->context / s->every : 0;
}

static int check_pooled(kt_program *p, kt_view pooled, const kt_mqa *s)
{
    int failed = program_check_view(p, "mqa pooled", pooled, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    int fits = s->every <= KT_PAGE_TOKENS ? KT_PAGE_TOKENS % s->every == 0 : s->every % KT_PAGE_TOKENS == 0;
    if (pooled.width != s->dim || !fits)
        return program_fail(p, KT_ERR_SHAPE, "mqa: windows of %d positions in %d of %d columns; a divisor or a multiple "
                            "of %d is possible", s->every, pooled.width, s->dim, KT_PAGE_TOKENS);
    if (p->options.cache == KT_CACHE_FP8)
        return program_fail(p, KT_ERR_RANGE, "mqa: pooled rows in an fp8 cache");
    int64_t most = most_pooled(s);
    if (most < 1 || most > MAX_ROWS)
        return program_fail(p, KT_ERR_SHAPE, "mqa: up to %lld pooled rows; 1..%lld are possible", (long long)most,
                            (long long)MAX_ROWS);
    if (s->layer_offset % 64 != 0 || s->layer_offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "mqa: layer_offset %zu is not a multiple of 64", s->layer_offset);
    const selection *c = s->choice > 0 && s->choice <= p->selections.n ? &p->selections.at[s->choice - 1] : NULL;
    if (s->choice && (!c || c->every != s->every || c->block != 1 || c->lists != 1))
        return program_fail(p, KT_ERR_RANGE, "mqa: choice %d of %d, or not of windows of %d", s->choice,
                            p->selections.n, s->every);
    return KT_OK;
}

static int check(kt_program *p, kt_view out, kt_view q, kt_view kv, kt_view pooled, const kt_mqa *s)
{
    int failed = program_open(p);
    const kt_view views[3] = {out, q, kv};
    for (int i = 0; i < 3 && !failed; i++)
        failed = program_check_view(p, "mqa", views[i], KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_overlap(p, "mqa", out, q, 0);
    if (failed)
        return failed;
    int64_t width = (int64_t)s->heads * s->dim;
    if (s->heads < 1 || s->dim < 2 || s->dim % 2 != 0 || q.width != width || out.width != width || kv.width != s->dim)
        return program_fail(p, KT_ERR_SHAPE, "mqa: %d heads of %d columns (an even number), but q has %d, kv %d, out %d",
                            s->heads, s->dim, q.width, kv.width, out.width);
    if (s->window < 1 || s->window > MAX_ROWS)
        return program_fail(p, KT_ERR_RANGE, "mqa: a window of %d; 1..%lld are possible", s->window,
                            (long long)MAX_ROWS);
    if (s->every < 0 || (!s->every && (s->choice || pooled.width)))
        return program_fail(p, KT_ERR_RANGE, "mqa: windows of %d positions", s->every);
    failed = s->every ? check_pooled(p, pooled, s) : KT_OK;
    return failed ? failed : check_scale(p, "mqa", s->scale);
}

static const float *copy_sinks(kt_program *p, const kt_mqa *s)
{
    size_t size = (size_t)s->heads * sizeof(float);
    float *copy = program_new(p, size);
    return copy ? memcpy(copy, s->sinks, size) : NULL;
}

/* Scratch of the most that a token attends to. */
static int reserve(kt_program *p, mqa *o)
{
    const selection *c = o->s.choice ? &p->selections.at[o->s.choice - 1] : NULL;
    int64_t most = o->s.window + (c ? c->top_k : most_pooled(&o->s));
    int failed = gathered_reserve(p, most, page_bytes(o), &o->gathered_bytes, &o->identity);
    o->gathered_offset = size_add(attention_shared_bytes(&o->a, kt_pool_threads(p->pool)), 63) / 64 * 64;
    program_reserve(p, size_add(o->gathered_offset, o->gathered_bytes), attention_local_bytes(&o->a));
    if (o->s.every)
        p->positions = min64(p->positions, (most_pooled(&o->s) + 1) * o->s.every - 1);
    return failed;
}

static void record(kt_program *p, mqa *o)
{
    size_t bytes = o->s.every ? (size_t)page_rows(&o->s) * row_bytes(o) : 0, end = o->s.layer_offset + bytes;
    program_operation(p);
    if (bytes) {
        p->page_bytes = p->page_bytes > end ? p->page_bytes : end;
        program_phase(p, append_run, o);
        program_touch_view(p, o->pooled, OWN_ROWS);
        program_touch_cache(p, o->s.layer_offset, bytes, ANY_ROWS | WRITES);
    }
    program_phase(p, keep_run, o);
    program_touch_view(p, o->kv, ANY_ROWS);
    program_phase(p, attend_run, o);
    program_touch_view(p, o->q, ANY_ROWS);
    program_touch_view(p, o->kv, ANY_ROWS);
    if (bytes)
        program_touch_cache(p, o->s.layer_offset, bytes, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    if (o->s.choice)
        program_touch(p, p->selections.at[o->s.choice - 1].resource, 0, 1, ANY_ROWS);
    program_touch_view(p, o->out, ANY_ROWS | WRITES);
}

int kt_program_mqa(kt_program *p, kt_view out, kt_view q, kt_view kv, kt_view pooled, const kt_mqa *s)
{
    int failed = check(p, out, q, kv, pooled, s);
    if (!failed)
        failed = program_reserve_state(p, "mqa", s->state_offset,
                                       size_mul((size_t)s->window * (size_t)s->dim, sizeof(float)));
    mqa *o = failed ? NULL : program_new(p, sizeof *o);
    const float *sinks = o && s->sinks ? copy_sinks(p, s) : NULL;
    if (!o || (s->sinks && !sinks))
        return failed ? failed : KT_ERR_MEMORY;
    *o = (mqa){.out = out, .q = q, .kv = kv, .pooled = pooled, .s = *s,
               .a = {.kv_heads = 1, .group = s->heads, .dk = s->dim, .dv = s->dim, .kv_f32 = p->options.cache == KT_CACHE_F32,
                     .pack = 1, .scale = s->scale, .sinks = sinks, .k_stride = s->dim, .v_stride = s->dim}};
    failed = reserve(p, o);
    if (!failed)
        record(p, o);
    return failed;
}
