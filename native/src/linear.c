/* linear.c - out = in * W^T + bias: which thread multiplies which panels for which tokens.
 *
 * One token: the weights are read once from memory, so threads take runs of panels, long enough to
 * stream. Many tokens: runs of panels as long as a fair share allows, since the products block for the
 * caches themselves and fetch ahead within a call; tokens are cut only when panels are too few for all
 * threads.
 */
#include "program.h"

#define TASKS_PER_THREAD 8              /* so that a slow thread delays the others by an eighth of its share */
#define MOST_PANELS 64                  /* of one task with one token */
/* With many tokens. 512x2048x4096 in int8 on one core, weights per call: 128 kB 75 %, 512 kB 93 % and
 * 2 MB 95 % of the peak. */
#define MOST_BYTES ((size_t)2 << 20)
#define FEWEST_PANELS 4                 /* below this the products reuse too little */
#define FEWEST_TOKENS 48

typedef struct linear {
    kt_view out;
    source in;
    matrices weight;
    const float *bias;
    int32_t domain;
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
    c.panel_blocks = (m->panels + c.panels - 1) / c.panels;
    if (tokens >= 2 * FEWEST_TOKENS && c.panel_blocks < tasks / 2) {
        int64_t blocks = min64((tasks + c.panel_blocks - 1) / c.panel_blocks, tokens / FEWEST_TOKENS);
        c.tokens = (tokens + blocks - 1) / blocks;
        c.token_blocks = (tokens + c.tokens - 1) / c.tokens;
    }
    return c;
}

static void linear_run(const void *arg, worker *w)
{
    const linear *o = arg;
    int64_t rows = rows_of(w, o->domain);
    cut c = cut_step(&o->weight, max64(1, rows), w->threads);
    act all, some;
    product p = {.y_stride = view_stride(w, o->out)};
    source_bind(w, &o->in, &all, &p);
    for (int64_t i; (i = worker_take(w, 1)) < c.panel_blocks * c.token_blocks && rows > 0;) {
        int64_t panel = i / c.token_blocks * c.panels, token = i % c.token_blocks * c.tokens;
        matrices_bind(w, &o->weight, 0, panel, min64(panel + c.panels, o->weight.panels), &p);
        p.n_tokens = min64(c.tokens, rows - token);
        if (o->in.slot < 0) {
            p.xf = view_row(w, o->in.view, token);
        } else {
            some = act_rows(&all, token);
            act_bind(&some, &p);
        }
        p.y = view_row(w, o->out, token) + panel * KT_PANEL_ROWS;
        p.bias = o->bias ? o->bias + panel * KT_PANEL_ROWS : NULL;
        product_run(w, o->weight.kind, &p);
    }
}

int kt_program_linear(kt_program *p, kt_view out, kt_view in, const kt_weight *w, const float *bias,
                      int32_t precise)
{
    matrices m;
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "linear in", in, -1);
    if (!failed)
        failed = program_check_view(p, "linear out", out, program_domain(p, in));
    if (!failed)
        failed = program_check_overlap(p, "linear", out, in, 0);
    if (!failed)
        failed = program_matrices(p, "linear weight", w, (int64_t[3]){out.width, in.width, 1}, precise, &m);
    linear *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    program_operation(p);
    *o = (linear){.out = out, .weight = m, .bias = bias, .domain = program_domain(p, in)};
    o->in = program_source(p, in, m.kind);
    program_phase(p, linear_run, o);
    program_touch_source(p, &o->in);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
