/* kt_offload.h - parts of a program that run for another device.
 *
 * A thread that runs parts of a program for a stream of another device: the stream hands over layer after layer
 * and waits for each. For a layer it runs part immediate[layer], lets the stream go on, then runs part
 * deferred[layer] (not in a step that defers nothing), one layer after the other in the order of their arrival. It runs as the pool's
 * thread 0; from kt_offload_begin until kt_offload_result nobody else uses the pool or the program.
 *
 * Two ways in. By calls: the stream calls kt_offload_submit and kt_offload_wait, which have the signature of
 * cudaHostFn_t, call nothing of CUDA and allocate nothing; who waits, and the idle thread, spins for spin_us, then
 * sleeps. By flags: the stream writes flags[layer] = 1, which the thread looks for (it sets it back to 0): all the
 * time until spin_us after the last event, then about every 0.1 ms; between steps it sleeps. When the layer is
 * done it writes flags[layers + layer] = 1, for which the stream waits and which it sets back.
 *
 * Nothing ever keeps the stream waiting: after an error - of a part, or because nothing happened for timeout_ms
 * while somebody waited, a part ran, or layers were to come by flags - the layers left in the step are done at
 * once, without computing. The first error is kept until the next step begins.
 *
 * While deferred[layer] runs, the stream may already write what layer + 1 reads: such neighbours read views and given
 * routings of their own (two of each, in turn, are enough).
 */
#ifndef KT_API_OFFLOAD_H
#define KT_API_OFFLOAD_H

#include "kt_program.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kt_offload kt_offload;

typedef struct kt_offload_options {
    int32_t layers;
    const int32_t *immediate;   /* [layers] parts; copied */
    const int32_t *deferred;    /* [layers] parts, or -1: none; copied */
    int32_t timeout_ms;         /* >= 1 */
    int32_t spin_us;            /* the pool's idle workers spin as long from now on */
    int32_t *flags;             /* [2 * layers], which must outlive the handle; NULL: by calls */
} kt_offload_options;

/* The program is finished, has neither embeddings nor attention (a step gives it no ids and no cache), and must
 * outlive the handle. */
KT_API kt_offload *kt_offload_create(kt_program *program, const kt_offload_options *options, char *error,
                                     size_t error_size);
/* In the middle of a step too: whoever waits goes on, and the part that runs ends. */
KT_API void kt_offload_free(kt_offload *offload);
KT_API const char *kt_offload_error(const kt_offload *offload);

/* A step of so many tokens will be launched: forget the last one. Each layer comes once. defer [n_tokens]: the most
 * experts of each token that are deferred; copied; NULL: none. KT_ERR_RANGE; KT_ERR_TIMEOUT: the last step still
 * runs. After an error nothing is computed until the next begin. */
KT_API int kt_offload_begin(kt_offload *offload, int64_t n_tokens, const int32_t *defer);
/* The tokens of the steps that begin from now on name this adapter of the program's; 0: none, as at first. Between two
 * steps. KT_ERR_RANGE: the program has no room for it. */
KT_API int kt_offload_adapter(kt_offload *offload, int32_t adapter);
/* The step is over: when nothing runs any more, KT_OK or its first error. */
KT_API int kt_offload_result(kt_offload *offload);

/* What submit and wait take for a layer; NULL: there is no such layer. Valid as long as the handle. */
KT_API void *kt_offload_ticket(kt_offload *offload, int32_t layer);
/* The layer's input is there. Returns at once; from any thread. */
KT_API void kt_offload_submit(void *ticket);
/* Returns when the layer's immediate part is done, or the step has failed; from any thread. */
KT_API void kt_offload_wait(void *ticket);

/* A part as it ran. */
typedef struct kt_span {
    int32_t layer, deferred;    /* deferred: 1: it was part deferred[layer] */
    int64_t start_ns, end_ns;   /* CLOCK_MONOTONIC */
} kt_span;

/* Fill out[0..min(capacity, n)) with the parts of the last step, in order; return n. After kt_offload_result. */
KT_API int32_t kt_offload_spans(const kt_offload *offload, kt_span *out, int32_t capacity);

#ifdef __cplusplus
}
#endif
#endif
