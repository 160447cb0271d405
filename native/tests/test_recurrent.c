/* test_recurrent.c - the causal convolution, the gated delta rule, the state space model and lightning attention against plain loops in double, on
 * every ISA row; the same bits however a sequence is cut into steps, on every row and for every team; and a state that is
 * read is not written. */
#include "check.h"

enum { TOKENS = 21, MOST_FLOATS = 40000 };

typedef struct shape {
    int heads, key_heads, dk, dv, width, per_key;
    float lowest;
    int scans;                  /* instead of the rule, behind a convolution with a bias: 1: the state space model, 2: lightning */
    int linear;
} shape;

static const shape shapes[] = {{4, 2, 24, 40, 4, 0, 0, 0, 0}, {3, 3, 20, 72, 3, 0, -1.5f, 0, 1},
                               {2, 1, 33, 16, 2, 1, 0, 0, 1}, {1, 1, 64, 144, 4, 1, -5, 0, 0},
                               {4, 2, 24, 40, 4, 0, 0, 1, 0}, {2, 1, 33, 72, 3, 0, 0, 1, 1},
                               {2, 2, 33, 33, 3, 0, 0, 2, 1}, {1, 1, 80, 80, 2, 0, 0, 2, 0}};
static const float dt_min = 0.4f, dt_max = 0.9f;    /* softplus of what is drawn is less, between, and more */

enum { STATES = 3 };

typedef struct fixture {
    shape s;
    kt_program *p;
    kt_view in, mixed, decay, beta, out;
    int keys, values, columns, decays;
    size_t rule_at, state_bytes;            /* where the rule's state begins */
    float *states;                          /* [STATES] */
    kt_run run;
    float weight[4 * 400], log_rate[4], rate[4], bias[80], skip[4], conv_bias[400], x[TOKENS][400], g[TOKENS][80], b[TOKENS][4];
} fixture;

static kt_view part(kt_view v, int first, int width)
{
    return (kt_view){v.buffer, v.column + first, width};
}

static void make_numbers(fixture *f, const shape *s)
{
    f->s = *s;
    f->keys = s->key_heads * s->dk;
    f->values = s->heads * s->dv;
    f->columns = 2 * f->keys + f->values;
    f->decays = s->per_key ? s->heads * s->dk : s->heads;
    fill(f->weight, (size_t)(s->width * f->columns), 1);
    fill(f->bias, (size_t)f->decays, 2);
    fill(f->skip, (size_t)s->heads, 3);
    fill(f->conv_bias, (size_t)f->columns, 4);
    for (int h = 0; h < s->heads; h++)
        f->log_rate[h] = logf(f->rate[h] = 0.05f * (float)(1 + h * h));
    for (int t = 0; t < TOKENS; t++) {
        fill(f->x[t], (size_t)f->columns, 10 + (uint64_t)t);
        fill(f->g[t], (size_t)f->decays, 50 + (uint64_t)t);
        fill(f->b[t], (size_t)s->heads, 90 + (uint64_t)t);
    }
}

static void record(fixture *f, kt_pool *pool)
{
    const shape *s = &f->s;
    kt_program *p = f->p = make_program(pool, TOKENS, 0, 0);
    f->in = make_view(p, f->columns, KT_ROWS_TOKENS);
    f->mixed = make_view(p, f->columns, KT_ROWS_TOKENS);
    f->decay = make_view(p, f->decays, KT_ROWS_TOKENS);
    f->beta = make_view(p, s->heads, KT_ROWS_TOKENS);
    f->out = make_view(p, f->values, KT_ROWS_TOKENS);
    f->rule_at = ((size_t)(f->columns * (s->width - 1)) * sizeof(float) + 63) / 64 * 64;
    f->state_bytes = f->rule_at + (size_t)(s->heads * s->dk * ((s->dv + 15) / 16 * 16)) * sizeof(float);
    kt_conv conv = {s->width, f->weight, 0, s->scans ? f->conv_bias : NULL, s->linear};
    kt_scan scan = {s->heads, s->key_heads, s->dk, s->dv, f->log_rate, f->bias, f->skip, dt_min, dt_max, f->rule_at};
    kt_delta rule = {s->heads, s->key_heads, s->dk, s->dv, f->log_rate, f->bias, f->rule_at, s->lowest};
    kt_view q = part(f->mixed, 0, f->keys), k = part(f->mixed, f->keys, f->keys);
    kt_view v = part(f->mixed, 2 * f->keys, f->values);
    OK(kt_program_conv(p, f->mixed, f->in, &conv), kt_program_error(p));
    if (s->scans == 2)
        OK(kt_program_lightning(p, f->out, q, k, v, &(kt_lightning){s->heads, s->dk, f->rate, f->rule_at}),
           kt_program_error(p));
    else if (s->scans)
        OK(kt_program_scan(p, f->out, v, k, q, f->decay, &scan), kt_program_error(p));
    else
        OK(kt_program_delta(p, f->out, q, k, v, f->decay, f->beta, &rule), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
}

/* ---- the reference ------------------------------------------------------------------------------ */

static void expect_conv(const fixture *f, int t, double *out)
{
    for (int c = 0; c < f->columns; c++) {
        double sum = f->s.scans ? (double)f->conv_bias[c] : 0;
        for (int i = 0; i < f->s.width; i++) {
            int row = t - f->s.width + 1 + i;
            sum += row < 0 ? 0 : (double)f->weight[i * f->columns + c] * (double)f->x[row][c];
        }
        out[c] = f->s.linear ? sum : sum / (1 + exp(-sum));
    }
}

static void unit(const double *x, int n, double *out)
{
    double sum = 1e-6;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < n; i++)
        out[i] = x[i] / sqrt(sum);
}

/* One token of one head; state [dk][dv]. */
static void expect_head(const fixture *f, int t, int h, const double *mixed, double *state, double *out)
{
    const shape *s = &f->s;
    int from = h / (s->heads / s->key_heads) * s->dk;
    double q[64], k[64], b = 1 / (1 + exp(-(double)f->b[t][h]));
    unit(mixed + from, s->dk, q);
    unit(mixed + f->keys + from, s->dk, k);
    for (int j = 0; j < s->dk; j++) {
        int at = s->per_key ? h * s->dk + j : h;
        double rate = exp((double)f->log_rate[h]), x = (double)f->g[t][at] + (double)f->bias[at];
        double g = exp(s->lowest != 0 ? (double)s->lowest / (1 + exp(-rate * x)) : -rate * log1p(exp(x)));
        for (int c = 0; c < s->dv; c++)
            state[j * s->dv + c] *= g;
    }
    for (int c = 0; c < s->dv; c++) {
        double told = 0;
        for (int j = 0; j < s->dk; j++)
            told += state[j * s->dv + c] * k[j];
        double delta = b * (mixed[2 * f->keys + h * s->dv + c] - told);
        out[h * s->dv + c] = 0;
        for (int j = 0; j < s->dk; j++) {
            state[j * s->dv + c] += k[j] * delta;
            out[h * s->dv + c] += state[j * s->dv + c] * q[j] / sqrt(s->dk);
        }
    }
}

/* The same of the state space model, or of lightning attention. */
static void expect_scan(const fixture *f, int t, int h, const double *mixed, double *state, double *out)
{
    const shape *s = &f->s;
    int from = h / (s->heads / s->key_heads) * s->dk;
    const double *c = mixed + from, *b = mixed + f->keys + from, *x = mixed + 2 * f->keys + h * s->dv;
    double dt = log1p(exp((double)f->g[t][h] + (double)f->bias[h]));
    dt = fmin(fmax(dt, (double)dt_min), (double)dt_max);
    double skip = (double)f->skip[h];
    if (s->scans == 2)
        dt = 1, skip = 0;
    double kept = exp(-exp((double)f->log_rate[h]) * dt);
    for (int i = 0; i < s->dv; i++) {
        out[h * s->dv + i] = skip * x[i];
        for (int j = 0; j < s->dk; j++) {
            state[j * s->dv + i] = kept * state[j * s->dv + i] + b[j] * dt * x[i];
            out[h * s->dv + i] += state[j * s->dv + i] * c[j];
        }
    }
}

/* want [TOKENS][values] */
static void expect(const fixture *f, double *want)
{
    double mixed[400], *state = need((size_t)(f->s.heads * f->s.dk * f->s.dv) * sizeof *state);
    for (int t = 0; t < TOKENS; t++) {
        expect_conv(f, t, mixed);
        for (int h = 0; h < f->s.heads; h++)
            (f->s.scans ? expect_scan : expect_head)(f, t, h, mixed, state + h * f->s.dk * f->s.dv, want + t * f->values);
    }
    free(state);
}

/* ---- the laws ----------------------------------------------------------------------------------- */

/* A step of one run at `start`, from one state to the other. */
static kt_step step_at(fixture *f, int start, int n, int32_t state, int32_t next)
{
    for (int t = 0; t < n; t++) {
        memcpy(row_of(f->p, f->in, t), f->x[start + t], (size_t)f->columns * sizeof(float));
        memcpy(row_of(f->p, f->decay, t), f->g[start + t], (size_t)f->decays * sizeof(float));
        memcpy(row_of(f->p, f->beta, t), f->b[start + t], (size_t)f->s.heads * sizeof(float));
    }
    f->run = (kt_run){.n_tokens = n, .start = start, .first_output = n, .state = state, .next_state = next};
    return (kt_step){.runs = &f->run, .n_runs = 1, .states = f->states, .n_states = STATES,
                     .state_bytes = f->state_bytes};
}

/* got [TOKENS][values] and the last state, in steps of `each`. */
static void run(fixture *f, int each, float *got, float *last)
{
    float *before = need(f->state_bytes), *states[2];
    int32_t now = 0;
    f->states = need(STATES * f->state_bytes);
    for (size_t i = 0; i < 2; i++)
        states[i] = f->states + i * f->state_bytes / sizeof(float);
    for (int t = 0; t < TOKENS; t += each, now = !now) {
        int n = t + each < TOKENS ? each : TOKENS - t;
        kt_step s = step_at(f, t, n, t ? now : -1, !now);
        memcpy(before, states[now], f->state_bytes);
        memset(states[!now], 0xff, f->state_bytes);
        OK(kt_program_run(f->p, &s), kt_program_error(f->p));
        CHECK(memcmp(before, states[now], f->state_bytes) == 0, "a step wrote the state that it read");
        for (int i = 0; i < n; i++)
            memcpy(got + (t + i) * f->values, row_of(f->p, f->out, i), (size_t)f->values * sizeof(float));
    }
    memcpy(last, (char *)states[now] + f->rule_at, f->state_bytes - f->rule_at);
    free(f->states);
    f->states = NULL;
    free(before);
}

static void check_shape(const shape *s)
{
    static float first[MOST_FLOATS], first_state[MOST_FLOATS], got[MOST_FLOATS], state[MOST_FLOATS];
    static double want[MOST_FLOATS];
    static fixture f;
    const char *rows[8];
    int n = usable_rows(rows), seen = 0;
    make_numbers(&f, s);
    expect(&f, want);
    for (int i = 0; i < n; i++)
        for (int32_t threads = 1; threads <= 3; threads++) {
            kt_pool *pool = make_pool(rows[i], threads);
            record(&f, pool);
            size_t bytes = f.state_bytes - f.rule_at;
            for (int each = 1; each <= TOKENS; each = each == 1 ? 5 : each + 16, seen++) {
                run(&f, each, seen ? got : first, seen ? state : first_state);
                CHECK(!seen || (memcmp(got, first, (size_t)(TOKENS * f.values) * sizeof(float)) == 0 &&
                                memcmp(state, first_state, bytes) == 0),
                      "%s, %d threads, steps of %d give other bits", rows[i], threads, each);
            }
            kt_program_free(f.p);
            kt_pool_free(pool);
        }
    double off = distance(first, want, TOKENS * f.values);
    CHECK(off < 1e-5, "%d heads of %d and %d are off by %g", s->heads, s->dk, s->dv, off);
}

static void check_refused(void)
{
    static fixture f;
    make_numbers(&f, &shapes[0]);
    kt_pool *pool = make_pool(NULL, 1);
    record(&f, pool);
    kt_step s = step_at(&f, 0, 2, -1, 0);
    s.states = NULL;
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "states of 0 bytes");
    f.states = need(STATES * f.state_bytes);
    s = step_at(&f, 0, 2, -1, 1);
    s.state_bytes -= 4;
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "is needed");
    s = step_at(&f, 0, 2, -1, STATES);
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "run 0: states -1 and 3 of 3");
    s = step_at(&f, 0, 2, 0, -1);
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "run 0: states 0 and -1 of 3");
    s = step_at(&f, 1, 2, -1, 1);
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "before position 1");
    s = step_at(&f, 1, 2, 1, 1);
    REFUSED(kt_program_run(f.p, &s), KT_ERR_RANGE, kt_program_error(f.p), "run 0 writes state 1, which run 0 reads");
    kt_program_free(f.p);
    kt_program *p = make_program(pool, 4, 0, 0);
    kt_view a = make_view(p, 64, KT_ROWS_TOKENS), b = make_view(p, 64, KT_ROWS_TOKENS);
    kt_conv conv = {1, f.weight, 0, NULL, 0};
    REFUSED(kt_program_conv(p, a, b, &conv), KT_ERR_SHAPE, kt_program_error(p), "over 1 rows");
    conv = (kt_conv){4, f.weight, 32, NULL, 0};
    REFUSED(kt_program_conv(p, a, b, &conv), KT_ERR_SHAPE, kt_program_error(p), "state_offset 32");
    REFUSED(kt_program_conv(p, a, a, &conv), KT_ERR_SHAPE, kt_program_error(p), "overlap");
    kt_delta rule = {2, 1, 8, 16, f.log_rate, f.bias, 0, 0};
    kt_view q = part(a, 0, 8), k = part(a, 8, 8), v = part(a, 16, 32);
    REFUSED(kt_program_delta(p, part(b, 0, 32), q, k, v, part(a, 48, 3), part(a, 52, 2), &rule), KT_ERR_SHAPE,
            kt_program_error(p), "decay 3");
    REFUSED(kt_program_delta(p, part(b, 0, 32), q, k, v, part(a, 47, 2), part(a, 52, 2), &rule), KT_ERR_SHAPE,
            kt_program_error(p), "overlap");
    const float lowest[] = {0.5f, NAN, -INFINITY};
    for (int i = 0; i < 3; i++) {
        rule.lowest = lowest[i];
        REFUSED(kt_program_delta(p, part(b, 0, 32), q, k, v, part(a, 48, 2), part(a, 52, 2), &rule), KT_ERR_RANGE,
                kt_program_error(p), "the lowest logarithm");
    }
    kt_scan scan = {2, 1, 8, 16, f.log_rate, f.bias, f.skip, 0, INFINITY, 0};
    REFUSED(kt_program_scan(p, part(b, 0, 32), v, k, q, part(a, 48, 3), &scan), KT_ERR_SHAPE, kt_program_error(p), "dt 3");
    REFUSED(kt_program_scan(p, part(b, 0, 32), v, k, q, part(a, 47, 2), &scan), KT_ERR_SHAPE, kt_program_error(p),
            "overlap");
    scan.skip = NULL;
    REFUSED(kt_program_scan(p, part(b, 0, 32), v, k, q, part(a, 48, 2), &scan), KT_ERR_SHAPE, kt_program_error(p),
            "2 heads");
    scan.skip = f.skip;
    const float lows[] = {-1, NAN, 3}, highs[] = {1, 1, 2};
    for (int i = 0; i < 3; i++) {
        scan.dt_min = lows[i];
        scan.dt_max = highs[i];
        REFUSED(kt_program_scan(p, part(b, 0, 32), v, k, q, part(a, 48, 2), &scan), KT_ERR_RANGE, kt_program_error(p),
                "dt between");
    }
    kt_lightning lightning = {1, 16, (float[1]){-1}, 0};
    REFUSED(kt_program_lightning(p, part(b, 0, 16), part(a, 0, 16), part(a, 16, 16), part(a, 32, 16), &lightning),
            KT_ERR_RANGE, kt_program_error(p), "head 0 decays at a rate of -1");
    REFUSED(kt_program_lightning(p, part(b, 0, 16), part(a, 0, 16), part(a, 16, 15), part(a, 32, 16), &lightning),
            KT_ERR_SHAPE, kt_program_error(p), "k 15");
    REFUSED(kt_program_lightning(p, part(b, 0, 16), part(a, 0, 16), part(a, 8, 16), part(a, 32, 16), &lightning),
            KT_ERR_SHAPE, kt_program_error(p), "overlap");
    rule.key_heads = 0;
    REFUSED(kt_program_delta(p, part(b, 0, 32), q, k, v, part(a, 48, 2), part(a, 52, 2), &rule), KT_ERR_SHAPE,
            kt_program_error(p), "0 key heads");
    kt_program_free(p);
    kt_pool_free(pool);
    free(f.states);
}

int main(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&shapes[i]);
    check_refused();
    return report("test_recurrent");
}
