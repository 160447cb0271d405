/* test_pool.c - the teams: every thread takes part, barriers hold, counters give each index once, idle
 * workers sleep, wrong options are refused, a system that forbids pinning and binding is lived with; and
 * arenas and parallel reads. */
#define _GNU_SOURCE
#include "check.h"
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ITEMS = 1000, ROUNDS = 20 };

typedef struct work {
    kt_pool *pool;
    int32_t first[ITEMS], second[ITEMS];    /* how often each index was taken, */
    int32_t own[4][ITEMS];                  /* and by each node */
    int32_t present[16];
    int32_t wrong;                          /* thread 0: something was not there after a barrier */
} work;

/* Two loops without a barrier between them, a barrier, and then everybody's work is visible. */
static void take_all(void *arg, int thread, int threads)
{
    work *w = arg;
    w->present[thread] += threads;
    for (int round = 0; round < ROUNDS; round++) {
        for (int64_t i; (i = pool_take(w->pool, thread, 7)) < ITEMS;) {
            for (int64_t j = i; j < i + 7 && j < ITEMS; j++)
                w->first[j]++;
        }
        pool_next_loop(w->pool, thread);
        for (int64_t i; (i = pool_take(w->pool, thread, 1)) < ITEMS;)
            w->second[i]++;
        pool_next_loop(w->pool, thread);
        int node = pool_place_of(w->pool, thread).node;
        for (int64_t i; (i = pool_take_own(w->pool, thread, 1)) < ITEMS;)
            w->own[node][i]++;
        pool_barrier(w->pool, thread);
        for (int i = 0; i < ITEMS && thread == 0; i++) {
            w->wrong += w->first[i] != round + 1 || w->second[i] != round + 1;
            for (int j = 0; j < kt_pool_nodes(w->pool); j++)
                w->wrong += w->own[j][i] != round + 1;
        }
        pool_barrier(w->pool, thread);
    }
}

static void check_team(int32_t threads, int32_t nodes, const int32_t *of_node)
{
    char error[256] = "";
    kt_pool_options o = {.isa = "portable", .n_threads = threads, .spin_us = 20, .n_nodes = nodes, .node_threads = of_node};
    work *w = need(sizeof *w);
    w->pool = kt_pool_create(&o, error, sizeof error);
    CHECK(w->pool != NULL, "%s", error);
    CHECK(kt_pool_threads(w->pool) == threads && !strcmp(kt_pool_isa(w->pool), "portable"), "not as asked for");
    CHECK(kt_pool_nodes(w->pool) == nodes && kt_pool_unpinned(w->pool) == 0, "not as asked for");
    for (int run = 1; run <= 10; run++) {
        memset(w->first, 0, sizeof w->first);
        memset(w->second, 0, sizeof w->second);
        memset(w->own, 0, sizeof w->own);
        pool_run(w->pool, take_all, w);
        CHECK(w->wrong == 0, "%d threads, %d nodes: %d indices missing or taken twice", threads, nodes, w->wrong);
        for (int i = 0; i < threads; i++)
            CHECK(w->present[i] == run * threads, "thread %d of %d took part %d times", i, threads, w->present[i]);
    }
    kt_pool_free(w->pool);
    free(w);
}

static void check_teams(void)
{
    for (int32_t threads = 1; threads <= 5; threads++)
        check_team(threads, 1, NULL);
    static const int32_t of_node[][4] = {{1, 1}, {3, 1}, {1, 2, 1}, {1, 1, 1, 1}, {2, 1, 1, 2}};
    static const int32_t nodes[] = {2, 2, 3, 4, 4}, threads[] = {2, 4, 4, 4, 6};
    for (int i = 0; i < 5; i++)
        check_team(threads[i], nodes[i], of_node[i]);
}

/* The processor time of 50 ms in which the process does nothing by itself, 50 ms after a task. */
static double idle_s(kt_pool *pool, work *w)
{
    struct timespec before, after, pause = {.tv_nsec = 50000000};
    pool_run(pool, take_all, w);
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    return (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
}

/* After the spinning time, which can be made longer, an idle team uses no processor time. */
static void check_idle(void)
{
    kt_pool *pool = make_pool("portable", 2);
    work *w = need(sizeof *w);
    w->pool = pool;
    double used = idle_s(pool, w);
    CHECK(used < 0.025, "an idle team of 2 used %g s of 0.05 s", used);
    cpu_set_t usable;
    sched_getaffinity(0, sizeof usable, &usable);
    pool_spin_for(pool, 10000000000);
    pool_spin_for(pool, 1);
    used = idle_s(pool, w);
    CHECK(used > 0.001 || CPU_COUNT(&usable) < 2, "a worker that spins for 10 s used %g s of 0.05 s", used);
    pool_run(pool, take_all, w);
    kt_pool_free(pool);
    free(w);
}

static void where(void *arg, int thread, int threads)
{
    (void)threads;
    ((int32_t *)arg)[thread] = sched_getcpu();
}

/* Pinned threads run where they should, and the caller's own thread is free again afterwards. */
static void check_pinning(void)
{
    cpu_set_t before, after;
    sched_getaffinity(0, sizeof before, &before);
    int32_t cpus[2], n = 0, seen[2] = {-1, -1};
    for (int32_t i = 0; i < CPU_SETSIZE && n < 2; i++) {
        if (CPU_ISSET(i, &before))
            cpus[n++] = i;
    }
    char error[256] = "";
    kt_pool_options o = {.isa = "portable", .n_threads = n, .cpus = cpus, .spin_us = 10};
    kt_pool *pool = kt_pool_create(&o, error, sizeof error);
    CHECK(pool != NULL, "%s", error);
    if (pool)
        pool_run(pool, where, seen);
    for (int32_t i = 0; i < n; i++)
        CHECK(seen[i] == cpus[i], "thread %d ran on CPU %d, not %d", i, seen[i], cpus[i]);
    sched_getaffinity(0, sizeof after, &after);
    CHECK(CPU_EQUAL(&before, &after), "the caller stayed pinned");
    kt_pool_free(pool);
}

static void check_options(void)
{
    char error[256] = "";
    int32_t far[2] = {0, 1000000}, absent[2] = {0, 1023};
    kt_pool_options o = {.isa = "mmx", .n_threads = 1};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "mmx") && strstr(error, "portable"), "%s", error);
    o = (kt_pool_options){.n_threads = 0};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "n_threads is 0"), "%s", error);
    o = (kt_pool_options){.n_threads = 2, .cpus = far};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "1000000"), "%s", error);
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    for (int i = 0; i < CPU_SETSIZE && !CPU_ISSET(absent[0], &mine); i++)
        absent[0] = i;
    o = (kt_pool_options){.n_threads = 2, .cpus = absent};
    if (sysconf(_SC_NPROCESSORS_CONF) < 1023)
        CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "1023"), "%s", error);
    static const int32_t none[] = {2, 0}, few[] = {1, 1};
    o = (kt_pool_options){.n_threads = 2, .n_nodes = 2, .node_threads = none};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "node 1 has 0"), "%s", error);
    o = (kt_pool_options){.n_threads = 3, .n_nodes = 2, .node_threads = few};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "n_threads is 3"), "%s", error);
    o = (kt_pool_options){.n_threads = 3, .n_nodes = 2};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "n_nodes is 2"), "%s", error);
    o = (kt_pool_options){.n_threads = 80, .n_nodes = KT_MAX_NODES + 1, .node_threads = few};
    CHECK(!kt_pool_create(&o, error, sizeof error) && strstr(error, "n_nodes is 65"), "%s", error);
    kt_pool_free(NULL);
}

/* From here on this process may neither pin threads nor bind memory, as in some containers. */
static void forbid(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_setaffinity, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        exit(77);
}

static void check_forbidden(void)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char error[256] = "";
        int32_t cpus[2] = {0, 1}, of_node[2] = {1, 1};
        uint64_t memory[2] = {1, 2};
        failures = 0;
        forbid();
        kt_pool_options o = {.isa = "portable", .n_threads = 2, .cpus = cpus, .n_nodes = 2, .node_threads = of_node,
                             .node_memory = memory};
        kt_pool *pool = kt_pool_create(&o, error, sizeof error);
        CHECK(pool && kt_pool_unpinned(pool) == EPERM, "not unpinned: %s", error);
        kt_arena *arena = kt_arena_create(100, 3, error, sizeof error);
        CHECK(arena && kt_arena_refused(arena) == EPERM, "not refused: %s", error);
        int32_t seen[2] = {-1, -1};
        pool_run(pool, where, seen);
        CHECK(seen[0] >= 0 && seen[1] >= 0, "the team did not work");
        kt_arena_free(arena);
        kt_pool_free(pool);
        _exit(report("test_pool, in a container"));
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        printf("skipped: this system allows no seccomp filter\n");
    else
        CHECK(status == 0, "the child ended with %#x", (unsigned)status);
}

static void check_arena(void)
{
    char error[256] = "";
    kt_arena *arena = kt_arena_create(5000001, 0, error, sizeof error);
    CHECK(arena != NULL, "%s", error);
    uint8_t *data = kt_arena_data(arena), any = 0;
    CHECK((uintptr_t)data % 64 == 0, "not aligned: %p", (void *)data);
    for (size_t i = 0; i < 5000001; i++)
        any |= data[i];
    CHECK(any == 0, "not zeroed");
    memset(data, 1, 5000001);
    CHECK(kt_arena_refused(arena) == 0, "an arena that is bound nowhere was refused");
    kt_arena_free(arena);
    for (uint64_t nodes = 1; nodes <= 3; nodes += 2) {      /* one node; two, where there may be only one */
        arena = kt_arena_create(5000001, nodes, error, sizeof error);
        CHECK(arena != NULL, "%s", error);
        memset(kt_arena_data(arena), 1, 5000001);
        kt_arena_free(arena);
    }
    kt_arena_free(NULL);
    CHECK(!kt_arena_create(SIZE_MAX - 5, 0, error, sizeof error) && error[0], "an arena of all addresses");
    CHECK(!kt_arena_create(SIZE_MAX / 4, 0, error, sizeof error) && strstr(error, "GiB"), "%s", error);
}

static void check_read(void)
{
    enum { SIZE = 9000001 };        /* more than two runs, and not a multiple of anything */
    char name[] = "/tmp/kt_test_XXXXXX";
    int fd = mkstemp(name);
    uint8_t *out = need(SIZE), *in = need(SIZE);
    uint64_t state = 3;
    for (int i = 0; i < SIZE; i++)
        out[i] = (uint8_t)random_bits(&state);
    CHECK(fd >= 0 && write(fd, out, SIZE) == SIZE, "cannot write a file");
    unlink(name);
    kt_pool *pool = make_pool("portable", 3);
    OK(kt_read(pool, fd, 0, SIZE, in), kt_pool_error(pool));
    CHECK(memcmp(in, out, SIZE) == 0, "read something else");
    OK(kt_read(pool, fd, 4097, SIZE - 4097, in), kt_pool_error(pool));
    CHECK(memcmp(in, out + 4097, SIZE - 4097) == 0, "read something else from an offset");
    OK(kt_read(pool, fd, 0, 0, in), kt_pool_error(pool));
    REFUSED(kt_read(pool, fd, 1, SIZE, in), KT_ERR_IO, kt_pool_error(pool), "ends at offset 9000001");
    REFUSED(kt_read(pool, -1, 0, 10, in), KT_ERR_IO, kt_pool_error(pool), "Bad file descriptor");
    REFUSED(kt_read(pool, fd, UINT64_MAX - 3, 10, in), KT_ERR_RANGE, kt_pool_error(pool), "no file");
    /* Pieces of awkward sizes, one of them empty, to the other end and back in another order. */
    static const size_t cuts[] = {0, 1, 1 << 20, 1 << 20, (3 << 20) + 17, SIZE - 5, SIZE};
    kt_copy_piece pieces[6];
    for (int i = 0; i < 6; i++)
        pieces[5 - i] = (kt_copy_piece){in + cuts[i], out + cuts[i], cuts[i + 1] - cuts[i]};
    memset(in, 0, SIZE);
    OK(kt_copy(pool, pieces, 6), kt_pool_error(pool));
    CHECK(memcmp(in, out, SIZE) == 0, "copied something else");
    OK(kt_copy(pool, pieces, 0), kt_pool_error(pool));
    pieces[2].src = NULL;
    REFUSED(kt_copy(pool, pieces, 6), KT_ERR_RANGE, kt_pool_error(pool), "piece 2 of 6");
    kt_pool_free(pool);
    close(fd);
    free(in);
    free(out);
}

int main(void)
{
    check_forbidden();
    check_teams();
    check_idle();
    check_pinning();
    check_options();
    check_arena();
    check_read();
    return report("test_pool");
}
