/* gqa.c - grouped-query attention: append the step's keys and values to their pages, then attend. */
#include "attention.h"

#include <string.h>

typedef struct gqa {
    kt_view out, q, k, v;
    attention a;
} gqa;

/* Heads of one token to rows: [kv_heads][64][head_dim]. */
static void append_row(const worker *w, const attention *a, const float *x, uint8_t *to, int64_t key)
{
    for (int64_t h = 0; h < a->kv_heads; h++) {
        int64_t at = h * a->v_head + key * a->v_stride;
        if (a->kv_f32)
            memcpy((float *)(void *)to + at, x + h * a->dv, (size_t)a->dv * sizeof(float));
        else
            w->kernels->to_bf16(x + h * a->dv, a->dv, a->dv, (uint16_t *)(void *)to + at);
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

static void append_run(const void *arg, worker *w)
{
    const gqa *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t position = w->step->start + t;
        uint8_t *page = cache_page(w, position / KT_PAGE_TOKENS);
        (o->a.kv_f32 ? append_row : append_lane)(w, &o->a, view_row(w, o->k, t), page + o->a.k_offset,
                                                 position % KT_PAGE_TOKENS);
        append_row(w, &o->a, view_row(w, o->v, t), page + o->a.v_offset, position % KT_PAGE_TOKENS);
    }
}

static void attend_run(const void *arg, worker *w)
{
    const gqa *o = arg;
    attend(&o->a, w, (head_rows){view_row(w, o->q, 0), view_stride(w, o->q), o->a.dk},
           (head_rows){view_row(w, o->out, 0), view_stride(w, o->out), o->a.dk});
}

static int check(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_gqa *s)
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
    int64_t dim = s->head_dim;
    if (s->heads < 1 || s->kv_heads < 1 || dim < 1 || s->heads % s->kv_heads != 0 || s->heads * dim != q.width ||
        s->heads * dim != out.width || s->kv_heads * dim != k.width || s->kv_heads * dim != v.width)
        return program_fail(p, KT_ERR_SHAPE, "gqa: %d heads and %d kv heads of %d columns, but q has %d, k %d, v %d, "
                            "out %d", s->heads, s->kv_heads, s->head_dim, q.width, k.width, v.width, out.width);
    if (dim % 2 != 0)
        return program_fail(p, KT_ERR_SHAPE, "gqa: head_dim %d is odd; keys are stored in pairs of columns",
                            s->head_dim);
    if (s->window < 0)
        return program_fail(p, KT_ERR_RANGE, "gqa: a window of %d; 0 (all keys) or more is possible", s->window);
    const selection *c = s->choice > 0 && s->choice <= p->selections.n ? &p->selections.at[s->choice - 1] : NULL;
    if (s->choice && (!c || c->block == 1 || c->lists != s->kv_heads))
        return program_fail(p, KT_ERR_RANGE, "gqa: choice %d of %d, or not of blocks by %d heads", s->choice,
                            p->selections.n, s->kv_heads);
    if (s->layer_offset % 64 != 0 || s->layer_offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "gqa: layer_offset %zu is not a multiple of 64", s->layer_offset);
    return check_scale(p, "gqa", s->scale);
}

int kt_program_gqa(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_gqa *shape)
{
    int failed = check(p, out, q, k, v, shape);
    gqa *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    int32_t dim = shape->head_dim;
    int32_t kv_f32 = p->options.kv_f32;
    size_t half = (size_t)k.width * KT_PAGE_TOKENS * (kv_f32 ? sizeof(float) : sizeof(uint16_t));
    *o = (gqa){.out = out, .q = q, .k = k, .v = v,
               .a = {.kv_heads = shape->kv_heads, .group = shape->heads / shape->kv_heads, .dk = dim, .dv = dim,
                     .kv_f32 = kv_f32, .window = shape->window, .choice = shape->choice, .scale = shape->scale,
                     .sinks = shape->sinks, .k_stride = dim, .v_stride = dim,
                     .k_head = (int64_t)KT_PAGE_TOKENS * dim, .v_head = (int64_t)KT_PAGE_TOKENS * dim,
                     .k_offset = shape->layer_offset, .v_offset = shape->layer_offset + half}};
    p->page_bytes = p->page_bytes > o->a.v_offset + half ? p->page_bytes : o->a.v_offset + half;
    program_reserve(p, attention_shared_bytes(&o->a), attention_local_bytes(&o->a));
    program_operation(p);
    program_phase(p, append_run, o);
    program_touch_view(p, k, OWN_ROWS);
    program_touch_view(p, v, OWN_ROWS);
    program_touch_cache(p, o->a.k_offset, 2 * half, ANY_ROWS | WRITES);
    program_phase(p, attend_run, o);
    program_touch_view(p, q, ANY_ROWS);
    program_touch_cache(p, o->a.k_offset, 2 * half, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    if (shape->choice)
        program_touch(p, p->selections.at[shape->choice - 1].resource, 0, 1, ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
