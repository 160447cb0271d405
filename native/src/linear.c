/* linear.c - out = in * W^T + bias: which thread multiplies which panels for which tokens.
 *
 * Each node has its rows of W beside it and gives its columns of the output, so nothing is added up between
 * nodes and their number never changes a bit.
 *
 * One token: the weights are read once from memory, so threads take runs of panels, long enough to
 * stream. Many tokens: runs of panels as long as a fair share allows, since the products block for the
 * caches themselves and fetch ahead within a call; tokens are cut only when panels are too few for all
 * threads.
 */
#include "linear.h"

#define TASKS_PER_THREAD 8              /* so that a slow thread delays the others by an eighth of its share */
#define MOST_PANELS 64                  /* of one task with one token, or whose results are joined */
/* With many tokens. 512x2048x4096 in int8 on one core, weights per call: 128 kB 75 %, 512 kB 93 % and
 * 2 MB 95 % of the peak. */
#define MOST_BYTES ((size_t)2 << 20)
#define FEWEST_PANELS 4                 /* below this the products reuse too little */
#define FEWEST_TOKENS 48
#define WIDE_TOKENS 48                  /* most of one task whose results are joined: two rows each in local scratch */

typedef struct linear {
    kt_view out;
    source in;
    linear_part *parts;                 /* [nodes] */
    const float *bias;
    int32_t kind, domain;
    kt_view x, inner;
    int32_t updates;                    /* lowrank_product */
} linear;

/* How a step is cut into tasks. */
typedef struct cut {
    int64_t panels, tokens;             /* of one task */
    int64_t panel_blocks, token_blocks;
} cut;

static cut cut_step(const matrices *m, int64_t tokens, int threads)
{
    int64_t tasks = (int64_t)threads * TASKS_PER_THREAD, fair = max64(1, m->panels / tasks);
    cut c = {.panels = min64(fair, MOST_PANELS), .tokens = tokens, .token_blocks = 1};
    if (tokens > 1)
        c.panels = max64(FEWEST_PANELS, min64(fair, (int64_t)(MOST_BYTES / m->panel_bytes)));
    if (act_is_wide(m->kind))
        c.panels = min64(c.panels, MOST_PANELS);
    c.panel_blocks = (m->panels + c.panels - 1) / c.panels;
    if (tokens >= 2 * FEWEST_TOKENS && c.panel_blocks < tasks / 2) {
        int64_t blocks = min64((tasks + c.panel_blocks - 1) / c.panel_blocks, tokens / FEWEST_TOKENS);
        c.tokens = (tokens + blocks - 1) / blocks;
    }
    if (act_is_wide(m->kind))
        c.tokens = min64(c.tokens, WIDE_TOKENS);
    c.token_blocks = (tokens + c.tokens - 1) / c.tokens;
    return c;
}

/* out row t = y[2t] + y[2t + 1] (+ bias), `width` columns of each. */
static void join_wide(const worker *w, const product *p, int64_t tokens, int64_t width, const float *bias, float *out,
                      int64_t stride)
{
    for (int64_t t = 0; t < tokens; t++, out += stride) {
        w->kernels->add(p->y + 2 * t * p->y_stride, p->y + (2 * t + 1) * p->y_stride, width, out);
        if (bias)
            w->kernels->add(out, bias, width, out);
    }
}

static void inner_run(const void *arg, worker *w)
{
    const linear *o = arg;
    if (w->batch->adapted)
        lowrank_inner_shared(w, o->updates, o->domain, o->x, o->inner);
}

/* What adapters add to `columns` columns of the output, from `column` on. */
static void add_updates(const linear *o, const worker *w, int64_t token, int64_t tokens, int64_t column, int64_t columns)
{
    int64_t panel = column / KT_PANEL_ROWS;
    adapted_rows rows = {.product = o->updates, .domain = o->domain, .n = tokens, .first = token,
                         .inner = view_row(w, o->inner, token), .inner_stride = view_stride(w, o->inner)};
    adapted_output out = {.y = view_row(w, o->out, token) + column, .y_stride = view_stride(w, o->out),
                          .columns = columns, .panel = panel,
                          .last_panel = panel + (columns + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS};
    lowrank_outer(w, &rows, &out);
}

static void linear_run(const void *arg, worker *w)
{
    const linear *o = arg;
    const linear_part *own = &o->parts[w->own.node];
    const matrices *m = &own->weight;
    int64_t rows = rows_of(w, o->domain);
    int wide = act_is_wide(o->kind);
    if (rows == 0 || m->panels == 0)
        return;
    cut c = cut_step(m, rows, w->own.threads);
    act all, some;
    product p = {0};
    source_bind(w, &o->in, &all, &p);
    int64_t tasks = c.panel_blocks * c.token_blocks;
    for (int64_t i = worker_take_own(w, 1), ahead; i < tasks; i = worker_go_on(w, ahead, 1)) {
        int64_t panel = i / c.token_blocks * c.panels, token = i % c.token_blocks * c.tokens;
        int64_t column = own->column + panel * KT_PANEL_ROWS;
        ahead = worker_take_ahead(w, i, tasks, 1);
        matrices_bind(w, m, 0, panel, min64(panel + c.panels, m->panels), &p);
        int64_t soon = worker_soon(w, i, ahead, 1);
        if (soon < tasks)
            p.next = panel_at(m, 0, soon / c.token_blocks * c.panels);
        int64_t tokens = min64(c.tokens, rows - token);
        const float *bias = o->bias ? o->bias + column : NULL;
        float *out = view_row(w, o->out, token) + column;
        p.n_tokens = wide ? 2 * tokens : tokens;
        if (o->in.slot < 0) {
            p.xf = view_row(w, o->in.view, token);
        } else {
            some = act_rows(&all, token);
            act_bind(&some, &p);
        }
        p.y = wide ? (float *)(void *)local_scratch(w) : out;
        p.y_stride = wide ? c.panels * KT_PANEL_ROWS : view_stride(w, o->out);
        p.bias = wide ? NULL : bias;
        product_run(w, o->kind, &p);
        if (wide)
            join_wide(w, &p, tokens, p.n, bias, out, view_stride(w, o->out));
        if (o->updates >= 0 && w->batch->adapted)
            add_updates(o, w, token, tokens, column, p.n);
    }
}

int linear_make_parts(kt_program *p, const kt_weight *w, int64_t n, int64_t k, int32_t reads, linear_part *parts,
                      const matrices **common)
{
    int64_t rows = 0, column = 0;
    const matrices *first = NULL;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        if (w[i].n < 0 || w[i].n > MAX_COLUMNS || (w[i].n && w[i].k != k))
            return program_fail(p, KT_ERR_SHAPE, "linear weight: node %d has [%lld, %lld], but [%lld, %lld] is needed in "
                                "all", i, (long long)w[i].n, (long long)w[i].k, (long long)n, (long long)k);
        rows += w[i].n;
    }
    if (rows != n)
        return program_fail(p, KT_ERR_SHAPE, "linear weight: [%lld, %lld], but [%lld, %lld] is needed", (long long)rows,
                            (long long)k, (long long)n, (long long)k);
    for (int32_t i = 0; i < p->n_nodes; i++) {
        linear_part *own = &parts[i];
        own->column = column;
        if (w[i].n == 0)
            continue;
        if (column % KT_PANEL_ROWS)
            return program_fail(p, KT_ERR_SHAPE, "linear weight: node %d begins at row %lld; they are cut every %d", i,
                                (long long)column, KT_PANEL_ROWS);
        int failed = program_matrices(p, "linear weight", &w[i], (int64_t[3]){w[i].n, k, 1}, reads, &own->weight);
        if (!failed && column && !matrices_read_alike(&own->weight, first))
            failed = program_fail(p, KT_ERR_SHAPE, "linear weight: node %d has another format", i);
        if (failed)
            return failed;
        first = column ? first : &own->weight;
        column += w[i].n;
    }
    *common = first;
    return KT_OK;
}

static void record_inner(kt_program *p, linear *o, kt_view x)
{
    o->updates = lowrank_product(p, 0, 1, x.width, (o->out.width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS);
    if (o->updates < 0)
        return;
    o->x = x;
    o->inner = lowrank_inner_view(p, o->domain);
    program_phase(p, inner_run, o);
    program_touch_view(p, x, ANY_ROWS);
    program_touch_view(p, o->inner, ANY_ROWS | WRITES);
}

int kt_program_linear(kt_program *p, kt_view out, kt_view x, const kt_linear *given)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "linear x", x, -1);
    if (!failed)
        failed = program_check_view(p, "linear out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "linear", out, x, 0);
    if (failed)
        return failed;
    linear *o = program_new(p, sizeof *o);
    linear_part *parts = program_new(p, (size_t)p->n_nodes * sizeof *parts);
    if (!o || !parts)
        return KT_ERR_MEMORY;
    *o = (linear){.out = out, .parts = parts, .bias = given->bias, .domain = program_domain(p, x)};
    const matrices *common = NULL;
    failed = linear_make_parts(p, given->weight, out.width, x.width, given->reads, parts, &common);
    if (failed)
        return failed;
    o->kind = common->kind;
    program_operation(p);
    if (act_is_wide(o->kind))
        program_reserve(p, 0, (size_t)(2 * WIDE_TOKENS * MOST_PANELS * KT_PANEL_ROWS) * sizeof(float));
    o->in = program_source(p, x, common);
    record_inner(p, o, x);
    program_phase(p, linear_run, o);
    program_touch_source(p, &o->in);
    if (o->updates >= 0)
        program_touch_view(p, o->inner, ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
