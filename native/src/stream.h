/* stream.h - the state shared by the two sides of an offload: the one that prepares and ends
 * steps (offload.c), and the one that works while a step runs.
 *
 * A step is changed (begin) only while the thread is at rest: `active` is taken back, then `busy` awaited. The
 * thread does it the other way round: it says busy, then looks at active and at what there is to do. Both are
 * sequentially consistent, so one of them sees the other. Errors, the start of a step and the watchdog's look are
 * serialised by `lock`, which a step that goes well never takes after its start.
 */
#ifndef KT_STREAM_H
#define KT_STREAM_H

#include "bell.h"
#include "program.h"
#include "thread.h"

#define OFFLOAD_ERROR 320       /* bytes of a sentence */

enum { OPEN, SUBMITTED, SIGNALLED };

typedef struct ticket {
    struct kt_offload *offload;
    int32_t layer;
} ticket;

struct kt_offload {
    bell work;                  /* rung for the thread: a step begins, a layer has come, it is over */
    bell done;                  /* rung for the others: a layer is signalled, the thread rests, an error */
    _Alignas(LINE) _Atomic int32_t arrived;     /* layers submitted */
    _Alignas(LINE) _Atomic int32_t taken;       /* layers the thread took from the queue */
    _Atomic int32_t busy;       /* the thread is serving a layer */
    _Atomic int32_t active;     /* between begin and result */
    _Atomic int32_t code;       /* KT_OK or the step's first error */
    _Atomic int32_t inside;     /* callers in submit and wait */
    _Atomic int32_t waiting;    /* callers in wait that have to */
    _Atomic int32_t stop;
    _Atomic int32_t n_spans;
    _Atomic int64_t event_ns;   /* when something happened last */
    kt_program *program;
    int32_t layers;
    int32_t *immediate, *deferred;      /* [layers] parts */
    ticket *tickets;            /* [layers] */
    _Atomic int32_t *state;     /* [layers] OPEN, ... */
    _Atomic int32_t *queue;     /* [layers] in order of arrival; -1: not there yet */
    _Atomic int32_t *flags;     /* [2 * layers] or NULL */
    kt_span *spans;             /* [2 * layers] */
    kt_run *runs;               /* [max_tokens] the tokens of a step: one run for neighbours of one depth */
    kt_step step;               /* of these runs */
    int32_t defers;             /* some token of the step defers */
    int32_t adapter;            /* of the tokens of further steps; 0: none */
    int64_t timeout_ns, spin_ns;
    pthread_t thread, watchdog;
    int started;                /* threads */
    pthread_mutex_t lock;
    pthread_cond_t stopped;     /* for the watchdog */
    char error[OFFLOAD_ERROR];
};

static inline int offload_failed(const kt_offload *o)
{
    return atomic_load(&o->code) != KT_OK;
}

/* Keep the step's first error and let everybody go on; returns code. */
int offload_fail(kt_offload *o, int32_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* What the two threads do until `stop`. */
void *offload_work(void *offload);
void *offload_watch(void *offload);

#endif
