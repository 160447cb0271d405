/* elementwise.c - operations on single rows: embed, norm, rope, swiglu, gate, add, scale,
 * temper, greatest, select.
 *
 * Every thread does the rows it owns, so a chain of these needs no barrier. The arithmetic is in the
 * kernels; here are only the loops over rows and heads, and the checks.
 */
#include "lowrank.h"
#include "program.h"

#include <math.h>
#include <string.h>

typedef struct rowwise {
    kt_view out, a, b;
    int32_t domain;
    int64_t head_width, first, dim;
    int32_t own_gains;          /* each run of columns has its own */
    int32_t adapted;            /* lowrank_gain */
    int32_t interleaved, table;
    int32_t late;               /* only of rows whose runs defer */
    kt_glu glu;
    gate_by gate;
    float eps, by, limit;
    const float *gain, *bias;
    const uint16_t *rows;       /* the embedding table, or NULL: */
    const float *rows_f32;
} rowwise;

/* Record one operation of a single phase that reads a (and b, if it has a width) and writes out. */
static int record(kt_program *p, phase_run *run, const rowwise *given, int32_t how_a)
{
    rowwise *o = program_new(p, sizeof *o);
    if (!o)
        return KT_ERR_MEMORY;
    *o = *given;
    o->domain = program_domain(p, given->out);
    program_operation(p);
    program_phase(p, run, o);
    if (o->a.width)
        program_touch_view(p, o->a, how_a);
    if (o->b.width)
        program_touch_view(p, o->b, OWN_ROWS);
    program_touch_view(p, o->out, OWN_ROWS | WRITES);
    return KT_OK;
}

/* ---- embed -------------------------------------------------------------------------------------- */

static void embed_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        size_t first = (size_t)w->step->ids[t] * (size_t)o->out.width;
        float *out = view_row(w, o->out, t);
        if (o->rows)
            w->kernels->from_bf16(o->rows + first, o->out.width, out);
        else
            memcpy(out, o->rows_f32 + first, (size_t)o->out.width * sizeof *out);
    }
}

int kt_program_embed(kt_program *p, kt_view out, const kt_embed *e)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "embed out", out, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    if (!e->table == !e->table_f32)
        return program_fail(p, KT_ERR_SHAPE, "embed: a table of bf16 or one of f32");
    if (e->vocab < 1 || e->vocab > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "embed: a table of %lld rows; 1..%lld are possible",
                            (long long)e->vocab, (long long)MAX_COLUMNS);
    p->vocab = min64(p->vocab, e->vocab);
    return record(p, embed_run, &(rowwise){.out = out, .rows = e->table, .rows_f32 = e->table_f32}, OWN_ROWS);
}

/* ---- norm --------------------------------------------------------------------------------------- */

static void norm_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t);
        const float *gain = lowrank_gain_of(w, o->adapted, o->gain, o->domain, t);
        for (int64_t c = 0; c < o->out.width; c += o->head_width)
            w->kernels->norm(x + c, gain + (o->own_gains ? c : 0), o->head_width, o->eps, y + c);
    }
}

int kt_program_norm(kt_program *p, kt_view out, kt_view x, const kt_norm *n)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "norm x", x, -1);
    if (!failed)
        failed = program_check_view(p, "norm out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "norm", out, x, 1);
    if (failed)
        return failed;
    int in_place = out.buffer == x.buffer && out.column == x.column;
    if (x.width != out.width || n->columns < 0 || n->columns > x.width || (n->columns && !in_place))
        return program_fail(p, KT_ERR_SHAPE, "norm: %d columns to %d, the first %lld in place", x.width, out.width,
                            (long long)n->columns);
    out.width = x.width = n->columns ? (int32_t)n->columns : x.width;
    int64_t run = n->head_width ? n->head_width : x.width;
    if (run < 1 || x.width % run != 0)
        return program_fail(p, KT_ERR_SHAPE, "norm: %d columns in runs of %lld", x.width, (long long)run);
    const float *gain = n->gain ? n->gain : program_constant(p, run, 1);
    if (!gain)
        return KT_ERR_MEMORY;
    rowwise o = {.out = out, .a = x, .head_width = run, .gain = gain, .eps = n->eps};
    o.own_gains = n->gain && n->own_gains;
    o.adapted = n->gain ? lowrank_gain(p) : -1;
    return record(p, norm_run, &o, OWN_ROWS);
}

/* An RMSNorm of what is left without the mean, in double: a row is short. */
static void layer_norm_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last, n = o->out.width;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t);
        double sum = 0;
        for (int64_t c = 0; c < n; c++)
            sum += (double)x[c];
        for (int64_t c = 0; c < n; c++)
            y[c] = (float)((double)x[c] - sum / (double)n);
        w->kernels->norm(y, lowrank_gain_of(w, o->adapted, o->gain, o->domain, t), n, o->eps, y);
        for (int64_t c = 0; c < n; c++)
            y[c] += o->bias[c];
    }
}

int kt_program_layer_norm(kt_program *p, kt_view out, kt_view x, const kt_layer_norm *n)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "layer_norm x", x, -1);
    if (!failed)
        failed = program_check_view(p, "layer_norm out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "layer_norm", out, x, 1);
    if (failed)
        return failed;
    if (!n->gain || !n->bias || x.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "layer_norm: %d columns to %d%s", x.width, out.width,
                            n->gain && n->bias ? "" : ", without a gain or a bias");
    rowwise o = {.out = out, .a = x, .gain = n->gain, .bias = n->bias, .eps = n->eps, .adapted = lowrank_gain(p)};
    return record(p, layer_norm_run, &o, OWN_ROWS);
}

/* ---- rope --------------------------------------------------------------------------------------- */

/* The number of the table of these angles: one for all rotations of a program that are alike. */
static int32_t find_table(kt_program *p, const kt_rope *r)
{
    size_t size = (size_t)r->dim / 2 * sizeof(float);
    for (int32_t i = 0; i < p->tables.n; i++) {
        const rope_table *t = &p->tables.at[i];
        if (t->dim == r->dim && t->shift == r->shift && !memcmp(&t->scale, &r->scale, sizeof r->scale) &&
            !memcmp(t->inv_freq, r->inv_freq, size))
            return i;
    }
    float *copy = program_new(p, size);
    if (!copy || !ROOM(p, p->tables))
        return KT_ERR_MEMORY;
    memcpy(copy, r->inv_freq, size);
    p->tables.at[p->tables.n] = (rope_table){.dim = r->dim, .scale = r->scale, .shift = r->shift, .inv_freq = copy,
                                             .resource = program_resource(p)};
    return p->tables.n++;
}

/* In f32, as the models were trained: the angle is rounded before its sine is taken. */
static void table_run(const void *arg, worker *w)
{
    const rope_table *r = &w->program->tables.at[((const rowwise *)arg)->table];
    int64_t t, last, half = r->dim / 2;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        float *cosine = r->data + t * r->dim, position = (float)(position_of(w, t) + r->shift);
        for (int64_t i = 0; i < half; i++) {
            float angle = position * r->inv_freq[i];
            cosine[i] = cosf(angle) * r->scale;
            cosine[half + i] = sinf(angle) * r->scale;
        }
    }
}

static void rope_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    const rope_table *r = &w->program->tables.at[o->table];
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        const float *cosine = r->data + t * r->dim;
        float *x = view_row(w, o->out, t);
        for (int64_t c = o->first; c < o->out.width; c += o->head_width)
            w->kernels->rope(x + c, cosine, cosine + r->dim / 2, r->dim, o->interleaved);
    }
}

int kt_program_rope(kt_program *p, kt_view x, const kt_rope *rope)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "rope", x, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    int64_t dim = rope->dim, width = rope->head_width, first = rope->first;
    if (rope->shift < -MAX_COLUMNS || rope->shift > MAX_COLUMNS)
        return program_fail(p, KT_ERR_RANGE, "rope: positions shifted by %lld", (long long)rope->shift);
    if (dim < 2 || dim % 2 != 0 || dim > MAX_COLUMNS || !rope->inv_freq)
        return program_fail(p, KT_ERR_SHAPE, "rope: dim is %lld; an even number of columns is rotated", (long long)dim);
    if (width < 1 || x.width % width != 0 || first < 0 || first > width || dim > width - first)
        return program_fail(p, KT_ERR_SHAPE, "rope: columns %lld..%lld of runs of %lld in %d columns",
                            (long long)first, (long long)first + dim, (long long)width, x.width);
    int32_t table = find_table(p, rope);
    rowwise *o = table < 0 ? NULL : program_new(p, sizeof *o);
    if (!o)
        return KT_ERR_MEMORY;
    *o = (rowwise){.out = x, .head_width = width, .first = first, .interleaved = rope->interleaved, .table = table};
    program_operation(p);
    rope_table *r = &p->tables.at[table];
    if (!r->recorded) {     /* once per step, at its first use */
        program_phase(p, table_run, o);
        program_touch(p, r->resource, 0, 1, OWN_ROWS | WRITES);
        r->recorded = 1;
    }
    program_phase(p, rope_run, o);
    program_touch(p, r->resource, 0, 1, OWN_ROWS);
    program_touch_view(p, x, OWN_ROWS | WRITES);
    return KT_OK;
}

/* ---- swiglu, gate, add, scale, temper, greatest, select ----------------------------------------- */

int program_glu(kt_program *p, const char *name, const kt_glu *given, kt_glu *glu)
{
    *glu = given ? *given : (kt_glu){.alpha = 1};
    if (!isfinite(glu->alpha) || !isfinite(glu->shift) || !(glu->limit >= 0) || !(glu->gate_limit >= 0) ||
        !(glu->cubic >= 0 && isfinite(glu->cubic)))
        return program_fail(p, KT_ERR_RANGE, "%s: an activation of alpha %g, cubic %g, shift %g and limit %g, %g of "
                            "gate", name, (double)glu->alpha, (double)glu->cubic, (double)glu->shift,
                            (double)glu->limit, (double)glu->gate_limit);
    glu->limit = glu->limit > 0 ? glu->limit : INFINITY;
    glu->gate_limit = glu->gate_limit > 0 ? glu->gate_limit : glu->limit;
    return KT_OK;
}

static void swiglu_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
        w->kernels->swiglu(view_row(w, o->a, t), o->out.width, &o->glu, view_row(w, o->out, t));
}

int kt_program_swiglu(kt_program *p, kt_view out, kt_view x, const kt_swiglu *given)
{
    kt_glu glu;
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "swiglu x", x, -1);
    if (!failed)
        failed = program_check_view(p, "swiglu out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "swiglu", out, x, 0);
    if (!failed)
        failed = program_glu(p, "swiglu", given->glu, &glu);
    if (failed)
        return failed;
    int64_t padded = ((int64_t)out.width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS;
    if (x.width != (glu.ungated ? out.width : 2 * padded))
        return program_fail(p, KT_ERR_SHAPE, "swiglu: %d columns from %d; twice the outputs rounded up to 16 are "
                            "needed, or as many without a gate", out.width, x.width);
    return record(p, swiglu_run, &(rowwise){.out = out, .a = x, .glu = glu}, OWN_ROWS);
}

/* Of few columns, one for each head: no kernel has a logarithm. */
static void softplus_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t), *by = view_row(w, o->b, t);
        float *out = view_row(w, o->out, t);
        for (int64_t c = 0; c < o->out.width; c++) {
            float b = by[c / o->head_width];
            out[c] = x[c] * (fmaxf(b, 0) + log1pf(expf(-fabsf(b))));
        }
    }
}

static void multiply_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t), *by = view_row(w, o->b, t);
        float *out = view_row(w, o->out, t);
        for (int64_t c = 0; c < o->out.width; c++)
            out[c] = x[c] * by[c / o->head_width];
    }
}

static void gate_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t), *by = view_row(w, o->b, t);
        float *out = view_row(w, o->out, t);
        for (int64_t c = 0; c < o->out.width; c += o->head_width)
            w->kernels->gate(x + c, by + c / o->head_width, o->head_width, &o->gate, out + c);
    }
}

int kt_program_gate(kt_program *p, kt_view out, kt_view x, kt_view by, const kt_gate *g)
{
    int32_t kind = g->kind;
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "gate x", x, -1);
    if (!failed)
        failed = program_check_view(p, "gate by", by, program_domain(p, x));
    if (!failed)
        failed = program_check_view(p, "gate out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "gate", out, x, 1);
    if (!failed)
        failed = program_check_overlap(p, "gate", out, by, by.width == x.width);
    if (failed)
        return failed;
    if (x.width != out.width || x.width % by.width != 0)
        return program_fail(p, KT_ERR_SHAPE, "gate: %d columns by %d to %d", x.width, by.width, out.width);
    if (kind < KT_GATE_SIGMOID || kind > KT_GATE_LINEAR)
        return program_fail(p, KT_ERR_RANGE, "gate: kind %d", kind);
    int one = by.width < x.width;       /* for a run */
    rowwise o = {.out = out, .a = x, .b = by, .head_width = x.width / by.width, .gate = {one, kind}};
    if (kind == KT_GATE_SOFTPLUS || kind == KT_GATE_LINEAR)
        return record(p, kind == KT_GATE_LINEAR ? multiply_run : softplus_run, &o, OWN_ROWS);
    o.head_width = one ? o.head_width : x.width;        /* as many columns as a kernel takes at once */
    return record(p, gate_run, &o, OWN_ROWS);
}

static void add_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
        if (!o->late || run_of(w, token_row(w, o->domain, t))->defer > 0)
            w->kernels->add(view_row(w, o->a, t), view_row(w, o->b, t), o->out.width, view_row(w, o->out, t));
}

int kt_program_add(kt_program *p, kt_view out, kt_view a, kt_view b)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "add a", a, -1);
    if (!failed)
        failed = program_check_view(p, "add b", b, program_domain(p, a));
    if (!failed)
        failed = program_check_view(p, "add out", out, program_domain(p, a));
    if (!failed)
        failed = program_check_overlap(p, "add", out, a, 1);
    if (!failed)
        failed = program_check_overlap(p, "add", out, b, 1);
    if (failed)
        return failed;
    if (a.width != b.width || a.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "add: %d columns and %d to %d", a.width, b.width, out.width);
    return record(p, add_run, &(rowwise){.out = out, .a = a, .b = b, .late = p->late}, OWN_ROWS);
}

static void scale_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t);
        float by = o->gain ? o->by * o->gain[0] : o->by, limit = o->limit;
        if (limit > 0)
            w->kernels->cap(x, o->out.width, by, limit, y);
        for (int64_t c = 0; c < o->out.width && limit == 0; c++)
            y[c] = x[c] * by;
    }
}

int kt_program_scale(kt_program *p, kt_view out, kt_view x, const kt_scale *s)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "scale x", x, -1);
    if (!failed)
        failed = program_check_view(p, "scale out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "scale", out, x, 1);
    if (failed)
        return failed;
    if (x.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "scale: %d columns to %d", x.width, out.width);
    if (!isfinite(s->by) || !(s->limit >= 0 && isfinite(s->limit)))
        return program_fail(p, KT_ERR_RANGE, "scale: by %g, limit %g", (double)s->by, (double)s->limit);
    rowwise o = {.out = out, .a = x, .by = s->by, .limit = s->limit, .gain = s->factor};
    return record(p, scale_run, &o, OWN_ROWS);
}

static void temper_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t), by = 1 + o->by * logf(1 + (float)((position_of(w, t) + o->first) / o->dim));
        for (int64_t c = 0; c < o->out.width; c++)
            y[c] = x[c] * by;
    }
}

int kt_program_temper(kt_program *p, kt_view out, kt_view x, const kt_temper *s)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "temper x", x, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "temper out", out, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_overlap(p, "temper", out, x, 1);
    if (failed)
        return failed;
    if (x.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "temper: %d columns to %d", x.width, out.width);
    if (!isfinite(s->beta) || s->every < 1 || s->shift < 0 || s->shift > MAX_COLUMNS)
        return program_fail(p, KT_ERR_RANGE, "temper: beta %g every %lld positions shifted by %lld", (double)s->beta,
                            (long long)s->every, (long long)s->shift);
    return record(p, temper_run, &(rowwise){.out = out, .a = x, .by = s->beta, .dim = s->every, .first = s->shift},
                  OWN_ROWS);
}

/* Of few columns: a router's. */
static void greatest_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float most = x[0];
        for (int64_t c = 1; c < o->a.width; c++)
            most = x[c] > most ? x[c] : most;
        *view_row(w, o->out, t) = most;
    }
}

int kt_program_greatest(kt_program *p, kt_view out, kt_view x)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "greatest x", x, -1);
    if (!failed)
        failed = program_check_view(p, "greatest out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "greatest", out, x, 0);
    if (failed)
        return failed;
    if (out.width != 1)
        return program_fail(p, KT_ERR_SHAPE, "greatest: %d columns to %d; one is possible", x.width, out.width);
    return record(p, greatest_run, &(rowwise){.out = out, .a = x}, OWN_ROWS);
}

static void select_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t i, last;
    for (own_rows(w, KT_ROWS_OUTPUTS, &i, &last); i < last; i++)
        memcpy(view_row(w, o->out, i), view_row(w, o->a, w->batch->output[i]),
               (size_t)o->out.width * sizeof(float));
}

int kt_program_select(kt_program *p, kt_view out, kt_view x)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "select x", x, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "select out", out, KT_ROWS_OUTPUTS);
    if (failed)
        return failed;
    if (x.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "select: %d columns to %d", x.width, out.width);
    /* Output rows are shared out otherwise than token rows, so any thread may read any token. */
    return record(p, select_run, &(rowwise){.out = out, .a = x}, ANY_ROWS);
}
