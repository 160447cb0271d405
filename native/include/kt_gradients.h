/* kt_gradients.h - operations for training: gradients of products with packed weights, which
 * are not changed.
 *
 * A weight W is read in its packed form alone: columns of it are decoded and turned in a thread's scratch memory, a few at
 * a time, rounded to bf16 unless the program is exact. Products are those of bf16 with f32 sums, or of f32. Gradients go
 * straight through the rounding of activations. Nothing depends on the number of threads, and in a program that
 * is by_row no row's gradients on the other rows, but those of factors, which are sums over rows.
 */
#ifndef KT_API_GRADIENTS_H
#define KT_API_GRADIENTS_H

#include "kt_adapters.h"
#include "kt_operations.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out = x * W: the gradient of v for y = v W^T, x being that of y.  W [x.width, out.width], shared out among nodes as for
 * kt_linear; the sums over each node's rows are added in the order of the nodes. */
typedef struct kt_transposed {
    const kt_weight *weight;    /* [nodes] */
    int32_t reads;              /* KT_READ_F32: x is not rounded; else as above */
} kt_transposed;
KT_API int kt_program_transposed(kt_program *program, kt_view out, kt_view x, const kt_transposed *transposed);

/* The gradients of kt_program_experts for its x and for its gates, dout being that of its result. gate and up are computed
 * again, as they were. The sums of dx are over the slots of a token, experts ascending. dgate [top_k] in the order of the
 * routing, 0 where an id is negative. The ids of a token differ. */
typedef struct kt_experts_backward {
    int32_t routing;
    const kt_weight *gate_up;       /* all of these as in kt_experts */
    const kt_weight *down;
    const kt_glu *glu;
    const float *gate_up_bias;
    const float *down_bias;
} kt_experts_backward;
KT_API int kt_program_experts_backward(kt_program *program, kt_view dx, kt_view dgate, kt_view x, kt_view dout,
                                       const kt_experts_backward *experts);

/* Where the gradients of an update's factors are added to, f32, in the layout of a and of b; NULL: they are not wanted. */
typedef struct kt_gradient {
    float *a;
    float *b;
} kt_gradient;

/* Of the n updates that kt_program_adapt gave a product of kt_program_experts_backward; until the next such call, or the
 * next of kt_program_adapt for this product, which forgets them. Both must live as long. Sums are over the rows of the step, ascending; with nodes, node after node where they share columns. */
KT_API int kt_program_gradients(kt_program *program, int32_t adapter, int32_t operation, int32_t part,
                                const kt_gradient *gradients, int32_t n);

#ifdef __cplusplus
}
#endif
#endif
