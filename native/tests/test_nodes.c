/* test_nodes.c - one pool of several nodes, all pretended: weights cut by rows and columns, dense products with the
 * same bits, experts within the rounding of one more order of the final sum.
 *
 * The bound: a node's sum over its columns is a chain of the same products as the one node's, so both lie within
 * (groups + 2 * experts + nodes + 4) * 2^-23 * sum |gate * down * h| of the exact sum of the same 8-bit values: two units
 * of rounding for each operation. It holds only if every node uses the activation scale of the whole row: a scale of
 * its own would be off by about 2^-8. */
#define _GNU_SOURCE
#include "nodes.h"

#include <unistd.h>

enum { EXPERTS = 3, TOP_K = 2, HIDDEN = 72, MOST = 37 };
static const int32_t node_counts[] = {1, 2, 3, 4, 8};
enum { NODE_COUNTS = sizeof node_counts / sizeof *node_counts };

/* ---- cutting ------------------------------------------------------------------------------------ */

/* Decoded slices are the decoded whole, whether they come from memory or from a file. */
static void check_cut(kt_pool *pool, const test_weight *t, int32_t axis, int64_t unit)
{
    const kt_weight *whole = &t->w;
    char name[] = "/tmp/kt_test_XXXXXX";
    int fd = mkstemp(name);
    size_t size = kt_packed_bytes(&whole->format, whole->n, whole->k) * (size_t)whole->count;
    CHECK(fd >= 0 && write(fd, whole->data, size) == (ssize_t)size, "cannot write a file");
    unlink(name);
    float *part = need((size_t)(whole->n * whole->k) * sizeof *part);
    sliced memory = cut(pool, whole, axis, unit, -1), file = cut(pool, whole, axis, unit, fd);
    for (int32_t i = 0; i < memory.nodes; i++) {
        const kt_weight *w = &memory.w[i];
        kt_slice s = memory.slices[i];
        if (s.first == s.last)
            continue;
        size_t bytes = kt_packed_bytes(&w->format, w->n, w->k) * (size_t)w->count;
        CHECK(memcmp(s.data, file.slices[i].data, bytes) == 0, "node %d has other bytes from a file", i);
        for (int64_t e = 0; e < w->count; e++) {
            const float *all = t->values + e * whole->n * whole->k;
            OK(kt_unpack(pool, w, e, part), kt_pool_error(pool));
            int64_t row = axis == KT_CUT_ROWS ? s.first : 0, column = axis == KT_CUT_ROWS ? 0 : s.first, wrong = 0;
            for (int64_t r = 0; r < w->n; r++)
                wrong += memcmp(part + r * w->k, all + (row + r) * whole->k + column, (size_t)w->k * sizeof *part) != 0;
            CHECK(wrong == 0, "node %d, matrix %lld: %lld rows differ", i, (long long)e, (long long)wrong);
        }
    }
    free_sliced(&memory);
    free_sliced(&file);
    free(part);
    close(fd);
}

static void check_refusals(void)
{
    kt_pool *pool = make_nodes("portable", 2, 1);
    test_weight t = make_weight(pool, &test_formats[INT4_G64].format, 32, 200, 1, 9);
    uint8_t *room = need(100000);
    kt_slice gap[] = {{0, 64, room}, {128, 200, room}}, within[] = {{0, 100, room}, {100, 200, room}};
    kt_slice shorter[] = {{0, 64, room}, {64, 128, room}}, nowhere[] = {{0, 64, room}, {64, 200, NULL}};
    kt_slice rows[] = {{0, 8, room}, {8, 32, room}}, good[] = {{0, 64, room}, {64, 200, room + 50000}};
    REFUSED(kt_place(pool, -1, 0, &t.w, KT_CUT_COLUMNS, gap), KT_ERR_SHAPE, kt_pool_error(pool), "begin at 64");
    REFUSED(kt_place(pool, -1, 0, &t.w, KT_CUT_COLUMNS, within), KT_ERR_SHAPE, kt_pool_error(pool), "every 64");
    REFUSED(kt_place(pool, -1, 0, &t.w, KT_CUT_COLUMNS, shorter), KT_ERR_SHAPE, kt_pool_error(pool), "128 of 200");
    REFUSED(kt_place(pool, -1, 0, &t.w, KT_CUT_COLUMNS, nowhere), KT_ERR_SHAPE, kt_pool_error(pool), "slice 1");
    REFUSED(kt_place(pool, -1, 0, &t.w, KT_CUT_ROWS, rows), KT_ERR_SHAPE, kt_pool_error(pool), "every 16");
    REFUSED(kt_place(pool, -1, 0, &t.w, 2, good), KT_ERR_SHAPE, kt_pool_error(pool), "axis 2");
    char name[] = "/tmp/kt_test_XXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    REFUSED(kt_place(pool, fd, 0, &t.w, KT_CUT_COLUMNS, good), KT_ERR_IO, kt_pool_error(pool), "the file ends");
    REFUSED(kt_place(pool, fd, UINT64_MAX - 5, &t.w, KT_CUT_COLUMNS, good), KT_ERR_RANGE, kt_pool_error(pool), "no file");
    close(fd);
    kt_weight nothing = t.w;
    nothing.data = NULL;
    REFUSED(kt_place(pool, -1, 0, &nothing, KT_CUT_COLUMNS, good), KT_ERR_SHAPE, kt_pool_error(pool), "no data");
    double rate;
    const void *far[] = {room, NULL};
    REFUSED(kt_ceiling(pool, KT_CEILING_READ, far, 100000, 0.001, &rate), KT_ERR_RANGE, kt_pool_error(pool), "node 1");
    REFUSED(kt_ceiling(pool, KT_CEILING_INT8, NULL, 0, (double)INFINITY, &rate), KT_ERR_RANGE, kt_pool_error(pool), "inf");
    CHECK(kt_pool_node_threads(pool, -1) == 0 && kt_pool_node_threads(pool, 2) == 0, "threads of a node that is not there");
    kt_format odd = {.bits = 5};
    CHECK(kt_cut_columns(&odd) == 0 && kt_cut_columns(&test_formats[BF16].format) == 32 &&
              kt_cut_columns(&test_formats[INT8].format) == 64,
          "where columns are cut");
    free(room);
    free_weight(&t);
    kt_pool_free(pool);
}

/* Experts whose first node has nothing, not even a format, and whose others are cut within a group. */
static void check_wrong_experts(void)
{
    kt_pool *pool = make_nodes("portable", 3, 1);
    kt_program *p = make_program(pool, 2, 1, 0);
    const kt_format *f = &test_formats[INT4_G64].format;
    test_weight up = make_weight(pool, f, 224, HIDDEN, EXPERTS, 1), down = make_weight(pool, f, HIDDEN, 100, EXPERTS, 2);
    kt_view x = make_view(p, HIDDEN, KT_ROWS_TOKENS), out = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    kt_route router = {.experts = EXPERTS, .top_k = TOP_K, .scale = 1};
    int32_t routing = kt_program_route(p, make_view(p, EXPERTS, KT_ROWS_TOKENS), &router);
    kt_weight ups[3] = {{.n = 0}, up.w, up.w}, downs[3] = {{.k = 0}, down.w, down.w};
    const kt_experts all = {.routing = routing, .gate_up = ups, .down = downs};
    REFUSED(kt_program_experts(p, out, x, &all), KT_ERR_SHAPE, kt_program_error(p), "node 2 begins at column 100");
    ups[1].n = 128;
    downs[1].k = 64;
    downs[2].k = INT64_MAX;
    REFUSED(kt_program_experts(p, out, x, &all), KT_ERR_SHAPE, kt_program_error(p), "a width of");
    downs[2].k = -16;
    REFUSED(kt_program_experts(p, out, x, &all), KT_ERR_SHAPE, kt_program_error(p), "a width of -16");
    downs[2] = down.w;
    ups[2].n = 192;
    REFUSED(kt_program_experts(p, out, x, &all), KT_ERR_SHAPE, kt_program_error(p), "[224, 72]");
    ups[2] = up.w;
    OK(kt_program_experts(p, out, x, &all), kt_program_error(p));
    kt_program_free(p);
    free_weight(&up);
    free_weight(&down);
    kt_pool_free(pool);
}

/* ---- programs ----------------------------------------------------------------------------------- */

typedef struct layer {
    int32_t width;
    test_weight router, gate_up, down, plain;
    float *gate_up_bias, *down_bias;
} layer;

static const kt_glu glu = {1.702f, 0.6f, 1};

typedef struct run {
    kt_program *program;
    kt_view x, logits, out, plain;
    int32_t routing;
    sliced parts[4];
} run;

static run record(kt_pool *pool, const layer *l, const float *bias, int32_t exact, int32_t reads)
{
    run r = {.program = make_program(pool, MOST, 1, exact)};
    kt_program *p = r.program;
    r.x = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.logits = make_view(p, EXPERTS, KT_ROWS_TOKENS);
    r.out = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    r.plain = make_view(p, (int32_t)l->plain.w.n, KT_ROWS_TOKENS);
    const kt_weight *whole[] = {&l->plain.w, &l->router.w, &l->gate_up.w, &l->down.w};
    int64_t unit = kt_cut_columns(&l->down.w.format), units[] = {16, 16, 2 * unit, unit};
    for (int i = 0; i < 4; i++)
        r.parts[i] = cut(pool, whole[i], i == 3 ? KT_CUT_COLUMNS : KT_CUT_ROWS, units[i], -1);
    OK(kt_program_linear(p, r.plain, r.x,
                         &(kt_linear){.weight = r.parts[0].w, .bias = bias, .reads = reads}), kt_program_error(p));
    OK(kt_program_linear(p, r.logits, r.x,
                         &(kt_linear){.weight = r.parts[1].w, .reads = KT_READ_F32}), kt_program_error(p));
    kt_route router = {.experts = EXPERTS, .top_k = TOP_K, .normalize = 1, .scale = 1};
    r.routing = kt_program_route(p, r.logits, &router);
    OK(r.routing, kt_program_error(p));
    kt_experts all = {.routing = r.routing, .gate_up = r.parts[2].w, .down = r.parts[3].w, .glu = &glu,
                      .gate_up_bias = l->gate_up_bias, .down_bias = l->down_bias};
    OK(kt_program_experts(p, r.out, r.x, &all), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    return r;
}

static void step(run *r, int64_t n)
{
    for (int64_t t = 0; t < n; t++)
        fill(row_of(r->program, r->x, t), HIDDEN, 777 + (uint64_t)t);
    kt_step s = {RUN(.n_tokens = n, .first_output = n)};
    OK(kt_program_run(r->program, &s), kt_program_error(r->program));
}

static void free_run(run *r)
{
    kt_program_free(r->program);
    for (int i = 0; i < 4; i++)
        free_sliced(&r->parts[i]);
}

/* size[i] = sum |gate * down[i][j] * h[j]| over the token's experts. */
REFERENCE static void term_sizes(const layer *l, const float *x, const int32_t *ids, const float *gate, double *size)
{
    int64_t padded = ((int64_t)l->width + 15) / 16 * 16;
    double in[HIDDEN], *y = need(sizeof *y * (size_t)(2 * padded));
    for (int i = 0; i < HIDDEN; i++) {
        in[i] = (double)x[i];
        size[i] = 0;
    }
    for (int k = 0; k < TOP_K; k++) {
        multiply(l->gate_up.values + ids[k] * 2 * padded * HIDDEN, 2 * padded, HIDDEN, in, y);
        for (int32_t j = 0; j < l->width; j++) {
            int32_t at = j / 16 * 32 + j % 16;
            const float *bias = l->gate_up_bias + ids[k] * 2 * padded + at;
            double g = fmin(y[at] + (double)bias[0], 0.6), u = fmax(-0.6, fmin(y[at + 16] + (double)bias[16], 0.6));
            double h = fabs(g / (1 + exp(-1.702 * g)) * (u + 1));
            for (int i = 0; i < HIDDEN; i++)
                size[i] += (double)gate[k] * h *
                           fabs((double)l->down.values[((int64_t)ids[k] * HIDDEN + i) * l->width + j]);
        }
    }
    for (int k = 0; k < TOP_K; k++)
        for (int i = 0; i < HIDDEN; i++)
            size[i] += (double)gate[k] * fabs((double)l->down_bias[ids[k] * HIDDEN + i]);
    free(y);
}

static void compare(run *one, run *many, const layer *l, int64_t n, const char *what)
{
    const float *gate;
    const int32_t *ids = kt_program_routing(one->program, one->routing, &gate);
    const kt_format *f = &l->down.w.format;
    int64_t chain = f->bits > 8 ? l->width : f->group ? l->width / f->group + 1 : 1;
    double most = (double)(chain + 2 * TOP_K + 8 + 4) * 0x1p-23;
    for (int64_t t = 0; t < n; t++) {
        const float *a = row_of(one->program, one->out, t), *b = row_of(many->program, many->out, t);
        double size[HIDDEN], worst = 0;
        term_sizes(l, row_of(one->program, one->x, t), ids + t * TOP_K, gate + t * TOP_K, size);
        for (int i = 0; i < HIDDEN; i++)
            worst = fmax(worst, fabs((double)a[i] - (double)b[i]) / (size[i] + 1e-30));
        CHECK(worst <= most, "%s, %lld tokens: row %lld is off by %g, %g is allowed", what, (long long)n, (long long)t,
              worst, most);
        CHECK(memcmp(row_of(one->program, one->plain, t), row_of(many->program, many->plain, t),
                     sizeof(float) * (size_t)one->plain.width) == 0,
              "%s, %lld tokens: row %lld of a dense product differs", what, (long long)n, (long long)t);
    }
}

/* As many nodes with the same columns, and two threads more: the same bits. */
static void compare_threads(run *many, const layer *l, const float *bias, const char *isa, int32_t exact,
                            const char *what)
{
    kt_pool *pool = make_nodes(isa, many->parts[0].nodes, 4);
    run more = record(pool, l, bias, exact, KT_READ_FORMAT);
    step(many, MOST);
    step(&more, MOST);
    int64_t wrong = 0;
    for (int64_t t = 0; t < MOST; t++)
        wrong += memcmp(row_of(many->program, many->out, t), row_of(more.program, more.out, t),
                        HIDDEN * sizeof(float)) != 0;
    CHECK(wrong == 0, "%s: %lld rows change with the threads", what, (long long)wrong);
    free_run(&more);
    kt_pool_free(pool);
}

static void check_layer(const char *isa, int format, int32_t width, int32_t exact)
{
    static const int64_t counts[] = {1, 2, MOST};
    const kt_format *f = &test_formats[format].format;
    int64_t padded = (width + 15) / 16 * 16;
    float bias[83];
    fill(bias, 83, 5);
    kt_pool *single = make_pool(isa, 1);
    layer l = {.width = width};
    l.router = make_weight(single, &test_formats[F32].format, EXPERTS, HIDDEN, 1, 1);
    l.gate_up = make_weight(single, f, 2 * padded, HIDDEN, EXPERTS, 2);
    l.down = make_weight(single, f, HIDDEN, width, EXPERTS, 3);
    l.plain = make_weight(single, f, 83, HIDDEN, 1, 4);
    l.gate_up_bias = need((size_t)(EXPERTS * 2 * padded) * sizeof(float));
    l.down_bias = need(EXPERTS * HIDDEN * sizeof(float));
    fill(l.gate_up_bias, (size_t)(EXPERTS * 2 * padded), 6);
    fill(l.down_bias, EXPERTS * HIDDEN, 7);
    int32_t reads = width % 128 ? KT_READ_FORMAT : KT_READ_WIDE;
    run one = record(single, &l, bias, exact, reads);
    for (int i = 1; i < NODE_COUNTS; i++) {
        kt_pool *pool = make_nodes(isa, node_counts[i], 1 + i % 3);
        if (width <= 200) {
            check_cut(pool, &l.down, KT_CUT_COLUMNS, kt_cut_columns(f));
            check_cut(pool, &l.gate_up, KT_CUT_ROWS, 32);
        }
        run many = record(pool, &l, bias, exact, reads);
        char what[80];
        snprintf(what, sizeof what, "%s, %s, width %d, %d nodes%s", isa, test_formats[format].name, width,
                 node_counts[i], exact ? ", exact" : "");
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            step(&one, counts[c]);
            for (int again = 0; again < 2; again++)     /* the second time finds what the first left behind */
                step(&many, counts[c]);
            compare(&one, &many, &l, counts[c], what);
        }
        if (i == 1 && width <= 200)
            compare_threads(&many, &l, bias, isa, exact, what);
        free_run(&many);
        kt_pool_free(pool);
    }
    free_run(&one);
    free_weight(&l.router);
    free_weight(&l.gate_up);
    free_weight(&l.down);
    free_weight(&l.plain);
    free(l.gate_up_bias);
    free(l.down_bias);
    kt_pool_free(single);
}

int main(void)
{
    static const int32_t wide[] = {768, 1408, 2880};
    static const int formats[] = {BF16, INT8, INT4_G64};
    const char *rows[8];
    int n = usable_rows(rows);
    for (int format = 0; format < TEST_FORMATS; format++)
        check_layer(own_row(), format, 200, 0);
    for (int i = 0; i < n; i++) {
        for (int f = 0; f < 3 && strcmp(rows[i], own_row()) != 0; f++)
            check_layer(rows[i], formats[f], 200, 0);
    }
    for (int f = 0; f < 3; f++)
        check_layer(own_row(), formats[f], 64, 0);
    for (int w = 0; w < 3; w++)
        check_layer(own_row(), INT4_G64, wide[w], 0);
    check_layer(own_row(), INT8, 1408, 0);
    check_layer(own_row(), BF16, 1408, 0);
    check_layer(own_row(), INT4_G64, 768, 1);
    check_refusals();
    check_wrong_experts();
    return report("test_nodes");
}
