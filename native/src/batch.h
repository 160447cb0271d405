/* batch.h - the rows of a step: the run of each, its position in the sequence, and whether it
 * has outputs.
 *
 * Found once per step, in memory of the program, so that operations look a row up instead of searching for it.
 */
#ifndef KT_BATCH_H
#define KT_BATCH_H

#include "kt.h"

typedef struct batch {
    const kt_run *runs;
    int64_t n_runs, rows, outputs;
    int32_t defer;              /* the greatest of all runs */
    int32_t adapted;            /* whether a run names an adapter */
    int64_t *first;             /* [n_runs + 1] first row of each run, then the number of rows */
    int32_t *run;               /* [rows] */
    int32_t *position;          /* [rows] */
    int32_t *output;            /* [outputs] row of each */
} batch;

/* Bytes for steps of up to max_tokens, and the batch in that memory. */
size_t batch_bytes(int64_t max_tokens);
batch batch_at(void *memory, int64_t max_tokens);
/* Fill b with the rows of a checked step. */
void batch_derive(batch *b, const kt_step *step);

/* KT_OK if the program can run the step; every sentence names the run. */
int batch_check(kt_program *p, const kt_step *step);

/* A range of positions. */
typedef struct chunk {
    int64_t start, tokens;
} chunk;

static inline chunk chunk_of(const kt_run *run)
{
    return run->chunk_tokens ? (chunk){run->chunk_start, run->chunk_tokens} : (chunk){run->start, run->n_tokens};
}

static inline int64_t run_end(const kt_run *run)
{
    return run->start + run->n_tokens;
}

/* Whether latent attention takes its expanded form there. */
static inline int is_expanded(const kt_run *run, int64_t position)
{
    return run->expanded <= position && position < run->expanded_end;
}

/* Where the last of the run's chunks ends. */
static inline int64_t chunk_end(const kt_run *run)
{
    chunk c = chunk_of(run);
    return c.start + c.tokens > run_end(run) ? c.start + c.tokens : run_end(run);
}

#endif
