/* mla.h - what the two forms of multi-head latent attention share. */
#ifndef KT_MLA_H
#define KT_MLA_H

#include "attention.h"

typedef struct mla {
    kt_view out, q, latent;
    kt_mla s;
    matrices uk_in, uk_out, uv;
    attention a;                /* absorbed, over latent rows: dk = lora + rope, dv = lora */
    size_t nope_offset, query_offset, result_offset;    /* bytes into the shared scratch */
} mla;

/* Attention of the step with expanded keys and values; called by all threads. Contains barriers, ends
 * without one. Bytes of scratch it needs, for steps of up to max_tokens. */
void mla_expanded(const mla *o, const worker *w);
size_t mla_expanded_shared_bytes(const mla *o, int64_t max_tokens);
size_t mla_expanded_local_bytes(const mla *o);

#endif
