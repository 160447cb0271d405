/* linear.c - out = in * W^T + bias: which thread multiplies which panels for which tokens.
 *
 * One token: the weights are read once from memory, so threads take runs of panels, long enough to
 * stream. Many tokens: blocks of panels that stay in the second cache while all tokens pass by.
 */
#include "program.h"

#include <string.h>

#define TASKS_PER_THREAD 8              /* so that a slow thread delays the others by an eighth of its share */
#define MOST_PANELS 64                  /* of one task */
#define BLOCK_BYTES ((size_t)128 << 10) /* weights of one task with many tokens: an eighth of a usual L2 */
#define BLOCK_TOKENS 256

typedef struct linear {
    kt_view out;
    source in;
    matrices weight;
    const float *bias;
    int32_t domain;
} linear;

static int64_t panels_per_task(const matrices *m, int64_t tokens, int threads)
{
    int64_t fair = max64(1, m->panels / ((int64_t)threads * TASKS_PER_THREAD));
    if (tokens == 1)
        return min64(fair, MOST_PANELS);
    return min64(fair, max64(1, (int64_t)(BLOCK_BYTES / m->panel_bytes)));
}

static void linear_run(const void *arg, worker *w)
{
    const linear *o = arg;
    int64_t rows = rows_of(w, o->domain);
    int64_t run = panels_per_task(&o->weight, rows, w->threads);
    int64_t panel_blocks = (o->weight.panels + run - 1) / run;
    int64_t token_blocks = (rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    act all, some;
    product p = {.y_stride = view_stride(w, o->out)};
    source_bind(w, &o->in, &all, &p);
    for (int64_t i; (i = worker_take(w, 1)) < panel_blocks * token_blocks;) {
        int64_t panel = i / token_blocks * run, token = i % token_blocks * BLOCK_TOKENS;
        matrices_bind(w, &o->weight, 0, panel, min64(panel + run, o->weight.panels), &p);
        p.n_tokens = min64(BLOCK_TOKENS, rows - token);
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
