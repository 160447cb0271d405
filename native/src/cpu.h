/* cpu.h - what this CPU supports, according to CPUID and to the operating system. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include "kernels/kernels.h"

/* What a row may need. An instruction set counts only if the system also saves its registers. */
#define KT_CPU_FMA         ((uint64_t)1 << 0)
#define KT_CPU_F16C        ((uint64_t)1 << 1)
#define KT_CPU_AVX2        ((uint64_t)1 << 2)
#define KT_CPU_AVX512F     ((uint64_t)1 << 3)
#define KT_CPU_AVX512DQ    ((uint64_t)1 << 4)
#define KT_CPU_AVX512BW    ((uint64_t)1 << 5)
#define KT_CPU_AVX512VL    ((uint64_t)1 << 6)
#define KT_CPU_AVX512_VNNI ((uint64_t)1 << 7)
#define KT_CPU_AVX512_BF16 ((uint64_t)1 << 8)
#define KT_CPU_YMM_STATE   ((uint64_t)1 << 9)
#define KT_CPU_ZMM_STATE   ((uint64_t)1 << 10)
#define KT_CPU_AMX_TILE    ((uint64_t)1 << 11)
#define KT_CPU_AMX_INT8    ((uint64_t)1 << 12)
#define KT_CPU_AMX_BF16    ((uint64_t)1 << 13)
#define KT_CPU_TILE_STATE  ((uint64_t)1 << 14)
#define KT_CPU_AMX_SHAPE   ((uint64_t)1 << 15)     /* 8 tiles of 16 x 64 bytes, multiplied whole */
#define KT_CPU_AMX_PERMISSION ((uint64_t)1 << 16)  /* Linux lets this process use them */

/* The rows' needs. An AVX-512 without VNNI runs the row avx2: its multiplications would be no wider. */
#define KT_CPU_ROW_AVX2 (KT_CPU_AVX2 | KT_CPU_FMA | KT_CPU_F16C | KT_CPU_YMM_STATE)
#define KT_CPU_ROW_AVX512                                                                       \
    (KT_CPU_ROW_AVX2 | KT_CPU_AVX512F | KT_CPU_AVX512DQ | KT_CPU_AVX512BW | KT_CPU_AVX512VL |   \
     KT_CPU_AVX512_VNNI | KT_CPU_ZMM_STATE)
#define KT_CPU_ROW_AVX512BF16 (KT_CPU_ROW_AVX512 | KT_CPU_AVX512_BF16)
#define KT_CPU_AMX (KT_CPU_AMX_TILE | KT_CPU_AMX_INT8 | KT_CPU_AMX_BF16 | KT_CPU_TILE_STATE | KT_CPU_AMX_SHAPE)
#ifdef KT_AMX_WITHOUT_BF16     /* CMakeLists.txt says why */
#define KT_CPU_ROW_AMX (KT_CPU_ROW_AVX512 | KT_CPU_AMX | KT_CPU_AMX_PERMISSION)
#else
#define KT_CPU_ROW_AMX (KT_CPU_ROW_AVX512BF16 | KT_CPU_AMX | KT_CPU_AMX_PERMISSION)
#endif

/* KT_CPU_* bits of the machine this runs on. Asks Linux for the use of tiles where all else is there. */
uint64_t cpu_features(void);

/* The row called `isa`, or the best one that runs here if it is NULL or "". NULL if there is no such
 * row or this CPU cannot run it: `error` then says so and lists the rows. */
const kt_kernels *cpu_choose_row(const char *isa, char *error, size_t size);

/* What suits this CPU, by measurements (int4, shares of the slower of reading and multiplying, two threads):
 *   ahead          32 lines on Intel's CPUs, 96 on Zen 5 and later, else 64. One token, k = 2048 / 768 / 7168, on Zen 4: 32 lines 0.89 / 0.83 / 0.78,
 *                  64 lines 0.95 / 0.89 / 0.96, 96 lines 0.92 / 0.93 / 0.94. On Sapphire Rapids: 32 lines 0.88 / 0.90 / 0.89,
 *                  64 lines 0.56 to 0.82 / 0.79 / 0.76, as the compiler orders the same instructions.
 *                  On Zen 5: 64 lines 0.90 / 0.86 / 0.90, 96 lines 0.94 / 0.93 / 0.95.
 *   loads          LOADS_IN_ORDER on Zen 5 and later. One token, k = 2048, shares of the read loop, on Zen 5: int6 0.95 instead of
 *                  0.80, nl4-s8 0.91 instead of 0.78, int4 0.94 either way; on Zen 4, int6 0.50 instead of 0.75, int4 0.80
 *                  instead of 0.95. LOADS_FAR on Intel's CPUs. The same on Emerald Rapids: int4 0.95 instead of 0.85, int6 0.96
 *                  instead of 0.85, nl4-s8 0.94 instead of 0.82, bf16 0.95 instead of 0.83; on avx2 int4 0.81 instead of 0.78,
 *                  int6 0.80 instead of 0.72; on Zen 4 it gained nothing.
 *   near           Zen 5 and later: 6 / 8 / 12 / 16 tokens 0.66 / 0.59 / 0.69 / 0.71 instead of 0.65 / 0.43 / 0.50 / 0.69. It
 *                  was not measured elsewhere.
 *   stream_int4    4 on Zen 5 and later and on Intel's CPUs, else 2. Int4, 3 / 4 tokens, on Zen 5 at 48 GB/s: 0.92 / 0.93 instead of 0.80 / 0.83,
 *                  at 75 GB/s 0.79 / 0.71 instead of 0.71 / 0.72; 6 tokens 0.60 to 0.83 either way. On Emerald Rapids 0.86 / 0.85
 *                  instead of 0.75 / 0.71.
 *   stream_int8    8 on Zen 5 and later and on Intel's CPUs, else 6. Int8, 8 tokens, on Zen 5: 0.93 instead of 0.79 to 0.87,
 *                  on Emerald Rapids 0.91 instead of 0.73.
 *   blocks_book4   not on AMD's CPUs. nl4-s8, 16 / 32 / 64 tokens, parts of the int8 peak, on Zen 5: 0.46 / 0.52 / 0.55 with
 *                  blocks, 0.58 / 0.63 / 0.65 without; on Sapphire Rapids 0.52 and 0.44 for many tokens. */
cpu_tuning cpu_tuned(void);

#endif
