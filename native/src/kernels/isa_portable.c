/* isa_portable.c - compiled with the flags of the baseline, x86-64 (no FMA instruction: fmaf is libm's), and holds nothing else. */
#define KT_ISA portable
#define KT_VEC "vec_portable.h"
#include "body.inc.c"
