/* isa_avx512.c - compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni and avx2's flags, and holds nothing else. */
#define KT_ISA avx512
#define KT_VEC "vec_avx512.h"
#include "body.inc.c"
