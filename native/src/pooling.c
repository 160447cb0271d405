/* pooling.c - pooling: the positions of a sequence in windows of `every`, each window becomes
 * one row.
 *
 * Of each column by itself a softmax over the window's rows weighs them. It is kept as it grows - the greatest score,
 * the sum of powers and the weighted sum - row by row, so that how a sequence is cut into steps never changes a bit.
 * The state is three rows for the window that is open; where windows overlap, three more for the next one, to which
 * the first half of each row already belongs.
 * Sources: DeepSeek-V4 report, sections 2.3.1 and 2.3.2; transformers 5.23 (deepseek_v4).
 */
#include "program.h"

#include <math.h>
#include <string.h>

#define BLOCK 64                /* columns of a task */
#define MOST_EVERY ((int32_t)1 << 16)

typedef struct pooling {
    kt_view out, in, score;
    kt_pooling s;
    int64_t dim;
} pooling;

/* Columns of a growing softmax; all zeros: of nothing yet, whatever the greatest score says. */
typedef struct growing {
    float max[BLOCK], sum[BLOCK], acc[BLOCK];
} growing;

static void empty(growing *g)
{
    memset(g, 0, sizeof *g);
}

/* The state [3][dim] of `dim` columns, of which these begin at `first`. */
static void load(growing *g, const float *state, int64_t dim, int64_t first, int64_t n)
{
    empty(g);
    if (!state)
        return;
    memcpy(g->max, state + first, (size_t)n * sizeof(float));
    memcpy(g->sum, state + dim + first, (size_t)n * sizeof(float));
    memcpy(g->acc, state + 2 * dim + first, (size_t)n * sizeof(float));
}

static void store(const growing *g, float *state, int64_t dim, int64_t first, int64_t n)
{
    memcpy(state + first, g->max, (size_t)n * sizeof(float));
    memcpy(state + dim + first, g->sum, (size_t)n * sizeof(float));
    memcpy(state + 2 * dim + first, g->acc, (size_t)n * sizeof(float));
}

static void push(growing *g, const float *x, const float *score, const float *bias, int64_t n)
{
    for (int64_t c = 0; c < n; c++) {
        float z = score[c] + bias[c];
        if (g->sum[c] == 0 || z > g->max[c]) {
            float keep = g->sum[c] == 0 ? 0 : expf(g->max[c] - z);
            g->max[c] = z;
            g->sum[c] = g->sum[c] * keep + 1;
            g->acc[c] = g->acc[c] * keep + x[c];
        } else {
            float more = expf(z - g->max[c]);
            g->sum[c] += more;
            g->acc[c] += more * x[c];
        }
    }
}

/* All tokens of a run, columns [first, first + n). */
static void pooling_columns(const pooling *o, const worker *w, int64_t number, int64_t first, int64_t n)
{
    const kt_run *run = &w->batch->runs[number];
    int64_t every = o->s.every, own = o->s.overlap ? o->dim : 0, last = w->batch->first[number + 1];
    const float *state = state_before(w, run, o->s.state_offset);
    float *next_state = state_after(w, run, o->s.state_offset);
    growing open, next;
    load(&open, state, o->dim, first, n);
    load(&next, o->s.overlap && state ? state + 3 * o->dim : NULL, o->dim, first, n);
    for (int64_t t = w->batch->first[number]; t < last; t++) {
        int64_t row = position_of(w, t) % every;
        const float *x = view_row(w, o->in, t) + first, *score = view_row(w, o->score, t) + first;
        const float *bias = o->s.bias + row * o->in.width + first;
        float *out = view_row(w, o->out, t) + first;
        push(&open, x + own, score + own, bias + own, n);
        if (o->s.overlap)
            push(&next, x, score, bias, n);
        if (row < every - 1) {
            memset(out, 0, (size_t)n * sizeof *out);
            continue;
        }
        for (int64_t c = 0; c < n; c++)
            out[c] = open.acc[c] / open.sum[c];
        open = next;            /* empty where windows do not overlap */
        empty(&next);
    }
    store(&open, next_state, o->dim, first, n);
    if (o->s.overlap)
        store(&next, next_state + 3 * o->dim, o->dim, first, n);
}

static void pooling_run(const void *arg, worker *w)
{
    const pooling *o = arg;
    int64_t blocks = (o->dim + BLOCK - 1) / BLOCK;
    for (int64_t i; (i = worker_take(w, 1)) < w->batch->n_runs * blocks;) {
        int64_t first = i % blocks * BLOCK;
        pooling_columns(o, w, i / blocks, first, min64(BLOCK, o->dim - first));
    }
}

int kt_program_pooling(kt_program *p, kt_view out, kt_view x, kt_view score, const kt_pooling *s)
{
    int failed = program_open(p);
    const kt_view views[3] = {out, x, score};
    for (int i = 0; i < 3 && !failed; i++)
        failed = program_check_view(p, "pooling", views[i], KT_ROWS_TOKENS);
    for (int i = 1; i < 3 && !failed; i++)
        failed = program_check_overlap(p, "pooling", out, views[i], 0);
    if (failed)
        return failed;
    int64_t parts = s->overlap ? 2 : 1;
    if (x.width != parts * out.width || score.width != x.width || s->every < 1 || s->every > MOST_EVERY || !s->bias)
        return program_fail(p, KT_ERR_SHAPE, "pooling: %d columns and %d scores to %d, %lld times, every %d (1..%d)%s",
                            x.width, score.width, out.width, (long long)parts, s->every, MOST_EVERY,
                            s->bias ? "" : ", without a bias");
    failed = program_reserve_state(p, "pooling", s->state_offset, (size_t)(3 * parts * out.width) * sizeof(float));
    pooling *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    *o = (pooling){.out = out, .in = x, .score = score, .s = *s, .dim = out.width};
    program_operation(p);
    program_phase(p, pooling_run, o);
    program_touch_view(p, x, ANY_ROWS);
    program_touch_view(p, score, ANY_ROWS);
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
