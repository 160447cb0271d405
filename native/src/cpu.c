/* cpu.c - CPUID and XCR0 to feature bits, feature bits to a row of kernels, cache sizes.
 *
 * Bit numbers: Intel SDM volume 2A (CPUID) and volume 1, 13.3 (XCR0); AMD APM volume 3, appendix E.
 */
#include "cpu.h"

#include <stdio.h>
#include <string.h>

#include <cpuid.h>

#define KT_ROW(isa, needs) extern const kt_kernels kernels_##isa;
#include "kernels/kernels.def"
#undef KT_ROW

const kt_row kt_rows[] = {
#define KT_ROW(isa, needs) {&kernels_##isa, needs},
#include "kernels/kernels.def"
#undef KT_ROW
    {NULL, 0},
};

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

/* The registers that the operating system saves: XCR0, or 0 if it does not use XSAVE. */
static uint32_t saved_state(registers one)
{
    uint32_t low = 0, high;
    if (one.c >> 27 & 1)
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

uint64_t cpu_features(void)
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

static void name_rows(char *out, size_t size)
{
    size_t used = 0;
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        int n = snprintf(out + used, size - used, "%s%s", used ? ", " : "", row->kernels->name);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}

const kt_kernels *cpu_choose_row(const char *isa, char *error, size_t size)
{
    uint64_t have = cpu_features();
    char missing[80] = "", rows[128] = "";
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
    name_rows(rows, sizeof rows);
    if (size && found)
        snprintf(error, size, "ISA '%s' does not run on this CPU, which lacks %s; rows: %s", isa, missing, rows);
    else if (size)
        snprintf(error, size, "unknown ISA '%.40s'; rows: %s", isa ? isa : "", rows);
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
