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

enum { LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
       TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD, TDPBF16PS, NOPS };
static const char *const op_name[NOPS] = {
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored",
    "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps" };

typedef struct {
    _Alignas(64) uint32_t d[16][16];        /* a tile: 16 rows of 64 bytes */
} tile;
static __thread struct {
    tile t[8];
    uint16_t colsb[8];
    uint8_t rows[8], palette, start_row;
} A __attribute__((tls_model("initial-exec")));

static unsigned long count[NOPS], traps;
static int active, trace, permitted;
static struct sigaction old_ill, old_sys;

/* ---- decoding --------------------------------------------------------- */

typedef struct { int op, reg, rm, vvvv, len; uint64_t addr, stride; } insn;

static const int gpr[16] = { REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15 };

/* 1 and *i filled in if an AMX instruction starts at p */
static int decode(const uint8_t *p, const greg_t *g, insn *i)
{
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2) return 0;           /* VEX3, map 0F38 */
    int R = !(p[1] & 0x80), X = !(p[1] & 0x40), B = !(p[1] & 0x20);
    int pp = p[2] & 3, vvvv = ~(p[2] >> 3) & 15;
    if (p[2] & 0x84) return 0;                                  /* W0, L=128 */
    int opc = p[3], m = p[4], mod = m >> 6, reg = m >> 3 & 7, rm = m & 7;
    static const int8_t t49[4] = { LDTILECFG, STTILECFG, -1, TILEZERO };   /* NP 66 F3 F2 */
    static const int8_t t4b[4] = { -1, TILELOADDT1, TILESTORED, TILELOADD };
    static const int8_t t5e[4] = { TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD };
    static const int8_t t5c[4] = { -1, -1, TDPBF16PS, -1 };
    int op = -1;
    switch (opc) {
    case 0x49: op = t49[pp];
        if (op == LDTILECFG && m == 0xc0) op = TILERELEASE;
        else if (op == TILEZERO ? mod != 3 || rm : mod == 3 || reg) return 0;
        break;
    case 0x4b: op = t4b[pp]; if (mod == 3 || rm != 4) return 0; break;
    case 0x5e: op = t5e[pp]; if (mod != 3) return 0; break;
    case 0x5c: op = t5c[pp]; if (mod != 3) return 0; break;
    }
    if (op < 0) return 0;
    if (opc == 0x5e || opc == 0x5c) { if (R || B || vvvv > 7) return 0; }
    else if (vvvv || (R && (op == TILEZERO || opc == 0x4b))) return 0;
    i->op = op; i->reg = reg; i->rm = rm; i->vvvv = vvvv;
    p += 5; i->len = 5; i->addr = i->stride = 0;
    if (mod == 3) return 1;
    uint64_t a = 0; int riprel = 0, base = rm;
    if (rm == 4) {
        int s = *p++, x = (s >> 3 & 7) | X << 3;
        i->len++; base = s & 7;
        if (x != 4) i->stride = (uint64_t)g[gpr[x]] << (s >> 6);
        if (opc == 0x49) a = i->stride;             /* an ordinary index there */
    } else if (mod == 0 && rm == 5) riprel = 1;
    int nobase = mod == 0 && base == 5;
    if (!nobase) a += (uint64_t)g[gpr[base | B << 3]];
    if (mod == 1) { a += (int8_t)*p; i->len += 1; }
    else if (mod == 2 || nobase) { int32_t d; memcpy(&d, p, 4); a += d; i->len += 4; }
    if (riprel) a += (uint64_t)g[REG_RIP] + i->len;
    i->addr = a;
    return 1;
}

/* ---- carrying out ----------------------------------------------------- */

static void clear_tiles(void) { memset(A.t, 0, sizeof A.t); }
static void init_state(void) { memset(&A, 0, sizeof A); }

static const char *bad_tile(int t)
{
    if (A.palette != 1) return "tiles are not configured";
    if (t > 7 || !A.rows[t]) return "a tile that the configuration leaves empty";
    if (A.colsb[t] & 3) return "colsb is no multiple of 4";
    return 0;
}

static const char *ld_config(const uint8_t *b)
{
    uint8_t c[64];
    memcpy(c, b, 64);
    if (c[0] == 0) { init_state(); return 0; }
    if (c[0] != 1) return "palette is not 0 or 1";
    for (int n = 2; n < 16; n++) if (c[n]) return "reserved byte 2..15 is not zero";
    for (int n = 32; n < 48; n++) if (c[n]) return "colsb of tile 8..15 is not zero";
    for (int n = 56; n < 64; n++) if (c[n]) return "rows of tile 8..15 is not zero";
    for (int n = 0; n < 8; n++) {
        int cb = c[16 + 2 * n] | c[17 + 2 * n] << 8, r = c[48 + n];
        if (cb > 64) return "colsb > 64";
        if (r > 16) return "rows > 16";
        if (!cb != !r) return "only one of rows and colsb is zero";
    }
    clear_tiles();
    A.palette = 1; A.start_row = c[1];
    for (int n = 0; n < 8; n++) { A.colsb[n] = c[16 + 2 * n] | c[17 + 2 * n] << 8; A.rows[n] = c[48 + n]; }
    return 0;
}

static void st_config(uint8_t *b)
{
    uint8_t c[64] = { 0 };
    if (A.palette) {
        c[0] = A.palette; c[1] = A.start_row;
        for (int n = 0; n < 8; n++) { c[16 + 2 * n] = A.colsb[n]; c[17 + 2 * n] = A.colsb[n] >> 8; c[48 + n] = A.rows[n]; }
    }
    memcpy(b, c, 64);
}

static const char *load_store(const insn *i)
{
    const char *e = bad_tile(i->reg);
    if (e) return e;
    int rows = A.rows[i->reg], cb = A.colsb[i->reg];
    tile *t = &A.t[i->reg];
    if (A.start_row >= rows) return "start_row is beyond the tile";
    /* row by row, only the bytes the instruction touches; start_row counts on
     * as the hardware's does, for a fault half way */
    for (int r = A.start_row; r < rows; r++) {
        uint8_t *m = (uint8_t *)(uintptr_t)(i->addr + (uint64_t)r * i->stride);
        if (i->op == TILESTORED) memcpy(m, t->d[r], cb);
        else { memcpy(t->d[r], m, cb); memset((uint8_t *)t->d[r] + cb, 0, 64 - cb); }
        A.start_row = r + 1;
    }
    if (i->op != TILESTORED) memset(t->d[rows], 0, (16 - rows) * 64);
    A.start_row = 0;
    return 0;
}

#define SX(v, s) ((int32_t)((uint32_t)(v) << (24 - (s))) >> 24)     /* signed byte at bit s */
#define ZX(v, s) ((int32_t)((uint32_t)(v) >> (s) & 0xff))
#define INT8_DOT(name, EA, EB)                                                        \
    __attribute__((noinline, target("avx2,fma"))) static void name(tile *c, const tile *a, const tile *b, int M, int N, int K) \
    {                                                                                 \
        for (int m = 0; m < M; m++) {                                                 \
            uint32_t acc[16];                                                         \
            memcpy(acc, c->d[m], 64);                                                 \
            for (int k = 0; k < K; k++) {                                             \
                uint32_t x = a->d[m][k];                                              \
                int32_t x0 = EA(x, 0), x1 = EA(x, 8), x2 = EA(x, 16), x3 = EA(x, 24); \
                for (int n = 0; n < 16; n++) {  /* columns >= N are cut off below */  \
                    uint32_t y = b->d[k][n];                                          \
                    acc[n] += (uint32_t)(x0 * EB(y, 0) + x1 * EB(y, 8) + x2 * EB(y, 16) + x3 * EB(y, 24)); \
                }                                                                     \
            }                                                                         \
            memcpy(c->d[m], acc, (size_t)N * 4);                                      \
        }                                                                             \
    }
INT8_DOT(dot_ss, SX, SX)
INT8_DOT(dot_su, SX, ZX)
INT8_DOT(dot_us, ZX, SX)
INT8_DOT(dot_uu, ZX, ZX)

static inline float f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

/* Called with MXCSR = round to nearest even, DAZ, FTZ, all exceptions masked.
 * Even and odd elements are summed apart with FMAs, then added, then added
 * to the destination: the order of the manual. */
#define FP_DOT(name, LO, HI)                                                          \
    __attribute__((noinline, target("avx2,fma"))) static void name(tile *c, const tile *a, const tile *b, int M, int N, int K) \
    {                                                                                 \
        for (int m = 0; m < M; m++) {                                                 \
            float e[16] = { 0 }, o[16] = { 0 };                                       \
            for (int k = 0; k < K; k++) {                                             \
                uint32_t x = a->d[m][k];                                              \
                float x0 = LO(x), x1 = HI(x);                                         \
                for (int n = 0; n < 16; n++) {                                        \
                    uint32_t y = b->d[k][n];                                          \
                    e[n] = __builtin_fmaf(x0, LO(y), e[n]);                           \
                    o[n] = __builtin_fmaf(x1, HI(y), o[n]);                           \
                }                                                                     \
            }                                                                         \
            for (int n = 0; n < N; n++) {                                             \
                float s = e[n] + o[n], r = f32(c->d[m][n]) + s;                       \
                memcpy(&c->d[m][n], &r, 4);                                           \
            }                                                                         \
        }                                                                             \
    }
#define BF_LO(v) f32((v) << 16)
#define BF_HI(v) f32((v) & 0xffff0000u)
FP_DOT(dot_bf16, BF_LO, BF_HI)

static const char *dot(const insn *i)
{
    int c = i->reg, a = i->rm, b = i->vvvv;     /* srcdest, src1, src2 */
    const char *e;
    if (c == a || c == b || a == b) return "the three tiles are not distinct";
    if ((e = bad_tile(c)) || (e = bad_tile(a)) || (e = bad_tile(b))) return e;
    int M = A.rows[c], N = A.colsb[c] / 4, K = A.rows[b];
    if (A.rows[a] != M) return "dst.rows != src1.rows";
    if (A.colsb[b] / 4 != N) return "dst.colsb != src2.colsb";
    if (A.colsb[a] / 4 != K) return "src1.colsb/4 != src2.rows";
    tile *C = &A.t[c]; const tile *X = &A.t[a], *Y = &A.t[b];
    unsigned mx = _mm_getcsr();
    switch (i->op) {
    case TDPBSSD: dot_ss(C, X, Y, M, N, K); break;
    case TDPBSUD: dot_su(C, X, Y, M, N, K); break;
    case TDPBUSD: dot_us(C, X, Y, M, N, K); break;
    case TDPBUUD: dot_uu(C, X, Y, M, N, K); break;
    case TDPBF16PS: _mm_setcsr(0x9fc0); dot_bf16(C, X, Y, M, N, K); _mm_setcsr(mx); break;
    }
    for (int r = 0; r < 16; r++) {
        if (r >= M) memset(C->d[r], 0, 64);
        else memset(&C->d[r][N], 0, (size_t)(16 - N) * 4);
    }
    A.start_row = 0;
    return 0;
}

static const char *carry_out(const insn *i)
{
    const char *e;
    switch (i->op) {
    case LDTILECFG: return ld_config((const uint8_t *)(uintptr_t)i->addr);
    case STTILECFG: st_config((uint8_t *)(uintptr_t)i->addr); return 0;
    case TILERELEASE: init_state(); return 0;
    case TILEZERO:
        if ((e = bad_tile(i->reg))) return e;
        memset(&A.t[i->reg], 0, sizeof(tile)); A.start_row = 0; return 0;
    case TILELOADD: case TILELOADDT1: case TILESTORED: return load_store(i);
    default: return dot(i);
    }
}

/* ---- signals ---------------------------------------------------------- */

static void give_up(int sig, const char *fmt, const char *a, const char *b, greg_t rip)
{
    char s[256];
    int n = snprintf(s, sizeof s, fmt, a, b, (unsigned long)rip);
    if (write(2, s, n) < 0) { }
    signal(sig, SIG_DFL);
    sigset_t m; sigemptyset(&m); sigaddset(&m, sig);
    sigprocmask(SIG_UNBLOCK, &m, 0);
    raise(sig);
    _exit(128 + sig);
}

static void on_ill(int sig, siginfo_t *si, void *ctx)
{
    greg_t *g = ((ucontext_t *)ctx)->uc_mcontext.gregs;
    insn i;
    int n = 0, saved = errno;
    while (decode((const uint8_t *)(uintptr_t)g[REG_RIP], g, &i)) {
        if (!permitted)
            give_up(SIGILL, "amxtrap: %s before arch_prctl(ARCH_REQ_XCOMP_PERM, 18)%s at %#lx\n", op_name[i.op], "", g[REG_RIP]);
        if (trace) fprintf(stderr, "amxtrap: %#llx %s tmm%d,tmm%d,tmm%d addr=%#lx stride=%ld\n", g[REG_RIP],
                           op_name[i.op], i.reg, i.rm, i.vvvv, (long)i.addr, (long)i.stride);
        const char *e = carry_out(&i);
        if (e) give_up(i.op == LDTILECFG ? SIGSEGV : SIGILL, "amxtrap: %s would fault: %s, at %#lx\n", op_name[i.op], e, g[REG_RIP]);
        __atomic_fetch_add(&count[i.op], 1, __ATOMIC_RELAXED);
        g[REG_RIP] += i.len;        /* and straight on with the next, if it is one of ours */
        n++;
    }
    errno = saved;
    if (n) { __atomic_fetch_add(&traps, 1, __ATOMIC_RELAXED); return; }
    if (old_ill.sa_flags & SA_SIGINFO) { old_ill.sa_sigaction(sig, si, ctx); return; }
    if (old_ill.sa_handler != SIG_DFL && old_ill.sa_handler != SIG_IGN) { old_ill.sa_handler(sig); return; }
    signal(SIGILL, SIG_DFL);        /* not ours: comes again and ends the program */
}

#define TILES 0x60000ul
static unsigned long xcr0;

static void on_sys(int sig, siginfo_t *si, void *ctx)
{
    greg_t *g = ((ucontext_t *)ctx)->uc_mcontext.gregs;
    if (si->si_syscall != SYS_arch_prctl) {
        if (old_sys.sa_flags & SA_SIGINFO) old_sys.sa_sigaction(sig, si, ctx);
        else if (old_sys.sa_handler != SIG_DFL && old_sys.sa_handler != SIG_IGN) old_sys.sa_handler(sig);
        else { signal(SIGSYS, SIG_DFL); raise(SIGSYS); }
        return;
    }
    unsigned long a = g[REG_RSI], v;
    switch (g[REG_RDI]) {
    case 0x1021: v = xcr0 | TILES; break;                                   /* ARCH_GET_XCOMP_SUPP */
    case 0x1022: v = xcr0 | 0x20000 | (permitted ? 0x40000 : 0); break;     /* ARCH_GET_XCOMP_PERM */
    default:                                                                /* ARCH_REQ_XCOMP_PERM */
        if (a == 18) permitted = 1;
        g[REG_RAX] = a > 63 ? -EINVAL : (xcr0 | TILES) >> a & 1 ? 0 : -EOPNOTSUPP;
        return;
    }
    memcpy((void *)a, &v, sizeof v);
    g[REG_RAX] = 0;
}

int amxtrap_active(void) { return active; }
unsigned long amxtrap_count(const char *name)
{
    for (int i = 0; i < NOPS; i++) if (!strcmp(name, op_name[i])) return count[i];
    return 0;
}

static void stats(void)
{
    fprintf(stderr, "amxtrap: %lu traps", traps);
    for (int i = 0; i < NOPS; i++) if (count[i]) fprintf(stderr, ", %s %lu", op_name[i], count[i]);
    fputc('\n', stderr);
}

static int on(const char *name) { const char *s = getenv(name); return s && *s && strcmp(s, "0"); }

__attribute__((constructor(101))) static void start(void)
{
    unsigned a, b, c, d;
    const char *s = getenv("AMXTRAP");
    if (s && !strcmp(s, "0")) return;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (d >> 24 & 1) return;                    /* the CPU has AMX itself */
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    xcr0 = a | (unsigned long)d << 32;
    trace = on("AMXTRAP_TRACE");
    if (on("AMXTRAP_STATS")) atexit(stats);

    struct sigaction sa = { .sa_flags = SA_SIGINFO | SA_ONSTACK };
    sa.sa_sigaction = on_ill; sigaction(SIGILL, &sa, &old_ill);
    sa.sa_sigaction = on_sys; sigaction(SIGSYS, &sa, &old_sys);
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
    struct sock_fprog fp = { sizeof f / sizeof *f, f };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &fp))
        fprintf(stderr, "amxtrap: no seccomp filter: ARCH_REQ_XCOMP_PERM will not be answered\n");
    pthread_atfork(0, 0, clear_tiles);      /* Linux gives a fork's child the configuration, not the tiles */
    active = 1;
}
