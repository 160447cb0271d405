/* lowrank_backward.h - gradients of adapters' updates (kt_gradients.h). For y += scale * B (A x), with rows' inner values
 * u = scale * A x and v = scale * B^T dy:  dx += A^T v,  dA = v x^T,  dB = dy u^T. */
#ifndef KT_LOWRANK_BACKWARD_H
#define KT_LOWRANK_BACKWARD_H

#include "lowrank.h"

/* rows' inner = v, as far as it is of panels [panel, last_panel) of dy. */
void lowrank_back(const worker *w, const adapted_rows *rows, const adapted_output *dy);
/* dx += gate * A^T v; here panels are of 16 columns of A, as they are for lowrank_gradient_a. */
void lowrank_back_outer(const worker *w, const adapted_rows *rows, const adapted_output *dx);
/* The gradients of A += gate * v x^T, rows' inner being v, and of B += gate * dy u^T, rows' inner being u. Where a factor
 * is one for all matrices nothing else may add to it meanwhile. */
void lowrank_gradient_a(const worker *w, const adapted_rows *rows, const adapted_output *x);
void lowrank_gradient_b(const worker *w, const adapted_rows *rows, const adapted_output *dy);

#endif
