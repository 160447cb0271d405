/* isa_avx2.c - compiled with -mavx2 -mfma -mf16c, and holds nothing else. */
#define KT_ISA avx2
#define KT_VEC "vec_avx2.h"
#include "body.inc.c"
