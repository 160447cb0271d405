/* more.inc.c - the kernels of rows that extend avx512: only those that differ. The others it
 * takes over from avx512, which are the same instructions. The stub that includes it sets, as
 * for body.inc.c, KT_ISA name of the row KT_VEC the header that defines its vocabulary KT_TILES
 * 1 if the row has tiles (AMX): products of many tokens then are those of amx_products.inc.c
 * and is compiled with the flags of the row. */
#include <math.h>

#include "formats.h"
#include "kernels.h"
#include "vec.h"

extern const kt_kernels kernels_avx512;

#include "product.inc.c"
#include "codes.inc.c"
#include "product_float.inc.c"
#include "attend_bf16.inc.c"
#include "turn.inc.c"
#include "ceiling.inc.c"
#ifdef KT_TILES
#include "amx_tiles.inc.c"
#include "amx_products.inc.c"

static size_t product_scratch_bytes(const kt_format *format, int64_t k)
{
    size_t bytes = kernels_avx512.product_scratch_bytes(format, k);
    size_t tiles = format->bits <= 16 ? amx_scratch_bytes(format, k) : 0;
    return tiles > bytes ? tiles : bytes;
}
#endif

extern const kt_kernels NAME(KT_ISA);
const kt_kernels NAME(KT_ISA) = {
    .name = NAME_TEXT(KT_ISA),
    .others = &kernels_avx512,
#ifdef KT_TILES
    .enter = enter,
    .leave = leave,
    .product_scratch_bytes = product_scratch_bytes,
    .product_int8 = amx_product_int8,
    .product_bf16 = amx_product_bf16,
#else
    .product_bf16 = product_bf16,
#endif
    .product_f32 = product_f32,
    .turn = turn_columns,
    .glu_backward = glu_backward_of,
    .attend_bf16 = attend_bf16,
    .pack_keys = pack_keys,
    .read_bytes = read_bytes,
    .int8_ops = int8_ops,
    .bf16_ops = bf16_ops,
};
