/* isa_avx512bf16.c - compiled with the flags of avx512 and -mavx512bf16, and holds nothing else. */
#define KT_ISA avx512bf16
#define KT_VEC "vec_avx512.h"
#include "more.inc.c"
