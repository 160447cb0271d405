/* attention_cut.h - how the queries of runs are cut into blocks, and how a thread iterates over
 * the blocks of all runs.
 *
 * The tasks of all runs are one list, run after run; a block belongs to one run. A thread's tasks ascend, so it walks
 * the runs along with them. How queries are grouped does not change a bit of any.
 */
#ifndef KT_ATTENTION_CUT_H
#define KT_ATTENTION_CUT_H

#include "attention.h"

/* Queries that are worked on together: tokens of one run x heads of one kv head. */
typedef struct block {
    int64_t kv_head, token, n_tokens, head, n_heads;    /* token: within the run; head: within the group */
    int64_t n;                                          /* n_tokens * n_heads, row = token * n_heads + head */
} block;

/* How a run is cut. */
typedef struct cut {
    const kt_run *run;
    int64_t row;            /* its first among those attended for, */
    int64_t step_row;       /* and of the step */
    int64_t token_blocks, head_blocks, tokens_each, heads_each;
    int64_t blocks;         /* kv_heads * token_blocks * head_blocks */
    int64_t rows;           /* most queries of a block */
    int64_t first_span, spans;
} cut;

/* All that is attended for: runs, and how they are cut. */
typedef struct work {
    const attention *a;
    const worker *w;
    run_range runs;
    int64_t queries;        /* of a block, at most */
    int64_t blocks, rows, spans;    /* of all runs: their sum, and the most of one */
    cut first;              /* of the first run */
    head_rows q, out;
} work;

/* Where a thread is in the list of tasks. */
typedef struct place_in {
    int64_t run, before;    /* tasks of the runs before */
    int64_t blocks_before;
    cut c;
} place_in;

/* Cut all runs of k: fills what is beside a, w, runs, q and out. */
void cut_work(work *k);
place_in first_place(const work *k);
/* Go on to the run of task i, in a wave over spans [done, done + n) of each run, counted from its first; 0: there is
 * none. Without waves a block is one task. */
int walk_to(const work *k, place_in *at, int64_t i, int64_t done, int64_t n);
void walk_to_block(const work *k, place_in *at, int64_t i);
/* Block i of a run; the last tokens come first, since they see the most keys. */
block block_at(const attention *a, const cut *c, int64_t i);
/* Where the spans of a block begin and end. */
int64_t block_first(const attention *a, const block *b, const kt_run *run);
int64_t block_end(const block *b, const kt_run *run);
/* The first key that a query at this position sees, and its page. */
int64_t first_seen(const attention *a, int64_t position);
int64_t first_page(const attention *a, int64_t position);

#endif
