/* hyper.c - hyper-connections: a residual of several streams, mixed by weights that each token
 * computes.
 *
 * Every thread does the rows it owns, as in elementwise.c; a row's streams lie side by side. One row of 4 streams of
 * 4096 columns takes 9 us in all of them together (one thread of a Zen 4), which waiting for other threads would eat up.
 */
#include "program.h"

#include <math.h>
#include <string.h>

#define MOST_STREAMS 16
#define MOST_ITERATIONS 1000
#define BLOCK 512               /* columns of all streams that stay in the first-level cache */

typedef struct hyper {
    kt_view out, in, y, by;
    int32_t domain;
    int64_t streams;
    kt_mix mix;
} hyper;

/* Record one operation of a single phase that reads in, y and by where they have a width, and writes out. */
static int record(kt_program *p, phase_run *run, const hyper *given)
{
    hyper *o = program_new(p, sizeof *o);
    if (!o)
        return KT_ERR_MEMORY;
    *o = *given;
    o->domain = program_domain(p, given->out);
    program_operation(p);
    program_phase(p, run, o);
    const kt_view read[3] = {o->in, o->y, o->by};
    for (int i = 0; i < 3; i++)
        if (read[i].width)
            program_touch_view(p, read[i], OWN_ROWS);
    program_touch_view(p, o->out, OWN_ROWS | WRITES);
    return KT_OK;
}

/* KT_OK if the views are apart and of one domain. */
static int check_views(kt_program *p, const char *name, kt_view out, const kt_view *read, int n)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, name, out, -1);
    for (int i = 0; i < n && !failed; i++) {
        failed = program_check_view(p, name, read[i], program_domain(p, out));
        if (!failed)
            failed = program_check_overlap(p, name, out, read[i], 0);
    }
    return failed;
}

/* ---- spread ------------------------------------------------------------------------------------- */

static void spread_run(const void *arg, worker *w)
{
    const hyper *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
        for (int64_t s = 0; s < o->streams; s++)
            memcpy(view_row(w, o->out, t) + s * o->in.width, view_row(w, o->in, t),
                   (size_t)o->in.width * sizeof(float));
}

int kt_program_spread(kt_program *p, kt_view out, kt_view x)
{
    int failed = check_views(p, "spread", out, &x, 1);
    if (failed)
        return failed;
    if (out.width % x.width != 0 || out.width / x.width > MOST_STREAMS)
        return program_fail(p, KT_ERR_SHAPE, "spread: %d columns to %d; 1..%d streams are possible", x.width, out.width,
                            MOST_STREAMS);
    return record(p, spread_run, &(hyper){.out = out, .in = x, .streams = out.width / x.width});
}

/* ---- mix ---------------------------------------------------------------------------------------- */

static float sigmoid(float x)
{
    return 1 / (1 + expf(-x));
}

/* The softmax of a row of n, + eps. */
static void soften(float *row, int64_t n, float eps)
{
    float max = row[0], sum = 0;
    for (int64_t k = 1; k < n; k++)
        max = row[k] > max ? row[k] : max;
    for (int64_t k = 0; k < n; k++)
        sum += row[k] = expf(row[k] - max);
    for (int64_t k = 0; k < n; k++)
        row[k] = row[k] / sum + eps;
}

/* n lines of a matrix, `next` from one to the other and `step` along it, by their sums + eps. */
static void divide_lines(float *comb, int64_t n, int64_t next, int64_t step, float eps)
{
    for (int64_t i = 0; i < n; i++) {
        float *line = comb + i * next, sum = 0;
        for (int64_t k = 0; k < n; k++)
            sum += line[k * step];
        for (int64_t k = 0; k < n; k++)
            line[k * step] /= sum + eps;
    }
}

static void mix_row(const kt_mix *m, int32_t width, float *x)
{
    int64_t n = m->streams;
    float *comb = x + 2 * n;
    for (int64_t i = 0; i < n; i++)
        x[i] = sigmoid(x[i] * m->scale[0] + m->base[i]) + m->eps;
    if (width == n)
        return;
    for (int64_t i = n; i < 2 * n; i++)
        x[i] = 2 * sigmoid(x[i] * m->scale[1] + m->base[i]);
    for (int64_t i = 0; i < n * n; i++)
        comb[i] = comb[i] * m->scale[2] + m->base[2 * n + i];
    for (int64_t j = 0; j < n; j++)
        soften(comb + j * n, n, m->eps);
    divide_lines(comb, n, 1, n, m->eps);
    for (int32_t i = 1; i < m->iterations; i++) {
        divide_lines(comb, n, n, 1, m->eps);
        divide_lines(comb, n, 1, n, m->eps);
    }
}

static void mix_run(const void *arg, worker *w)
{
    const hyper *o = arg;
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
        mix_row(&o->mix, o->out.width, view_row(w, o->out, t));
}

int kt_program_mix(kt_program *p, kt_view x, const kt_mix *m)
{
    int failed = check_views(p, "mix", x, NULL, 0);
    if (failed)
        return failed;
    int32_t n = m->streams;
    if (n < 1 || n > MOST_STREAMS || (x.width != n && x.width != (2 + n) * n) || !m->scale || !m->base)
        return program_fail(p, KT_ERR_SHAPE, "mix: %d streams (1..%d) from %d columns%s", n, MOST_STREAMS, x.width,
                            m->scale && m->base ? "" : ", without scales or a base");
    if (m->iterations < 1 || m->iterations > MOST_ITERATIONS || !(m->eps >= 0) || !isfinite(m->eps))
        return program_fail(p, KT_ERR_RANGE, "mix: %d iterations (1..%d), eps %g", m->iterations, MOST_ITERATIONS,
                            (double)m->eps);
    return record(p, mix_run, &(hyper){.out = x, .mix = *m});
}

/* ---- collapse, expand --------------------------------------------------------------------------- */

/* out += by * x, or out = by * x of the first. */
static void add_scaled(float *restrict out, const float *restrict x, float by, int64_t n, int first)
{
    for (int64_t c = 0; first && c < n; c++)
        out[c] = by * x[c];
    for (int64_t c = 0; !first && c < n; c++)
        out[c] += by * x[c];
}

static void collapse_run(const void *arg, worker *w)
{
    const hyper *o = arg;
    int64_t t, last, width = o->out.width;
    for (own_rows(w, o->domain, &t, &last); t < last; t++)
        for (int64_t s = 0; s < o->streams; s++)
            add_scaled(view_row(w, o->out, t), view_row(w, o->in, t) + s * width, view_row(w, o->by, t)[s], width,
                       s == 0);
}

int kt_program_collapse(kt_program *p, kt_view out, kt_view x, kt_view by)
{
    const kt_view read[2] = {x, by};
    int failed = check_views(p, "collapse", out, read, 2);
    if (failed)
        return failed;
    if (by.width > MOST_STREAMS || x.width != (int64_t)by.width * out.width)
        return program_fail(p, KT_ERR_SHAPE, "collapse: %d streams (1..%d), %d columns to %d", by.width, MOST_STREAMS,
                            x.width, out.width);
    return record(p, collapse_run, &(hyper){.out = out, .in = x, .by = by, .streams = by.width});
}

static void expand_run(const void *arg, worker *w)
{
    const hyper *o = arg;
    int64_t t, last, width = o->y.width, n = o->streams;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        const float *in = view_row(w, o->in, t), *y = view_row(w, o->y, t);
        const float *post = view_row(w, o->by, t), *comb = post + n;
        for (int64_t first = 0; first < width; first += BLOCK)
            for (int64_t k = 0; k < n; k++) {
                int64_t columns = min64(BLOCK, width - first);
                float *out = view_row(w, o->out, t) + k * width + first;
                add_scaled(out, y + first, post[k], columns, 1);
                for (int64_t j = 0; j < n; j++)
                    add_scaled(out, in + j * width + first, comb[j * n + k], columns, 0);
            }
    }
}

int kt_program_expand(kt_program *p, kt_view out, kt_view x, kt_view y, kt_view by)
{
    const kt_view read[3] = {x, y, by};
    int failed = check_views(p, "expand", out, read, 3);
    if (failed)
        return failed;
    int64_t n = x.width / y.width;
    if (n < 1 || n > MOST_STREAMS || x.width != n * y.width || out.width != x.width || by.width != (1 + n) * n)
        return program_fail(p, KT_ERR_SHAPE, "expand: streams of %d columns (1..%d streams) in %d, to %d, by %d", y.width,
                            MOST_STREAMS, x.width, out.width, by.width);
    return record(p, expand_run, &(hyper){.out = out, .in = x, .y = y, .by = by, .streams = n});
}
