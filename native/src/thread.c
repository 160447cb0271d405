/* thread.c - starting threads, and the clock. */
#define _GNU_SOURCE
#include "thread.h"

#include <signal.h>
#include <stddef.h>
#include <time.h>

int thread_start(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
    static const int faults[] = {SIGILL, SIGFPE, SIGSEGV, SIGBUS};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(thread, attributes, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void thread_sleep(int64_t ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}
