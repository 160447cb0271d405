/* pool.h - the pool's interface for the drivers: run a task on all threads, wait for one
 * another inside it, divide work with a counter.
 *
 * Inside a task every thread goes through the same sequence of barriers and loops; the counters belong
 * to the pool and are zero when a task starts, after a barrier, and after pool_next_loop. So nobody
 * ever resets one by hand:
 *
 *     static void task(void *arg, int thread, int threads) {
 *         for (int64_t i; (i = pool_take(pool, thread, 1)) < n;)
 *             work(i);
 *         pool_barrier(pool, thread);             // all i are done
 *         for (int64_t j; (j = pool_take(pool, thread, 4)) < m;)
 *             more(j, min(j + 4, m));             // runs of 4
 *     }                                           // pool_run returns when all threads are here
 *
 * Work that belongs to a node, because its memory lies there, is shared out within its team alone:
 * pool_take_own counts for each team by itself. A loop is one or the other.
 */
#ifndef KT_POOL_H
#define KT_POOL_H

#include "cpu.h"
#include "kernels/kernels.h"

#define POOL_LOOPS 32   /* loops between two barriers */

typedef void pool_task(void *arg, int thread, int threads);

/* Run task on all threads of all teams, the caller's being number 0; returns when all are done. Not
 * from inside a task, and by one caller at a time. */
void pool_run(kt_pool *pool, pool_task *task, void *arg);

/* The calling thread will run many tasks and does nothing else: it stays where thread 0 works. */
void pool_settle(const kt_pool *pool);

/* Inside a task: returns when all threads of the pool have arrived. What they wrote before is seen. */
void pool_barrier(kt_pool *pool, int thread);

/* Inside a task: the first index of the next `run` indices of the current loop, ascending from 0.
 * The caller compares it with the loop's end; every thread of the loop asks for the same `run`. */
int64_t pool_take(kt_pool *pool, int thread, int64_t run);

/* The same, from a counter that the thread's own team has for itself. */
int64_t pool_take_own(kt_pool *pool, int thread, int64_t run);

/* Inside a task: start another loop without waiting; at most POOL_LOOPS - 1 times between barriers. */
void pool_next_loop(kt_pool *pool, int thread);

/* Idle workers spin for so many nanoseconds at least, unless there are more of them than CPUs. */
void pool_spin_for(kt_pool *pool, int64_t ns);

/* Where a thread sits: its node, its number within the team, and the team's threads. */
typedef struct pool_place {
    int node, thread, threads;
} pool_place;
pool_place pool_place_of(const kt_pool *pool, int thread);

/* OS nodes of a node's memory, of all of them: kt_pool_options.node_memory. */
uint64_t pool_memory(const kt_pool *pool, int node);
uint64_t pool_all_memory(const kt_pool *pool);

const kt_kernels *pool_kernels(const kt_pool *pool);
/* Fewest tokens of a product that use tiles, where the row has them; kind: KT_TILE_*. */
int64_t pool_tile_min(const kt_pool *pool, int32_t kind);
cpu_tuning pool_tuning(const kt_pool *pool);
void pool_set_error(kt_pool *pool, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
