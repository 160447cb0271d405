/* isa_amx.c - compiled with the flags of avx512bf16 and -mamx-tile -mamx-int8 -mamx-bf16, and holds nothing else. */
#define KT_ISA amx
#define KT_VEC "vec_avx512.h"
#define KT_TILES 1
#include "more.inc.c"
