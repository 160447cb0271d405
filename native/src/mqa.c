/* mqa.c - attention of many heads over one key, which is its own value: that of the last positions, which lie in the
 * sequence's state, and pooled rows of the windows before (pooling.c), which lie in pages.
 *
 * What a token attends to is gathered to pages of its own, where each token is what a kv head is elsewhere, as in
 * mla_chosen.c; tokens that attend to equally many rows go together.
 * Source: DeepSeek-V4 report, section 2.3; transformers 5.23 (deepseek_v4).
 */
#include "attention.h"

#include <string.h>

#define GATHERED_BYTES ((size_t)16 << 20)   /* of a batch; one token at least */
#define MOST_BATCH 64                       /* tokens */

typedef struct mqa {
    kt_view out, q, kv, pooled;             /* pooled.width 0: none */
    kt_mqa s;
    attention a;                            /* over gathered rows */
    int32_t *identity;                      /* 0, 1, ...: their pages */
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

static uint8_t *pooled_row(const mqa *o, const worker *w, int64_t number)
{
    int64_t last = (number + 1) * o->s.every - 1, row = last % KT_PAGE_TOKENS / o->s.every;
    return cache_page(w, last / KT_PAGE_TOKENS) + o->s.layer_offset + (size_t)row * row_bytes(o);
}

/* x as the cache has it. */
static void put_row(const mqa *o, const worker *w, const float *x, uint8_t *to)
{
    if (o->a.kv_f32)
        memcpy(to, x, row_bytes(o));
    else
        w->kernels->to_bf16(x, o->s.dim, o->s.dim, (uint16_t *)(void *)to);
}

/* The key of a position of the step or of the window before it. */
static const float *window_row(const mqa *o, const worker *w, int64_t position)
{
    if (position >= w->step->start)
        return view_row(w, o->kv, position - w->step->start);
    return w->step->state + o->s.state_offset / sizeof(float) + position % o->s.window * o->s.dim;
}

/* ---- what is kept ------------------------------------------------------------------------------- */

static void append_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t end = w->step->start + t + 1;
        if (end % o->s.every == 0)
            put_row(o, w, view_row(w, o->pooled, t), pooled_row(o, w, end / o->s.every - 1));
    }
}

/* The next state: of each place of the ring the last position that has it. */
static void keep_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    int64_t window = o->s.window, last = w->step->start + w->step->n_tokens - 1;
    float *next = w->step->next_state + o->s.state_offset / sizeof(float);
    for (int64_t place = w->thread; place < window; place += w->threads) {
        int64_t position = last - (last + window - place) % window;
        if (position < 0)
            memset(next + place * o->s.dim, 0, (size_t)o->s.dim * sizeof *next);
        else
            memcpy(next + place * o->s.dim, window_row(o, w, position), (size_t)o->s.dim * sizeof *next);
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
    int64_t end = w->step->start + token + 1;
    keys k = {.window = min64(end, o->s.window)};
    k.first = end - k.window;
    k.pooled = o->s.every ? end / o->s.every : 0;
    if (s && !selection_is_all(s, w->step)) {
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

static int64_t pages_of(int64_t count)
{
    return (count + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
}

static size_t token_bytes(const mqa *o, int64_t count)
{
    return size_mul((size_t)(pages_of(count) * KT_PAGE_TOKENS), row_bytes(o));
}

/* Rows of tokens [first, first + n), `count` of each, to pages [n][64][dim]. */
static void gather(const mqa *o, const worker *w, int64_t first, int64_t n, int64_t count)
{
    uint8_t *pages = shared_scratch(w) + o->gathered_offset;
    for (int64_t i; (i = worker_take(w, 1)) < n * pages_of(count);) {
        int64_t at = i / n * KT_PAGE_TOKENS, last = min64(count, at + KT_PAGE_TOKENS);
        uint8_t *to = pages + (size_t)(i * KT_PAGE_TOKENS) * row_bytes(o);
        keys k = keys_of(o, w, first + i % n);
        for (; at < last; at++, to += row_bytes(o)) {
            int64_t number = at - k.window;
            if (number < 0)
                put_row(o, w, window_row(o, w, k.first + at), to);
            else
                memcpy(to, pooled_row(o, w, k.places ? k.places[number] : number), row_bytes(o));
        }
    }
}

static head_rows rows_at(const mqa *o, const worker *w, kt_view v, int64_t token)
{
    return (head_rows){view_row(w, v, token), view_stride(w, v), o->s.dim};
}

static void attend_gathered(const mqa *o, const worker *w, int64_t first, int64_t n, int64_t count)
{
    attention a = o->a;
    a.kv_heads = (int32_t)n;
    kt_step step = *w->step;
    step.start = count - 1;             /* one position that sees them all */
    step.n_tokens = 1;
    step.pages = o->identity;
    step.cache = shared_scratch(w) + o->gathered_offset;
    step.page_bytes = (size_t)(n * KT_PAGE_TOKENS) * row_bytes(o);
    worker over = *w;
    over.step = &step;
    attend(&a, &over, rows_at(o, w, o->q, first), rows_at(o, w, o->out, first));
}

/* Tokens can be taken for kv heads where their rows lie without gaps. */
static int64_t most_together(const mqa *o, const worker *w, int64_t count)
{
    int64_t width = (int64_t)o->s.heads * o->s.dim;
    if (view_stride(w, o->q) != width || view_stride(w, o->out) != width)
        return 1;
    return max64(1, min64(MOST_BATCH, (int64_t)(o->gathered_bytes / token_bytes(o, count))));
}

static void attend_run(const void *arg, worker *w)
{
    const mqa *o = arg;
    int64_t tokens = w->step->n_tokens;
    for (int64_t t = 0, n; t < tokens; t += n) {
        int64_t count = keys_count(o, w, t), most = most_together(o, w, count);
        for (n = 1; n < most && t + n < tokens && keys_count(o, w, t + n) == count;)
            n++;
        gather(o, w, t, n, count);
        worker_barrier(w);
        attend_gathered(o, w, t, n, count);
        if (t + n < tokens)
            worker_barrier(w);
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

/* Each of a batch's tokens has the sinks of all heads. */
static const float *repeat_sinks(kt_program *p, const kt_mqa *s)
{
    size_t size = (size_t)s->heads * sizeof(float);
    float *all = program_new(p, MOST_BATCH * size);
    for (int64_t i = 0; all && i < MOST_BATCH; i++)
        memcpy(all + i * s->heads, s->sinks, size);
    return all;
}

/* Scratch of the most that a token attends to, and the numbers of its pages. */
static int reserve(kt_program *p, mqa *o)
{
    const selection *c = o->s.choice ? &p->selections.at[o->s.choice - 1] : NULL;
    int64_t pooled = c ? c->top_k : most_pooled(&o->s), most = o->s.window + pooled;
    size_t token = token_bytes(o, most);
    o->gathered_bytes = token > GATHERED_BYTES ? token : GATHERED_BYTES;
    o->gathered_bytes = p->options.max_tokens == 1 ? token : o->gathered_bytes;
    o->gathered_offset = size_add(attention_shared_bytes(&o->a), 63) / 64 * 64;
    o->identity = program_new(p, (size_t)pages_of(most) * sizeof *o->identity);
    if (!o->identity)
        return KT_ERR_MEMORY;
    for (int64_t i = 0; i < pages_of(most); i++)
        o->identity[i] = (int32_t)i;
    program_reserve(p, size_add(o->gathered_offset, o->gathered_bytes), attention_local_bytes(&o->a));
    if (o->s.every)
        p->positions = min64(p->positions, (most_pooled(&o->s) + 1) * o->s.every - 1);
    return KT_OK;
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
    const float *sinks = o && s->sinks ? repeat_sinks(p, s) : NULL;
    if (!o || (s->sinks && !sinks))
        return failed ? failed : KT_ERR_MEMORY;
    int64_t page = (int64_t)KT_PAGE_TOKENS * s->dim;
    *o = (mqa){.out = out, .q = q, .kv = kv, .pooled = pooled, .s = *s,
               .a = {.kv_heads = 1, .group = s->heads, .dk = s->dim, .dv = s->dim, .kv_f32 = p->options.kv_f32,
                     .pack = 1, .scale = s->scale, .sinks = sinks, .k_stride = s->dim, .v_stride = s->dim,
                     .k_head = page, .v_head = page}};
    failed = reserve(p, o);
    if (!failed)
        record(p, o);
    return failed;
}
