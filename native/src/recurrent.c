/* recurrent.c - operations with a fixed-size state for each sequence: the causal convolution,
 * the gated delta rule and the state space model of Mamba-2.
 *
 * A run reads the state that was, run.state, and writes the one that will be, run.next_state: a place of
 * both is touched by one phase of one operation only, so states need no barriers.
 */
#include "program.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MOST_WIDTH 16
#define MOST_KEYS 4096
#define PANEL_COLUMNS 64    /* of a head's state: with 128 keys 32 kB, a first-level cache */
#define NORM_EPS 1e-6

/* ---- convolution -------------------------------------------------------------------------------- */

typedef struct conv {
    kt_view out, in;
    int32_t width, linear;
    const float *weight, *bias;
    const float *zeros;             /* [columns]: rows before the first */
    size_t offset;
} conv;

/* Row t of a run's input, the first of which is row `first` of the step; of before the run where t is negative. */
static const float *conv_row(const conv *o, const worker *w, const kt_run *run, int64_t first, int64_t t)
{
    const float *state = state_before(w, run, o->offset);
    if (t >= 0)
        return view_row(w, o->in, first + t);
    return state ? state + (o->width - 1 + t) * o->in.width : o->zeros;
}

/* out[c] = bias[c] + sum over i of rows[i][c] * weight[i][c], i < width and c < n: few of a step, so no kernel has it. */
static void convolve(const float *const *rows, const float *weight, const float *bias, int64_t width, int64_t n,
                     float *restrict out)
{
    memcpy(out, bias, (size_t)n * sizeof *out);
    for (int64_t i = 0; i < width; i++)
        for (int64_t c = 0; c < n; c++)
            out[c] += rows[i][c] * weight[i * n + c];
}

static void conv_run(const void *arg, worker *w)
{
    const conv *o = arg;
    const float *rows[MOST_WIDTH];
    int64_t row, last, kept = o->width - 1, columns = o->in.width;
    for (own_rows(w, KT_ROWS_TOKENS, &row, &last); row < last; row++) {
        const kt_run *run = run_of(w, row);
        int64_t t = position_of(w, row) - run->start;
        for (int64_t i = 0; i < o->width; i++)
            rows[i] = conv_row(o, w, run, row - t, t - kept + i);
        (o->linear ? convolve : w->kernels->conv)(rows, o->weight, o->bias, o->width, columns, view_row(w, o->out, row));
        for (int64_t i = 0; t == run->n_tokens - 1 && i < kept; i++)
            memcpy(state_after(w, run, o->offset) + i * columns, rows[i + 1], (size_t)columns * sizeof(float));
    }
}

int kt_program_conv(kt_program *p, kt_view out, kt_view x, const kt_conv *given)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "conv x", x, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_view(p, "conv out", out, KT_ROWS_TOKENS);
    if (!failed)
        failed = program_check_overlap(p, "conv", out, x, 0);
    if (failed)
        return failed;
    if (x.width != out.width || given->width < 2 || given->width > MOST_WIDTH || !given->weight)
        return program_fail(p, KT_ERR_SHAPE, "conv: %d columns to %d over %d rows (2..%d)%s", x.width, out.width,
                            given->width, MOST_WIDTH, given->weight ? "" : ", without weights");
    size_t row = (size_t)x.width * sizeof(float);
    failed = program_reserve_state(p, "conv", given->state_offset, row * (size_t)(given->width - 1));
    conv *o = failed ? NULL : program_new(p, sizeof *o);
    float *zeros = o ? program_new(p, row) : NULL;
    if (!zeros)
        return failed ? failed : KT_ERR_MEMORY;
    *o = (conv){.out = out, .in = x, .width = given->width, .linear = given->linear, .weight = given->weight,
                .zeros = zeros, .bias = given->bias ? given->bias : zeros, .offset = given->state_offset};
    program_operation(p);
    program_phase(p, conv_run, o);
    program_touch_view(p, x, ANY_ROWS);
    program_touch_view(p, out, OWN_ROWS | WRITES);
    return KT_OK;
}

/* ---- gated delta rule --------------------------------------------------------------------------- */

typedef struct delta {
    kt_view out, q, k, v, decay, beta;
    int64_t heads, key_heads, dk, dv;
    int64_t panels;                     /* of each head's columns */
    float *rate, lowest;
    const float *bias;
    const float *q_gain, *k_gain;       /* [dk], all the same: RMSNorm with it is division by the length */
    size_t offset;
} delta;

static int64_t ceil16(int64_t n)
{
    return (n + 15) / 16 * 16;
}

/* log(1 + e^x) */
static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* What is left of a state, by what the token says of it. */
static float decay_of(const delta *o, float rate, float x)
{
    return expf(o->lowest != 0 ? o->lowest * sigmoid(rate * x) : -rate * softplus(x));
}

static void prepare_run(const void *arg, worker *w)
{
    const delta *o = arg;
    int64_t t, last, each = o->decay.width / o->heads;
    float eps = (float)(NORM_EPS / (double)o->dk);
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        float *q = view_row(w, o->q, t), *k = view_row(w, o->k, t);
        float *decay = view_row(w, o->decay, t), *beta = view_row(w, o->beta, t);
        for (int64_t h = 0; h < o->key_heads; h++) {
            w->kernels->norm(q + h * o->dk, o->q_gain, o->dk, eps, q + h * o->dk);
            w->kernels->norm(k + h * o->dk, o->k_gain, o->dk, eps, k + h * o->dk);
        }
        for (int64_t c = 0; c < o->decay.width; c++)
            decay[c] = decay_of(o, o->rate[c / each], decay[c] + o->bias[c]);
        for (int64_t h = 0; h < o->heads; h++)
            beta[h] = sigmoid(beta[h]);
    }
}

/* Panel `panel` of head `h`, for all tokens of a run. */
static delta_block block_at(const delta *o, const worker *w, int64_t number, int64_t h, int64_t panel)
{
    const kt_run *run = &w->batch->runs[number];
    int64_t row = w->batch->first[number];
    int64_t first = panel * PANEL_COLUMNS, each = o->decay.width / o->heads, kh = h / (o->heads / o->key_heads);
    int64_t at = h * o->dk * ceil16(o->dv) + o->dk * first;
    const float *state = state_before(w, run, o->offset);
    delta_block d = {.n_tokens = run->n_tokens, .dk = o->dk,
                     .columns = min64(PANEL_COLUMNS, o->dv - first),
                     .q = view_row(w, o->q, row) + kh * o->dk, .q_stride = view_stride(w, o->q),
                     .k = view_row(w, o->k, row) + kh * o->dk, .k_stride = view_stride(w, o->k),
                     .v = view_row(w, o->v, row) + h * o->dv + first, .v_stride = view_stride(w, o->v),
                     .decay = view_row(w, o->decay, row) + h * each, .decay_stride = view_stride(w, o->decay),
                     .decay_step = each > 1, .beta = view_row(w, o->beta, row) + h,
                     .beta_stride = view_stride(w, o->beta), .state = state ? state + at : NULL,
                     .next = state_after(w, run, o->offset) + at, .out = view_row(w, o->out, row) + h * o->dv + first,
                     .out_stride = view_stride(w, o->out), .scratch = (float *)(void *)local_scratch(w)};
    d.width = ceil16(d.columns);
    return d;
}

static void delta_run(const void *arg, worker *w)
{
    const delta *o = arg;
    int64_t blocks = o->heads * o->panels;
    for (int64_t i; (i = worker_take(w, 1)) < w->batch->n_runs * blocks;) {
        delta_block d = block_at(o, w, i / blocks, i % blocks / o->panels, i % o->panels);
        w->kernels->delta_rule(&d);
    }
}

static int check_delta(kt_program *p, const kt_view v[6], const kt_delta *s)
{
    static const char *const names[] = {"delta out", "delta q", "delta k", "delta v", "delta decay", "delta beta"};
    int failed = program_open(p);
    for (int i = 0; i < 6 && !failed; i++)
        failed = program_check_view(p, names[i], v[i], KT_ROWS_TOKENS);
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < i && !failed; j++)
            failed = program_check_overlap(p, "delta", v[i], v[j], 0);
    if (failed)
        return failed;
    int64_t heads = s->heads, keys = (int64_t)s->key_heads * s->dk;
    if (heads < 1 || s->key_heads < 1 || heads % s->key_heads != 0 || s->dk < 1 || s->dk > MOST_KEYS || s->dv < 1 ||
        v[1].width != keys || v[2].width != keys || v[3].width != heads * s->dv || v[0].width != heads * s->dv ||
        (v[4].width != heads && v[4].width != heads * s->dk) || v[5].width != heads || !s->log_rate || !s->bias)
        return program_fail(p, KT_ERR_SHAPE, "delta: %d heads of %d columns and %d key heads of %d (at most %d), but "
                            "q has %d, k %d, v %d, decay %d, beta %d, out %d", s->heads, s->dv, s->key_heads, s->dk,
                            MOST_KEYS, v[1].width, v[2].width, v[3].width, v[4].width, v[5].width, v[0].width);
    if (!(s->lowest <= 0 && s->lowest >= -FLT_MAX))
        return program_fail(p, KT_ERR_RANGE, "delta: the lowest logarithm of what is left is %g, not negative or 0",
                            (double)s->lowest);
    return KT_OK;
}

int kt_program_delta(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, kt_view decay, kt_view beta,
                     const kt_delta *s)
{
    const kt_view views[6] = {out, q, k, v, decay, beta};
    int failed = check_delta(p, views, s);
    size_t size = failed ? 0 : size_mul((size_t)s->heads * (size_t)s->dk, (size_t)ceil16(s->dv) * sizeof(float));
    if (!failed && size > INT64_MAX / 4)
        return program_fail(p, KT_ERR_SHAPE, "delta: a state of %zu bytes", size);
    if (!failed)
        failed = program_reserve_state(p, "delta", s->state_offset, size);
    delta *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    double dk = s->dk;
    *o = (delta){.out = out, .q = q, .k = k, .v = v, .decay = decay, .beta = beta, .heads = s->heads,
                 .key_heads = s->key_heads, .dk = s->dk, .dv = s->dv,
                 .panels = (s->dv + PANEL_COLUMNS - 1) / PANEL_COLUMNS, .rate = program_constant(p, s->heads, 0),
                 .bias = s->bias, .q_gain = program_constant(p, s->dk, 1 / dk), .k_gain = program_constant(p, s->dk, 1 / sqrt(dk)),
                 .offset = s->state_offset, .lowest = s->lowest};
    if (!o->rate || !o->q_gain || !o->k_gain)
        return KT_ERR_MEMORY;
    for (int32_t h = 0; h < s->heads; h++)
        o->rate[h] = expf(s->log_rate[h]);
    program_reserve(p, 0, 2 * (size_t)s->dk * sizeof(float));
    program_operation(p);
    program_phase(p, prepare_run, o);
    const kt_view changed[4] = {o->q, o->k, decay, beta};
    for (int i = 0; i < 4; i++)
        program_touch_view(p, changed[i], OWN_ROWS | WRITES);
    program_phase(p, delta_run, o);
    for (int i = 1; i < 6; i++)
        program_touch_view(p, views[i], ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}

/* ---- state space model -------------------------------------------------------------------------- */

typedef struct scan {
    kt_view out, x, b, c, dt;
    int64_t heads, groups, state_dim, head_dim;
    int64_t panels;                     /* of each head's columns */
    float *rate, dt_min, dt_max;
    const float *bias, *skip;           /* NULL in lightning attention, where each dt is 1 and nothing passes by */
    size_t offset;
} scan;

static void prepare_scan(const void *arg, worker *w)
{
    const scan *o = arg;
    int64_t t, last;
    for (own_rows(w, KT_ROWS_TOKENS, &t, &last); t < last; t++) {
        float *dt = view_row(w, o->dt, t);
        for (int64_t h = 0; h < o->heads; h++)
            dt[h] = fminf(fmaxf(softplus(dt[h] + o->bias[h]), o->dt_min), o->dt_max);
    }
}

/* Panel `panel` of head `h`, for all tokens of a run. */
static scan_block scan_at(const scan *o, const worker *w, int64_t number, int64_t h, int64_t panel)
{
    static const float one = 1;
    const kt_run *run = &w->batch->runs[number];
    int64_t row = w->batch->first[number], first = panel * PANEL_COLUMNS;
    int64_t from = h / (o->heads / o->groups) * o->state_dim, column = h * o->head_dim + first;
    int64_t at = h * o->state_dim * ceil16(o->head_dim) + o->state_dim * first;
    const float *state = state_before(w, run, o->offset);
    scan_block s = {.n_tokens = run->n_tokens, .state_dim = o->state_dim,
                    .columns = min64(PANEL_COLUMNS, o->head_dim - first), .rate = o->rate[h],
                    .skip = o->skip ? o->skip[h] : 0,
                    .x = view_row(w, o->x, row) + column, .x_stride = view_stride(w, o->x),
                    .b = view_row(w, o->b, row) + from, .b_stride = view_stride(w, o->b),
                    .c = view_row(w, o->c, row) + from, .c_stride = view_stride(w, o->c),
                    .dt = o->bias ? view_row(w, o->dt, row) + h : &one, .dt_stride = o->bias ? view_stride(w, o->dt) : 0,
                    .state = state ? state + at : NULL, .next = state_after(w, run, o->offset) + at,
                    .out = view_row(w, o->out, row) + column, .out_stride = view_stride(w, o->out)};
    s.width = ceil16(s.columns);
    return s;
}

static void scan_run(const void *arg, worker *w)
{
    const scan *o = arg;
    int64_t blocks = o->heads * o->panels;
    for (int64_t i; (i = worker_take(w, 1)) < w->batch->n_runs * blocks;) {
        scan_block s = scan_at(o, w, i / blocks, i % blocks / o->panels, i % o->panels);
        w->kernels->scan(&s);
    }
}

static int check_scan(kt_program *p, const kt_view v[5], const kt_scan *s)
{
    static const char *const names[] = {"scan out", "scan x", "scan b", "scan c", "scan dt"};
    int failed = program_open(p);
    for (int i = 0; i < 5 && !failed; i++)
        failed = program_check_view(p, names[i], v[i], KT_ROWS_TOKENS);
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < i && !failed; j++)
            failed = program_check_overlap(p, "scan", v[i], v[j], 0);
    if (failed)
        return failed;
    int64_t values = (int64_t)s->heads * s->head_dim, each = (int64_t)s->groups * s->state_dim;
    if (s->heads < 1 || s->groups < 1 || s->heads % s->groups != 0 || s->state_dim < 1 || s->state_dim > MOST_KEYS ||
        s->head_dim < 1 || v[0].width != values || v[1].width != values || v[2].width != each || v[3].width != each ||
        v[4].width != s->heads || !s->log_rate || !s->bias || !s->skip)
        return program_fail(p, KT_ERR_SHAPE, "scan: %d heads of %d columns in %d groups, a state of %d (at most %d), but "
                            "x has %d, b %d, c %d, dt %d, out %d", s->heads, s->head_dim, s->groups, s->state_dim,
                            MOST_KEYS, v[1].width, v[2].width, v[3].width, v[4].width, v[0].width);
    if (!(s->dt_min >= 0 && s->dt_min <= s->dt_max))
        return program_fail(p, KT_ERR_RANGE, "scan: dt between %g and %g", (double)s->dt_min, (double)s->dt_max);
    return KT_OK;
}

int kt_program_scan(kt_program *p, kt_view out, kt_view x, kt_view b, kt_view c, kt_view dt, const kt_scan *s)
{
    const kt_view views[5] = {out, x, b, c, dt};
    int failed = check_scan(p, views, s);
    size_t size = failed ? 0 : size_mul((size_t)s->heads * (size_t)s->state_dim, (size_t)ceil16(s->head_dim) * sizeof(float));
    if (!failed && size > INT64_MAX / 4)
        return program_fail(p, KT_ERR_SHAPE, "scan: a state of %zu bytes", size);
    if (!failed)
        failed = program_reserve_state(p, "scan", s->state_offset, size);
    scan *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    *o = (scan){.out = out, .x = x, .b = b, .c = c, .dt = dt, .heads = s->heads, .groups = s->groups,
                .state_dim = s->state_dim, .head_dim = s->head_dim,
                .panels = (s->head_dim + PANEL_COLUMNS - 1) / PANEL_COLUMNS, .rate = program_constant(p, s->heads, 0),
                .dt_min = s->dt_min, .dt_max = s->dt_max, .bias = s->bias, .skip = s->skip, .offset = s->state_offset};
    if (!o->rate)
        return KT_ERR_MEMORY;
    for (int32_t h = 0; h < s->heads; h++)
        o->rate[h] = expf(s->log_rate[h]);
    program_operation(p);
    program_phase(p, prepare_scan, o);
    program_touch_view(p, dt, OWN_ROWS | WRITES);
    program_phase(p, scan_run, o);
    for (int i = 1; i < 5; i++)
        program_touch_view(p, views[i], ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}

/* ---- lightning attention --------------------------------------------------------------------------- */

static int check_lightning(kt_program *p, const kt_view v[4], const kt_lightning *s)
{
    static const char *const names[] = {"lightning out", "lightning q", "lightning k", "lightning v"};
    int failed = program_open(p);
    for (int i = 0; i < 4 && !failed; i++)
        failed = program_check_view(p, names[i], v[i], KT_ROWS_TOKENS);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i && !failed; j++)
            failed = program_check_overlap(p, "lightning", v[i], v[j], 0);
    if (failed)
        return failed;
    int64_t width = (int64_t)s->heads * s->head_dim;
    if (s->heads < 1 || s->head_dim < 1 || s->head_dim > MOST_KEYS || v[0].width != width || v[1].width != width ||
        v[2].width != width || v[3].width != width || !s->rates)
        return program_fail(p, KT_ERR_SHAPE, "lightning: %d heads of %d columns (at most %d), but q has %d, k %d, v %d, "
                            "out %d", s->heads, s->head_dim, MOST_KEYS, v[1].width, v[2].width, v[3].width, v[0].width);
    for (int32_t h = 0; h < s->heads; h++)
        if (!(s->rates[h] >= 0))
            return program_fail(p, KT_ERR_RANGE, "lightning: head %d decays at a rate of %g", h, (double)s->rates[h]);
    return KT_OK;
}

int kt_program_lightning(kt_program *p, kt_view out, kt_view q, kt_view k, kt_view v, const kt_lightning *s)
{
    const kt_view views[4] = {out, q, k, v};
    int failed = check_lightning(p, views, s);
    size_t size = failed ? 0 : size_mul((size_t)s->heads * (size_t)s->head_dim, (size_t)ceil16(s->head_dim) * sizeof(float));
    if (!failed && size > INT64_MAX / 4)
        return program_fail(p, KT_ERR_SHAPE, "lightning: a state of %zu bytes", size);
    if (!failed)
        failed = program_reserve_state(p, "lightning", s->state_offset, size);
    scan *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    *o = (scan){.out = out, .x = v, .b = k, .c = q, .heads = s->heads, .groups = s->heads, .state_dim = s->head_dim,
                .head_dim = s->head_dim, .panels = (s->head_dim + PANEL_COLUMNS - 1) / PANEL_COLUMNS,
                .rate = program_constant(p, s->heads, 0), .offset = s->state_offset};
    if (!o->rate)
        return KT_ERR_MEMORY;
    memcpy(o->rate, s->rates, (size_t)s->heads * sizeof *o->rate);
    program_operation(p);
    program_phase(p, scan_run, o);
    for (int i = 1; i < 4; i++)
        program_touch_view(p, views[i], ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
