/* attention.h - causal attention of runs' queries over the pages of the cache, for GQA and MLA.
 *
 * The keys are cut into *spans* of a fixed number of pages. A span's partial result (maximum, sum,
 * weighted values) is computed from nothing, and the spans are merged in ascending order, whoever
 * computed them; so the result does not depend on how the work was shared out. A page before the window of all
 * queries of a block is not read, nor one that none of them chose; that does not move the spans.
 */
#ifndef KT_ATTENTION_H
#define KT_ATTENTION_H

#include "program.h"

#define SPAN_PAGES 8        /* 512 keys: enough work for a task, few enough partials */
#define BLOCK_QUERIES 64    /* queries that pass over a page together */

typedef struct attention {
    int32_t kv_heads;
    int32_t group;                  /* queries per token that share a kv head */
    int32_t dk, dv, kv_f32;
    int32_t fp8;                    /* codes: decoded page by page, K of a head from panels (or rows: pack) */
    int32_t pack;                   /* bf16 keys lie as rows and are packed to panels page by page (MLA) */
    int32_t window;                 /* a query sees so many keys, its own included; 0: all */
    int32_t windowed;               /* keys and values lie in window pages */
    int32_t chunked;                /* the first key seen is that of the last multiple of `window` */
    float scale;
    int32_t choice;                 /* of blocks, a list for each kv head; 0: all that a query sees */
    const float *sinks;             /* [kv_heads * group] a score that each head's softmax has besides; or NULL */
    int64_t k_stride, v_stride;     /* elements from one key to the next, where they are rows */
    int64_t k_head, v_head;         /* elements from one kv head to the next */
    size_t k_offset, v_offset;      /* bytes into a page */
    size_t k_scales, v_scales;      /* the same, of fp8 scales [64][heads]: kv_heads, or those of a row that is packed: */
    int32_t row_heads[2];           /* the columns of each, the second may have none */
    size_t shared_offset;           /* bytes into the shared scratch, of partials */
} attention;

/* KT_OK if scores may be multiplied by it: maxima are found before. */
static inline int check_scale(kt_program *p, const char *name, float scale)
{
    if (scale > 0 && scale <= 3.4e38f)
        return KT_OK;
    return program_fail(p, KT_ERR_RANGE, "%s: a scale of %g, it must be positive", name, (double)scale);
}

/* Row (token, head) begins at data + token * token_stride + head * head_stride. */
typedef struct head_rows {
    float *data;
    int64_t token_stride, head_stride;
} head_rows;

/* Columns of a query as attend_bf16 reads it, and of a key in panels: whole pairs. */
static inline int64_t paired(int64_t dk)
{
    return (dk + 1) / 2 * 2;
}

/* Elements of K of one head and page: panels, or rows where the cache is f32. */
static inline int64_t page_keys(int64_t dk, int32_t kv_f32)
{
    return KT_PAGE_TOKENS * (kv_f32 ? dk : paired(dk));
}

/* Bytes of an element of the cache. */
static inline size_t cached_bytes(const attention *a)
{
    return a->kv_f32 ? sizeof(float) : a->fp8 ? sizeof(uint8_t) : sizeof(uint16_t);
}

/* The heads of a row that is packed. */
static inline int64_t row_heads(const attention *a)
{
    return a->row_heads[1] ? 2 : 1;
}

/* Rows [n][dk] bf16 of the codes of a page, rows that are packed. */
void decode_rows(const attention *a, const worker *w, const uint8_t *page, int64_t n, uint16_t *out);

/* Of shared scratch, for a team of so many threads, and of each thread's. */
size_t attention_shared_bytes(const attention *a, int threads);
size_t attention_local_bytes(const attention *a);

/* Runs [first, last) of a step. */
typedef struct run_range {
    int64_t first, last;
} run_range;

static inline run_range all_runs(const worker *w)
{
    return (run_range){0, w->batch->n_runs};
}

/* out = attention of q, the rows of these runs, each over its own pages; called by all threads of the team, from a
 * phase. Contains barriers when a few queries meet a long context, as many for all runs as for the longest; ends
 * without one. */
void attend(const attention *a, const worker *w, run_range runs, head_rows q, head_rows out);

static inline uint8_t *cache_page(const worker *w, const kt_run *run, int64_t page)
{
    return (uint8_t *)w->step->cache + (size_t)run->pages[page] * w->step->page_bytes;
}

/* The same for an attention that may keep its keys in window pages: of those, only what its window reaches is there. */
static inline uint8_t *attention_page(const attention *a, const worker *w, const kt_run *run, int64_t page)
{
    const kt_step *s = w->step;
    return a->windowed ? (uint8_t *)s->windows + (size_t)run->window_pages[page] * s->window_page_bytes
                       : cache_page(w, run, page);
}

#endif
