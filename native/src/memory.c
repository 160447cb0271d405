/* memory.c - where weights live and how they get there: arenas on huge pages, and parallel reads.
 *
 * An arena is one anonymous mapping, cut so that it begins on a 2 MiB boundary and advised to use huge
 * pages: with 4 kB pages the product kernels spend their time in the page walker. The system may give
 * small pages all the same; nothing here depends on it. It knows nothing of what it holds.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)          /* bytes of a huge page */
#define READ_RUN ((size_t)4 << 20)      /* bytes of one pread: long enough to stream, short enough to share */

struct kt_arena {
    void *mapping;
    size_t mapped;
    uint8_t *data;
};

kt_arena *kt_arena_create(size_t size, char *error, size_t error_size)
{
    if (size > SIZE_MAX / 2) {
        snprintf(error, error_size, "an arena of %zu bytes is more than any machine has", size);
        return NULL;
    }
    kt_arena *arena = malloc(sizeof *arena);
    size_t rounded = (size + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;       /* at least one page, also for size 0 */
    size_t mapped = rounded + HUGE_PAGE;                     /* room to move the start to a boundary */
    void *mapping = arena ? mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    if (mapping == MAP_FAILED) {
        snprintf(error, error_size, "no memory for an arena of %.2f GiB: %s", (double)size / (1 << 30),
                 strerror(errno));
        free(arena);
        return NULL;
    }
    size_t lead = (HUGE_PAGE - (uintptr_t)mapping % HUGE_PAGE) % HUGE_PAGE;
    arena->mapping = mapping;
    arena->mapped = mapped;
    arena->data = (uint8_t *)mapping + lead;
    madvise(arena->data, rounded, MADV_HUGEPAGE);       /* a refusal costs speed, not correctness */
    return arena;
}

void kt_arena_free(kt_arena *arena)
{
    if (!arena)
        return;
    munmap(arena->mapping, arena->mapped);
    free(arena);
}

void *kt_arena_data(kt_arena *arena)
{
    return arena->data;
}

/* ---- reading ------------------------------------------------------------------------------------ */

typedef struct reading {
    kt_pool *pool;
    int fd;
    uint64_t offset;
    size_t size;
    uint8_t *dst;
    _Atomic int failed;         /* errno of the first failure; -1: the file ended */
    _Atomic uint64_t where;     /* file offset of that failure */
} reading;

/* dst[first..last) of the reading; 0, an errno, or -1 at the end of the file. *at: how far it came. */
static int read_run(const reading *r, size_t first, size_t last, size_t *at)
{
    for (*at = first; *at < last;) {
        ssize_t n = pread(r->fd, r->dst + *at, last - *at, (off_t)(r->offset + *at));
        if (n > 0)
            *at += (size_t)n;
        else if (n == 0)
            return -1;
        else if (errno != EINTR)
            return errno;
    }
    return 0;
}

static void read_task(void *arg, int thread, int threads)
{
    reading *r = arg;
    int64_t runs = (int64_t)((r->size + READ_RUN - 1) / READ_RUN);
    (void)threads;
    for (int64_t i; (i = pool_take(r->pool, thread, 1)) < runs && atomic_load(&r->failed) == 0;) {
        size_t first = (size_t)i * READ_RUN, at;
        size_t last = r->size - first < READ_RUN ? r->size : first + READ_RUN;
        int failed = read_run(r, first, last, &at), none = 0;
        if (failed && atomic_compare_exchange_strong(&r->failed, &none, failed))
            atomic_store(&r->where, r->offset + at);
    }
}

int kt_read(kt_pool *pool, int32_t fd, uint64_t offset, size_t size, void *dst)
{
    if (offset > INT64_MAX || size > INT64_MAX - offset) {
        pool_set_error(pool, "reading %zu bytes from offset %llu: no file is that long", size,
                       (unsigned long long)offset);
        return KT_ERR_RANGE;
    }
    reading r = {.pool = pool, .fd = fd, .offset = offset, .size = size, .dst = dst};
    pool_run(pool, read_task, &r);
    int failed = atomic_load(&r.failed);
    if (failed == 0)
        return KT_OK;
    pool_set_error(pool, "reading %zu bytes from offset %llu: %s at offset %llu", size,
                   (unsigned long long)offset, failed < 0 ? "the file ends" : strerror(failed),
                   (unsigned long long)atomic_load(&r.where));
    return KT_ERR_IO;
}
