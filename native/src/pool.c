/* pool.c - the team of threads, and nothing of what they compute.
 *
 * One team of pinned threads, the caller's being number 0; a later pool holds one team per NUMA node,
 * so all a team needs is in its own struct. Everything waits on a *bell*: a number that is counted up,
 * watched by spinning for a short time and then by sleeping on it (futex), so that waiting costs well
 * under a microsecond while work is coming and no CPU while it is not.
 */
#define _GNU_SOURCE
#include "pool.h"

#include "cpu.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64             /* bytes of a cache line: what different threads write lies apart */
#define MAX_THREADS 4096

/* How long a barrier spins before it sleeps: about what sleeping and being woken costs, and waking costs
 * per sleeper. Longer is worse where the cores are shared: the one that is waited for may need this very
 * core (2 threads beside 8 other processes: 1 ms made a step take 4 times as long as 20 us). */
#define BARRIER_SPIN_NS 10000
#define BARRIER_SPIN_NS_PER_THREAD 5000

typedef struct bell {
    _Alignas(LINE) _Atomic uint32_t rung;   /* how often; the futex word */
    _Atomic uint32_t sleepers;
} bell;

typedef struct counter {
    _Alignas(LINE) _Atomic int64_t next;
} counter;

typedef struct seat {
    _Alignas(LINE) struct team *team;
    int index;
    int loop;               /* which counter this thread takes from; the same in all seats */
    pthread_t thread;       /* of seats 1.. */
} seat;

typedef struct team {
    bell start;             /* rung once per task */
    bell together;          /* rung when the last thread has arrived at a barrier */
    _Alignas(LINE) _Atomic int32_t arrived;
    counter loops[POOL_LOOPS];
    pool_task *task;        /* NULL: the workers go home */
    void *arg;
    int threads, started;   /* seats, and those that have a thread */
    int64_t idle_spin_ns, barrier_spin_ns;
    seat *seats;
} team;

struct kt_pool {
    team team;
    const kt_kernels *kernels;
    int32_t tile_min[KT_TILE_KINDS];
    cpu_set_t caller_cpu;   /* where thread 0 runs tasks */
    int pinned;
    char error[256];
};

/* ---- bells -------------------------------------------------------------------------------------- */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* 1 if it rang within spin_ns. */
static int bell_spin(bell *b, uint32_t seen, int64_t spin_ns)
{
    if (spin_ns > 0) {
        int64_t end = now_ns() + spin_ns;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load_explicit(&b->rung, memory_order_acquire) != seen)
                    return 1;
                relax();
            }
        } while (now_ns() < end);
    }
    return 0;
}

static void bell_wait(bell *b, uint32_t seen, int64_t spin_ns)
{
    if (bell_spin(b, seen, spin_ns))
        return;
    /* Announce, then sleep: the kernel looks at the number again, so a ring in between is not lost. */
    while (atomic_load(&b->rung) == seen) {
        atomic_fetch_add(&b->sleepers, 1);
        syscall(SYS_futex, &b->rung, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&b->sleepers, 1);
    }
}

static void bell_ring(bell *b)
{
    atomic_fetch_add(&b->rung, 1);
    if (atomic_load(&b->sleepers) > 0)
        syscall(SYS_futex, &b->rung, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* ---- inside a task ------------------------------------------------------------------------------ */

void pool_barrier(kt_pool *pool, int thread)
{
    team *m = &pool->team;
    seat *s = &m->seats[thread];
    uint32_t seen = atomic_load_explicit(&m->together.rung, memory_order_relaxed);
    int loop = s->loop;
    s->loop = 0;
    if (atomic_fetch_add(&m->arrived, 1) + 1 < m->threads) {
        bell_wait(&m->together, seen, m->barrier_spin_ns);
        return;
    }
    /* The last one prepares the next round before it lets the others go. */
    for (int i = 0; i <= loop; i++)
        atomic_store_explicit(&m->loops[i].next, 0, memory_order_relaxed);
    atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
    if (m->threads > 1)
        bell_ring(&m->together);
}

int64_t pool_take(kt_pool *pool, int thread, int64_t run)
{
    team *m = &pool->team;
    return atomic_fetch_add_explicit(&m->loops[m->seats[thread].loop].next, run, memory_order_relaxed);
}

void pool_next_loop(kt_pool *pool, int thread)
{
    pool->team.seats[thread].loop++;
}

/* Where the row has tiles: this thread is about to use them, or will not for a while. */
static void use_tiles(const kt_pool *pool, int begin)
{
    void (*change)(void) = begin ? pool->kernels->enter : pool->kernels->leave;
    if (change)
        change();
}

/* A worker that sleeps has no tiles; one that spins keeps them. */
static void wait_for_work(kt_pool *pool, uint32_t seen)
{
    team *m = &pool->team;
    if (bell_spin(&m->start, seen, m->idle_spin_ns))
        return;
    use_tiles(pool, 0);
    bell_wait(&m->start, seen, 0);
    use_tiles(pool, 1);
}

static void *work(void *arg)
{
    seat *s = arg;
    team *m = s->team;
    /* team is the first member of its pool */
    kt_pool *pool = (kt_pool *)m;
    use_tiles(pool, 1);
    for (uint32_t seen = 0;; seen++) {
        wait_for_work(pool, seen);
        if (m->task == NULL)
            return NULL;
        m->task(m->arg, s->index, m->threads);
        pool_barrier(pool, s->index);
    }
}

void pool_run(kt_pool *pool, pool_task *task, void *arg)
{
    team *m = &pool->team;
    cpu_set_t before;
    /* The caller is pinned only while it works here: what it starts elsewhere must not inherit that. */
    int pinned = pool->pinned && sched_getaffinity(0, sizeof before, &before) == 0;
    if (pinned)
        sched_setaffinity(0, sizeof pool->caller_cpu, &pool->caller_cpu);
    if (m->threads > 1) {
        m->task = task;
        m->arg = arg;
        bell_ring(&m->start);
    }
    use_tiles(pool, 1);
    task(arg, 0, m->threads);
    pool_barrier(pool, 0);
    use_tiles(pool, 0);
    if (pinned)
        sched_setaffinity(0, sizeof before, &before);
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
    return 1;
}

/* Start thread i, with signals blocked: those are the caller's business. All but the faults a thread raises itself,
 * whose handlers (of Python's faulthandler, of an emulator) want to see them. 0 or an errno. */
static int start_worker(team *m, int i, const int32_t *cpus)
{
    static const int faults[] = {SIGILL, SIGFPE, SIGSEGV, SIGBUS};
    pthread_attr_t attributes;
    sigset_t all, before;
    int failed = pthread_attr_init(&attributes);
    if (failed)
        return failed;
    if (cpus) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i], &set);
        failed = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    sigfillset(&all);
    for (size_t f = 0; f < sizeof faults / sizeof *faults; f++)
        sigdelset(&all, faults[f]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!failed)
        failed = pthread_create(&m->seats[i].thread, &attributes, work, &m->seats[i]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
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

static int start_team(kt_pool *pool, const kt_pool_options *o, char *error, size_t size)
{
    team *m = &pool->team;
    int failed = o->cpus ? try_caller_cpu(pool, o->cpus[0]) : 0;
    for (m->started = 1; !failed && m->started < m->threads; m->started++) {
        failed = start_worker(m, m->started, o->cpus);
        if (failed)
            break;
    }
    if (failed) {
        int i = pool->pinned || !o->cpus ? m->started : 0;
        snprintf(error, size, "cannot start thread %d of %d on CPU %d: %s", i, m->threads,
                 o->cpus ? o->cpus[i] : -1, strerror(failed));
    }
    return failed == 0;
}

kt_pool *kt_pool_create(const kt_pool_options *options, char *error, size_t error_size)
{
    if (!check_options(options, error, error_size))
        return NULL;
    const kt_kernels *kernels = cpu_choose_row(options->isa, error, error_size);
    if (!kernels)
        return NULL;
    kt_pool *pool = aligned_alloc(LINE, sizeof *pool);
    seat *seats = aligned_alloc(LINE, sizeof *seats * (size_t)options->n_threads);
    if (!pool || !seats) {
        snprintf(error, error_size, "no memory for a team of %d threads", options->n_threads);
        free(pool);
        free(seats);
        return NULL;
    }
    memset(pool, 0, sizeof *pool);
    memset(seats, 0, sizeof *seats * (size_t)options->n_threads);
    team *m = &pool->team;
    m->threads = options->n_threads;
    m->seats = seats;
    for (int i = 0; i < m->threads; i++) {
        seats[i].team = m;
        seats[i].index = i;
    }
    /* More threads than CPUs: whoever spins takes the core from the one it waits for. */
    int crowded = m->threads > usable_cpus(options);
    m->idle_spin_ns = crowded ? 0 : (int64_t)options->spin_us * 1000;
    m->barrier_spin_ns = crowded ? 0 : BARRIER_SPIN_NS + BARRIER_SPIN_NS_PER_THREAD * (int64_t)m->threads;
    pool->kernels = kernels;
    for (int i = 0; i < KT_TILE_KINDS; i++)
        pool->tile_min[i] = options->tile_min[i] > 0 ? options->tile_min[i] : 2;
    if (!start_team(pool, options, error, error_size)) {
        kt_pool_free(pool);
        return NULL;
    }
    return pool;
}

void kt_pool_free(kt_pool *pool)
{
    if (!pool)
        return;
    team *m = &pool->team;
    m->task = NULL;
    bell_ring(&m->start);
    for (int i = 1; i < m->started; i++)
        pthread_join(m->seats[i].thread, NULL);
    free(m->seats);
    free(pool);
}

/* ---- facts -------------------------------------------------------------------------------------- */

const kt_kernels *pool_kernels(const kt_pool *pool)
{
    return pool->kernels;
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
    return pool->team.threads;
}
