/* thread.h - shared by all threads of the library: how they start, the clock, the pause in a
 * spinning loop. */
#ifndef KT_THREAD_H
#define KT_THREAD_H

#include <pthread.h>
#include <stdint.h>

/* Start a thread with signals blocked: those are the caller's business. All but the faults a thread raises itself,
 * whose handlers (of Python's faulthandler, of an emulator) want to see them. attributes: NULL for none; 0 or an
 * errno. */
int thread_start(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);

/* CLOCK_MONOTONIC */
int64_t now_ns(void);

void thread_sleep(int64_t ns);     /* less than a second */

static inline void thread_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#endif
