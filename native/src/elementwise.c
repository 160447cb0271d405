/* elementwise.c - what is done to each row by itself: embed, norm, rope, swiglu, gate, add, scale, select.
 *
 * Every thread does the rows it owns, so a chain of these needs no barrier. The arithmetic is in the
 * kernels; here are only the loops over rows and heads, and the checks.
 */
#include "program.h"

#include <math.h>
#include <string.h>

typedef struct rowwise {
    kt_view out, a, b;
    int32_t domain;
    int64_t head_width, first, dim;
    int32_t interleaved, table;
    kt_glu glu;
    gate_by gate;
    float eps, by;
    const float *gain, *bias;
    const void *rows;           /* the embedding table, of this type */
    int32_t dtype;
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
        if (o->dtype == KT_F32)
            memcpy(out, (const float *)o->rows + first, (size_t)o->out.width * sizeof *out);
        else
            w->kernels->from_bf16((const uint16_t *)o->rows + first, o->out.width, out);
    }
}

int kt_program_embed(kt_program *p, kt_view out, const void *table, int32_t dtype, int64_t vocab)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "embed out", out, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    if (!table || vocab < 1 || vocab > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "embed: a table of %lld rows; 1..%lld are possible",
                            (long long)(table ? vocab : 0), (long long)MAX_COLUMNS);
    if (dtype != KT_BF16 && dtype != KT_F32)
        return program_fail(p, KT_ERR_SHAPE, "embed: a table of dtype %d; bf16 and f32 are possible", (int)dtype);
    p->vocab = min64(p->vocab, vocab);
    return record(p, embed_run, &(rowwise){.out = out, .rows = table, .dtype = dtype}, OWN_ROWS);
}

/* ---- norm --------------------------------------------------------------------------------------- */

static void norm_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t);
        for (int64_t c = 0; c < o->out.width; c += o->head_width)
            w->kernels->norm(x + c, o->gain, o->head_width, o->eps, y + c);
    }
}

int kt_program_norm(kt_program *p, kt_view out, kt_view in, int64_t head_width, const float *gain, float eps)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "norm in", in, -1);
    if (!failed)
        failed = program_check_view(p, "norm out", out, program_domain(p, in));
    if (!failed)
        failed = program_check_overlap(p, "norm", out, in, 1);
    if (failed)
        return failed;
    if (in.width != out.width || head_width < 1 || in.width % head_width != 0)
        return program_fail(p, KT_ERR_SHAPE, "norm: %d columns to %d in runs of %lld", in.width, out.width,
                            (long long)head_width);
    if (!gain && !(gain = program_constant(p, head_width, 1)))
        return KT_ERR_MEMORY;
    return record(p, norm_run, &(rowwise){.out = out, .a = in, .head_width = head_width, .gain = gain, .eps = eps},
                  OWN_ROWS);
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
        w->kernels->norm(y, o->gain, n, o->eps, y);
        for (int64_t c = 0; c < n; c++)
            y[c] += o->bias[c];
    }
}

int kt_program_layer_norm(kt_program *p, kt_view out, kt_view in, const float *gain, const float *bias, float eps)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "layer_norm in", in, -1);
    if (!failed)
        failed = program_check_view(p, "layer_norm out", out, program_domain(p, in));
    if (!failed)
        failed = program_check_overlap(p, "layer_norm", out, in, 1);
    if (failed)
        return failed;
    if (!gain || !bias || in.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "layer_norm: %d columns to %d%s", in.width, out.width,
                            gain && bias ? "" : ", without a gain or a bias");
    return record(p, layer_norm_run, &(rowwise){.out = out, .a = in, .gain = gain, .bias = bias, .eps = eps}, OWN_ROWS);
}

/* ---- rope --------------------------------------------------------------------------------------- */

int32_t kt_program_rope_table(kt_program *p, int64_t dim, const float *inv_freq, float scale, int64_t shift)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (shift < -MAX_COLUMNS || shift > MAX_COLUMNS)
        return program_fail(p, KT_ERR_RANGE, "rope table: positions shifted by %lld", (long long)shift);
    if (dim < 2 || dim % 2 != 0 || dim > MAX_COLUMNS || !inv_freq)
        return program_fail(p, KT_ERR_SHAPE, "rope table: dim is %lld; an even number of columns is rotated",
                            (long long)dim);
    size_t size = (size_t)dim / 2 * sizeof(float);
    float *copy = program_new(p, size);
    if (!copy || !ROOM(p, p->tables))
        return KT_ERR_MEMORY;
    memcpy(copy, inv_freq, size);
    p->tables.at[p->tables.n] = (rope_table){.dim = dim, .scale = scale, .shift = shift, .inv_freq = copy,
                                             .resource = program_resource(p)};
    return p->tables.n++;
}

/* In f32, as the models were trained: the angle is rounded before its sine is taken. */
static void table_run(const void *arg, worker *w)
{
    const rope_table *r = &w->program->tables.at[((const rowwise *)arg)->table];
    int64_t t, last, half = r->dim / 2;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        float *cosine = r->data + t * r->dim, position = (float)(w->step->start + t + r->shift);
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

int kt_program_rope(kt_program *p, kt_view x, int32_t table, int64_t head_width, int64_t first,
                    int32_t interleaved)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "rope", x, KT_ROWS_TOKENS);
    if (failed)
        return failed;
    if (table < 0 || table >= p->tables.n)
        return program_fail(p, KT_ERR_RANGE, "rope: table %d of %d", table, p->tables.n);
    int64_t dim = p->tables.at[table].dim;
    if (head_width < 1 || x.width % head_width != 0 || first < 0 || first > head_width || dim > head_width - first)
        return program_fail(p, KT_ERR_SHAPE, "rope: columns %lld..%lld of runs of %lld in %d columns",
                            (long long)first, (long long)first + dim, (long long)head_width, x.width);
    rowwise *o = program_new(p, sizeof *o);
    if (!o)
        return KT_ERR_MEMORY;
    *o = (rowwise){.out = x, .head_width = head_width, .first = first, .interleaved = interleaved, .table = table};
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

/* ---- swiglu, gate, add, scale, select ----------------------------------------------------------- */

int program_glu(kt_program *p, const char *name, const kt_glu *given, kt_glu *glu)
{
    *glu = given ? *given : (kt_glu){.alpha = 1};
    if (!isfinite(glu->alpha) || !isfinite(glu->shift) || !(glu->limit >= 0) || !(glu->gate_limit >= 0))
        return program_fail(p, KT_ERR_RANGE, "%s: an activation of alpha %g, shift %g and limit %g, %g of gate", name,
                            (double)glu->alpha, (double)glu->shift, (double)glu->limit, (double)glu->gate_limit);
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

int kt_program_swiglu(kt_program *p, kt_view out, kt_view in, const kt_glu *given)
{
    kt_glu glu;
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "swiglu in", in, -1);
    if (!failed)
        failed = program_check_view(p, "swiglu out", out, program_domain(p, in));
    if (!failed)
        failed = program_check_overlap(p, "swiglu", out, in, 0);
    if (!failed)
        failed = program_glu(p, "swiglu", given, &glu);
    if (failed)
        return failed;
    if (in.width != ((int64_t)out.width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS * 2)
        return program_fail(p, KT_ERR_SHAPE, "swiglu: %d columns from %d; twice the outputs rounded up to 16 are "
                            "needed", out.width, in.width);
    return record(p, swiglu_run, &(rowwise){.out = out, .a = in, .glu = glu}, OWN_ROWS);
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

int kt_program_gate(kt_program *p, kt_view out, kt_view x, kt_view by, int32_t kind)
{
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
    if (kind < KT_GATE_SIGMOID || kind > KT_GATE_SOFTPLUS)
        return program_fail(p, KT_ERR_RANGE, "gate: kind %d", kind);
    int one = by.width < x.width;       /* for a run */
    rowwise o = {.out = out, .a = x, .b = by, .head_width = x.width / by.width, .gate = {one, kind}};
    if (kind == KT_GATE_SOFTPLUS)
        return record(p, softplus_run, &o, OWN_ROWS);
    o.head_width = one ? o.head_width : x.width;        /* as many columns as a kernel takes at once */
    return record(p, gate_run, &o, OWN_ROWS);
}

static void add_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
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
    return record(p, add_run, &(rowwise){.out = out, .a = a, .b = b}, OWN_ROWS);
}

static void scale_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *x = view_row(w, o->a, t);
        float *y = view_row(w, o->out, t);
        for (int64_t c = 0; c < o->out.width; c++)
            y[c] = x[c] * o->by;
    }
}

int kt_program_scale(kt_program *p, kt_view out, kt_view in, float by)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "scale in", in, -1);
    if (!failed)
        failed = program_check_view(p, "scale out", out, program_domain(p, in));
    if (!failed)
        failed = program_check_overlap(p, "scale", out, in, 1);
    if (failed)
        return failed;
    if (in.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "scale: %d columns to %d", in.width, out.width);
    if (!isfinite(by))
        return program_fail(p, KT_ERR_RANGE, "scale: by %g", (double)by);
    return record(p, scale_run, &(rowwise){.out = out, .a = in, .by = by}, OWN_ROWS);
}

static void select_run(const void *arg, worker *w)
{
    const rowwise *o = arg;
    int64_t i, last;
    for (own_rows(w, KT_ROWS_OUTPUTS, &i, &last); i < last; i++)
        memcpy(view_row(w, o->out, i), view_row(w, o->a, w->step->first_output + i),
               (size_t)o->out.width * sizeof(float));
}

int kt_program_select(kt_program *p, kt_view out, kt_view in)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "select in", in, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "select out", out, KT_ROWS_OUTPUTS);
    if (failed)
        return failed;
    if (in.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "select: %d columns to %d", in.width, out.width);
    /* Output rows are shared out otherwise than token rows, so any thread may read any token. */
    return record(p, select_run, &(rowwise){.out = out, .a = in}, ANY_ROWS);
}
