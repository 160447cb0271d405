/* experts_backward.h - the gradients of routed experts as they are recorded (experts_backward.c) and run
 * (moe_backward.c). */
#ifndef KT_EXPERTS_BACKWARD_H
#define KT_EXPERTS_BACKWARD_H

#include "moe.h"
#include "transposed.h"

/* What one node has besides its part of the experts. Its scratch holds first hidden values, as the forward has them,
 * then at these offsets one row for each slot of: gradients of gate and up, the same as products read them, sums of the
 * gate's gradient over blocks of columns, and the inner values of updates, u and two of v. */
typedef struct backward_part {
    transpose gate_up, down;
    size_t dz, act, sums, gate_up_v, down_v;
    int64_t z_stride, blocks;           /* floats of a row of dz; sums of a row: of 64 hidden columns each */
} backward_part;

typedef struct experts_backward {
    moe forward;                        /* its `out` is dx */
    kt_view dgate, dout;
    source in;                          /* dout, as products with down's transpose read it */
    sums dx;
    backward_part *parts;               /* [nodes] */
} experts_backward;

/* The phases, in this order; those with * if adapters may update the products. Between them those of the forward that make
 * u: gate_up_inner_run, down_inner_run. */
void down_back_inner_run(const void *arg, worker *w);       /* * v of down */
void hidden_backward_run(const void *arg, worker *w);       /* dout W of down */
void hidden_rotate_run(const void *arg, worker *w);         /* back, if down has a rotation */
void glu_backward_run(const void *arg, worker *w);          /* hidden values again, dz, the gates' gradients */
void gate_up_back_inner_run(const void *arg, worker *w);    /* * v of gate_up */
void convert_dz_run(const void *arg, worker *w);            /* unless products read f32 */
void dx_run(const void *arg, worker *w);
void backward_finish_run(const void *arg, worker *w);
void gate_up_gradients_run(const void *arg, worker *w);     /* * */
void down_gradients_run(const void *arg, worker *w);        /* * */

#endif
