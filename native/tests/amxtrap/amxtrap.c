/* amxtrap.c - real AMX machine code on an x86-64 CPU that has no AMX, so that the row amx is tested anywhere.
 *
 * Each tile instruction raises SIGILL there. The handler decodes it, carries it out (tile registers are
 * thread-local memory), goes on with the next one as long as those are tile instructions too, and returns
 * behind them: about 10 us for a run of them. arch_prctl(ARCH_REQ_XCOMP_PERM) is answered through a seccomp
 * filter (SIGSYS), and insisted on, as Linux does. CPUID and XGETBV cannot be caught: cpu.c asks
 * amxtrap_active(). Semantics: the instruction pages of the Intel SDM, volume 2. Not yet compared with a CPU
 * that has AMX; on one nothing traps and this file does nothing. It says nothing about speed.
 *
 * Linked into every C test; tests/amx.py makes the library that Python tests preload.
 *
 *   AMXTRAP_STATS=1   at exit: how many of each instruction were carried out
 *   AMXTRAP_TRACE=1   one line per instruction on stderr
 *   AMXTRAP=0         off
 */
#define _GNU_SOURCE
#include "amxtrap.h"

#include <errno.h>
#include <immintrin.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum operation {
    LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBSSD, TDPBSUD, TDPBUSD,
    TDPBUUD, TDPBF16PS, OPERATIONS
};
static const char *const names[OPERATIONS] = {
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored", "tdpbssd", "tdpbsud",
    "tdpbusd", "tdpbuud", "tdpbf16ps",
};

typedef struct tile {
    _Alignas(64) uint32_t d[16][16];    /* 16 rows of 64 bytes */
} tile;

/* What the CPU would hold for this thread. */
static __thread struct {
    tile t[8];
    uint16_t row_bytes[8];
    uint8_t rows[8], palette, start_row;
} state __attribute__((tls_model("initial-exec")));

static unsigned long count[OPERATIONS], traps;
static int active, trace, permitted;
static struct sigaction old_ill, old_sys;

/* ---- decoding ----------------------------------------------------------------------------------- */

typedef struct instruction {
    int op;
    int reg, rm, vvvv;          /* tile numbers, as the encoding names them */
    int length;
    uint64_t address, stride;
} instruction;

static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* The operation of these opcode, prefix (none, 66, F3, F2) and ModRM bytes, or -1. */
static int operation_of(int opcode, int prefix, int modrm)
{
    static const int8_t of_49[4] = {LDTILECFG, STTILECFG, -1, TILEZERO};
    static const int8_t of_4b[4] = {-1, TILELOADDT1, TILESTORED, TILELOADD};
    static const int8_t of_5e[4] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
    int mod = modrm >> 6, reg = modrm >> 3 & 7, rm = modrm & 7, op = of_49[prefix];
    switch (opcode) {
    case 0x49:
        if (op == LDTILECFG && modrm == 0xc0)
            return TILERELEASE;
        if (op == TILEZERO)
            return mod == 3 && rm == 0 ? op : -1;
        return mod == 3 || reg ? -1 : op;
    case 0x4b:
        return mod == 3 || rm != 4 ? -1 : of_4b[prefix];
    case 0x5e:
        return mod == 3 ? of_5e[prefix] : -1;
    case 0x5c:
        return mod == 3 && prefix == 2 ? TDPBF16PS : -1;
    default:
        return -1;
    }
}

/* The memory operand of an instruction whose bytes after ModRM are at p; x and b: the prefix's bits X and B. */
static void decode_memory(const uint8_t *p, const greg_t *g, int modrm, int x, int b, instruction *i)
{
    int mod = modrm >> 6, base = modrm & 7, relative = 0;
    uint64_t at = 0;
    if (base == 4) {
        int sib = *p++, index = (sib >> 3 & 7) | x << 3;
        i->length++;
        base = sib & 7;
        if (index != 4)
            i->stride = (uint64_t)g[registers[index]] << (sib >> 6);
        if (i->op == LDTILECFG || i->op == STTILECFG)
            at = i->stride;                                 /* an ordinary index there */
    } else if (mod == 0 && base == 5) {
        relative = 1;
    }
    int no_base = mod == 0 && base == 5;
    if (!no_base)
        at += (uint64_t)g[registers[base | b << 3]];
    if (mod == 1) {
        at += (uint64_t)(int8_t)*p;
        i->length += 1;
    } else if (mod == 2 || no_base) {
        int32_t displacement;
        memcpy(&displacement, p, 4);
        at += (uint64_t)displacement;
        i->length += 4;
    }
    if (relative)
        at += (uint64_t)g[REG_RIP] + (uint64_t)i->length;
    i->address = at;
}

/* 1, and *i filled in, if a tile instruction is at p. */
static int decode(const uint8_t *p, const greg_t *g, instruction *i)
{
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || p[2] & 0x84)  /* VEX of three bytes, map 0F38, W0, 128 bits */
        return 0;
    int r = !(p[1] & 0x80), x = !(p[1] & 0x40), b = !(p[1] & 0x20), vvvv = ~(p[2] >> 3) & 15;
    int op = operation_of(p[3], p[2] & 3, p[4]), is_dot = p[3] == 0x5e || p[3] == 0x5c;
    if (op < 0 || (is_dot && (r || b || vvvv > 7)))
        return 0;
    if (!is_dot && (vvvv || (r && (op == TILEZERO || p[3] == 0x4b))))
        return 0;
    *i = (instruction){.op = op, .reg = p[4] >> 3 & 7, .rm = p[4] & 7, .vvvv = vvvv, .length = 5};
    if (p[4] >> 6 != 3)
        decode_memory(p + 5, g, p[4], x, b, i);
    return 1;
}

/* ---- carrying out: NULL, or why the CPU would fault ---------------------------------------------- */

static void clear_tiles(void)
{
    memset(state.t, 0, sizeof state.t);
}

static const char *bad_tile(int t)
{
    if (state.palette != 1)
        return "tiles are not configured";
    if (t > 7 || !state.rows[t])
        return "a tile that the configuration leaves empty";
    return state.row_bytes[t] & 3 ? "a row is no multiple of 4 bytes" : NULL;
}

static const char *load_config(const uint8_t *from)
{
    uint8_t c[64];
    memcpy(c, from, 64);
    if (c[0] == 0) {
        memset(&state, 0, sizeof state);
        return NULL;
    }
    if (c[0] != 1)
        return "palette is not 0 or 1";
    for (int n = 0; n < 64; n++)
        if (c[n] && ((n >= 2 && n < 16) || (n >= 32 && n < 48) || n >= 56))
            return "a reserved byte, or one of a tile beyond 7, is not zero";
    for (int n = 0; n < 8; n++) {
        int bytes = c[16 + 2 * n] | c[17 + 2 * n] << 8, rows = c[48 + n];
        if (bytes > 64 || rows > 16)
            return "more than 64 bytes or 16 rows";
        if (!bytes != !rows)
            return "only one of rows and bytes is zero";
    }
    clear_tiles();
    state.palette = 1;
    state.start_row = c[1];
    for (int n = 0; n < 8; n++) {
        state.row_bytes[n] = (uint16_t)(c[16 + 2 * n] | c[17 + 2 * n] << 8);
        state.rows[n] = c[48 + n];
    }
    return NULL;
}

static void store_config(uint8_t *to)
{
    uint8_t c[64] = {0};
    if (state.palette) {
        c[0] = state.palette;
        c[1] = state.start_row;
        for (int n = 0; n < 8; n++) {
            c[16 + 2 * n] = (uint8_t)state.row_bytes[n];
            c[48 + n] = state.rows[n];
        }
    }
    memcpy(to, c, 64);
}

/* Row by row, and only the bytes that the CPU touches; start_row counts on as it does there, for a fault half way.
 * memcpy, so that AddressSanitizer sees what is touched. */
static const char *load_or_store(const instruction *i)
{
    const char *bad = bad_tile(i->reg);
    if (bad)
        return bad;
    int rows = state.rows[i->reg];
    size_t bytes = state.row_bytes[i->reg];
    tile *t = &state.t[i->reg];
    if (state.start_row >= rows)
        return "start_row is beyond the tile";
    for (int r = state.start_row; r < rows; r++) {
        uint8_t *at = (uint8_t *)(uintptr_t)(i->address + (uint64_t)r * i->stride);
        if (i->op == TILESTORED) {
            memcpy(at, t->d[r], bytes);
        } else {
            memcpy(t->d[r], at, bytes);
            memset((uint8_t *)t->d[r] + bytes, 0, 64 - bytes);
        }
        state.start_row = (uint8_t)(r + 1);
    }
    if (i->op != TILESTORED)
        memset(t->d[rows], 0, (size_t)(16 - rows) * 64);
    state.start_row = 0;
    return NULL;
}

/* Lanes beyond n are computed too, and cut off. */
typedef void dot_rows(tile *c, const tile *a, const tile *b, int m, int n, int k);

#define DOT __attribute__((noinline, target("avx2,fma"))) static void
#define SIGNED(v, s) ((int32_t)((uint32_t)(v) << (24 - (s))) >> 24)     /* the byte at bit s */
#define UNSIGNED(v, s) ((int32_t)((uint32_t)(v) >> (s) & 0xff))
#define INT8_DOT(name, A, B)                                                                                    \
    DOT name(tile *c, const tile *a, const tile *b, int m, int n, int k)                                        \
    {                                                                                                           \
        for (int i = 0; i < m; i++) {                                                                           \
            uint32_t sum[16];                                                                                   \
            memcpy(sum, c->d[i], 64);                                                                           \
            for (int j = 0; j < k; j++) {                                                                       \
                uint32_t x = a->d[i][j];                                                                        \
                int32_t x0 = A(x, 0), x1 = A(x, 8), x2 = A(x, 16), x3 = A(x, 24);                               \
                for (int lane = 0; lane < 16; lane++) {                                                         \
                    uint32_t y = b->d[j][lane];                                                                 \
                    sum[lane] += (uint32_t)(x0 * B(y, 0) + x1 * B(y, 8) + x2 * B(y, 16) + x3 * B(y, 24));       \
                }                                                                                               \
            }                                                                                                   \
            memcpy(c->d[i], sum, (size_t)n * 4);                                                                \
        }                                                                                                       \
    }
INT8_DOT(dot_ss, SIGNED, SIGNED)
INT8_DOT(dot_su, SIGNED, UNSIGNED)
INT8_DOT(dot_us, UNSIGNED, SIGNED)
INT8_DOT(dot_uu, UNSIGNED, UNSIGNED)

static inline float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Even and odd elements are summed apart, each by a chain of fma from 0; then even + odd; then that to the sum: the
 * order of the manual. Run with MXCSR = nearest even, denormals are zero in and out. */
DOT dot_bf16(tile *c, const tile *a, const tile *b, int m, int n, int k)
{
    for (int i = 0; i < m; i++) {
        float even[16] = {0}, odd[16] = {0};
        for (int j = 0; j < k; j++) {
            float x0 = float_of(a->d[i][j] << 16), x1 = float_of(a->d[i][j] & 0xffff0000u);
            for (int lane = 0; lane < 16; lane++) {
                even[lane] = __builtin_fmaf(x0, float_of(b->d[j][lane] << 16), even[lane]);
                odd[lane] = __builtin_fmaf(x1, float_of(b->d[j][lane] & 0xffff0000u), odd[lane]);
            }
        }
        for (int lane = 0; lane < n; lane++) {
            float both = even[lane] + odd[lane], sum = float_of(c->d[i][lane]) + both;
            memcpy(&c->d[i][lane], &sum, 4);
        }
    }
}

static dot_rows *dot_of(int op)
{
    return op == TDPBSSD ? dot_ss : op == TDPBSUD ? dot_su : op == TDPBUSD ? dot_us : op == TDPBUUD ? dot_uu : dot_bf16;
}

static const char *dot(const instruction *i)
{
    int c = i->reg, a = i->rm, b = i->vvvv;     /* sum, first and second source */
    const char *bad;
    if (c == a || c == b || a == b)
        return "the three tiles are not distinct";
    if ((bad = bad_tile(c)) || (bad = bad_tile(a)) || (bad = bad_tile(b)))
        return bad;
    int m = state.rows[c], n = state.row_bytes[c] / 4, k = state.rows[b];
    if (state.rows[a] != m || state.row_bytes[b] / 4 != n || state.row_bytes[a] / 4 != k)
        return "the shapes of the three tiles do not fit";
    tile *sum = &state.t[c];
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    dot_of(i->op)(sum, &state.t[a], &state.t[b], m, n, k);
    _mm_setcsr(mode);
    for (int r = 0; r < 16; r++)
        memset(&sum->d[r][r < m ? n : 0], 0, (size_t)(r < m ? 16 - n : 16) * 4);
    state.start_row = 0;
    return NULL;
}

static const char *carry_out(const instruction *i)
{
    const char *bad;
    switch (i->op) {
    case LDTILECFG:
        return load_config((const uint8_t *)(uintptr_t)i->address);
    case STTILECFG:
        store_config((uint8_t *)(uintptr_t)i->address);
        return NULL;
    case TILERELEASE:
        memset(&state, 0, sizeof state);
        return NULL;
    case TILEZERO:
        if ((bad = bad_tile(i->reg)))
            return bad;
        memset(&state.t[i->reg], 0, sizeof(tile));
        state.start_row = 0;
        return NULL;
    case TILELOADD:
    case TILELOADDT1:
    case TILESTORED:
        return load_or_store(i);
    default:
        return dot(i);
    }
}

/* ---- signals ------------------------------------------------------------------------------------- */

/* Say why, then end as the CPU would end the program. */
static void give_up(int sig, const char *op, const char *why, greg_t rip)
{
    char text[256];
    sigset_t set;
    int n = snprintf(text, sizeof text, "amxtrap: %s would fault at %#lx: %s\n", op, (unsigned long)rip, why);
    if (write(2, text, (size_t)n) < 0)
        _exit(128 + sig);
    signal(sig, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, sig);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(sig);
    _exit(128 + sig);
}

/* What handled the signal before does so now; the signal comes again and ends the program where nothing did. */
static void pass_on(const struct sigaction *old, int sig, siginfo_t *info, void *context)
{
    if (old->sa_flags & SA_SIGINFO)
        old->sa_sigaction(sig, info, context);
    else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN)
        old->sa_handler(sig);
    else
        signal(sig, SIG_DFL);
}

static void on_ill(int sig, siginfo_t *info, void *context)
{
    greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
    instruction i;
    int n = 0, saved = errno;
    for (; decode((const uint8_t *)(uintptr_t)g[REG_RIP], g, &i); n++) {
        if (!permitted)
            give_up(SIGILL, names[i.op], "nobody asked arch_prctl(ARCH_REQ_XCOMP_PERM, 18)", g[REG_RIP]);
        if (trace)
            fprintf(stderr, "amxtrap: %#llx %s tmm%d,tmm%d,tmm%d at %#lx, stride %ld\n", g[REG_RIP], names[i.op], i.reg,
                    i.rm, i.vvvv, (long)i.address, (long)i.stride);
        const char *bad = carry_out(&i);
        if (bad)
            give_up(i.op == LDTILECFG ? SIGSEGV : SIGILL, names[i.op], bad, g[REG_RIP]);
        __atomic_fetch_add(&count[i.op], 1, __ATOMIC_RELAXED);
        g[REG_RIP] += i.length;
    }
    errno = saved;
    if (n)
        __atomic_fetch_add(&traps, 1, __ATOMIC_RELAXED);
    else
        pass_on(&old_ill, sig, info, context);
}

#define TILES 0x60000ul         /* XCR0: configuration and data */
static unsigned long xcr0;

/* arch_prctl's three questions about tiles; the filter lets nothing else through to here. */
static void on_sys(int sig, siginfo_t *info, void *context)
{
    greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_syscall != SYS_arch_prctl) {
        pass_on(&old_sys, sig, info, context);
        return;
    }
    unsigned long argument = (unsigned long)g[REG_RSI], answer = xcr0 | TILES;
    if (g[REG_RDI] == 0x1023) {                             /* ARCH_REQ_XCOMP_PERM */
        permitted |= argument == 18;
        g[REG_RAX] = argument > 63 ? -EINVAL : answer >> argument & 1 ? 0 : -EOPNOTSUPP;
        return;
    }
    if (g[REG_RDI] == 0x1022)                               /* ARCH_GET_XCOMP_PERM; else ARCH_GET_XCOMP_SUPP */
        answer = xcr0 | 0x20000 | (permitted ? 0x40000 : 0);
    memcpy((void *)argument, &answer, sizeof answer);
    g[REG_RAX] = 0;
}

/* ---- for tests, and the start -------------------------------------------------------------------- */

int amxtrap_active(void)
{
    return active;
}

unsigned long amxtrap_count(const char *name)
{
    for (int i = 0; i < OPERATIONS; i++)
        if (strcmp(name, names[i]) == 0)
            return __atomic_load_n(&count[i], __ATOMIC_RELAXED);
    return 0;
}

static void print_counts(void)
{
    fprintf(stderr, "amxtrap: %lu traps", traps);
    for (int i = 0; i < OPERATIONS; i++)
        if (count[i])
            fprintf(stderr, ", %s %lu", names[i], count[i]);
    fputc('\n', stderr);
}

static int is_on(const char *name)
{
    const char *s = getenv(name);
    return s && *s && strcmp(s, "0") != 0;
}

/* arch_prctl 0x1021..0x1023 becomes SIGSYS. */
static int filter_calls(void)
{
    struct sock_filter f[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 6),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x1021, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 0x1023, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof f / sizeof *f, f};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

__attribute__((constructor(101))) static void start(void)
{
    unsigned a, b, c, d;
    const char *off = getenv("AMXTRAP");
    if (off && strcmp(off, "0") == 0)
        return;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (d >> 24 & 1)                        /* the CPU has tiles itself */
        return;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    xcr0 = a | (unsigned long)d << 32;
    trace = is_on("AMXTRAP_TRACE");
    if (is_on("AMXTRAP_STATS"))
        atexit(print_counts);
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
    action.sa_sigaction = on_ill;
    sigaction(SIGILL, &action, &old_ill);
    action.sa_sigaction = on_sys;
    sigaction(SIGSYS, &action, &old_sys);
    if (!filter_calls())
        return;                             /* then the row amx stays out of reach, as on a CPU without it */
    pthread_atfork(NULL, NULL, clear_tiles);        /* Linux gives a fork's child the configuration, not the tiles */
    active = 1;
}
