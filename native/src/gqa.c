/* gqa.c - grouped-query attention: append the step's keys and values to their pages, then attend. */
#include "attention.h"

#include <string.h>

typedef struct gqa {
    kt_view out, q, k, v;
    attention a;
} gqa;

/* Heads of one token to rows: [kv_heads][64][width]. */
static void append_row(const worker *w, const attention *a, int64_t width, const float *x, uint8_t *to, int64_t key)
{
    for (int64_t h = 0; h < a->kv_heads; h++, x += width) {
        int64_t at = (h * KT_PAGE_TOKENS + key) * width;
        if (a->kv_f32)
            memcpy((float *)(void *)to + at, x, (size_t)width * sizeof(float));
        else
            w->kernels->to_bf16(x, width, width, (uint16_t *)(void *)to + at);
    }
}

/* Heads of one token to lane key % 16 of their panels: [kv_heads][4][pairs][16][2]. */
static void append_lane(const worker *w, const attention *a, const float *x, uint8_t *to, int64_t key)
{
    int64_t width = paired(a->dk);
    uint16_t *row = (uint16_t *)(void *)local_scratch(w);
    for (int64_t h = 0; h < a->kv_heads; h++) {
        uint16_t *lane = (uint16_t *)(void *)to + h * a->k_head + key / 16 * 16 * width + key % 16 * 2;
        w->kernels->to_bf16(x + h * a->dk, a->dk, width, row);
        for (int64_t c = 0; c < width; c += 2)
            memcpy(lane + 16 * c, row + c, 2 * sizeof *row);
    }
}

/* Heads of one token to codes and scales: rows, or lanes of panels. */
static void append_codes(const worker *w, const attention *a, const float *x, uint8_t *page, int64_t key)
{
    uint8_t *row = local_scratch(w), *scales = page + a->k_scales + key * a->kv_heads;
    for (int64_t h = 0; h < a->kv_heads; h++) {
        uint8_t *lane = page + a->k_offset + h * a->k_head + key / 16 * 16 * a->dk + key % 16 * 2;
        scales[h] = w->kernels->to_fp8(x + h * a->dk, a->dk, row);
        for (int64_t c = 0; c < a->dk; c += 2)
            memcpy(lane + 16 * c, row + c, 2);
    }
}

static void append_value_codes(const worker *w, const attention *a, const float *x, uint8_t *page, int64_t key)
{
    uint8_t *scales = page + a->v_scales + key * a->kv_heads;
    for (int64_t h = 0; h < a->kv_heads; h++)
        scales[h] = w->kernels->to_fp8(x + h * a->dv, a->dv, page + a->v_offset + h * a->v_head + key * a->dv);
}

static void append_run(const void *arg, worker *w)
{
    const gqa *o = arg;
    const attention *a = &o->a;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t position = position_of(w, t), key = position % KT_PAGE_TOKENS;
        uint8_t *page = attention_page(a, w, run_of(w, t), position / KT_PAGE_TOKENS);
        if (a->fp8) {
            append_codes(w, a, view_row(w, o->k, t), page, key);
            append_value_codes(w, a, view_row(w, o->v, t), page, key);
            continue;
        }
        if (a->kv_f32)
            append_row(w, a, a->dk, view_row(w, o->k, t), page + a->k_offset, key);
        else
            append_lane(w, a, view_row(w, o->k, t), page + a->k_offset, key);
        append_row(w, a, a->dv, view_row(w, o->v, t), page + a->v_offset, key);
    }
}

static void attend_run(const void *arg, worker *w)
{
    const gqa *o = arg;
    attend(&o->a, w, all_runs(w), (head_rows){view_row(w, o->q, 0), view_stride(w, o->q), o->a.dk},
           (head_rows){view_row(w, o->out, 0), view_stride(w, o->out), o->a.dv});
}

static int32_t value_dim(const kt_gqa *s)
{
    return s->v ? s->v : s->head_dim;
}

static int check_views(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_gqa *s)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "gqa q", q, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "gqa k", k, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "gqa v", v, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "gqa out", out, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_overlap(p, "gqa", out, q, 0);
    if (failed)
        return failed;
    int64_t dk = s->head_dim, dv = value_dim(s);
    if (s->heads < 1 || s->kv_heads < 1 || dk < 1 || dv < 1 || s->heads % s->kv_heads != 0 ||
        s->heads * dk != q.width || s->heads * dv != out.width || s->kv_heads * dk != k.width ||
        s->kv_heads * dv != v.width)
        return program_fail(p, KT_ERR_SHAPE, "gqa: %d heads and %d kv heads of %d columns, values of %d, but q has %d, "
                            "k %d, v %d, out %d", s->heads, s->kv_heads, s->head_dim, (int32_t)dv, q.width, k.width,
                            v.width, out.width);
    return KT_OK;
}

static int check(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_gqa *s)
{
    int failed = check_views(p, out, q, k, v, s);
    if (failed)
        return failed;
    if (s->head_dim % 2 != 0)
        return program_fail(p, KT_ERR_SHAPE, "gqa: head_dim %d is odd; keys are stored in pairs of columns",
                            s->head_dim);
    if (s->window < 0)
        return program_fail(p, KT_ERR_RANGE, "gqa: a window of %d; 0 (all keys) or more is possible", s->window);
    if (s->chunked && (s->chunked != 1 || !s->window || s->choice))
        return program_fail(p, KT_ERR_RANGE, "gqa: chunked is %d with a window of %d and choice %d; chunks need a window "
                            "and no choice", s->chunked, s->window, s->choice);
    if (s->windowed && (s->windowed != 1 || !s->window || s->choice))
        return program_fail(p, KT_ERR_RANGE, "gqa: windowed is %d with a window of %d and choice %d; window pages need a "
                            "window and no choice", s->windowed, s->window, s->choice);
    const selection *c = s->choice > 0 && s->choice <= p->selections.n ? &p->selections.at[s->choice - 1] : NULL;
    if (s->choice && (!c || c->block == 1 || c->lists != s->kv_heads))
        return program_fail(p, KT_ERR_RANGE, "gqa: choice %d of %d, or not of blocks by %d heads", s->choice,
                            p->selections.n, s->kv_heads);
    if (s->layer_offset % 64 != 0 || s->layer_offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "gqa: layer_offset %zu is not a multiple of 64", s->layer_offset);
    return check_scale(p, "gqa", s->scale);
}

static void touch_pages(kt_program *p, const attention *a, size_t size, int32_t how)
{
    if (a->windowed)
        program_touch_windows(p, a->k_offset, size, how);
    else
        program_touch_cache(p, a->k_offset, size, how);
}

int kt_program_gqa(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_gqa *shape)
{
    int failed = check(p, out, q, k, v, shape);
    gqa *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    int32_t dk = shape->head_dim, dv = value_dim(shape), fp8 = p->options.cache == KT_CACHE_FP8;
    size_t column = KT_PAGE_TOKENS * cache_element(p), scales = fp8 ? KT_PAGE_TOKENS * (size_t)shape->kv_heads : 0;
    size_t keys = (size_t)k.width * column, elements = keys + (size_t)v.width * column, both = elements + 2 * scales;
    size_t first = shape->layer_offset;
    *o = (gqa){.out = out, .q = q, .k = k, .v = v,
               .a = {.kv_heads = shape->kv_heads, .group = shape->heads / shape->kv_heads, .dk = dk, .dv = dv,
                     .kv_f32 = p->options.cache == KT_CACHE_F32, .fp8 = fp8, .window = shape->window, .windowed = shape->windowed,
                     .chunked = shape->chunked, .choice = shape->choice, .scale = shape->scale,
                     .sinks = shape->sinks, .k_stride = dk, .v_stride = dv,
                     .k_head = (int64_t)KT_PAGE_TOKENS * dk, .v_head = (int64_t)KT_PAGE_TOKENS * dv,
                     .k_offset = first, .v_offset = first + keys,
                     .k_scales = first + elements, .v_scales = first + elements + scales}};
    size_t end = first + both, *page_bytes = shape->windowed ? &p->window_bytes : &p->page_bytes;
    *page_bytes = *page_bytes > end ? *page_bytes : end;
    p->window = shape->windowed && shape->window > p->window ? shape->window : p->window;
    program_reserve(p, attention_shared_bytes(&o->a, kt_pool_threads(p->pool)), attention_local_bytes(&o->a));
    program_operation(p);
    program_phase(p, append_run, o);
    program_touch_view(p, k, OWN_ROWS);
    program_touch_view(p, v, OWN_ROWS);
    touch_pages(p, &o->a, both, ANY_ROWS | WRITES);
    program_phase(p, attend_run, o);
    program_touch_view(p, q, ANY_ROWS);
    touch_pages(p, &o->a, both, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    if (shape->choice)
        program_touch(p, p->selections.at[shape->choice - 1].resource, 0, 1, ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
