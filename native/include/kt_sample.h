/* kt_sample.h - the choice of the next token of many sequences, each with its own settings. */
#ifndef KT_API_SAMPLE_H
#define KT_API_SAMPLE_H

#include "kt_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One row of logits and how its token is chosen. In this order: the bias is added to its ids; logits of seen ids are
 * divided by `repetition` where positive, else multiplied; `presence` and `frequency` times the count are taken off
 * those in the answer; what is not in the mask goes; all are divided by the temperature; top-k, top-p and min-p drop
 * the unlikely; `at` says which of the others is taken, in ascending order of ids.
 *
 * A block is KT_BLOCK_COLUMNS columns; peaks, sums and best are what kt_program_summary found. */
typedef struct kt_choice {
    const float *values;        /* [vocab] */
    const float *peaks, *sums;  /* [blocks] */
    int32_t best;
    float sums_temperature;     /* 0: there are no sums */
    float temperature;          /* 0: the greatest is taken */
    int32_t top_k;              /* 0, or vocab and more: all */
    double top_p, min_p;        /* 1 and 0: all */
    double at;                  /* 0..1, below 1 */
    float repetition, presence, frequency;      /* 1, 0, 0: nothing is changed */
    int32_t n_seen, n_bias;
    const int32_t *seen;        /* [n_seen] different ids of the prompt and the answer */
    const int32_t *answered;    /* [n_seen] how often each is in the answer */
    const int32_t *bias_ids;    /* [n_bias] different ids */
    const float *bias;          /* [n_bias] */
    const uint32_t *mask;       /* [(vocab + 31) / 32] bit i of word j: 32 j + i may be taken; NULL: all may */
    int32_t n_likeliest;        /* likeliest ids wanted; -1: no logarithms at all */
    /* out */
    int32_t id;                 /* KT_CHOICE_BROKEN: a logit is NaN or infinite; KT_CHOICE_NONE: the mask leaves none */
    float logprob;              /* of id, before anything was changed */
    int32_t *likeliest;         /* [n_likeliest], descending; -1 where there are no more */
    float *logprobs;            /* [n_likeliest] */
} kt_choice;

#define KT_CHOICE_BROKEN -1
#define KT_CHOICE_NONE -2

typedef struct kt_sampler kt_sampler;

/* For rows of `vocab` logits; uses the pool, which must outlive it, between other work. NULL: no memory, or a vocab
 * that is not 1..2^24. */
KT_API kt_sampler *kt_sampler_create(kt_pool *pool, int64_t vocab, char *error, size_t error_size);
KT_API void kt_sampler_free(kt_sampler *sampler);

/* Choose the token of each row; equal to a loop over the rows. KT_OK; KT_ERR_RANGE: an id outside the vocabulary, and
 * nothing was chosen. */
KT_API int kt_sampler_choose(kt_sampler *sampler, kt_choice *rows, int64_t n);

#ifdef __cplusplus
}
#endif

#endif
