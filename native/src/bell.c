/* bell.c - waiting and waking, on a futex. */
#define _GNU_SOURCE
#include "bell.h"

#include "thread.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

int bell_spin(bell *b, uint32_t seen, int64_t spin_ns)
{
    if (spin_ns > 0) {
        int64_t end = now_ns() + spin_ns;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load_explicit(&b->rung, memory_order_acquire) != seen)
                    return 1;
                thread_relax();
            }
        } while (now_ns() < end);
    }
    return 0;
}

void bell_wait(bell *b, uint32_t seen, int64_t spin_ns)
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

void bell_ring(bell *b)
{
    atomic_fetch_add(&b->rung, 1);
    if (atomic_load(&b->sleepers) > 0)
        syscall(SYS_futex, &b->rung, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}
