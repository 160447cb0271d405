/* test_lowrank.c - adapters: a product with an update is that of the merged weight, for each row by the adapter of its
 * run, with the bits that it has alone and on any row of kernels and number of threads; wrong updates are refused. */
#include "check.h"

enum { HIDDEN = 83, WIDTH = 40, EXPERTS = 3, TOP_K = 2, ROWS = 53, PADDED = 48 };
enum { RUNS = 3, EACH = 13, TOKENS = RUNS * EACH, RANKS = 7, HIDDEN_PADDED = 96 };
enum { LINEAR, GATE_UP, DOWN, PRODUCTS };

typedef struct factors {
    float *a, *b;               /* as kt_update has them */
    kt_update update;
} factors;

/* Random factors of the rows of some panels, zero where there is no row. */
static factors make_factors(const kt_weight *w, int32_t rank, int32_t first, int32_t step, uint64_t seed)
{
    int64_t k = (w->k + 15) / 16 * 16;
    int32_t panels = (int32_t)((w->n + 15) / 16 - first + step - 1) / step;
    size_t n_a = (size_t)(w->count * rank * k), n_b = (size_t)(w->count * panels * rank) * 16;
    factors f = {.a = need(n_a * sizeof(float)), .b = need(n_b * sizeof(float))};
    fill(f.a, n_a, seed);
    fill(f.b, n_b, seed + 1);
    for (size_t i = 0; i < n_a; i++)
        f.a[i] = (int64_t)i % k < w->k ? 0.1f * f.a[i] : 0.0f;
    f.update = (kt_update){.rank = rank, .first_panel = first, .panel_step = step, .panels = panels, .scale = 0.7f,
                           .in_f32 = 1, .a = f.a, .b = f.b};
    return f;
}

/* values [count][n][k] += scale * B A */
REFERENCE static void merge(float *values, const kt_weight *w, const kt_update *u)
{
    int64_t k = (w->k + 15) / 16 * 16;
    const float *a = u->a, *b = u->b;
    for (int64_t e = 0; e < w->count; e++)
        for (int32_t p = 0; p < u->panels; p++)
            for (int32_t i = 0; i < 16; i++) {
                int64_t row = (u->first_panel + (int64_t)p * u->panel_step) * 16 + i;
                for (int64_t c = 0; row < w->n && c < w->k; c++) {
                    double sum = 0;
                    for (int32_t r = 0; r < u->rank; r++)
                        sum += (double)b[((e * u->panels + p) * u->rank + r) * 16 + i] * (double)a[(e * u->rank + r) * k + c];
                    values[(e * w->n + row) * w->k + c] += (float)(u->scale * sum);
                }
            }
}

typedef struct recorded {
    kt_program *program;
    kt_view x, out, plain, normed;
} recorded;

static float own_gain[HIDDEN], gains[2][HIDDEN];    /* the norm's, and those of adapters 1 and 2 */

static recorded record(kt_pool *pool, const kt_weight *w, int adapters)
{
    recorded r = {.program = make_program(pool, TOKENS, 1, 1)};
    kt_program *p = r.program;
    if (adapters)
        OK(kt_program_adapters(p, 2, RANKS), kt_program_error(p));
    r.x = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.out = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.plain = make_view(p, ROWS, KT_ROWS_TOKENS);
    r.normed = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    int32_t routing = kt_program_given(p, EXPERTS, TOP_K);
    OK(routing, kt_program_error(p));
    OK(kt_program_linear(p, r.plain, r.x, &(kt_linear){.weight = &w[LINEAR]}), kt_program_error(p));
    OK(kt_program_experts(p, r.out, r.x, &(kt_experts){.routing = routing, .gate_up = &w[GATE_UP], .down = &w[DOWN]}),
       kt_program_error(p));
    OK(kt_program_norm(p, r.normed, r.x, &(kt_norm){.gain = own_gain, .eps = 1e-6f}), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    return r;
}

/* Rows [first, first + n) of the input, the experts of each by its number, in runs of EACH with these adapters. */
static void compute(recorded *r, int first, int n, const int32_t *adapters)
{
    kt_program *p = r->program;
    const float *gate;
    int32_t *ids = (int32_t *)(uintptr_t)kt_program_routing(p, 0, &gate);
    kt_run runs[RUNS] = {{0}};
    for (int i = 0; i < n * TOP_K; i++) {
        int number = first * TOP_K + i;
        ids[i] = (number / TOP_K + number % TOP_K) % EXPERTS;
        ((float *)(uintptr_t)gate)[i] = 0.3f + 0.1f * (float)(number % 16);
    }
    for (int t = 0; t < n; t++)
        fill(row_of(p, r->x, t), HIDDEN, 50 + (uint64_t)(first + t));
    for (int i = 0; i < n / EACH; i++)
        runs[i] = (kt_run){.n_tokens = EACH, .first_output = EACH, .adapter = adapters[i]};
    kt_step s = {.runs = runs, .n_runs = n / EACH};
    OK(kt_program_run(p, &s), kt_program_error(p));
}

/* The operations that have products: the routing that is given is none of them. */
static const int32_t operations[PRODUCTS] = {0, 1, 1}, parts[PRODUCTS] = {0, 0, 1};
enum { NORM = 2 };

static void adapt(kt_program *p, int32_t adapter, factors f[PRODUCTS][2])
{
    for (int i = 0; i < PRODUCTS; i++) {
        kt_update updates[2] = {f[i][0].update, f[i][1].update};
        OK(kt_program_adapt(p, adapter, operations[i], parts[i], updates, 2), kt_program_error(p));
    }
    OK(kt_program_adapt_gain(p, adapter, NORM, gains[adapter - 1]), kt_program_error(p));
}

static void same(const char *what, const recorded *one, const recorded *two, int first, int n)
{
    for (int t = 0; t < n; t++) {
        CHECK(memcmp(row_of(one->program, one->plain, first + t), row_of(two->program, two->plain, t),
                     ROWS * sizeof(float)) == 0, "%s: linear, token %d", what, first + t);
        CHECK(memcmp(row_of(one->program, one->out, first + t), row_of(two->program, two->out, t),
                     HIDDEN * sizeof(float)) == 0, "%s: experts, token %d", what, first + t);
        CHECK(memcmp(row_of(one->program, one->normed, first + t), row_of(two->program, two->normed, t),
                     HIDDEN * sizeof(float)) == 0, "%s: norm, token %d", what, first + t);
    }
}

/* Rows of a run are normed with this gain: by the same arithmetic as with any other. */
static void normed_with(const char *what, const recorded *got, const recorded *want, int first, const float *gain)
{
    for (int t = first; t < first + EACH; t++)
        for (int i = 0; i < HIDDEN; i++) {
            float own = row_of(want->program, want->normed, t)[i], its = row_of(got->program, got->normed, t)[i];
            CHECK(fabsf(its * own_gain[i] - own * gain[i]) <= 1e-6f, "%s: norm, token %d, column %d", what, t, i);
        }
}

static void close_to(const char *what, const recorded *got, const recorded *want, int first)
{
    for (int t = first; t < first + EACH; t++) {
        double row[HIDDEN];
        for (int i = 0; i < ROWS; i++)
            row[i] = (double)row_of(want->program, want->plain, t)[i];
        double off = distance(row_of(got->program, got->plain, t), row, ROWS);
        CHECK(off <= 1e-5, "%s: linear, token %d is off by %g", what, t, off);
        for (int i = 0; i < HIDDEN; i++)
            row[i] = (double)row_of(want->program, want->out, t)[i];
        off = distance(row_of(got->program, got->out, t), row, HIDDEN);
        CHECK(off <= 1e-5, "%s: experts, token %d is off by %g", what, t, off);
    }
}

typedef struct model {
    test_weight weights[PRODUCTS];
    factors adapters[2][PRODUCTS][2];
} model;

static model make_model(kt_pool *pool)
{
    const kt_format *f32 = &test_formats[F32].format;
    model m = {{make_weight(pool, f32, ROWS, HIDDEN, 1, 1), make_weight(pool, f32, 2 * PADDED, HIDDEN, EXPERTS, 2),
                make_weight(pool, f32, HIDDEN, WIDTH, EXPERTS, 3)}, {{{{0}}}}};
    for (int i = 0; i < PRODUCTS; i++)
        for (uint64_t a = 0; a < 2; a++) {
            m.adapters[a][i][0] = make_factors(&m.weights[i].w, 1 + (int32_t)a, 0, 1, 100 * a + 10 * (uint64_t)i);
            m.adapters[a][i][1] = make_factors(&m.weights[i].w, 5 - (int32_t)a, 1, 2, 100 * a + 10 * (uint64_t)i + 5);
        }
    return m;
}

static void free_model(model *m)
{
    for (int i = 0; i < PRODUCTS; i++) {
        free_weight(&m->weights[i]);
        for (int a = 0; a < 4; a++) {
            free(m->adapters[a / 2][i][a % 2].a);
            free(m->adapters[a / 2][i][a % 2].b);
        }
    }
}

static void check_row(const char *isa, const recorded *other)
{
    static const int32_t mixed[RUNS] = {1, 0, 2}, none[RUNS] = {0, 0, 0};
    kt_pool *pool = make_pool(isa, 3), *alone = make_pool(isa, 1);
    model m = make_model(pool);
    kt_weight w[PRODUCTS] = {m.weights[LINEAR].w, m.weights[GATE_UP].w, m.weights[DOWN].w};
    recorded with = record(pool, w, 1), without = record(pool, w, 0), one = record(alone, w, 1);
    for (int a = 0; a < 2; a++) {
        adapt(with.program, a + 1, m.adapters[a]);
        adapt(one.program, a + 1, m.adapters[a]);
    }
    compute(&with, 0, TOKENS, none);
    compute(&without, 0, TOKENS, none);
    same("room without an adapter", &with, &without, 0, TOKENS);
    compute(&with, 0, TOKENS, mixed);
    close_to("a run without an adapter", &with, &without, EACH);
    normed_with("adapter 1", &with, &without, 0, gains[0]);
    normed_with("a run without an adapter", &with, &without, EACH, own_gain);
    normed_with("adapter 2", &with, &without, 2 * EACH, gains[1]);
    for (int run = 0; run < RUNS; run++) {
        compute(&one, run * EACH, EACH, mixed + run);
        same("alone, on one thread", &with, &one, run * EACH, EACH);
    }
    if (other->program)
        same(isa, &with, other, 0, TOKENS);
    for (int a = 0; a < 2; a++) {
        test_weight merged[PRODUCTS];
        kt_weight whole[PRODUCTS];
        for (int i = 0; i < PRODUCTS; i++) {
            size_t size = kt_packed_bytes(&w[i].format, w[i].n, w[i].k);
            merged[i] = (test_weight){.values = need((size_t)(w[i].count * w[i].n * w[i].k) * sizeof(float)),
                                      .data = need(size * (size_t)w[i].count)};
            memcpy(merged[i].values, m.weights[i].values, (size_t)(w[i].count * w[i].n * w[i].k) * sizeof(float));
            merge(merged[i].values, &w[i], &m.adapters[a][i][0].update);
            merge(merged[i].values, &w[i], &m.adapters[a][i][1].update);
            for (int64_t e = 0; e < w[i].count; e++)
                OK(pack_floats(pool, &w[i].format, w[i].n, w[i].k, merged[i].values + e * w[i].n * w[i].k, NULL,
                               (uint8_t *)merged[i].data + (size_t)e * size, NULL), kt_pool_error(pool));
            whole[i] = w[i];
            whole[i].data = merged[i].data;
        }
        recorded plain = record(pool, whole, 0);
        compute(&plain, 0, TOKENS, none);
        close_to(isa, &with, &plain, a * 2 * EACH);
        kt_program_free(plain.program);
        for (int i = 0; i < PRODUCTS; i++)
            free_weight(&merged[i]);
    }
    kt_program_free(with.program);
    kt_program_free(without.program);
    kt_program_free(one.program);
    free_model(&m);
    kt_pool_free(pool);
    kt_pool_free(alone);
}

static void check_refusals(void)
{
    kt_pool *pool = make_pool("portable", 1);
    model m = make_model(pool);
    kt_weight w[PRODUCTS] = {m.weights[LINEAR].w, m.weights[GATE_UP].w, m.weights[DOWN].w};
    recorded r = record(pool, w, 1);
    kt_program *p = r.program;
    kt_update right = m.adapters[0][LINEAR][0].update;
    static const struct {
        const char *part;
        int32_t rank, first, step, panels;
        float scale;
    } wrong[] = {
        {"rank 0", 0, 0, 1, 4, 1}, {"rank 8", 8, 0, 1, 4, 1}, {"5 panels", 1, 0, 1, 5, 1}, {"from -1", 1, -1, 1, 4, 1},
        {"every 0-th", 1, 0, 0, 4, 1}, {"0 panels", 1, 0, 1, 0, 1}, {"scale", 1, 0, 1, 4, INFINITY},
        {"panels from 2147483647", 1, INT32_MAX, INT32_MAX, INT32_MAX, 1},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        kt_update u = right;
        u.rank = wrong[i].rank;
        u.first_panel = wrong[i].first;
        u.panel_step = wrong[i].step;
        u.panels = wrong[i].panels;
        u.scale = wrong[i].scale;
        REFUSED(kt_program_adapt(p, 1, 0, 0, &u, 1), KT_ERR_RANGE, kt_program_error(p), wrong[i].part);
    }
    kt_update two[2] = {right, right};
    two[1].rank = RANKS;
    REFUSED(kt_program_adapt(p, 1, 0, 0, two, 2), KT_ERR_RANGE, kt_program_error(p), "8 in all");
    REFUSED(kt_program_adapt(p, 3, 0, 0, &right, 1), KT_ERR_RANGE, kt_program_error(p), "adapter 3 of 2");
    REFUSED(kt_program_adapt(p, 0, 0, 0, &right, 1), KT_ERR_RANGE, kt_program_error(p), "adapter 0 of 2");
    REFUSED(kt_program_adapt(p, 1, 0, 1, &right, 1), KT_ERR_RANGE, kt_program_error(p), "part 1 of operation 0");
    REFUSED(kt_program_adapt_gain(p, 3, NORM, own_gain), KT_ERR_RANGE, kt_program_error(p), "adapter 3 of 2");
    REFUSED(kt_program_adapt_gain(p, 1, 0, own_gain), KT_ERR_RANGE, kt_program_error(p), "operation 0 is not a norm");
    right.a = NULL;
    REFUSED(kt_program_adapt(p, 1, 0, 0, &right, 1), KT_ERR_RANGE, kt_program_error(p), "without a factor");
    kt_run run = {.n_tokens = 1, .first_output = 1, .adapter = 3};
    kt_step s = {.runs = &run, .n_runs = 1};
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, kt_program_error(p), "adapter is 3, outside 0..2");
    REFUSED(kt_program_adapters(p, 1, 1), KT_ERR_SHAPE, kt_program_error(p), "finished");
    kt_program_free(p);
    p = make_program(pool, TOKENS, 1, 1);
    REFUSED(kt_program_adapters(p, 0, 1), KT_ERR_RANGE, kt_program_error(p), "0 adapters");
    REFUSED(kt_program_adapters(p, 1, 1 << 20), KT_ERR_RANGE, kt_program_error(p), "1048576 ranks");
    kt_program_free(p);
    free_model(&m);
    kt_pool_free(pool);
}

int main(void)
{
    static const int32_t mixed[RUNS] = {1, 0, 2};
    const char *rows[8];
    int n = usable_rows(rows);
    for (int i = 0; i < HIDDEN; i++) {
        own_gain[i] = 0.5f + 0.01f * (float)i;
        gains[0][i] = 1.5f - 0.01f * (float)i;
        gains[1][i] = i % 2 ? 0.25f : 2.0f;
    }
    /* What the portable row computes is what every row does. */
    kt_pool *pool = make_pool("portable", 2);
    model m = make_model(pool);
    recorded portable = record(pool, (kt_weight[3]){m.weights[0].w, m.weights[1].w, m.weights[2].w}, 1);
    for (int a = 0; a < 2; a++)
        adapt(portable.program, a + 1, m.adapters[a]);
    compute(&portable, 0, TOKENS, mixed);
    for (int row = 0; row < n; row++)
        check_row(rows[row], &portable);
    kt_program_free(portable.program);
    free_model(&m);
    kt_pool_free(pool);
    check_refusals();
    return report("test_lowrank");
}
