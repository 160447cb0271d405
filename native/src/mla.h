/* mla.h - shared by the forms of multi-head latent attention. */
#ifndef KT_MLA_H
#define KT_MLA_H

#include "attention.h"

enum { MLA_ABSORBED_FORM, MLA_CHOSEN_FORM, MLA_EXPANDED_FORM };

/* Rows [first, first + n) of the step that are worked on together in one form: those of one run if they are expanded,
 * else of one or more, at most MLA_ABSORBED. */
typedef struct mla_rows {
    int64_t first, n;
    int32_t form;
    int32_t tiled;              /* bf16 products use tiles, where the CPU has them */
} mla_rows;

/* What one thread finds in the first phase and reads in the others: the step's first rows. A cache line each. */
typedef union mla_own {
    mla_rows first;
    uint8_t line[64];
} mla_own;

typedef struct mla {
    kt_view out, q, latent;
    kt_mla s;
    matrices uk_in, uk_out, uv;
    attention a;                /* absorbed, over latent rows: dk = lora + rope, dv = lora */
    size_t nope_offset, query_offset, result_offset;    /* bytes into the shared scratch */
    size_t chosen_offset, chosen_bytes;                 /* the same, of gathered rows */
    int32_t selection;          /* whose positions are attended to; -1: all */
    const int32_t *identity;    /* numbers of the pages of gathered rows */
    mla_own *own;               /* [threads] */
    int32_t updates[3];         /* lowrank_product of uk_in, uk_out and uv */
    size_t inner_offset;        /* local: what adapters' A make of rows */
} mla;

/* The most rows that go together unless they are expanded: bounds the scratch, [tokens][heads][2 * lora + rope] f32. */
#define MLA_ABSORBED 128

/* Products of bf16 use tiles from some number of tokens on, which changes their last bits. So the number is a page's
 * where rows are expanded and else one, not that of the rows that happen to be together: let p use tiles, or not. */
static inline void mla_tiles(product *p, int32_t tiled)
{
    if (p->format->bits == 16)
        p->tile_min = tiled ? 1 : INT64_MAX;
}

static inline int mla_tiled(const worker *w, const matrices *m, int64_t tokens)
{
    return m->kind == ACT_BF16 && tokens >= pool_tile_min(w->pool, KT_TILE_BF16);
}

/* Where the absorbed queries lie, and the results before uv. */
static inline head_rows mla_queries(const mla *o, const worker *w)
{
    return (head_rows){(float *)(void *)(shared_scratch(w) + o->query_offset), (int64_t)o->s.heads * o->a.dk, o->a.dk};
}

static inline head_rows mla_results_at(const mla *o, const worker *w)
{
    return (head_rows){(float *)(void *)(shared_scratch(w) + o->result_offset), (int64_t)o->s.heads * o->s.lora,
                       o->s.lora};
}

/* Attention of absorbed queries over what each row chose; called by all threads. Contains barriers, ends without one. */
void mla_chosen(const mla *o, const worker *w, mla_rows r);
/* Bytes of a page of gathered rows, and the most of them that a token has. */
size_t mla_chosen_page(const mla *o);
int64_t mla_chosen_keys(const selection *s);

/* Attention of one run with expanded keys and values; called by all threads. Contains barriers, ends
 * without one. Bytes of scratch it needs, for steps of up to max_tokens. */
void mla_expanded(const mla *o, const worker *w, mla_rows r);
size_t mla_expanded_shared_bytes(const mla *o, int64_t max_tokens);
size_t mla_expanded_local_bytes(const mla *o);

#endif
