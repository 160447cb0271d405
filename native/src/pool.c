/* pool.c - the teams of threads, independent of what they compute.
 *
 * One team of pinned threads per NUMA node, the caller's thread being number 0 of the first. Threads meet at
 * barriers in two steps, team by team and then the teams, so that a barrier costs one line between sockets
 * per team. Everything waits on bells (bell.h).
 */
#define _GNU_SOURCE
#include "pool.h"

#include "bell.h"
#include "cpu.h"
#include "thread.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_THREADS 4096

/* How long a barrier spins before it sleeps: about what sleeping and being woken costs, and waking costs
 * per sleeper. Longer is worse where the cores are shared: the one that is waited for may need this very
 * core (2 threads beside 8 other processes: 1 ms made a step take 4 times as long as 20 us). */
#define BARRIER_SPIN_NS 10000
#define BARRIER_SPIN_NS_PER_THREAD 5000

typedef struct counter {
    _Alignas(LINE) _Atomic int64_t next;
} counter;

typedef struct seat {
    _Alignas(LINE) kt_pool *pool;
    struct team *team;
    int index;
    int loop;               /* which counters this thread takes from; the same in all seats */
    pthread_t thread;       /* of seats 1.. */
} seat;

typedef struct team {
    bell start;             /* rung once per task */
    bell together;          /* rung when all threads of the pool have arrived at a barrier */
    _Alignas(LINE) _Atomic int32_t arrived;
    counter loops[POOL_LOOPS];
    int node, first, threads;   /* its number, its first seat */
    uint64_t memory;        /* bit i: OS node i; 0: anywhere */
} team;

struct kt_pool {
    _Alignas(LINE) _Atomic int32_t arrived;     /* teams that are complete at a barrier */
    counter loops[POOL_LOOPS];
    team *teams;
    seat *seats;
    int n_teams, threads, started;              /* started: seats that have a thread */
    pool_task *task;        /* NULL: the workers go home */
    void *arg;
    _Atomic int64_t idle_spin_ns;
    int64_t barrier_spin_ns;
    const kt_kernels *kernels;
    int32_t tile_min[KT_TILE_KINDS];
    cpu_tuning tuning;
    cpu_set_t caller_cpu;   /* where thread 0 runs tasks */
    int pinned;
    int unpinned;           /* errno: why threads are not pinned although it was asked */
    char error[256];
};

/* ---- inside a task ------------------------------------------------------------------------------ */

static void reset_loops(counter *loops, int last)
{
    for (int i = 0; i <= last; i++)
        atomic_store_explicit(&loops[i].next, 0, memory_order_relaxed);
}

void pool_barrier(kt_pool *pool, int thread)
{
    seat *s = &pool->seats[thread];
    team *m = s->team;
    uint32_t seen = atomic_load_explicit(&m->together.rung, memory_order_relaxed);
    int loop = s->loop;
    s->loop = 0;
    if (atomic_fetch_add(&m->arrived, 1) + 1 < m->threads) {
        bell_wait(&m->together, seen, pool->barrier_spin_ns);
        return;
    }
    /* The last one of a team prepares its next round, the last one of all the common one, before anybody goes on. */
    reset_loops(m->loops, loop);
    atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 < pool->n_teams) {
        bell_wait(&m->together, seen, pool->barrier_spin_ns);
        return;
    }
    reset_loops(pool->loops, loop);
    atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
    for (int i = 0; pool->threads > 1 && i < pool->n_teams; i++)
        bell_ring(&pool->teams[i].together);
}

int64_t pool_take(kt_pool *pool, int thread, int64_t run)
{
    return atomic_fetch_add_explicit(&pool->loops[pool->seats[thread].loop].next, run, memory_order_relaxed);
}

int64_t pool_take_own(kt_pool *pool, int thread, int64_t run)
{
    const seat *s = &pool->seats[thread];
    return atomic_fetch_add_explicit(&s->team->loops[s->loop].next, run, memory_order_relaxed);
}

void pool_next_loop(kt_pool *pool, int thread)
{
    pool->seats[thread].loop++;
}

void pool_spin_for(kt_pool *pool, int64_t ns)
{
    int64_t now = atomic_load(&pool->idle_spin_ns);
    if (now >= 0 && now < ns)
        atomic_store(&pool->idle_spin_ns, ns);
}

/* Where the row has tiles: this thread is about to use them, or will not for a while. */
static void use_tiles(const kt_pool *pool, int begin)
{
    void (*change)(void) = begin ? pool->kernels->enter : pool->kernels->leave;
    if (change)
        change();
}

/* A worker that sleeps has no tiles; one that spins keeps them. */
static void wait_for_work(const seat *s, uint32_t seen)
{
    bell *start = &s->team->start;
    if (bell_spin(start, seen, atomic_load_explicit(&s->pool->idle_spin_ns, memory_order_relaxed)))
        return;
    use_tiles(s->pool, 0);
    bell_wait(start, seen, 0);
    use_tiles(s->pool, 1);
}

static void *work(void *arg)
{
    seat *s = arg;
    kt_pool *pool = s->pool;
    use_tiles(pool, 1);
    for (uint32_t seen = 0;; seen++) {
        wait_for_work(s, seen);
        if (pool->task == NULL)
            return NULL;
        pool->task(pool->arg, s->index, pool->threads);
        pool_barrier(pool, s->index);
    }
}

static void ring_all(kt_pool *pool)
{
    for (int i = 0; i < pool->n_teams; i++)
        bell_ring(&pool->teams[i].start);
}

void pool_run(kt_pool *pool, pool_task *task, void *arg)
{
    cpu_set_t before;
    /* The caller is pinned only while it works here: what it starts elsewhere must not inherit that. */
    int pinned = pool->pinned && sched_getaffinity(0, sizeof before, &before) == 0 &&
                 !CPU_EQUAL(&before, &pool->caller_cpu);
    if (pinned)
        sched_setaffinity(0, sizeof pool->caller_cpu, &pool->caller_cpu);
    if (pool->threads > 1) {
        pool->task = task;
        pool->arg = arg;
        ring_all(pool);
    }
    use_tiles(pool, 1);
    task(arg, 0, pool->threads);
    pool_barrier(pool, 0);
    use_tiles(pool, 0);
    if (pinned)
        sched_setaffinity(0, sizeof before, &before);
}

void pool_settle(const kt_pool *pool)
{
    if (pool->pinned)
        sched_setaffinity(0, sizeof pool->caller_cpu, &pool->caller_cpu);
}

/* ---- create and free ---------------------------------------------------------------------------- */

/* How many threads can run at once, to decide whether spinning makes sense. */
static int usable_cpus(const kt_pool_options *o)
{
    cpu_set_t set;
    if (o->cpus) {
        CPU_ZERO(&set);
        for (int i = 0; i < o->n_threads; i++)
            CPU_SET(o->cpus[i], &set);
    } else if (sched_getaffinity(0, sizeof set, &set) != 0) {
        return 1;
    }
    return CPU_COUNT(&set);
}

static int check_nodes(const kt_pool_options *o, char *error, size_t size)
{
    int64_t threads = 0;
    if (o->n_nodes < 0 || o->n_nodes > KT_MAX_NODES || (o->n_nodes > 1 && !o->node_threads)) {
        snprintf(error, size, "n_nodes is %d, outside 1..%d, or says not how many threads each has", o->n_nodes,
                 KT_MAX_NODES);
        return 0;
    }
    for (int i = 0; o->node_threads && i < o->n_nodes; i++) {
        if (o->node_threads[i] < 1) {
            snprintf(error, size, "node %d has %d threads; it needs one at least", i, o->node_threads[i]);
            return 0;
        }
        threads += o->node_threads[i];
    }
    if (o->node_threads && o->n_nodes && threads != o->n_threads)
        snprintf(error, size, "the nodes have %lld threads together, n_threads is %d", (long long)threads, o->n_threads);
    return !o->node_threads || !o->n_nodes || threads == o->n_threads;
}

static int check_options(const kt_pool_options *o, char *error, size_t size)
{
    if (o->n_threads < 1 || o->n_threads > MAX_THREADS) {
        snprintf(error, size, "n_threads is %d, outside 1..%d", o->n_threads, MAX_THREADS);
        return 0;
    }
    for (int i = 0; o->cpus && i < o->n_threads; i++) {
        if (o->cpus[i] < 0 || o->cpus[i] >= CPU_SETSIZE) {
            snprintf(error, size, "CPU number %d of thread %d is outside 0..%d", o->cpus[i], i, CPU_SETSIZE - 1);
            return 0;
        }
    }
    return check_nodes(o, error, size);
}

/* Start thread i. 0 or an errno. */
static int start_worker(kt_pool *pool, int i, const int32_t *cpus)
{
    pthread_attr_t attributes;
    int failed = pthread_attr_init(&attributes);
    if (failed)
        return failed;
    if (cpus) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i], &set);
        failed = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    if (!failed)
        failed = thread_start(&pool->seats[i].thread, &attributes, work, &pool->seats[i]);
    pthread_attr_destroy(&attributes);
    return failed;
}

/* 0 or an errno: can the caller's thread run there? */
static int try_caller_cpu(kt_pool *pool, int32_t cpu)
{
    cpu_set_t before;
    CPU_ZERO(&pool->caller_cpu);
    CPU_SET(cpu, &pool->caller_cpu);
    if (sched_getaffinity(0, sizeof before, &before) != 0 ||
        sched_setaffinity(0, sizeof pool->caller_cpu, &pool->caller_cpu) != 0)
        return errno;
    sched_setaffinity(0, sizeof before, &before);
    pool->pinned = 1;
    return 0;
}

/* Start all threads that are not there yet; *at: which one failed. 0 or an errno. */
static int start_workers(kt_pool *pool, const int32_t *cpus, int *at)
{
    *at = 0;
    int failed = cpus ? try_caller_cpu(pool, cpus[0]) : 0;
    while (!failed && pool->started < pool->threads) {
        *at = pool->started;
        failed = start_worker(pool, *at, cpus);
        pool->started += !failed;
    }
    return failed;
}

/* Where the system forbids pinning, as a container may, threads run unpinned; a CPU that is not there is an error. */
static int start_threads(kt_pool *pool, const kt_pool_options *o, char *error, size_t size)
{
    const int32_t *cpus = o->cpus;
    int at, failed = start_workers(pool, cpus, &at);
    if (cpus && (failed == EPERM || failed == EACCES || failed == ENOSYS)) {
        pool->unpinned = failed;
        pool->pinned = 0;
        cpus = NULL;
        failed = start_workers(pool, NULL, &at);
    }
    if (failed)
        snprintf(error, size, "cannot start thread %d of %d on CPU %d: %s", at, pool->threads, cpus ? cpus[at] : -1,
                 strerror(failed));
    return failed == 0;
}

/* Teams and seats, in the order of the options. */
static void seat_teams(kt_pool *pool, const kt_pool_options *o)
{
    for (int i = 0, first = 0; i < pool->n_teams; i++) {
        team *m = &pool->teams[i];
        m->node = i;
        m->first = first;
        m->threads = pool->n_teams > 1 ? o->node_threads[i] : pool->threads;
        m->memory = o->node_memory ? o->node_memory[i] : 0;
        for (int j = first; j < first + m->threads; j++) {
            pool->seats[j].pool = pool;
            pool->seats[j].team = m;
            pool->seats[j].index = j;
        }
        first += m->threads;
    }
    pool->started = 1;
}

static void *zeroed(size_t size)
{
    void *memory = aligned_alloc(LINE, size);
    if (memory)
        memset(memory, 0, size);
    return memory;
}

kt_pool *kt_pool_create(const kt_pool_options *options, char *error, size_t error_size)
{
    if (!check_options(options, error, error_size))
        return NULL;
    const kt_kernels *kernels = cpu_choose_row(options->isa, error, error_size);
    if (!kernels)
        return NULL;
    kt_pool *pool = zeroed(sizeof *pool);
    int n_teams = options->n_nodes > 1 ? options->n_nodes : 1;
    if (pool) {
        pool->teams = zeroed(sizeof *pool->teams * (size_t)n_teams);
        pool->seats = zeroed(sizeof *pool->seats * (size_t)options->n_threads);
    }
    if (!pool || !pool->teams || !pool->seats) {
        snprintf(error, error_size, "no memory for a team of %d threads", options->n_threads);
        kt_pool_free(pool);
        return NULL;
    }
    pool->n_teams = n_teams;
    pool->threads = options->n_threads;
    seat_teams(pool, options);
    /* More threads than CPUs: whoever spins takes the core from the one it waits for. */
    int crowded = pool->threads > usable_cpus(options);
    atomic_store(&pool->idle_spin_ns, crowded ? -1 : (int64_t)options->spin_us * 1000);
    pool->barrier_spin_ns = crowded ? 0 : BARRIER_SPIN_NS + BARRIER_SPIN_NS_PER_THREAD * (int64_t)pool->threads;
    pool->kernels = kernels;
    pool->tuning = cpu_tuned();
    for (int i = 0; i < KT_TILE_KINDS; i++)
        pool->tile_min[i] = options->tile_min[i] > 0 ? options->tile_min[i] : 2;
    if (!start_threads(pool, options, error, error_size)) {
        kt_pool_free(pool);
        return NULL;
    }
    return pool;
}

void kt_pool_free(kt_pool *pool)
{
    if (!pool)
        return;
    pool->task = NULL;
    if (pool->started > 1)
        ring_all(pool);
    for (int i = 1; i < pool->started; i++)
        pthread_join(pool->seats[i].thread, NULL);
    free(pool->seats);
    free(pool->teams);
    free(pool);
}

/* ---- facts -------------------------------------------------------------------------------------- */

const kt_kernels *pool_kernels(const kt_pool *pool)
{
    return pool->kernels;
}

pool_place pool_place_of(const kt_pool *pool, int thread)
{
    const team *m = pool->seats[thread].team;
    return (pool_place){.node = m->node, .thread = thread - m->first, .threads = m->threads};
}

uint64_t pool_memory(const kt_pool *pool, int node)
{
    return pool->teams[node].memory;
}

uint64_t pool_all_memory(const kt_pool *pool)
{
    uint64_t all = 0;
    for (int i = 0; i < pool->n_teams; i++)
        all |= pool->teams[i].memory;
    return all;
}

cpu_tuning pool_tuning(const kt_pool *pool)
{
    return pool->tuning;
}

int64_t pool_tile_min(const kt_pool *pool, int32_t kind)
{
    return pool->tile_min[kind];
}

void pool_set_error(kt_pool *pool, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(pool->error, sizeof pool->error, format, arguments);
    va_end(arguments);
}

const char *kt_pool_error(const kt_pool *pool)
{
    return pool->error;
}

const char *kt_pool_isa(const kt_pool *pool)
{
    return pool->kernels->name;
}

int32_t kt_pool_threads(const kt_pool *pool)
{
    return pool->threads;
}

int32_t kt_pool_nodes(const kt_pool *pool)
{
    return pool->n_teams;
}

int32_t kt_pool_node_threads(const kt_pool *pool, int32_t node)
{
    return node >= 0 && node < pool->n_teams ? pool->teams[node].threads : 0;
}

int32_t kt_pool_unpinned(const kt_pool *pool)
{
    return pool->unpinned;
}
