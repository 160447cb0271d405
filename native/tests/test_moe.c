/* test_moe.c - linear and routed experts against plain loops: every ISA row, format and awkward size;
 * and the law that integer formats give the same bits for every thread and token count. */
#include "check.h"

/* With 17 experts a task has all columns of one if there are one or two threads, a part if there are more. */
enum { EXPERTS = 17, TOP_K = 3, MOST = 150 };

typedef struct layer {
    int32_t hidden, width;
    test_weight router, gate_up, down, plain;
    float *bias;
    int64_t rows;               /* of an expert's gate_up */
    kt_glu glu;
    kt_experts options;         /* with biases, or nothing */
} layer;

enum { PLAIN, OPTIONS, UNGATED };

typedef struct run {
    kt_program *program;
    kt_view x, logits, out, plain;
    int32_t routing;
} run;

/* Biases of the experts, and an activation that clamps a good part of gate and up. */
static void give_options(layer *l, int64_t padded)
{
    float *wide = need(sizeof(float) * (size_t)(EXPERTS * 2 * padded));
    float *narrow = need(sizeof(float) * (size_t)(EXPERTS * l->hidden));
    fill(wide, (size_t)(EXPERTS * 2 * padded), 6);
    fill(narrow, (size_t)(EXPERTS * l->hidden), 7);
    l->glu = (kt_glu){1.702f, 0.5f, 1, 0.7f, 0};
    l->options = (kt_experts){.gate_up_bias = wide, .down_bias = narrow};
}

static layer make_layer(kt_pool *pool, const kt_format *format, int32_t hidden, int32_t width, int kind)
{
    int64_t padded = (width + 15) / 16 * 16;
    layer l = {.hidden = hidden, .width = width, .rows = kind == UNGATED ? width : 2 * padded, .bias = need(200),
               .glu = {.alpha = 1, .ungated = kind == UNGATED}};
    l.router = make_weight(pool, &test_formats[F32].format, EXPERTS, hidden, 1, 1);
    l.gate_up = make_weight(pool, format, l.rows, hidden, EXPERTS, 2);
    l.down = make_weight(pool, format, hidden, width, EXPERTS, 3);
    l.plain = make_weight(pool, format, 37, hidden, 1, 4);
    fill(l.bias, 37, 5);
    if (kind == OPTIONS)
        give_options(&l, padded);
    return l;
}

static void free_layer(layer *l)
{
    free_weight(&l->router);
    free_weight(&l->gate_up);
    free_weight(&l->down);
    free_weight(&l->plain);
    free(l->bias);
    free((void *)(uintptr_t)l->options.gate_up_bias);
    free((void *)(uintptr_t)l->options.down_bias);
}

static run record(kt_pool *pool, const layer *l, int64_t tokens, int32_t exact)
{
    run r = {.program = make_program(pool, tokens, 1, exact)};
    r.x = make_view(r.program, l->hidden, KT_ROWS_TOKENS);
    r.logits = make_view(r.program, EXPERTS, KT_ROWS_TOKENS);
    r.out = make_view(r.program, l->hidden, KT_ROWS_TOKENS);
    r.plain = make_view(r.program, 37, KT_ROWS_TOKENS);
    OK(kt_program_linear(r.program, r.plain, r.x,
                         &(kt_linear){.weight = &l->plain.w, .bias = l->bias}), kt_program_error(r.program));
    OK(kt_program_linear(r.program, r.logits, r.x,
                         &(kt_linear){.weight = &l->router.w, .reads = KT_READ_F32}), kt_program_error(r.program));
    kt_route router = {.experts = EXPERTS, .top_k = TOP_K, .normalize = 1, .scale = 1};
    r.routing = kt_program_route(r.program, r.logits, &router);
    OK(r.routing, kt_program_error(r.program));
    kt_experts all = l->options;
    all.routing = r.routing;
    all.gate_up = &l->gate_up.w;
    all.down = &l->down.w;
    all.glu = all.down_bias || l->glu.ungated ? &l->glu : NULL;
    OK(kt_program_experts(r.program, r.out, r.x, &all), kt_program_error(r.program));
    OK(kt_program_finish(r.program, NULL), kt_program_error(r.program));
    return r;
}

/* Tokens first..first+n of the test's text; every run of the same tokens gets the same inputs. */
static void step(run *r, int64_t first, int64_t n)
{
    for (int64_t t = 0; t < n; t++)
        fill(row_of(r->program, r->x, t), (size_t)r->x.width, 777 + (uint64_t)(first + t));
    kt_step s = {RUN(.n_tokens = n, .first_output = n)};
    OK(kt_program_run(r->program, &s), kt_program_error(r->program));
}

/* What the activation makes of an expert's gate and up, y [2I'], or of up alone; for a finite x. */
static double activation(const layer *l, const double *y, int32_t expert, int64_t padded, int64_t i)
{
    if (l->glu.ungated)
        return fmax(0, y[i]) * fmax(0, y[i]);
    int64_t at = i / 16 * 32 + i % 16;
    const float *bias = l->options.gate_up_bias ? l->options.gate_up_bias + expert * 2 * padded + at : NULL;
    double g = y[at] + (bias ? (double)bias[0] : 0), u = y[at + 16] + (bias ? (double)bias[16] : 0);
    double limit = l->glu.limit > 0 ? (double)l->glu.limit : INFINITY;
    double top = l->glu.gate_limit > 0 ? (double)l->glu.gate_limit : limit;
    g = fmin(g, top);
    u = fmax(-limit, fmin(u, limit));
    return g / (1 + exp(-(double)l->glu.alpha * g)) * (u + (double)l->glu.shift);
}

static void expect_experts(const layer *l, const float *x, const int32_t *ids, const float *gate, double *out)
{
    int64_t padded = (l->width + 15) / 16 * 16;
    double *in = need(sizeof(double) * (size_t)l->hidden), *y = need(sizeof(double) * (size_t)(2 * padded));
    double *h = need(sizeof(double) * (size_t)l->width), *d = need(sizeof(double) * (size_t)l->hidden);
    for (int32_t i = 0; i < l->hidden; i++) {
        in[i] = (double)x[i];
        out[i] = 0;
    }
    for (int k = 0; k < TOP_K; k++) {
        multiply(l->gate_up.values + ids[k] * l->rows * l->hidden, l->rows, l->hidden, in, y);
        for (int32_t i = 0; i < l->width; i++)
            h[i] = activation(l, y, ids[k], padded, i);
        multiply(l->down.values + (int64_t)ids[k] * l->hidden * l->width, l->hidden, l->width, h, d);
        for (int32_t i = 0; i < l->hidden; i++)
            out[i] += (double)gate[k] * (d[i] + (l->options.down_bias ? (double)l->options.down_bias[ids[k] * l->hidden + i] : 0));
    }
    free(in);
    free(y);
    free(h);
    free(d);
}

static void compare(run *r, const layer *l, int64_t n, double tolerance, const char *what)
{
    const float *gate;
    const int32_t *ids = kt_program_routing(r->program, r->routing, &gate);
    double want[1024], x[1024];
    for (int64_t t = 0; t < n; t++) {
        const float *in = row_of(r->program, r->x, t);
        expect_experts(l, in, ids + t * TOP_K, gate + t * TOP_K, want);
        double off = distance(row_of(r->program, r->out, t), want, l->hidden);
        CHECK(off <= tolerance, "experts, %s, %lld tokens: row %lld is off by %g", what, (long long)n, (long long)t,
              off);
        for (int32_t i = 0; i < l->hidden; i++)
            x[i] = (double)in[i];
        multiply(l->plain.values, 37, l->hidden, x, want);
        for (int i = 0; i < 37; i++)
            want[i] += (double)l->bias[i];
        off = distance(row_of(r->program, r->plain, t), want, 37);
        CHECK(off <= tolerance, "linear, %s, %lld tokens: row %lld is off by %g", what, (long long)n, (long long)t,
              off);
    }
}

/* Rows first..first+n of `all` ([MOST][hidden + 37]) are equal to this run's, bit for bit. */
static void same_bits(run *r, const layer *l, const float *all, int64_t first, int64_t n, const char *what)
{
    for (int64_t t = 0; t < n; t++) {
        const float *want = all + (first + t) * (l->hidden + 37);
        int same = memcmp(want, row_of(r->program, r->out, t), sizeof(float) * (size_t)l->hidden) == 0 &&
                   memcmp(want + l->hidden, row_of(r->program, r->plain, t), sizeof(float) * 37) == 0;
        CHECK(same, "%s: token %lld in a step of %lld has other bits", what, (long long)(first + t), (long long)n);
    }
}

static void check_bits(const char *isa, const layer *l, const float *all, const char *format)
{
    const int64_t sizes[] = {1, 2, 5, 17, 33, MOST};
    for (int32_t threads = 1; threads <= 4; threads += 3) {     /* `all` was made by 3 */
        kt_pool *pool = make_pool(isa, threads);
        run r = record(pool, l, MOST, 0);
        char what[80];
        snprintf(what, sizeof what, "%s, %s, %d threads", isa, format, threads);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            step(&r, 3 % (MOST - sizes[i] + 1), sizes[i]);
            same_bits(&r, l, all, 3 % (MOST - sizes[i] + 1), sizes[i], what);
        }
        kt_program_free(r.program);
        kt_pool_free(pool);
    }
}

static void check_format(const char *const *rows, int n_rows, int format, int32_t hidden, int32_t width,
                         int kind)
{
    kt_pool *pool = make_pool(NULL, 2);
    const struct named_format *f = &test_formats[format];
    layer l = make_layer(pool, &f->format, hidden, width, kind);
    float *all = need(sizeof(float) * MOST * (size_t)(hidden + 37));
    for (int i = 0; i < n_rows; i++) {
        kt_pool *own = make_pool(rows[i], 3);
        for (int32_t exact = 0; exact < 2; exact++) {
            run r = record(own, &l, MOST, exact);
            const int64_t sizes[] = {1, 2, 17, MOST};
            for (int s = 0; s < 4; s++) {
                step(&r, 0, sizes[s]);
                compare(&r, &l, sizes[s] < 17 ? sizes[s] : 17, exact ? 2e-6 : fast_tolerance(&f->format), f->name);
            }
            for (int64_t t = 0; t < MOST && !exact; t++) {      /* of the last step: all tokens */
                memcpy(all + t * (hidden + 37), row_of(r.program, r.out, t), sizeof(float) * (size_t)hidden);
                memcpy(all + t * (hidden + 37) + hidden, row_of(r.program, r.plain, t), sizeof(float) * 37);
            }
            kt_program_free(r.program);
        }
        kt_pool_free(own);
        if (f->format.bits <= 8)
            check_bits(rows[i], &l, all, f->name);
    }
    free(all);
    free_layer(&l);
    kt_pool_free(pool);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    for (int format = 0; format < TEST_FORMATS; format++) {
        check_format(rows, n, format, 160, 72, OPTIONS);
        check_format(rows, n, format, 128, 64, PLAIN);
        check_format(rows, n, format, 96, 72, UNGATED);
    }
    return report("test_moe");
}
