/* mla.c - multi-head latent attention: the cache keeps one latent row per token, shared by all heads.
 *
 * Here is the *absorbed* form: each head's q_nope goes through uk_in into the latent space, the heads
 * attend over the latent rows as if those were their keys and values, and uv brings the result back. It
 * reads each latent row once for all heads, but multiplies with lora columns instead of a head's few; so
 * many tokens take the *expanded* form (mla_expanded.c). Over chosen positions it is always the absorbed one
 * (mla_chosen.c). Source: DeepSeek-V2 report, section 2.1.
 *
 * Which form a row takes is a matter of its position alone: the run says which of its positions are expanded. Rows of
 * the same form that follow one another are worked on together, so that the matrices are read once for all of them.
 */
#include "gathered.h"
#include "lowrank.h"
#include "mla.h"

#include <string.h>

/* Where the positions end that follow one another with or without expansion as this one does. */
static int64_t alike(const kt_run *run, int64_t position, int expanded)
{
    int64_t end = run_end(run);
    if (expanded)
        return min64(end, run->expanded_end);
    return position < run->expanded ? min64(end, run->expanded) : end;
}

/* From a row on the rows of its run that have its form, at most MLA_ABSORBED unless they are expanded. A row that sees no
 * more positions than would be chosen attends to all. */
static mla_rows piece_at(const mla *o, const worker *w, int64_t row)
{
    const kt_run *run = run_of(w, row);
    int64_t position = position_of(w, row);
    int expanded = is_expanded(run, position);
    int64_t reach = o->selection < 0 ? INT64_MAX : selection_reach(&w->program->selections.at[o->selection]);
    int64_t end = alike(run, position, expanded), together = expanded ? KT_PAGE_TOKENS : 1;
    mla_rows r = {.first = row, .form = expanded ? MLA_EXPANDED_FORM : MLA_ABSORBED_FORM};
    if (position >= reach)
        r.form = MLA_CHOSEN_FORM;
    else
        end = min64(end, reach);
    r.n = r.form == MLA_EXPANDED_FORM ? end - position : min64(end - position, MLA_ABSORBED);
    r.tiled = mla_tiled(w, &o->uk_in, together) || mla_tiled(w, &o->uv, together);
    return r;
}

/* The rows after r; 0: there are none. */
static int next_rows(const mla *o, const worker *w, mla_rows *r)
{
    int64_t row = r->first + r->n, rows = w->batch->rows;
    if (row == rows)
        return 0;
    *r = piece_at(o, w, row);
    while (r->form != MLA_EXPANDED_FORM && r->first + r->n < rows) {
        mla_rows more = piece_at(o, w, r->first + r->n);
        if (more.form != r->form || more.tiled != r->tiled || r->n + more.n > MLA_ABSORBED)
            break;
        r->n += more.n;
    }
    return 1;
}

/* The step's first rows, if they take the absorbed form: the usual ones, in phases of their own. All others go through
 * the last phase. */
static mla_rows find_first(const mla *o, const worker *w)
{
    mla_rows r = {0};
    next_rows(o, w, &r);
    return r.form == MLA_ABSORBED_FORM ? r : (mla_rows){0};
}

/* The same in the phases after the first. */
static mla_rows first_rows(const mla *o, const worker *w)
{
    return o->own[w->thread].first;
}

/* The runs of rows. */
static run_range runs_of(const worker *w, mla_rows r)
{
    return (run_range){w->batch->run[r.first], w->batch->run[r.first + r.n - 1] + 1};
}

static int64_t most_absorbed(const kt_program *p)
{
    return min64(MLA_ABSORBED, p->options.max_tokens);
}

/* Scratch: q_nope converted [heads][T], absorbed queries [T][heads][lora + rope], results
 * [T][heads][lora], the results converted [heads][T] (where q_nope was). */

static act nope_act(const mla *o, const worker *w)
{
    return act_for(&o->uk_in, shared_scratch(w) + o->nope_offset, most_absorbed(w->program) * o->s.heads, o->s.nope);
}

static act result_act(const mla *o, const worker *w)
{
    return act_for(&o->uv, shared_scratch(w) + o->nope_offset, most_absorbed(w->program) * o->s.heads, o->s.lora);
}

/* ---- phases ------------------------------------------------------------------------------------- */

/* A latent row to codes and scales, of a layer's part of a page from `to` on. */
static void append_codes(const mla *o, const worker *w, const float *x, uint8_t *to, int64_t key)
{
    const attention *a = &o->a;
    uint8_t *codes = to + key * a->dk, *scales = to + (a->k_scales - a->k_offset) + key * row_heads(a);
    scales[0] = w->kernels->to_fp8(x, a->row_heads[0], codes);
    if (row_heads(a) > 1)
        scales[1] = w->kernels->to_fp8(x + a->row_heads[0], a->row_heads[1], codes + a->row_heads[0]);
}

static void append_run(const void *arg, worker *w)
{
    const mla *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        int64_t position = position_of(w, t), width = o->a.dk;
        uint8_t *to = cache_page(w, run_of(w, t), position / KT_PAGE_TOKENS) + o->a.k_offset;
        const float *x = view_row(w, o->latent, t);
        if (o->a.fp8)
            append_codes(o, w, x, to, position % KT_PAGE_TOKENS);
        else if (o->a.kv_f32)
            memcpy((float *)(void *)to + position % KT_PAGE_TOKENS * width, x, (size_t)width * sizeof *x);
        else
            w->kernels->to_bf16(x, width, width, (uint16_t *)(void *)to + position % KT_PAGE_TOKENS * width);
    }
}

/* The absorbed form step by step, each called by all threads and shared out among them, with a barrier between;
 * first q_nope as uk_in reads it and q_rope to the end of the absorbed queries, for the rows [first, last) of r. */
static void split(const mla *o, const worker *w, mla_rows r, int64_t first, int64_t last)
{
    act a = nope_act(o, w);
    head_rows to = mla_queries(o, w);
    for (int64_t t = first; t < last; t++) {
        for (int64_t h = 0; h < o->s.heads; h++) {
            const float *x = view_row(w, o->q, r.first + t) + h * (o->s.nope + o->s.rope);
            if (a.kind != ACT_F32)
                act_convert(w, &a, x, o->s.nope, -1.0f, h * r.n + t);
            memcpy(to.data + t * to.token_stride + h * to.head_stride + o->s.lora, x + o->s.nope,
                   (size_t)o->s.rope * sizeof *x);
        }
    }
}

static void split_run(const void *arg, worker *w)
{
    const mla *o = arg;
    mla_rows r = o->own[w->thread].first = find_first(o, w);
    int64_t first, last;
    own_rows(w, KT_ROWS_TOKENS, &first, &last);
    split(o, w, r, first, min64(last, r.n));
}

/* The products of all heads are tasks of a head and a run of its panels. One task per head would leave most of a large
 * team idle; where a matrix is cut does not change a bit. */
typedef struct head_part {
    int64_t head, first, last;      /* panels */
} head_part;

/* Tasks of a head. */
static int64_t parts(const mla *o, const worker *w, const matrices *m)
{
    return min64(m->panels, (2 * (int64_t)w->threads + o->s.heads - 1) / o->s.heads);
}

/* Task i, where a head has n. */
static head_part part_at(const matrices *m, int64_t n, int64_t i)
{
    return (head_part){i / n, m->panels * (i % n) / n, m->panels * (i % n + 1) / n};
}

/* What adapters add to a head's part of a product of the rows r. */
static void update_head(const mla *o, const worker *w, int part, mla_rows r, head_part t, const product *p,
                        adapted_input in)
{
    if (o->updates[part] < 0 || !w->batch->adapted)
        return;
    adapted_rows rows = {.product = o->updates[part], .domain = KT_ROWS_TOKENS, .matrix = t.head, .first = r.first,
                         .n = r.n};
    adapted_output out = {.y = p->y, .y_stride = p->y_stride, .columns = p->n, .panel = t.first, .last_panel = t.last};
    lowrank_add(w, rows, in, out, local_scratch(w) + o->inner_offset);
}

static void absorb(const mla *o, const worker *w, mla_rows r)
{
    act all = nope_act(o, w), some;
    head_rows to = mla_queries(o, w);
    product p = {.n_tokens = r.n, .y_stride = to.token_stride};
    int64_t n = parts(o, w, &o->uk_in), tasks = n * o->s.heads;
    for (int64_t i; (i = worker_take(w, 1)) < tasks;) {
        head_part t = part_at(&o->uk_in, n, i);
        matrices_bind(w, &o->uk_in, t.head, t.first, t.last, &p);
        mla_tiles(&p, r.tiled);
        some = act_rows(&all, t.head * p.n_tokens);
        act_bind(&some, &p);
        if (all.kind == ACT_F32) {
            p.xf = view_row(w, o->q, r.first) + t.head * (o->s.nope + o->s.rope);
            p.x_stride = view_stride(w, o->q);
        }
        p.y = to.data + t.head * to.head_stride + t.first * KT_PANEL_ROWS;
        product_run(w, all.kind, &p);
        adapted_input in = {.x = view_row(w, o->q, r.first) + t.head * (o->s.nope + o->s.rope),
                            .x_stride = view_stride(w, o->q), .k = o->s.nope};
        update_head(o, w, 0, r, t, &p, in);
    }
}

static void absorb_run(const void *arg, worker *w)
{
    mla_rows r = first_rows(arg, w);
    if (r.n)
        absorb(arg, w, r);
}

/* The part of run i that lies in rows r. */
static kt_run part_of(const worker *w, mla_rows r, int64_t i)
{
    kt_run run = w->batch->runs[i];
    int64_t first = max64(r.first, w->batch->first[i]), end = min64(r.first + r.n, w->batch->first[i + 1]);
    run.start += first - w->batch->first[i];
    run.n_tokens = end - first;
    return run;
}

static void attend_absorbed(const mla *o, const worker *w, mla_rows r)
{
    run_range all = runs_of(w, r);
    kt_run runs[MLA_ABSORBED];
    int64_t first[MLA_ABSORBED + 1] = {0}, n = all.last - all.first;
    for (int64_t i = 0; i < n; i++) {
        runs[i] = part_of(w, r, all.first + i);
        first[i + 1] = first[i] + runs[i].n_tokens;
    }
    batch rows = {.runs = runs, .n_runs = n, .rows = r.n, .first = first};
    worker over = *w;
    over.batch = &rows;
    attend(&o->a, &over, (run_range){0, n}, mla_queries(o, w), mla_results_at(o, w));
}

static void attend_run(const void *arg, worker *w)
{
    mla_rows r = first_rows(arg, w);
    if (r.n)
        attend_absorbed(arg, w, r);
}

static void convert_results(const mla *o, const worker *w, mla_rows r)
{
    act a = result_act(o, w);
    head_rows from = mla_results_at(o, w);
    for (int64_t i; (i = worker_take(w, 1)) < r.n * o->s.heads;)
        act_convert(w, &a, from.data + i * from.head_stride, o->s.lora, -1.0f, i % o->s.heads * r.n + i / o->s.heads);
}

static void results_run(const void *arg, worker *w)
{
    mla_rows r = first_rows(arg, w);
    if (r.n)
        convert_results(arg, w, r);
}

static void multiply_values(const mla *o, const worker *w, mla_rows r)
{
    act all = result_act(o, w), some;
    head_rows from = mla_results_at(o, w);
    product p = {.n_tokens = r.n, .y_stride = view_stride(w, o->out)};
    int64_t n = parts(o, w, &o->uv), tasks = n * o->s.heads;
    for (int64_t i; (i = worker_take(w, 1)) < tasks;) {
        head_part t = part_at(&o->uv, n, i);
        matrices_bind(w, &o->uv, t.head, t.first, t.last, &p);
        mla_tiles(&p, r.tiled);
        some = act_rows(&all, t.head * p.n_tokens);
        act_bind(&some, &p);
        if (all.kind == ACT_F32) {
            p.xf = from.data + t.head * from.head_stride;
            p.x_stride = from.token_stride;
        }
        p.y = view_row(w, o->out, r.first) + t.head * o->s.v + t.first * KT_PANEL_ROWS;
        product_run(w, all.kind, &p);
        adapted_input in = {.x = from.data + t.head * from.head_stride,
                            .x_stride = from.token_stride, .k = o->s.lora};
        update_head(o, w, 2, r, t, &p, in);
    }
}

/* All of the absorbed form, over what the rows see or chose. */
static void absorbed(const mla *o, const worker *w, mla_rows r)
{
    for (int64_t i; (i = worker_take(w, 1)) < r.n;)
        split(o, w, r, i, i + 1);
    worker_barrier(w);
    absorb(o, w, r);
    if (r.form == MLA_CHOSEN_FORM) {
        pool_next_loop(w->pool, w->thread);     /* rows are gathered meanwhile */
        mla_chosen(o, w, r);
    } else {
        worker_barrier(w);
        attend_absorbed(o, w, r);
    }
    worker_barrier(w);
    if (o->uv.kind != ACT_F32) {
        convert_results(o, w, r);
        worker_barrier(w);
    }
    multiply_values(o, w, r);
}

/* The values of the first rows, then everything of the others, some after the other since they share the scratch. */
static void values_run(const void *arg, worker *w)
{
    const mla *o = arg;
    mla_rows r = first_rows(o, w);
    if (r.n)
        multiply_values(o, w, r);
    for (int again = r.n > 0; next_rows(o, w, &r); again = 1) {
        if (again)
            worker_barrier(w);
        if (r.form == MLA_EXPANDED_FORM)
            mla_expanded(o, w, r);
        else
            absorbed(o, w, r);
    }
}

/* ---- recording ---------------------------------------------------------------------------------- */

static int check(kt_program *p, kt_view out, kt_view q, kt_view latent, const kt_mla *s)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "mla q", q, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "mla latent", latent, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "mla out", out, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_overlap(p, "mla", out, q, 0);
    if (failed)
        return failed;
    if (s->heads < 1 || s->nope < 1 || s->rope < 0 || s->v < 1 || s->lora < 1 ||
        s->heads * ((int64_t)s->nope + s->rope) != q.width || s->heads * (int64_t)s->v != out.width ||
        (int64_t)s->lora + s->rope != latent.width)
        return program_fail(p, KT_ERR_SHAPE, "mla: %d heads of nope %d, rope %d, v %d, lora %d, but q has %d columns, "
                            "latent %d, out %d", s->heads, s->nope, s->rope, s->v, s->lora, q.width, latent.width,
                            out.width);
    if (s->layer_offset % 64 != 0 || s->layer_offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "mla: layer_offset %zu is not a multiple of 64", s->layer_offset);
    const selection *c = s->choice > 0 && s->choice <= p->selections.n ? &p->selections.at[s->choice - 1] : NULL;
    if (s->choice && (!c || c->block != 1))
        return program_fail(p, KT_ERR_RANGE, "mla: choice %d of %d, or of blocks", s->choice,
                            p->selections.n);
    if (s->choice && p->options.cache == KT_CACHE_FP8)
        return program_fail(p, KT_ERR_RANGE, "mla: chosen positions in an fp8 cache");
    return check_scale(p, "mla", s->scale);
}

static size_t align64(size_t size)
{
    return size_add(size, 63) / 64 * 64;
}

static int reserve(kt_program *p, mla *o)
{
    int64_t rows = most_absorbed(p) * o->s.heads;
    size_t nope = act_bytes(o->uk_in.kind, rows, act_stride(o->uk_in.kind, o->s.nope));
    size_t result = act_bytes(o->uv.kind, rows, act_stride(o->uv.kind, o->s.lora));
    o->nope_offset = align64(attention_shared_bytes(&o->a, kt_pool_threads(p->pool)));
    o->query_offset = size_add(o->nope_offset, align64(nope > result ? nope : result));
    o->result_offset = size_add(o->query_offset, align64(size_mul((size_t)rows, (size_t)o->a.dk * sizeof(float))));
    o->chosen_offset = align64(size_add(o->result_offset, size_mul((size_t)rows, (size_t)o->s.lora * sizeof(float))));
    size_t attending = attention_local_bytes(&o->a), expanding = mla_expanded_local_bytes(o);
    o->inner_offset = align64(attending > expanding ? attending : expanding);
    program_reserve(p, o->chosen_offset, attending);
    program_reserve(p, mla_expanded_shared_bytes(o, p->options.max_tokens),
                    p->adapters ? size_add(o->inner_offset, lowrank_bytes(p)) : expanding);
    if (o->selection < 0)
        return KT_OK;
    int64_t keys = mla_chosen_keys(&p->selections.at[o->selection]);
    int failed = gathered_reserve(p, keys, mla_chosen_page(o), &o->chosen_bytes, &o->identity);
    program_reserve(p, size_add(o->chosen_offset, o->chosen_bytes), 0);
    return failed;
}

static void record(kt_program *p, mla *o, size_t layer_bytes)
{
    const matrices *weights[3] = {&o->uk_in, &o->uk_out, &o->uv};
    program_operation(p);
    for (int i = 0; i < 3; i++)
        o->updates[i] = lowrank_product(p, i, o->s.heads, weights[i]->weight.k, weights[i]->panels);
    program_phase(p, append_run, o);
    program_touch_view(p, o->latent, OWN_ROWS);
    program_touch_cache(p, o->a.k_offset, layer_bytes, ANY_ROWS | WRITES);
    program_phase(p, split_run, o);
    program_touch_view(p, o->q, OWN_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    program_phase(p, absorb_run, o);
    program_touch_view(p, o->q, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    program_phase(p, attend_run, o);
    program_touch_cache(p, o->a.k_offset, layer_bytes, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    if (o->uv.kind != ACT_F32) {
        program_phase(p, results_run, o);
        program_touch_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, values_run, o);
    program_touch_view(p, o->q, ANY_ROWS);
    program_touch_cache(p, o->a.k_offset, layer_bytes, ANY_ROWS);
    if (o->selection >= 0)
        program_touch(p, p->selections.at[o->selection].resource, 0, 1, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    program_touch_view(p, o->out, ANY_ROWS | WRITES);
}

int kt_program_mla(kt_program *p, kt_view out, kt_view q, kt_view latent, const kt_mla *shape)
{
    matrices uk_in, uk_out, uv;
    int64_t heads = shape->heads;
    int failed = check(p, out, q, latent, shape);
    if (!failed)
        failed = program_matrices(p, "mla uk_in", &shape->uk_in, (int64_t[3]){shape->lora, shape->nope, heads}, 0,
                                  &uk_in);
    if (!failed)
        failed = program_matrices(p, "mla uk_out", &shape->uk_out, (int64_t[3]){shape->nope, shape->lora, heads}, 0,
                                  &uk_out);
    if (!failed)
        failed = program_matrices(p, "mla uv", &shape->uv, (int64_t[3]){shape->v, shape->lora, heads}, 0, &uv);
    if (!failed && (uk_in.rotation || uk_out.rotation || uv.rotation))
        failed = program_fail(p, KT_ERR_SHAPE, "mla: weights with a rotation");
    mla *o = failed ? NULL : program_new(p, sizeof *o);
    mla_own *own = o ? program_new(p, (size_t)kt_pool_threads(p->pool) * sizeof *own) : NULL;
    if (!own)
        return failed ? failed : KT_ERR_MEMORY;
    int32_t width = latent.width, fp8 = p->options.cache == KT_CACHE_FP8, heads_kept = shape->rope ? 2 : 1;
    size_t codes = (size_t)width * KT_PAGE_TOKENS * cache_element(p);
    size_t layer_bytes = codes + (fp8 ? KT_PAGE_TOKENS * (size_t)heads_kept : 0);
    *o = (mla){.out = out, .q = q, .latent = latent, .s = *shape, .uk_in = uk_in, .uk_out = uk_out, .uv = uv,
               .selection = shape->choice - 1, .own = own,
               .a = {.kv_heads = 1, .group = shape->heads, .dk = width, .dv = shape->lora,
                     .kv_f32 = p->options.cache == KT_CACHE_F32,
                     .fp8 = fp8, .row_heads = {shape->lora, shape->rope}, .pack = 1, .scale = shape->scale,
                     .k_stride = width, .v_stride = width, .k_offset = shape->layer_offset,
                     .v_offset = shape->layer_offset, .k_scales = shape->layer_offset + codes}};
    p->page_bytes = p->page_bytes > shape->layer_offset + layer_bytes ? p->page_bytes
                                                                      : shape->layer_offset + layer_bytes;
    failed = reserve(p, o);
    if (!failed)
        record(p, o, layer_bytes);
    return failed;
}
