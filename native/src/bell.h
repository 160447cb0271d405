/* bell.h - what threads wait on: a counter, watched by spinning for a short time and then by
 * sleeping on it (futex), so that waiting costs well under a microsecond while work is coming
 * and no CPU when idle. A zeroed bell is ready. */
#ifndef KT_BELL_H
#define KT_BELL_H

#include <stdatomic.h>
#include <stdint.h>

#define LINE 64             /* bytes of a cache line: what different threads write lies apart */

typedef struct bell {
    _Alignas(LINE) _Atomic uint32_t rung;   /* how often; the futex word */
    _Atomic uint32_t sleepers;
} bell;

/* 1 if it has rung since it was `seen`, or does so within spin_ns. */
int bell_spin(bell *b, uint32_t seen, int64_t spin_ns);

/* Returns when it has rung since it was `seen`: spins for spin_ns, then sleeps. */
void bell_wait(bell *b, uint32_t seen, int64_t spin_ns);

/* Let all who wait go on; what was written before is seen by them. */
void bell_ring(bell *b);

#endif
