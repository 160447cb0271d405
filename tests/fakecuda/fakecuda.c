/* fakecuda.c - a CUDA 13 runtime and driver without a GPU, to dry-run host code of PyTorch and Triton programs.
 *
 * Kernels compute nothing. Everything else happens as on a device: each stream is a thread that takes its work in
 * order, copies move bytes when the stream gets there, host functions run in the stream's thread, words in memory are
 * waited for and written, graphs are captured and replayed, and what is not allowed in a capture is refused with the
 * error that the runtime gives. "Device" memory is host memory, zeroed.
 *
 *   FAKE_DEVICES=1   FAKE_SM=90   FAKE_VRAM_MB=81920   FAKE_KERNEL_US=0   FAKE_LOG=file: refusals, graphs
 *   FAKE_NODES=1: the nodes of each graph, too
 *   FAKE_TAKEN_MB=0: of the memory, by another program   FAKE_DRIVER=13000: its version
 *   FAKE_FAIL=name:after:code: fake_fail for ever, of a program that cannot call it
 *
 * A program under test may let calls fail by fake_fail, and read by fake_calls how often each was made.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define RT(x) return (last_error = (x))

static __thread cudaError_t last_error;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static FILE *log_file;
static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static long kernel_us;

static void say(const char *format, ...)
{
    if (!log_file)
        return;
    va_list a;
    va_start(a, format);
    pthread_mutex_lock(&big);
    vfprintf(log_file, format, a);
    fputc('\n', log_file);
    fflush(log_file);
    pthread_mutex_unlock(&big);
    va_end(a);
}

/* ---- calls that fail ------------------------------------------------------------------------------- */

enum { CALLS = 64, NAME = 48 };
static struct { char name[NAME]; long made; } calls[CALLS];
static struct { char name[NAME]; long left; int code, forever; } failure;

/* Let the call `name`, or "*": each, fail with a code after some that do not: once, or from then on. "": none does. */
API void fake_fail(const char *name, long after, int code, int forever)
{
    pthread_mutex_lock(&big);
    snprintf(failure.name, NAME, "%s", name);
    failure.left = after, failure.code = code, failure.forever = forever;
    pthread_mutex_unlock(&big);
}

/* How often a call was made since the last time that this was asked. */
API long fake_calls(const char *name)
{
    long made = 0;
    pthread_mutex_lock(&big);
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(calls[i].name, name))
            made = calls[i].made, calls[i].made = 0;
    pthread_mutex_unlock(&big);
    return made;
}

/* The code with which this call is to fail; 0: it is not. */
static int fails(const char *name)
{
    int code = 0, i = 0;
    pthread_mutex_lock(&big);
    while (i < CALLS - 1 && calls[i].name[0] && strcmp(calls[i].name, name))
        i++;
    snprintf(calls[i].name, NAME, "%s", name);
    calls[i].made++;
    if (failure.name[0] && (failure.name[0] == '*' || !strcmp(failure.name, name)) && failure.left-- <= 0) {
        code = failure.code;
        if (failure.forever)
            failure.left = 0;
        else
            failure.name[0] = 0;
    }
    pthread_mutex_unlock(&big);
    return code;
}
#define MAY_FAIL(name)                                                                                                 \
    for (int code = fails(name); code;)                                                                                \
    RT((cudaError_t)code)

/* ---- memory: what is pinned, what is the device's ------------------------------------------------ */

typedef struct range { uintptr_t at; size_t size; int type; } range;   /* type: 1 host, 2 device */
static range *ranges;
static int n_ranges, cap_ranges;
static size_t used_bytes;
static pthread_mutex_t mem_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t vram(void)
{
    const char *v = getenv("FAKE_VRAM_MB");
    return (size_t)(v ? atol(v) : 81920) << 20;
}

/* What another program has of it. */
static size_t taken(void)
{
    const char *v = getenv("FAKE_TAKEN_MB");
    return (size_t)(v ? atol(v) : 0) << 20;
}

static void add_range(void *p, size_t size, int type)
{
    pthread_mutex_lock(&mem_lock);
    if (n_ranges == cap_ranges)
        ranges = realloc(ranges, (size_t)(cap_ranges = cap_ranges ? 2 * cap_ranges : 256) * sizeof *ranges);
    ranges[n_ranges++] = (range){(uintptr_t)p, size, type};
    pthread_mutex_unlock(&mem_lock);
}

static int find_range(const void *p)
{
    for (int i = 0; i < n_ranges; i++)
        if ((uintptr_t)p >= ranges[i].at && (uintptr_t)p < ranges[i].at + ranges[i].size)
            return i;
    return -1;
}

static range drop_range(void *p)
{
    range found = {0};
    pthread_mutex_lock(&mem_lock);
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].at == (uintptr_t)p) {
            found = ranges[i];
            ranges[i] = ranges[--n_ranges];
            break;
        }
    pthread_mutex_unlock(&mem_lock);
    return found;
}

static int type_of(const void *p)
{
    pthread_mutex_lock(&mem_lock);
    int i = find_range(p), type = i < 0 ? 0 : ranges[i].type;
    pthread_mutex_unlock(&mem_lock);
    return type;
}

/* ---- work ---------------------------------------------------------------------------------------- */

enum { COPY, SET, HOST, KERNEL, RECORD, WAIT_EVENT, WAIT_VALUE, WRITE_VALUE, GRAPH };
enum { FILLS = 1u << 31, EARLY = 1u << 30 };  /* of a kernel: it fills with a value, elements of a size; it starts early */
static const char *kinds[] = {"copy", "set", "host", "kernel", "record", "wait_event", "wait_value", "write_value", "graph"};

typedef struct event event;
typedef struct graph graph;
typedef struct item {
    int kind;
    void *a, *b;
    size_t size;
    unsigned long long value;
    unsigned flags;
    const char *name;
} item;

struct graph { item *at; int n, cap; _Atomic int refs; };
typedef struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;
    item *at;
    int n, cap, first, running;
    int started, index;
    enum cudaStreamCaptureStatus status;
    enum cudaStreamCaptureMode mode;
    unsigned long long capture_id;
    graph *captured;
    pthread_t by;
    struct stream *origin;
} stream;
struct event { _Atomic unsigned long long wanted, done; stream *captured_on; unsigned long long capture_id; int recorded; };

static stream default_stream = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER};
static stream *all_streams[4096];
static int n_streams;
static _Atomic unsigned long long capture_ids = 1;
static __thread stream *capturing_here;     /* a capture that this thread began */

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void run_graph(graph *g);
static void execute(item *w)
{
    event *e = w->a;
    switch (w->kind) {
    case COPY: memmove(w->a, w->b, w->size); break;
    case SET: memset(w->a, (int)w->value, w->size); break;
    case HOST: ((void (*)(void *))w->a)(w->b); break;
    case KERNEL:
        if (w->flags & FILLS)
            for (size_t i = 0, each = w->flags & 15; i < w->size; i++)
                memcpy((char *)w->a + i * each, &w->value, each);
        if (kernel_us) { int64_t until = now_us() + kernel_us; while (now_us() < until) {} }
        break;
    case RECORD: atomic_store(&e->done, w->value); break;
    case WAIT_EVENT: while (atomic_load(&e->done) < w->value) usleep(2); break;
    case WAIT_VALUE: {
        _Atomic uint32_t *v = w->a;
        int64_t since = now_us();
        while (atomic_load(v) != (uint32_t)w->value) {
            if (now_us() - since > 60000000) { say("HANG: wait_value at %p for a minute", w->a); since = now_us(); }
            usleep(1);
        }
        break;
    }
    case WRITE_VALUE: atomic_store((_Atomic uint32_t *)w->a, (uint32_t)w->value); break;
    case GRAPH: run_graph(w->a); break;
    }
}

static void run_graph(graph *g)
{
    for (int i = 0; i < g->n; i++)
        execute(&g->at[i]);
}

static void *stream_main(void *arg)
{
    stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->first == s->n) {
            s->first = s->n = 0;
            s->running = 0;
            pthread_cond_broadcast(&s->idle);
            pthread_cond_wait(&s->wake, &s->lock);
        }
        s->running = 1;
        item w = s->at[s->first++];
        pthread_mutex_unlock(&s->lock);
        execute(&w);
        pthread_mutex_lock(&s->lock);
    }
    return NULL;
}

static void start(stream *s)
{
    if (!s->started) {
        s->started = 1;
        s->index = n_streams;
        all_streams[n_streams++] = s;
        pthread_create(&s->thread, NULL, stream_main, s);
        pthread_detach(s->thread);
    }
}

static stream *of(cudaStream_t s)
{
    stream *found = (uintptr_t)s <= 2 ? &default_stream : (stream *)s;
    pthread_mutex_lock(&big);
    start(found);
    pthread_mutex_unlock(&big);
    return found;
}

static void drain(stream *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->first != s->n || s->running)
        pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static void add(item **at, int *n, int *cap, item w)
{
    if (*n == *cap)
        *at = realloc(*at, (size_t)(*cap = *cap ? 2 * *cap : 64) * sizeof **at);
    (*at)[(*n)++] = w;
}

static cudaError_t refuse(const char *what, cudaError_t code)
{
    say("REFUSED %s: %d", what, code);
    return code;
}

static void invalidate(stream *s)
{
    if (s && s->status == cudaStreamCaptureStatusActive)
        s->status = cudaStreamCaptureStatusInvalidated;
}

/* Give work to a stream, or to the graph that is captured on it. */
static cudaError_t give(cudaStream_t to, item w)
{
    stream *s = of(to);
    if (s == &default_stream && capturing_here && w.kind != RECORD && w.kind != WAIT_EVENT) {
        /* legacy stream beside a capture: allowed as torch's streams are non-blocking, but suspicious */
        say("NOTE: %s %s on the default stream while this thread captures", kinds[w.kind], w.name ? w.name : "");
    }
    if (s->status == cudaStreamCaptureStatusInvalidated)
        return refuse(kinds[w.kind], cudaErrorStreamCaptureInvalidated);
    if (s->status == cudaStreamCaptureStatusActive) {
        add(&s->captured->at, &s->captured->n, &s->captured->cap, w);
        return cudaSuccess;
    }
    pthread_mutex_lock(&s->lock);
    add(&s->at, &s->n, &s->cap, w);
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    return cudaSuccess;
}

/* What "potentially unsafe" calls are told while a capture is under way that concerns this thread. */
static int unsafe(const char *what)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return 0;
    stream *blocking = NULL;
    if (capturing_here && capturing_here->mode != cudaStreamCaptureModeRelaxed)
        blocking = capturing_here;
    for (int i = 0; !blocking && thread_mode == cudaStreamCaptureModeGlobal && i < n_streams; i++)
        if (all_streams[i]->status == cudaStreamCaptureStatusActive && all_streams[i]->mode == cudaStreamCaptureModeGlobal)
            blocking = all_streams[i];
    if (!blocking)
        return 0;
    invalidate(blocking);
    refuse(what, cudaErrorStreamCaptureUnsupported);
    return 1;
}

/* ---- runtime: memory ----------------------------------------------------------------------------- */

static int take(size_t size)
{
    pthread_mutex_lock(&mem_lock);
    int fits = used_bytes + size <= vram() - taken();
    used_bytes += fits ? size : 0;
    pthread_mutex_unlock(&mem_lock);
    return fits;
}

API cudaError_t cudaMalloc(void **p, size_t size)
{
    MAY_FAIL("cudaMalloc");
    if (unsafe("cudaMalloc"))
        RT(cudaErrorStreamCaptureUnsupported);
    if (!take(size))
        RT(cudaErrorMemoryAllocation);
    *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    add_range(*p, size, 2);
    return cudaSuccess;
}

API cudaError_t cudaFree(void *p)
{
    if (!p)
        return cudaSuccess;
    if (unsafe("cudaFree"))
        RT(cudaErrorStreamCaptureUnsupported);
    for (int i = 0; i < n_streams; i++)
        drain(all_streams[i]);
    range r = drop_range(p);
    if (!r.size)
        RT(cudaErrorInvalidValue);
    used_bytes -= r.size;
    munmap(p, r.size);
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags)
{
    MAY_FAIL("cudaHostAlloc");
    if (unsafe("cudaHostAlloc"))
        RT(cudaErrorStreamCaptureUnsupported);
    size_t rounded = (size + 4095) / 4096 * 4096;
    *p = mmap(NULL, rounded ? rounded : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    add_range(*p, rounded ? rounded : 4096, 1);
    return cudaSuccess;
}
API cudaError_t cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }

API cudaError_t cudaFreeHost(void *p)
{
    if (unsafe("cudaFreeHost"))
        RT(cudaErrorStreamCaptureUnsupported);
    range r = drop_range(p);
    if (r.size)
        munmap(p, r.size);
    return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags)
{
    MAY_FAIL("cudaHostRegister");
    if (unsafe("cudaHostRegister"))
        RT(cudaErrorStreamCaptureUnsupported);
    uintptr_t first = (uintptr_t)p / 4096 * 4096, last = ((uintptr_t)p + size + 4095) / 4096 * 4096;
    unsigned char *there = malloc((last - first) / 4096);
    if (mincore((void *)first, last - first, there) != 0) {     /* a hole: nothing is mapped there */
        free(there);
        say("REFUSED cudaHostRegister of %zu bytes: not all mapped", size);
        RT(cudaErrorInvalidValue);
    }
    free(there);
    pthread_mutex_lock(&mem_lock);
    int clash = 0;
    for (int i = 0; i < n_ranges; i++)
        clash |= ranges[i].type == 1 && ranges[i].at / 4096 * 4096 < last && first < ranges[i].at + ranges[i].size;
    pthread_mutex_unlock(&mem_lock);
    if (clash)
        RT(refuse("cudaHostRegister", cudaErrorHostMemoryAlreadyRegistered));
    add_range(p, size, 1);
    say("registered %zu bytes at page offset %zu", size, (size_t)((uintptr_t)p - first));
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *p)
{
    if (unsafe("cudaHostUnregister"))
        RT(cudaErrorStreamCaptureUnsupported);
    RT(drop_range(p).size ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned flags)
{
    MAY_FAIL("cudaHostGetDevicePointer");
    if (type_of(p) != 1)
        RT(refuse("cudaHostGetDevicePointer", cudaErrorInvalidValue));
    *out = p;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    memset(a, 0, sizeof *a);
    a->type = (enum cudaMemoryType)type_of(p);
    a->device = a->type == cudaMemoryTypeUnregistered ? -2 : 0;
    a->devicePointer = a->type == cudaMemoryTypeUnregistered ? NULL : (void *)p;
    a->hostPointer = a->type == cudaMemoryTypeHost ? (void *)p : NULL;
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    MAY_FAIL("cudaMemGetInfo");
    *total = vram();
    *free_bytes = *total - taken() - used_bytes;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s)
{
    MAY_FAIL("cudaMemcpyAsync");
    int a = type_of(to), b = type_of(from);
    if (kind == cudaMemcpyHostToDevice && a != 2)
        RT(refuse("cudaMemcpyAsync: target is not the device's", cudaErrorInvalidValue));
    if (kind == cudaMemcpyDeviceToHost && b != 2)
        RT(refuse("cudaMemcpyAsync: source is not the device's", cudaErrorInvalidValue));
    int pageable = a == 0 || b == 0;
    stream *on = of(s);
    if (pageable && on->status != cudaStreamCaptureStatusNone) {
        invalidate(on);
        RT(refuse("cudaMemcpyAsync of pageable memory", cudaErrorStreamCaptureUnsupported));
    }
    if (pageable) {     /* staged: in order, but done when the call returns */
        drain(on);
        memmove(to, from, size);
        return cudaSuccess;
    }
    RT(give(s, (item){.kind = COPY, .a = to, .b = (void *)from, .size = size, .name = kind == cudaMemcpyHostToDevice ? "h2d" : kind == cudaMemcpyDeviceToHost ? "d2h" : "d2d"}));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    if (unsafe("cudaMemcpy"))
        RT(cudaErrorStreamCaptureUnsupported);
    drain(of(0));
    memmove(to, from, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s)
{
    for (size_t i = 0; i < height; i++) {
        cudaError_t e = give(s, (item){.kind = COPY, .a = (char *)to + i * to_pitch, .b = (char *)from + i * from_pitch, .size = width, .name = "2d"});
        if (e)
            RT(e);
    }
    return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int e, size_t size, cudaStream_t s)
{
    RT(give(s, (item){.kind = COPY, .a = to, .b = (void *)from, .size = size, .name = "peer"}));
}
API cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t s)
{
    MAY_FAIL("cudaMemsetAsync");
    RT(give(s, (item){.kind = SET, .a = p, .value = (unsigned)value, .size = size}));
}
API cudaError_t cudaMemset(void *p, int value, size_t size)
{
    if (unsafe("cudaMemset"))
        RT(cudaErrorStreamCaptureUnsupported);
    drain(of(0));
    memset(p, value, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { static char room[1 << 16]; *p = room; return cudaSuccess; }

/* ---- runtime: streams and events ------------------------------------------------------------------ */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    MAY_FAIL("cudaStreamCreateWithPriority");
    stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->idle, NULL);
    *out = (cudaStream_t)s;
    of(*out);
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { drain(of(s)); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }

API cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    MAY_FAIL("cudaStreamSynchronize");
    stream *on = of(s);
    if (on->status != cudaStreamCaptureStatusNone) {
        invalidate(on);
        RT(refuse("cudaStreamSynchronize of a capturing stream", cudaErrorStreamCaptureUnsupported));
    }
    drain(on);
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t s)
{
    stream *on = of(s);
    if (on->status != cudaStreamCaptureStatusNone) {
        invalidate(on);
        RT(refuse("cudaStreamQuery of a capturing stream", cudaErrorStreamCaptureUnsupported));
    }
    pthread_mutex_lock(&on->lock);
    int busy = on->first != on->n || on->running;
    pthread_mutex_unlock(&on->lock);
    return busy ? cudaErrorNotReady : cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void)
{
    if (unsafe("cudaDeviceSynchronize"))
        RT(cudaErrorStreamCaptureUnsupported);
    for (int i = 0; i < n_streams; i++)
        drain(all_streams[i]);
    return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = calloc(1, sizeof(event)); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t given, cudaStream_t s, unsigned flags)
{
    MAY_FAIL("cudaEventRecordWithFlags");
    event *e = (event *)given;
    stream *on = of(s);
    e->recorded = 1;
    if (on->status == cudaStreamCaptureStatusActive) {
        e->captured_on = on;
        e->capture_id = on->capture_id;
        return cudaSuccess;
    }
    e->captured_on = NULL;
    RT(give(s, (item){.kind = RECORD, .a = e, .value = atomic_fetch_add(&e->wanted, 1) + 1}));
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }

API cudaError_t cudaEventQuery(cudaEvent_t given)
{
    event *e = (event *)given;
    if (unsafe("cudaEventQuery"))
        RT(cudaErrorStreamCaptureUnsupported);
    if (e->captured_on)
        RT(refuse("cudaEventQuery", cudaErrorCapturedEvent));
    return atomic_load(&e->done) >= atomic_load(&e->wanted) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t given)
{
    MAY_FAIL("cudaEventSynchronize");
    event *e = (event *)given;
    if (e->captured_on)
        RT(refuse("cudaEventSynchronize", cudaErrorCapturedEvent));
    while (atomic_load(&e->done) < atomic_load(&e->wanted))
        usleep(2);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1.0f; return cudaSuccess; }

API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t given, unsigned flags)
{
    MAY_FAIL("cudaStreamWaitEvent");
    event *e = (event *)given;
    stream *on = of(s);
    if (e->captured_on) {
        if (on->status == cudaStreamCaptureStatusNone) {   /* joins the capture */
            on->status = cudaStreamCaptureStatusActive;
            on->captured = e->captured_on->captured;
            on->capture_id = e->capture_id;
            on->mode = e->captured_on->mode;
            on->origin = e->captured_on;
        }
        return cudaSuccess;
    }
    if (on->status == cudaStreamCaptureStatusActive && e->recorded) {
        invalidate(on);
        RT(refuse("cudaStreamWaitEvent on an event from outside", cudaErrorStreamCaptureIsolation));
    }
    RT(give(s, (item){.kind = WAIT_EVENT, .a = e, .value = atomic_load(&e->wanted)}));
}

/* ---- runtime: capture and graphs ------------------------------------------------------------------ */

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    MAY_FAIL("cudaStreamBeginCapture");
    if ((uintptr_t)s <= 1)
        RT(refuse("capture of the legacy stream", cudaErrorStreamCaptureUnsupported));
    stream *on = of(s);
    if (on->status != cudaStreamCaptureStatusNone)
        RT(cudaErrorIllegalState);
    on->status = cudaStreamCaptureStatusActive;
    on->mode = mode;
    on->captured = calloc(1, sizeof(graph));
    on->capture_id = atomic_fetch_add(&capture_ids, 1);
    on->by = pthread_self();
    on->origin = on;
    capturing_here = on;
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    stream *on = of(s);
    *out = NULL;
    if (on->status == cudaStreamCaptureStatusNone)
        RT(cudaErrorIllegalState);
    int code = fails("cudaStreamEndCapture"), bad = on->status == cudaStreamCaptureStatusInvalidated;
    for (int i = 0; i < n_streams; i++)
        if (all_streams[i] != on && all_streams[i]->origin == on && all_streams[i]->status != cudaStreamCaptureStatusNone)
            all_streams[i]->status = cudaStreamCaptureStatusNone;
    on->status = cudaStreamCaptureStatusNone;
    capturing_here = NULL;
    if (code)
        RT((cudaError_t)code);
    if (bad)
        RT(refuse("cudaStreamEndCapture", cudaErrorStreamCaptureInvalidated));
    int counts[GRAPH + 1] = {0}, early = 0;
    for (int i = 0; i < on->captured->n; i++) {
        counts[on->captured->at[i].kind]++;
        early += on->captured->at[i].kind == KERNEL && (on->captured->at[i].flags & EARLY) != 0;
    }
    say("GRAPH %d nodes: %d kernels, %d copies, %d sets, %d host, %d wait_value, %d write_value, %d early", on->captured->n,
        counts[KERNEL], counts[COPY], counts[SET], counts[HOST], counts[WAIT_VALUE], counts[WRITE_VALUE], early);
    if (getenv("FAKE_NODES"))
        for (int i = 0; i < on->captured->n; i++)
            say("NODE %d %s %.200s %zu", i, kinds[on->captured->at[i].kind], on->captured->at[i].name ? on->captured->at[i].name : "", on->captured->at[i].size);
    *out = (cudaGraph_t)on->captured;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g,
                                         const cudaGraphNode_t **deps, const cudaGraphEdgeData **edges, size_t *n)
{
    stream *on = of(s);
    *status = on->status;
    if (id)
        *id = on->capture_id;
    if (g)
        *g = (cudaGraph_t)on->captured;
    if (deps)
        *deps = NULL;
    if (edges)
        *edges = NULL;
    if (n)
        *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = of(s)->status; return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n)
{
    *n = (size_t)((graph *)g)->n;
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags)
{
    MAY_FAIL("cudaGraphInstantiateWithFlags");
    graph *copy = calloc(1, sizeof *copy), *from = (graph *)g;
    for (int i = 0; i < from->n; i++)
        add(&copy->at, &copy->n, &copy->cap, from->at[i]);
    *out = (cudaGraphExec_t)copy;
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags) { return cudaGraphInstantiateWithFlags(out, g, flags); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) { MAY_FAIL("cudaGraphLaunch"); RT(give(s, (item){.kind = GRAPH, .a = g})); }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return cudaSuccess; }
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t a, cudaGraphNode_t *b, cudaGraphEdgeData *c, size_t *n) { *n = 0; return cudaSuccess; }

API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *arg)
{
    MAY_FAIL("cudaLaunchHostFunc");
    if (!f)
        RT(refuse("cudaLaunchHostFunc", cudaErrorInvalidValue));
    RT(give(s, (item){.kind = HOST, .a = (void *)f, .b = arg, .name = "host"}));
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *arg, unsigned flags) { RT(cudaErrorNotSupported); }

/* ---- runtime: kernels ------------------------------------------------------------------------------- */

typedef struct known { const void *host; const char *name; } known;
static known *functions;
static int n_functions, cap_functions, sorted;

API void **__cudaRegisterFatBinary(void *f) { static void *handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void **h) {}
API void __cudaUnregisterFatBinary(void **h) {}
API char __cudaInitModule(void **h) { return 1; }
API void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {}
API void __cudaRegisterFunction(void **h, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e)
{
    if (n_functions == cap_functions)
        functions = realloc(functions, (size_t)(cap_functions = cap_functions ? 2 * cap_functions : 65536) * sizeof *functions);
    functions[n_functions++] = (known){host, device};
    sorted = 0;
}
static int by_host(const void *a, const void *b)
{
    const known *x = a, *y = b;
    return x->host < y->host ? -1 : x->host > y->host;
}
static const char *name_of(const void *host)
{
    pthread_mutex_lock(&big);
    if (!sorted)
        qsort(functions, (size_t)n_functions, sizeof *functions, by_host);
    sorted = 1;
    known key = {host, NULL}, *found = bsearch(&key, functions, (size_t)n_functions, sizeof *functions, by_host);
    pthread_mutex_unlock(&big);
    return found ? found->name : "?";
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[8];
static __thread int depth;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s)
{
    pushed[depth].grid = grid;
    pushed[depth].block = block;
    pushed[depth].shared = shared;
    pushed[depth++].stream = s;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s)
{
    depth--;
    *grid = pushed[depth].grid;
    *block = pushed[depth].block;
    *shared = pushed[depth].shared;
    *(void **)s = pushed[depth].stream;
    return cudaSuccess;
}

/* torch's fill of contiguous memory, the one kernel that is done: (int n, FillFunctor<T>{value}, array<char *, 1>). */
static int as_fill(const char *name, void **args, item *w)
{
    const char *at = strstr(name, "vectorized_elementwise_kernel"), *of = at ? strstr(at, "11FillFunctorI") : NULL;
    if (!of || !args)
        return 0;
    of += strlen("11FillFunctorI");
    unsigned each = *of == 'i' || *of == 'f' ? 4 : *of == 'l' || *of == 'd' ? 8 : *of == 'b' || *of == 'h' || *of == 'a' ? 1 : !strncmp(of, "N3c108BFloat16", 14) ? 2 : 0;
    if (!each)
        return 0;
    w->size = (size_t)*(int *)args[0];
    memcpy(&w->value, args[1], each);
    w->a = *(void **)args[2];
    w->flags = FILLS | each;
    return 1;
}

static cudaError_t launch(const void *host, dim3 grid, dim3 block, size_t shared, cudaStream_t s, void **args)
{
    MAY_FAIL("cudaLaunchKernel");
    const char *name = name_of(host);
    item w = {.kind = KERNEL, .name = name};
    as_fill(name, args, &w);
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || block.x * block.y * block.z > 1024 || shared > 232448)
        RT(refuse(name, cudaErrorInvalidConfiguration));
    RT(give(s, w));
}
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *host) { *k = (cudaKernel_t)host; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(k, grid, block, shared, s, args); }
API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(f, grid, block, shared, s, args); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) { return launch(f, grid, block, shared, s, args); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) { return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream, args); }
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f)
{
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = 90;
    a->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int value) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) { *n = 2048 / (block ? block : 1) > 16 ? 16 : 2048 / (block ? block : 1); return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0); }

/* Work of a library that is a fake too. */
API int fake_note_kernel(void *s, const char *name)
{
    return fails("cublas") ? 13 : (int)give((cudaStream_t)s, (item){.kind = KERNEL, .name = name});
}

/* ---- runtime: the device ------------------------------------------------------------------------------ */

static int sm(void) { const char *v = getenv("FAKE_SM"); return v ? atoi(v) : 90; }
static int devices(void) { const char *v = getenv("FAKE_DEVICES"); return v ? atoi(v) : 0; }
static __thread int device_now;

static int driver(void) { const char *v = getenv("FAKE_DRIVER"); return v ? atoi(v) : 13000; }

API cudaError_t cudaGetDeviceCount(int *n)
{
    *n = driver() < 13000 ? 0 : devices();
    return *n ? cudaSuccess : (last_error = driver() < 13000 ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int *d) { *d = device_now; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { if (d >= devices()) RT(cudaErrorInvalidDevice); device_now = d; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *v) { *v = driver(); return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *out, int n, int d) { snprintf(out, (size_t)n, "0000:00:%02x.0", d + 5); return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3 (fake)");
    p->totalGlobalMem = vram();
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = sm() / 10;
    p->minor = sm() % 10;
    p->multiProcessorCount = 132;
    p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = p->memoryPoolsSupported = 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->clusterLaunch = 1;
    p->textureAlignment = 512;
    return cudaSuccess;
}
static int attribute(int a)
{
    switch (a) {
    case 1: return 1024;            /* threads per block */
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;
    case 10: return 32;
    case 12: return 65536;
    case 13: return 1980000;        /* clock, kHz */
    case 16: return 132;
    case 19: case 31: case 41: return 1;
    case 36: return 2619000;
    case 37: return 5120;
    case 38: return 50 << 20;
    case 39: return 2048;
    case 75: return sm() / 10;
    case 76: return sm() % 10;
    case 81: return 233472;
    case 82: return 65536;
    case 95: return 1;
    case 97: return 232448;
    case 99: return 1;
    case 106: return 32;
    case 115: return 1;
    case 120: return 1;
    }
    return 0;
}
API cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute((int)a); return cudaSuccess; }
API cudaError_t cudaGetLastError(void) { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorString(cudaError_t e)
{
    static __thread char text[96];
    switch ((int)e) {
    case 0: return "no error";
    case 2: return "out of memory";
    case 100: return "no CUDA-capable device is detected";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    case 905: return "dependency created on uncaptured work in another stream";
    case 906: return "operation would make the legacy stream depend on a capturing blocking stream";
    case 907: return "operation not permitted on an event last recorded in a capturing stream";
    }
    snprintf(text, sizeof text, "fake error %d", (int)e);
    return text;
}
API const char *cudaGetErrorName(cudaError_t e) { return "cudaErrorFake"; }

/* ---- driver ------------------------------------------------------------------------------------------- */

API CUresult cuInit(unsigned f) { return 0; }
API CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
API CUresult cuGetErrorString(CUresult e, const char **s) { *s = cudaGetErrorString((cudaError_t)e); return 0; }
API CUresult cuGetErrorName(CUresult e, const char **s) { *s = "CUDA_ERROR_FAKE"; return 0; }
API CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return 0; }
API CUresult cuDeviceGetCount(int *n) { *n = devices(); return 0; }
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute((int)a); return 0; }
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)&default_stream; return 0; }
API CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
API CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1 << 20; return 0; }
API CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)&default_stream; return 0; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
API CUresult cuModuleLoadData(CUmodule *m, const void *image)
{
    int code = fails("cuModuleLoadData");
    if (code)
        return (CUresult)code;
    if (unsafe("cuModuleLoadData"))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *m = (CUmodule)image;
    return 0;
}
API CUresult cuModuleUnload(CUmodule m) { return 0; }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)strdup(name); say("triton kernel %s", name); return 0; }
API CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0; return 0; }
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return 0; }
API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p)
{
    int type = type_of((void *)p);
    if (type == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)out = p;
    return 0;
}
API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **data, CUdeviceptr p) { return cuPointerGetAttribute(data[0], a[0], p); }
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra)
{
    int code = fails("cuLaunchKernelEx");
    if (code)
        return (CUresult)code;
    if (!c->gridDimX || !c->gridDimY || !c->gridDimZ || c->gridDimY > 65535 || c->gridDimZ > 65535)
        return (CUresult)refuse((const char *)f, cudaErrorInvalidConfiguration);
    unsigned flags = 0;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && c->attrs[i].value.programmaticStreamSerializationAllowed) {
            if (sm() < 90)
                return (CUresult)refuse((const char *)f, cudaErrorNotSupported);
            flags |= EARLY;
        }
    return (CUresult)give((cudaStream_t)c->hStream, (item){.kind = KERNEL, .name = (const char *)f, .flags = flags});
}
#undef cuStreamBatchMemOp
API CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned n, CUstreamBatchMemOpParams *p, unsigned flags)
{
    int code = fails("cuStreamBatchMemOp");
    if (code)
        return (CUresult)code;
    for (unsigned i = 0; i < n; i++) {
        cudaError_t e;
        if (p[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
            if (p[i].waitValue.flags != CU_STREAM_WAIT_VALUE_EQ || type_of((void *)p[i].waitValue.address) == 0)
                return (CUresult)refuse("wait_value", cudaErrorInvalidValue);
            e = give((cudaStream_t)s, (item){.kind = WAIT_VALUE, .a = (void *)p[i].waitValue.address, .value = p[i].waitValue.value});
        } else if (p[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            if (p[i].writeValue.flags != 0 || type_of((void *)p[i].writeValue.address) == 0)
                return (CUresult)refuse("write_value", cudaErrorInvalidValue);
            e = give((cudaStream_t)s, (item){.kind = WRITE_VALUE, .a = (void *)p[i].writeValue.address, .value = p[i].writeValue.value});
        } else
            return (CUresult)refuse("batch_mem_op", cudaErrorInvalidValue);
        if (e)
            return (CUresult)e;
    }
    return 0;
}

static int nothing(void) { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status)
{
    void *found = dlsym(RTLD_DEFAULT, symbol);
    *f = found ? found : (void *)nothing;
    if (!found)
        say("driver entry point %s: a function that does nothing", symbol);
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAKE_LOG"), *us = getenv("FAKE_KERNEL_US");
    log_file = path ? fopen(path, "a") : NULL;
    kernel_us = us ? atol(us) : 0;
    char name[NAME];
    long after;
    int code;
    const char *fail = getenv("FAKE_FAIL");
    if (fail && sscanf(fail, "%47[^:]:%ld:%d", name, &after, &code) == 3)
        fake_fail(name, after, code, 1);
}
