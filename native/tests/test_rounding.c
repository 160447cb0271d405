/* test_rounding.c - exact products that round their input as another format's do: of the same values, they give what
 * that format's own products give, on every row; and what cannot be rounded is refused. */
#include "check.h"

enum { TOKENS = 5, HIDDEN = 96, WIDTH = 80, EXPERTS = 3, TOP_K = 2, ROWS = 37 };

typedef struct layer {
    test_weight plain, gate_up, down;       /* in the format */
} layer;

typedef struct run {
    kt_program *program;
    kt_view x, out, plain, wide;
} run;

static run record(kt_pool *pool, const kt_weight *w, int32_t exact)
{
    run r = {.program = make_program(pool, TOKENS, 1, exact)};
    kt_program *p = r.program;
    r.x = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.out = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.plain = make_view(p, ROWS, KT_ROWS_TOKENS);
    r.wide = make_view(p, ROWS, KT_ROWS_TOKENS);
    int32_t routing = kt_program_given(p, EXPERTS, TOP_K);
    OK(routing, kt_program_error(p));
    OK(kt_program_linear(p, r.plain, r.x, &(kt_linear){.weight = &w[0]}), kt_program_error(p));
    OK(kt_program_linear(p, r.wide, r.x, &(kt_linear){.weight = &w[0], .reads = KT_READ_WIDE}), kt_program_error(p));
    OK(kt_program_experts(p, r.out, r.x, &(kt_experts){.routing = routing, .gate_up = &w[1], .down = &w[2]}),
       kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    const float *gate;
    int32_t *ids = (int32_t *)(uintptr_t)kt_program_routing(p, routing, &gate);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        ids[i] = (i / TOP_K + i % TOP_K) % EXPERTS;
        ((float *)(uintptr_t)gate)[i] = 0.3f + 0.1f * (float)i;
    }
    for (int t = 0; t < TOKENS; t++)
        fill(row_of(p, r.x, t), HIDDEN, 50 + (uint64_t)t);
    kt_step s = {RUN(.n_tokens = TOKENS, .first_output = TOKENS)};
    OK(kt_program_run(p, &s), kt_program_error(p));
    return r;
}

/* The decoded values in f32, which name their format as that of their input. */
static test_weight in_f32(kt_pool *pool, const test_weight *from)
{
    const kt_weight *w = &from->w;
    const kt_format *f32 = &test_formats[F32].format;
    size_t size = kt_packed_bytes(f32, w->n, w->k);
    test_weight t = {.values = need(1), .data = need(size * (size_t)w->count)};
    t.w = (kt_weight){.format = *f32, .n = w->n, .k = w->k, .count = w->count, .data = t.data, .input = &w->format};
    for (int64_t i = 0; i < w->count; i++)
        OK(pack_floats(pool, f32, w->n, w->k, from->values + i * w->n * w->k, NULL,
                       (uint8_t *)t.data + (size_t)i * size, NULL), kt_pool_error(pool));
    return t;
}

static void compare(const char *what, const run *one, const run *two, kt_view a, kt_view b, double most)
{
    for (int t = 0; t < TOKENS; t++) {
        double want[HIDDEN];
        for (int32_t i = 0; i < a.width; i++)
            want[i] = (double)row_of(two->program, b, t)[i];
        double off = distance(row_of(one->program, a, t), want, a.width);
        CHECK(off <= most, "%s, token %d is off by %g", what, t, off);
    }
}

static void check_format(const char *isa, int format)
{
    kt_pool *pool = make_pool(isa, 3);
    const kt_format *f = &test_formats[format].format;
    layer l = {make_weight(pool, f, ROWS, HIDDEN, 1, 1), make_weight(pool, f, 2 * WIDTH, HIDDEN, EXPERTS, 2),
               make_weight(pool, f, HIDDEN, WIDTH, EXPERTS, 3)};
    test_weight plain = in_f32(pool, &l.plain), gate_up = in_f32(pool, &l.gate_up), down = in_f32(pool, &l.down);
    run own = record(pool, (kt_weight[3]){l.plain.w, l.gate_up.w, l.down.w}, 0);
    run like = record(pool, (kt_weight[3]){plain.w, gate_up.w, down.w}, 1);
    char what[96];
    snprintf(what, sizeof what, "%s, %s", isa, test_formats[format].name);
    compare(what, &like, &own, like.plain, own.plain, 1e-5);
    compare(what, &like, &own, like.wide, own.wide, 1e-5);
    /* A hidden value that lies between two steps may go to either. */
    compare(what, &like, &own, like.out, own.out, 0.1 * fast_tolerance(f));
    kt_program_free(own.program);
    kt_program_free(like.program);
    test_weight *all[] = {&l.plain, &l.gate_up, &l.down, &plain, &gate_up, &down};
    for (int i = 0; i < 6; i++)
        free_weight(all[i]);
    kt_pool_free(pool);
}

static void check_refusals(void)
{
    kt_pool *pool = make_pool(NULL, 1);
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    kt_view x = make_view(p, 64, KT_ROWS_TOKENS), out = make_view(p, 16, KT_ROWS_TOKENS);
    test_weight w = make_weight(pool, &test_formats[BF16].format, 16, 64, 1, 1);
    w.w.input = &test_formats[INT8].format;
    REFUSED(kt_program_linear(p, out, x, &(kt_linear){.weight = &w.w}), KT_ERR_SHAPE, kt_program_error(p),
            "only input that is read as f32");
    w.w.input = &(kt_format){.bits = 5};
    REFUSED(kt_program_linear(p, out, x, &(kt_linear){.weight = &w.w}), KT_ERR_SHAPE, kt_program_error(p), "5 bits");
    kt_program_free(p);
    free_weight(&w);
    kt_pool_free(pool);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    for (int row = 0; row < n; row++)
        for (int format = 0; format < TEST_FORMATS; format++)
            check_format(rows[row], format);
    check_refusals();
    return report("test_rounding");
}
