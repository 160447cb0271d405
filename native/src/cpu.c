/* cpu.c - from CPUID and XCR0 to feature bits, from feature bits to a row of kernels, and cache
 * sizes.
 *
 * Tiles need two things more: an operating system that saves them (XCR0 bits 17 and 18), and Linux' permission
 * for this process, since they make signal frames 8 kB larger. In tests an emulator may stand in for the CPU
 * (native/tests/amxtrap); what CPUID and XCR0 say about tiles is then taken as said.
 *
 * Bit numbers: Intel SDM volume 2A (CPUID) and volume 1, 13.3 (XCR0); AMD APM volume 3, appendix E.
 */
#define _GNU_SOURCE         /* syscall */
#include "cpu.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023   /* ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, which older systems lack */
#define TILE_DATA 18                /* the state component that holds tiles */

/* Only the emulator defines this. */
__attribute__((weak)) int amxtrap_active(void);

#define KT_ROW(isa, needs) extern const kt_kernels kernels_##isa;
#include "kernels/kernels.def"
#undef KT_ROW

static const kt_kernels *const declared[] = {
#define KT_ROW(isa, needs) &kernels_##isa,
#include "kernels/kernels.def"
#undef KT_ROW
};
enum { ROWS = sizeof declared / sizeof *declared };

enum {
#define KT_ROW(isa, needs) ROW_##isa,
#include "kernels/kernels.def"
#undef KT_ROW
};

static kt_kernels complete[ROWS];

const kt_row kt_rows[] = {
#define KT_ROW(isa, needs) {&complete[ROW_##isa], needs},
#include "kernels/kernels.def"
#undef KT_ROW
    {NULL, 0},
};

/* All of a table are pointers, and null are those that another row's stand for. Before any thread asks for a row. */
__attribute__((constructor)) static void complete_rows(void)
{
    enum { POINTERS = sizeof(kt_kernels) / sizeof(void *) };
    for (int row = 0; row < ROWS; row++) {
        const void *own[POINTERS], *others[POINTERS] = {NULL};
        memcpy(own, declared[row], sizeof own);
        if (declared[row]->others)
            memcpy(others, declared[row]->others, sizeof others);
        for (int i = 0; i < POINTERS; i++)
            own[i] = own[i] ? own[i] : others[i];
        memcpy(&complete[row], own, sizeof own);
    }
}

static const struct {
    uint64_t bit;
    const char *name;
} feature_names[] = {
    {KT_CPU_FMA, "fma"},
    {KT_CPU_F16C, "f16c"},
    {KT_CPU_AVX2, "avx2"},
    {KT_CPU_AVX512F, "avx512f"},
    {KT_CPU_AVX512DQ, "avx512dq"},
    {KT_CPU_AVX512BW, "avx512bw"},
    {KT_CPU_AVX512VL, "avx512vl"},
    {KT_CPU_AVX512_VNNI, "avx512_vnni"},
    {KT_CPU_AVX512_BF16, "avx512_bf16"},
    {KT_CPU_YMM_STATE, "os-ymm"},
    {KT_CPU_ZMM_STATE, "os-zmm"},
    {KT_CPU_AMX_TILE, "amx_tile"},
    {KT_CPU_AMX_INT8, "amx_int8"},
    {KT_CPU_AMX_BF16, "amx_bf16"},
    {KT_CPU_AMX_SHAPE, "amx-shape"},
    {KT_CPU_TILE_STATE, "os-tiles"},
    {KT_CPU_AMX_PERMISSION, "amx-permission"},
};

typedef struct registers {
    uint32_t a, b, c, d;
} registers;

/* The registers of a CPUID leaf, all 0 if the CPU does not have it. */
static registers leaf(uint32_t number, uint32_t sub)
{
    registers r = {0, 0, 0, 0};
    if (!__get_cpuid_count(number, sub, &r.a, &r.b, &r.c, &r.d))
        return (registers){0, 0, 0, 0};
    return r;
}

static int is_made_by(const char *maker)
{
    registers zero = leaf(0, 0);
    return !memcmp(&zero.b, maker, 4) && !memcmp(&zero.d, maker + 4, 4) && !memcmp(&zero.c, maker + 8, 4);
}

cpu_tuning cpu_tuned(void)
{
    enum { ZEN_5 = 0x1a };      /* its family, the base (15) and the extended one together */
    uint32_t version = leaf(1, 0).a, family = (version >> 8 & 15) + (version >> 20 & 255);
    int is_amd = is_made_by("AuthenticAMD"), is_zen_5 = is_amd && family >= ZEN_5;
    int is_intel = is_made_by("GenuineIntel");
    return (cpu_tuning){
        .ahead = is_intel ? 32 * 64 : is_zen_5 ? 96 * 64 : 64 * 64,
        .loads = is_intel ? LOADS_FAR : is_zen_5 ? LOADS_IN_ORDER : LOADS_NEAR,
        .near = is_zen_5,
        .stream_int4 = is_intel || is_zen_5 ? 4 : 2,
        .stream_int8 = is_intel || is_zen_5 ? 8 : 6,
        .blocks_book4 = !is_amd,
    };
}

/* The registers that the operating system saves: XCR0, or 0 if it does not use XSAVE. */
static uint32_t saved_state(registers one)
{
    uint32_t low = 0, high;
    if (one.c >> 27 & 1)
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* All but the tiles. */
static uint64_t vector_features(void)
{
    registers one = leaf(1, 0), seven = leaf(7, 0);
    registers seven_one = seven.a >= 1 ? leaf(7, 1) : (registers){0, 0, 0, 0};
    uint32_t saved = saved_state(one);
    uint64_t have = 0;
    have |= one.c >> 12 & 1 ? KT_CPU_FMA : 0;
    have |= one.c >> 29 & 1 ? KT_CPU_F16C : 0;
    have |= seven.b >> 5 & 1 ? KT_CPU_AVX2 : 0;
    have |= seven.b >> 16 & 1 ? KT_CPU_AVX512F : 0;
    have |= seven.b >> 17 & 1 ? KT_CPU_AVX512DQ : 0;
    have |= seven.b >> 30 & 1 ? KT_CPU_AVX512BW : 0;
    have |= seven.b >> 31 & 1 ? KT_CPU_AVX512VL : 0;
    have |= seven.c >> 11 & 1 ? KT_CPU_AVX512_VNNI : 0;
    have |= seven_one.a >> 5 & 1 ? KT_CPU_AVX512_BF16 : 0;
    have |= (saved & 0x06) == 0x06 ? KT_CPU_YMM_STATE : 0;     /* xmm, upper ymm */
    have |= (saved & 0xe6) == 0xe6 ? KT_CPU_ZMM_STATE : 0;     /* and mask registers, zmm 0-15, 16-31 */
    return have;
}

static int is_emulated(void)
{
    return amxtrap_active && amxtrap_active() == 1;
}

/* Palette 1 and the multiplier are as large as the kernels want them; both may be larger on a later CPU. */
static int has_shape(void)
{
    registers palette = leaf(0x1d, 1), multiplier = leaf(0x1e, 0);
    uint32_t names = palette.b >> 16, row_bytes = palette.b & 0xffff, rows = palette.c & 0xffff;
    uint32_t max_k = multiplier.b & 0xff, max_n = multiplier.b >> 8 & 0xffff;
    return names >= 8 && row_bytes >= 64 && rows >= 16 && max_k >= 16 && max_n >= 64;
}

static uint64_t tile_features(void)
{
    registers seven = leaf(7, 0);
    uint64_t have = is_emulated() ? KT_CPU_AMX : 0;
    have |= seven.d >> 24 & 1 ? KT_CPU_AMX_TILE : 0;
    have |= seven.d >> 25 & 1 ? KT_CPU_AMX_INT8 : 0;
    have |= seven.d >> 22 & 1 ? KT_CPU_AMX_BF16 : 0;
    have |= (saved_state(leaf(1, 0)) >> 17 & 3) == 3 ? KT_CPU_TILE_STATE : 0;      /* configuration, data */
    if (have & KT_CPU_AMX_TILE)
        have |= has_shape() ? KT_CPU_AMX_SHAPE : 0;
    return have;
}

/* 0, or the errno of the refusal. Granted for good; asking again changes nothing. */
static int ask_permission(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
}

uint64_t cpu_features(void)
{
    uint64_t have = vector_features() | tile_features();
    if ((have & KT_CPU_AMX) == KT_CPU_AMX && ask_permission() == 0)
        have |= KT_CPU_AMX_PERMISSION;
    return have;
}

void kt_amx(kt_amx_info *out)
{
    uint64_t have = tile_features();
    *out = (kt_amx_info){.tile = (have & KT_CPU_AMX_TILE) != 0, .int8 = (have & KT_CPU_AMX_INT8) != 0,
                         .bf16 = (have & KT_CPU_AMX_BF16) != 0, .shape = (have & KT_CPU_AMX_SHAPE) != 0,
                         .os_state = (have & KT_CPU_TILE_STATE) != 0, .permission = -1, .emulated = is_emulated()};
    if ((have & KT_CPU_AMX) == KT_CPU_AMX)
        out->permission = ask_permission();
}

/* Names of the features in `bits`, space separated, as many as fit. */
static void name_features(uint64_t bits, char *out, size_t size)
{
    size_t used = 0;
    out[0] = 0;
    for (size_t i = 0; i < sizeof feature_names / sizeof feature_names[0]; i++) {
        size_t length = strlen(feature_names[i].name);
        if (!(bits & feature_names[i].bit) || used + length + 2 > size)
            continue;
        if (used)
            out[used++] = ' ';
        memcpy(out + used, feature_names[i].name, length + 1);
        used += length;
    }
}

/* Names of the rows that a CPU with these features runs. */
static void name_rows(uint64_t have, char *out, size_t size)
{
    size_t used = 0;
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        if (row->needs & ~have)
            continue;
        int n = snprintf(out + used, size - used, "%s%s", used ? ", " : "", row->kernels->name);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}

const kt_kernels *cpu_choose_row(const char *isa, char *error, size_t size)
{
    uint64_t have = cpu_features();
    char missing[sizeof((kt_isa_info *)0)->missing] = "", rows[128] = "";
    int found = 0;
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        int named = isa && *isa;
        if (named && strcmp(isa, row->kernels->name) != 0)
            continue;
        if ((row->needs & ~have) == 0)
            return row->kernels;
        if (named) {
            name_features(row->needs & ~have, missing, sizeof missing);
            found = 1;
        }
    }
    name_rows(have, rows, sizeof rows);
    if (size && found)
        snprintf(error, size, "ISA '%s' does not run on this CPU, which lacks %s; it runs %s", isa, missing, rows);
    else if (size)
        snprintf(error, size, "unknown ISA '%.40s'; this CPU runs %s", isa ? isa : "", rows);
    return NULL;
}

int32_t kt_isa_rows(kt_isa_info *out, int32_t capacity)
{
    uint64_t have = cpu_features();
    int32_t n = 0;
    for (const kt_row *row = kt_rows; row->kernels; row++, n++) {
        if (n >= capacity)
            continue;
        out[n].name = row->kernels->name;
        out[n].usable = (row->needs & ~have) == 0;
        name_features(row->needs & ~have, out[n].missing, sizeof out[n].missing);
    }
    return n;
}

size_t kt_cache_bytes(int32_t level)
{
    registers extended = leaf(0x80000001, 0);
    uint32_t number = extended.c >> 22 & 1 ? 0x8000001d : 4;    /* AMD with topology extensions, or Intel */
    for (uint32_t sub = 0; sub < 16; sub++) {
        registers r = leaf(number, sub);
        uint32_t type = r.a & 31;                               /* 0 none, 1 data, 2 code, 3 both */
        if (type == 0)
            break;
        if (type != 2 && (int32_t)(r.a >> 5 & 7) == level)
            return (size_t)((r.b >> 22) + 1) * ((r.b >> 12 & 1023) + 1) * ((r.b & 4095) + 1) *
                   ((size_t)r.c + 1);
    }
    return 0;
}
