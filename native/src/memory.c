/* memory.c - the memory of weights: arenas on huge pages, on the NUMA node that they belong to.
 * How their bytes get there stands in place.c.
 *
 * An arena is one anonymous mapping, cut so that it begins on a 2 MiB boundary and advised to use huge
 * pages: with 4 kB pages the product kernels spend their time in the page walker. It prefers the nodes it is
 * asked for and takes another's memory before it fails. The system may give small pages, or refuse to bind, as
 * a container does; nothing here depends on it. It knows nothing of what it holds.
 */
#define _GNU_SOURCE
#include "kt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)          /* bytes of a huge page */

struct kt_arena {
    void *mapping;
    size_t mapped;
    uint8_t *data;
    int refused;
};

/* From linux/mempolicy.h, which not every system has. */
enum { PREFERRED = 1, INTERLEAVE = 3 };

/* 0 or an errno. One node is preferred; over several, pages take turns. */
static int bind_memory(void *data, size_t size, uint64_t nodes)
{
    unsigned long mask = (unsigned long)nodes;
    int mode = nodes & (nodes - 1) ? INTERLEAVE : PREFERRED;
    if (nodes == 0)
        return 0;
    /* The kernel takes one bit less than it is told. */
    return syscall(SYS_mbind, data, size, mode, &mask, 8 * sizeof mask + 1, 0) == 0 ? 0 : errno;
}

kt_arena *kt_arena_create(size_t size, uint64_t nodes, char *error, size_t error_size)
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
    madvise(arena->data, rounded, MADV_HUGEPAGE);       /* a refusal costs speed, not correctness; so does that of */
    arena->refused = bind_memory(arena->data, rounded, nodes);
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

int32_t kt_arena_refused(const kt_arena *arena)
{
    return arena->refused;
}
