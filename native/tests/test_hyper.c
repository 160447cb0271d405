/* test_hyper.c - hyper-connections against plain loops in double: spread, mix, collapse and expand, of one stream
 * and of several, one token and many, inside wider buffers. */
#include "check.h"

enum { MOST = 9, MOST_STREAMS = 16, MOST_WIDTH = 1100 };

typedef struct shape {
    int32_t streams, width, iterations;
    float eps;
} shape;

static const shape shapes[] = {{4, 40, 20, 1e-6f}, {3, 1100, 1, 1e-3f}, {1, 7, 2, 1e-6f}, {16, 5, 3, 0}};

/* Columns of x become weights; comb is normalised as the paper says it. */
static void expect_mix(const shape *s, const float *scale, const float *base, int width, const float *x, double *out)
{
    int n = s->streams;
    double *comb = out + 2 * n, eps = (double)s->eps;
    for (int i = 0; i < width; i++) {
        int part = i < n ? 0 : i < 2 * n ? 1 : 2;
        double z = (double)x[i] * (double)scale[part] + (double)base[i];
        out[i] = part == 0 ? 1 / (1 + exp(-z)) + eps : part == 1 ? 2 / (1 + exp(-z)) : z;
    }
    for (int j = 0; j < n && width > n; j++) {
        double sum = 0;
        for (int k = 0; k < n; k++)
            sum += exp(comb[j * n + k]);
        for (int k = 0; k < n; k++)
            comb[j * n + k] = exp(comb[j * n + k]) / sum + eps;
    }
    for (int round = 1; round < 2 * s->iterations && width > n; round++)
        for (int i = 0; i < n; i++) {
            double sum = eps;       /* odd rounds: column i */
            for (int k = 0; k < n; k++)
                sum += round % 2 ? comb[k * n + i] : comb[i * n + k];
            for (int k = 0; k < n; k++)
                comb[round % 2 ? k * n + i : i * n + k] /= sum;
        }
}

static void close_to(const char *what, const float *got, const double *want, int n)
{
    double off = distance(got, want, n);
    CHECK(off < 2e-6, "%s is off by %g", what, off);
}

static void compare_row(kt_program *p, const kt_view v[7], const shape *s, int64_t t, const double *weights,
                        const double *head)
{
    int n = s->streams, width = s->width;
    const float *in = row_of(p, v[1], t), *y = row_of(p, v[0], t);
    double want[MOST_STREAMS * MOST_WIDTH];
    close_to("mix", row_of(p, v[2], t), weights, (2 + n) * n);
    close_to("mix of a head", row_of(p, v[3], t), head, n);
    for (int c = 0; c < width; c++) {
        want[c] = 0;
        for (int j = 0; j < n; j++)
            want[c] += weights[j] * (double)in[j * width + c];
    }
    close_to("collapse", row_of(p, v[4], t), want, width);
    for (int k = 0; k < n; k++)
        for (int c = 0; c < width; c++) {
            want[k * width + c] = weights[n + k] * (double)y[c];
            for (int j = 0; j < n; j++)
                want[k * width + c] += weights[2 * n + j * n + k] * (double)in[j * width + c];
        }
    close_to("expand", row_of(p, v[5], t), want, n * width);
    for (int i = 0; i < n * width; i++)
        CHECK(row_of(p, v[6], t)[i] == y[i % width], "spread: column %d", i);
}

static void check_shape(kt_pool *pool, const shape *s)
{
    enum { MOST_WEIGHTS = (2 + MOST_STREAMS) * MOST_STREAMS };
    static double weights[MOST][MOST_WEIGHTS], heads[MOST][MOST_STREAMS];
    int32_t n = s->streams, all = (2 + n) * n;
    float scale[3] = {0.7f, -1.3f, 2.1f}, base[MOST_WEIGHTS];
    fill(base, (size_t)all, 5);
    kt_program *p = make_program(pool, MOST, 1, 0);
    kt_view wide = make_view(p, s->width + 3, KT_ROWS_TOKENS), y = {wide.buffer, 2, s->width};
    kt_view in = make_view(p, n * s->width, KT_ROWS_TOKENS), by = make_view(p, all, KT_ROWS_TOKENS);
    kt_view head = make_view(p, n, KT_ROWS_TOKENS), one = make_view(p, s->width, KT_ROWS_TOKENS);
    kt_view out = make_view(p, n * s->width, KT_ROWS_TOKENS), copies = make_view(p, n * s->width, KT_ROWS_TOKENS);
    kt_mix m = {.streams = n, .iterations = s->iterations, .eps = s->eps, .scale = scale, .base = base};
    OK(kt_program_mix(p, by, &m), kt_program_error(p));
    OK(kt_program_mix(p, head, &m), kt_program_error(p));
    OK(kt_program_collapse(p, one, in, (kt_view){by.buffer, 0, n}), kt_program_error(p));
    OK(kt_program_expand(p, out, in, y, (kt_view){by.buffer, n, all - n}), kt_program_error(p));
    OK(kt_program_spread(p, copies, y), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    for (int64_t tokens = 1; tokens <= MOST; tokens += MOST - 1) {
        for (int64_t t = 0; t < tokens; t++) {
            fill(row_of(p, y, t), (size_t)s->width, 7 + (uint64_t)t);
            fill(row_of(p, in, t), (size_t)(n * s->width), 70 + (uint64_t)t);
            fill(row_of(p, by, t), (size_t)all, 700 + (uint64_t)t);
            fill(row_of(p, head, t), (size_t)n, 7000 + (uint64_t)t);
            expect_mix(s, scale, base, all, row_of(p, by, t), weights[t]);
            expect_mix(s, scale, base, n, row_of(p, head, t), heads[t]);
        }
        kt_step step = {RUN(.n_tokens = tokens, .first_output = tokens)};
        OK(kt_program_run(p, &step), kt_program_error(p));
        for (int64_t t = 0; t < tokens; t++)
            compare_row(p, (const kt_view[7]){y, in, by, head, one, out, copies}, s, t, weights[t], heads[t]);
    }
    kt_program_free(p);
}

static void check_refusals(kt_pool *pool)
{
    float values[24] = {0};
    kt_program *p = make_program(pool, 1, 1, 0);
    kt_view x = make_view(p, 24, KT_ROWS_TOKENS), y = make_view(p, 8, KT_ROWS_TOKENS);
    kt_view outputs = make_view(p, 8, KT_ROWS_OUTPUTS), many = make_view(p, 24, KT_ROWS_TOKENS);
    kt_mix m = {.streams = 4, .iterations = 1, .scale = values, .base = values};
    REFUSED(kt_program_mix(p, y, &m), KT_ERR_SHAPE, kt_program_error(p), "4 streams (1..16) from 8");
    m.iterations = 0;
    REFUSED(kt_program_mix(p, x, &m), KT_ERR_RANGE, kt_program_error(p), "0 iterations");
    m = (kt_mix){.streams = 4, .iterations = 1, .eps = NAN, .scale = values, .base = values};
    REFUSED(kt_program_mix(p, x, &m), KT_ERR_RANGE, kt_program_error(p), "eps");
    m = (kt_mix){.streams = 4, .iterations = 1};
    REFUSED(kt_program_mix(p, x, &m), KT_ERR_SHAPE, kt_program_error(p), "without scales");
    REFUSED(kt_program_spread(p, x, (kt_view){y.buffer, 0, 5}), KT_ERR_SHAPE, kt_program_error(p), "5 columns to 24");
    REFUSED(kt_program_spread(p, x, (kt_view){x.buffer, 0, 8}), KT_ERR_SHAPE, kt_program_error(p), "overlap");
    kt_view by = {many.buffer, 0, 4};
    REFUSED(kt_program_collapse(p, y, x, by), KT_ERR_SHAPE, kt_program_error(p), "4 streams");
    REFUSED(kt_program_collapse(p, outputs, x, by), KT_ERR_SHAPE, kt_program_error(p), "domain");
    by.width = 11;
    REFUSED(kt_program_expand(p, x, (kt_view){many.buffer, 0, 24}, y, by), KT_ERR_SHAPE, kt_program_error(p), "by 11");
    kt_program_free(p);
}

int main(void)
{
    kt_pool *pool = make_pool(NULL, 2);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(pool, &shapes[i]);
    check_refusals(pool);
    kt_pool_free(pool);
    return report("test_hyper");
}
