/* ceiling.c - the best speed of the pool's threads in a plain loop, the reference for every
 * benchmark. The loops are kernels (kernels/ceiling.inc.c); here they are run for a given time
 * and counted. */
#define _POSIX_C_SOURCE 199309L    /* clock_gettime */

#include <stdatomic.h>
#include <time.h>

#include "pool.h"

#define READ_PIECE ((size_t)4 << 20)    /* bytes between looks at the clock */
#define MOST_SECONDS 3600.0             /* nobody waits longer, and there is no way to stop it */
#define ROUNDS 20000                    /* of the arithmetic loops, likewise: some tens of microseconds */

typedef struct ceiling_task {
    kt_pool *pool;
    int32_t kind;
    const void *const *data;            /* [nodes] */
    size_t size;
    double seconds;
    atomic_uint_fast64_t rate;          /* whole units per second, all threads */
    atomic_uint_fast64_t used;          /* keeps the work from being optimised away */
} ceiling_task;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void ceiling_run(void *arg, int thread, int threads)
{
    ceiling_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    pool_place own = pool_place_of(t->pool, thread);
    size_t part = t->size / (size_t)own.threads / 64 * 64, at = 0;
    const uint8_t *data = t->data ? (const uint8_t *)t->data[own.node] + part * (size_t)own.thread : NULL;
    (void)threads;
    uint64_t operations, total = 0, used = 0;
    double start, end;
    pool_barrier(t->pool, thread);
    start = end = now();
    while (end - start < t->seconds) {
        if (t->kind == KT_CEILING_READ) {
            size_t piece = part - at < READ_PIECE ? part - at : READ_PIECE;
            used += kernels->read_bytes(data + at, piece);
            total += piece;
            at = at + piece < part ? at + piece : 0;
        } else {
            used += (t->kind == KT_CEILING_INT8 ? kernels->int8_ops : kernels->bf16_ops)(ROUNDS, &operations);
            total += operations;
        }
        end = now();
    }
    atomic_fetch_add(&t->rate, (uint64_t)((double)total / (end - start)));
    atomic_fetch_add(&t->used, used);
}

int kt_ceiling(kt_pool *pool, int32_t kind, const void *const *data, size_t size, double seconds, double *rate)
{
    size_t least = (size_t)kt_pool_threads(pool) * 4096;
    if (kind < KT_CEILING_READ || kind > KT_CEILING_BF16 || !(seconds > 0.0 && seconds <= MOST_SECONDS) ||
        (kind == KT_CEILING_READ && (!data || size < least))) {
        pool_set_error(pool, "cannot measure ceiling %d over %zu bytes for %g s", (int)kind, size, seconds);
        return KT_ERR_RANGE;
    }
    for (int32_t i = 0; kind == KT_CEILING_READ && i < kt_pool_nodes(pool); i++) {
        if (!data[i]) {
            pool_set_error(pool, "cannot measure reading: node %d has no data", i);
            return KT_ERR_RANGE;
        }
    }
    ceiling_task t = {.pool = pool, .kind = kind, .data = data, .size = size, .seconds = seconds};
    pool_run(pool, ceiling_run, &t);
    *rate = (double)atomic_load(&t.rate);
    return KT_OK;
}
