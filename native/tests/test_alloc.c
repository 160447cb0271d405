/* test_alloc.c - nothing is allocated while a program runs: every way to get memory is wrapped (linked
 * with -Wl,--wrap) and counted around kt_program_run, for one token and for many, short and long context, and
 * around a step of an offload. And where there is no memory for a program, nothing is kept of it.
 *
 * link: -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=aligned_alloc,--wrap=mmap,--wrap=free
 */
#define _GNU_SOURCE
#include "everything.h"

#include <stdatomic.h>
#include <sys/mman.h>

static _Atomic int counting, calls;
static int maps_left = -1;      /* so many mappings are given, then none; negative: no end */

static void note(void)
{
    if (atomic_load(&counting))
        atomic_fetch_add(&calls, 1);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void *__real_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset);
void __real_free(void *memory);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset);
void __wrap_free(void *memory);

void *__wrap_malloc(size_t size)
{
    note();
    return __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    note();
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    note();
    return __real_realloc(old, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    note();
    return __real_aligned_alloc(alignment, size);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    note();
    if (maps_left == 0)
        return MAP_FAILED;
    maps_left -= maps_left > 0;
    return __real_mmap(at, size, protection, flags, fd, offset);
}

void __wrap_free(void *memory)
{
    note();
    __real_free(memory);
}

static void count(everything *e, int64_t n, int64_t start, const char *what)
{
    int32_t ids[80];
    for (int i = 0; i < 80; i++)
        ids[i] = i % EV_VOCAB;
    kt_step s = ev_step(e, ids, n, start, 1);
    atomic_store(&calls, 0);
    atomic_store(&counting, 1);
    int code = kt_program_run(e->program, &s);
    atomic_store(&counting, 0);
    OK(code, kt_program_error(e->program));
    CHECK(atomic_load(&calls) == 0, "%s: %d calls to the allocator", what, atomic_load(&calls));
}

/* A reservation that fails halfway gives back what it had, and may be tried again. */
static void check_finish(void)
{
    static const int32_t threads[] = {1, 1};
    kt_pool *pool = make_pool_of(&(kt_pool_options){.isa = "portable", .n_threads = 2, .n_nodes = 2,
                                                    .node_threads = threads});
    for (int maps = 0; maps < 3; maps++) {
        kt_program *p = make_program(pool, 4, 1, 0);
        kt_view view = make_view(p, 16, KT_ROWS_TOKENS);
        maps_left = maps;
        REFUSED(kt_program_finish(p, NULL), KT_ERR_MEMORY, kt_program_error(p), "no memory");
        CHECK(kt_program_data(p, view.buffer, NULL) == NULL, "a buffer of an unfinished program");
        maps_left = -1;
        OK(kt_program_finish(p, NULL), kt_program_error(p));
        CHECK(row_of(p, view, 3) != NULL, "no buffer");
        kt_program_free(p);
    }
    kt_pool_free(pool);
}

/* A step of an offload: by calls, and by flags. */
static void check_offload(kt_pool *pool)
{
    char error[256] = "";
    _Atomic int32_t flags[2];
    kt_program *p = make_program(pool, 2, 1, 0);
    kt_view a = make_view(p, 64, KT_ROWS_TOKENS);
    OK(kt_program_add(p, a, a, a), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    for (int by_flags = 0; by_flags < 2; by_flags++) {
        kt_offload_options options = {.layers = 1, .immediate = (int32_t[]){0}, .deferred = (int32_t[]){0},
                                      .timeout_ms = 60000, .flags = by_flags ? (int32_t *)(void *)flags : NULL};
        kt_offload *o = kt_offload_create(p, &options, error, sizeof error);
        CHECK(o != NULL, "%s", error);
        atomic_store(&calls, 0);
        atomic_store(&counting, 1);
        OK(kt_offload_begin(o, 2, (int32_t[]){1, 0}), kt_offload_error(o));
        if (by_flags)
            atomic_store(&flags[0], 1);
        else
            kt_offload_submit(kt_offload_ticket(o, 0));
        kt_offload_wait(kt_offload_ticket(o, 0));
        OK(kt_offload_result(o), kt_offload_error(o));
        atomic_store(&counting, 0);
        CHECK(atomic_load(&calls) == 0, "an offload by %s allocates %d times", by_flags ? "flags" : "calls",
              atomic_load(&calls));
        kt_offload_free(o);
    }
    kt_program_free(p);
}

int main(void)
{
    check_finish();
    kt_pool *pool = make_pool(own_row(), 2);
    for (int32_t exact = 0; exact < 2; exact++) {
        everything *e = ev_make(pool, exact);
        count(e, 1, 0, "first token");
        count(e, 1, 1, "one token");
        count(e, 80, 2, "many tokens");
        count(e, 1, 1200, "one token, long context");
        count(e, 80, 1190, "many tokens, long context");
        ev_free(e);
    }
    check_offload(pool);
    kt_pool_free(pool);
    atomic_store(&counting, 1);
    void *volatile kept = malloc(1);        /* volatile: the pair must not be optimised away */
    free(kept);
    CHECK(atomic_load(&calls) >= 2, "the wrapping itself does not work");
    return report("test_alloc");
}
