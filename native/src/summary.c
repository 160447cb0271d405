/* summary.c - what the choice of a token needs to know about its logits, computed by the whole
 * team while they are still in the caches: the greatest of every block of columns, the weight
 * of the block relative to it, and the best column of all.
 *
 * A block is always one thread's, so results do not depend on how blocks are shared out.
 */
#include "program.h"

/* Blocks a thread takes at once: 8 kB of logits, about a microsecond. 150,000 logits are 75 such runs. */
#define RUN 32

typedef struct summary {
    kt_view best, peaks, sums, logits;
    int32_t domain;
} summary;

static void blocks_run(const void *arg, worker *w)
{
    const summary *o = arg;
    int64_t runs = (o->peaks.width + RUN - 1) / RUN, rows = rows_of(w, o->domain);
    for (int64_t i; (i = worker_take(w, 1)) < runs * rows;) {
        int64_t row = i / runs, block = i % runs * RUN, column = block * KT_BLOCK_COLUMNS;
        w->kernels->summarize(view_row(w, o->logits, row) + column,
                              min64(RUN * KT_BLOCK_COLUMNS, o->logits.width - column),
                              run_of(w, token_row(w, o->domain, row))->temperature,
                              view_row(w, o->peaks, row) + block, view_row(w, o->sums, row) + block);
    }
}

static void best_run(const void *arg, worker *w)
{
    const summary *o = arg;
    int64_t row, last;
    for (own_rows(w, o->domain, &row, &last); row < last; row++) {
        const float *peaks = view_row(w, o->peaks, row), *x = view_row(w, o->logits, row);
        int64_t block = 0;
        for (int64_t i = 1; i < o->peaks.width; i++)
            block = peaks[i] > peaks[block] ? i : block;
        int64_t column = block * KT_BLOCK_COLUMNS;
        while (x[column] < peaks[block])    /* ends: a value of the block is its peak, or NaN */
            column++;
        *view_row(w, o->best, row) = (float)column;
    }
}

static int check(kt_program *p, const summary *o)
{
    int failed = program_check_view(p, "summary of", o->logits, -1);
    if (failed)
        return failed;
    int64_t blocks = ((int64_t)o->logits.width + KT_BLOCK_COLUMNS - 1) / KT_BLOCK_COLUMNS;
    if (o->best.width != 1 || o->peaks.width != blocks || o->sums.width != blocks || o->logits.width > 1 << 24)
        return program_fail(p, KT_ERR_SHAPE, "summary: %d best, %d peaks and %d sums of %d columns; 1, %lld and %lld "
                            "of at most 2^24 are needed", o->best.width, o->peaks.width, o->sums.width,
                            o->logits.width, (long long)blocks, (long long)blocks);
    const kt_view views[] = {o->logits, o->best, o->peaks, o->sums};
    for (int i = 1; i < 4 && !failed; i++) {
        failed = program_check_view(p, "summary", views[i], program_domain(p, o->logits));
        for (int j = 0; j < i && !failed; j++)
            failed = program_check_overlap(p, "summary", views[j], views[i], 0);
    }
    return failed;
}

int kt_program_summary(kt_program *p, kt_view best, kt_view peaks, kt_view sums, kt_view logits)
{
    summary given = {.best = best, .peaks = peaks, .sums = sums, .logits = logits};
    int failed = program_open(p);
    if (!failed)
        failed = check(p, &given);
    summary *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    given.domain = program_domain(p, logits);
    *o = given;
    program_operation(p);
    program_phase(p, blocks_run, o);
    program_touch_view(p, logits, ANY_ROWS);
    program_touch_view(p, peaks, ANY_ROWS | WRITES);
    program_touch_view(p, sums, ANY_ROWS | WRITES);
    program_phase(p, best_run, o);
    program_touch_view(p, logits, OWN_ROWS);
    program_touch_view(p, peaks, OWN_ROWS);
    program_touch_view(p, best, OWN_ROWS | WRITES);
    return KT_OK;
}
