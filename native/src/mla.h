/* mla.h - what the forms of multi-head latent attention share. */
#ifndef KT_MLA_H
#define KT_MLA_H

#include "attention.h"

typedef struct mla {
    kt_view out, q, latent;
    kt_mla s;
    matrices uk_in, uk_out, uv;
    attention a;                /* absorbed, over latent rows: dk = lora + rope, dv = lora */
    size_t nope_offset, query_offset, result_offset;    /* bytes into the shared scratch */
    size_t chosen_offset;       /* the same, of gathered rows */
    int32_t selection;          /* whose positions are attended to; -1: all */
    int32_t *identity;          /* 0, 1, ...: pages of gathered rows */
} mla;

/* Tokens [first, first + n) of the step; at most MLA_ABSORBED of them in the absorbed form. */
typedef struct mla_rows {
    int64_t first, n;
} mla_rows;

/* A step of more tokens is always expanded, or goes in several batches where positions are chosen: bounds the
 * scratch, [tokens][heads][2 * lora + rope] f32. */
#define MLA_ABSORBED 128

/* The absorbed form step by step, each called by all threads and shared out among them, with a barrier between;
 * first q_nope as uk_in reads it and q_rope to the end of the absorbed queries, for the rows [first, last) of r. */
void mla_split(const mla *o, const worker *w, mla_rows r, int64_t first, int64_t last);
void mla_absorb(const mla *o, const worker *w, mla_rows r);
void mla_results(const mla *o, const worker *w, mla_rows r);
void mla_values(const mla *o, const worker *w, mla_rows r);
head_rows mla_queries(const mla *o, const worker *w);
head_rows mla_results_at(const mla *o, const worker *w);

/* Attention of the step over the chosen positions; called by all threads. Contains barriers, ends without one. */
void mla_chosen(const mla *o, const worker *w);
/* Bytes of gathered rows, for steps of up to max_tokens. */
size_t mla_chosen_bytes(const mla *o, int64_t max_tokens, const selection *s);
/* 0, 1, ... for as many pages as a token's chosen rows fill; NULL if there is no memory. */
int32_t *mla_chosen_pages(kt_program *p, const selection *s);

/* Attention of the step with expanded keys and values; called by all threads. Contains barriers, ends
 * without one. Bytes of scratch it needs, for steps of up to max_tokens. */
void mla_expanded(const mla *o, const worker *w);
size_t mla_expanded_shared_bytes(const mla *o, int64_t max_tokens);
size_t mla_expanded_local_bytes(const mla *o);

#endif
