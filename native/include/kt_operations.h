/* kt_operations.h - the operations of programs, each appended with one call; views, steps and T
 * are defined in kt_program.h.
 *
 * All calls are alike: the program, the views, first those that are written, and a struct of the operation's name
 * with everything else that it needs to know; none where that is nothing. Weights, vectors and tables are borrowed
 * and must outlive the program unless they are said to be copied. A result that is no view is a number, returned.
 * ktcli/ops has one row for each, with the same names. */
#ifndef KT_API_OPERATIONS_H
#define KT_API_OPERATIONS_H

#include "kt_program.h"
#include "kt_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[t] = table[ids[t]] */
typedef struct kt_embed {
    const uint16_t *table;  /* [vocab][out.width] bf16, or NULL */
    const float *table_f32; /* the same of f32, where there is none of bf16 */
    int64_t vocab;
} kt_embed;
KT_API int kt_program_embed(kt_program *program, kt_view out, const kt_embed *embed);

/* Each run of head_width columns: out = x / sqrt(mean(x^2) + eps) * gain.  out may equal x. */
typedef struct kt_norm {
    const float *gain;      /* [head_width] or NULL: ones */
    float eps;
    int64_t head_width;     /* 0: all columns are one run */
    int64_t columns;        /* of x in place, the first that are normalised; 0: all */
    int32_t own_gains;      /* 1: gain [x.width], each run has its own */
} kt_norm;
KT_API int kt_program_norm(kt_program *program, kt_view out, kt_view x, const kt_norm *norm);

/* Each row: out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * gain + bias */
typedef struct kt_layer_norm {
    const float *gain;      /* [x.width] */
    const float *bias;      /* [x.width] */
    float eps;
} kt_layer_norm;
KT_API int kt_program_layer_norm(kt_program *program, kt_view out, kt_view x, const kt_layer_norm *norm);

/* What a product reads its activations as. */
enum kt_reads {
    KT_READ_FORMAT,         /* as the weight's format says: int8 for integers, bf16 for bf16, f32 for E4M3 */
    KT_READ_F32,            /* f32 (the router) */
    KT_READ_WIDE,           /* two int8 values each, 15 bits, where the format says int8 (the output head); of rotated
                             * weights of 8 bits or with scales for groups as GROUPS */
    KT_READ_GROUPS,         /* of rotated 8-bit weights, a row of which has one scale, int8 with a scale for each 64
                             * columns (down of dense MLPs); else as FORMAT */
};

/* out = x * W^T (+ bias).  W is one matrix [out.width, x.width], of which each node of the pool has some rows. The
 * number of nodes never changes a bit. */
typedef struct kt_linear {
    const kt_weight *weight;    /* [nodes], one behind the other, n = 0 where a node has none, all but the last a
                                 * multiple of 16 rows */
    const float *bias;          /* [out.width] or NULL */
    int32_t reads;              /* KT_READ_* */
} kt_linear;
KT_API int kt_program_linear(kt_program *program, kt_view out, kt_view x, const kt_linear *linear);

/* Rotate in place columns [first, first + dim) of each run of head_width columns by cos and sin of
 * (position + shift) * inv_freq[i], times `scale`. The angles of rotations that are alike are found once per step. */
typedef struct kt_rope {
    int32_t dim;
    const float *inv_freq;  /* [dim/2], copied */
    float scale;
    int32_t interleaved;    /* 1: pairs (2i, 2i+1); 0: pairs (i, i + dim/2) */
    int64_t shift;
    int64_t head_width;
    int64_t first;
} kt_rope;
KT_API int kt_program_rope(kt_program *program, kt_view x, const kt_rope *rope);

/* Causal attention over the paged cache; the step's own K and V are appended first.
 * A page holds for this layer, from layer_offset, K and then V, bf16 (or another kt_cache): K of each kv head in
 * panels of 16 tokens, [kv_heads][4][head_dim/2][16][2] - token 16 i + j is lane j of panel i, its columns
 * 2c and 2c + 1 are word c there - but rows [kv_heads][64][head_dim] when f32; V [kv_heads][64][v]. Both have
 * kv_heads heads with scales when fp8.
 * head_dim is even. q [heads*head_dim], k [kv_heads*head_dim], v [kv_heads*v], out [heads*v]. */
typedef struct kt_gqa {
    int32_t heads, kv_heads, head_dim;
    float scale;            /* of the scores, positive; usually 1/sqrt(head_dim) */
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
    int32_t window;         /* a token sees the last so many positions, its own included; 0: all */
    const float *sinks;     /* [heads] or NULL: each head's softmax has one more score, that of no key */
    int32_t choice;         /* of blocks, by as many heads as kv_heads: what kt_program_choose returned; 0: all */
    int32_t v;              /* columns of a head's values, any number; 0: head_dim */
    int32_t windowed;       /* 1: K and V lie in the run's window pages, layer_offset is into those; needs a window */
    int32_t chunked;        /* 1: a token sees the positions from the last multiple of `window` on; needs a window */
} kt_gqa;
KT_API int kt_program_gqa(kt_program *program, kt_view out, kt_view q, kt_view k, kt_view v,
                          const kt_gqa *shape);

/* Which cached places each token attends to; the step's own index keys are appended first. A place is a block of
 * so many positions. With weight [heads] there is one list per token: position j is worth
 *   scale * sum over heads h, ascending, of weight[h] * max(0, q[h] . key[j]),
 * and block is 1. Without (weight.width 0) each head has a list, a block of a multiple of 64 positions is worth the
 * greatest q[h] . key[j] of those that the token sees, and its own block and the local - 1 before it come first.
 * The top_k best are chosen, of equals the lower place. In a step that ends at or before position top_k * block
 * every place is, and nothing is scored.
 * A page holds for this, from layer_offset, bf16 keys in panels of 16 tokens, [4][dim/2][16][2], as kt_gqa has
 * them; rows [64][dim] where the cache is f32. dim is even.
 * every > 1, with weights: a place is a window of so many positions. Its key is that of its last one, other keys are
 * not kept, and a token sees the windows that are complete with it: of position p, (p + 1) / every. A page then holds
 * 64 / every keys, rounded up to 16. */
typedef struct kt_choose {
    int32_t heads, dim, top_k, block, local;
    float scale;
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
    int32_t every;          /* 0: 1; a divisor of 64 */
} kt_choose;
/* Returns the number (>= 1) of the choice or KT_ERR_*. It lasts until the next choose of the same top_k, block and
 * lists in the program, which gives it the same number. */
KT_API int32_t kt_program_choose(kt_program *program, kt_view q, kt_view key, kt_view weight, const kt_choose *shape);
/* What the last step chose: places [max_tokens][lists][top_k], ascending, and count [max_tokens][lists]. NULL: there
 * is no such choice. Without meaning after a step that scored nothing. */
KT_API const int32_t *kt_program_choice(kt_program *program, int32_t choice, const int32_t **count);

/* Multi-head latent attention. A page holds for this layer [64][lora + rope], bf16 (or another kt_cache); the
 * columns lora and rope are heads with scales of their own, if there are some, when fp8.
 * q [heads*(nope+rope)] rotated, latent [lora+rope] normed and rotated, out [heads*v]. Weights, one
 * matrix per head: uk_in [lora, nope] (q to latent), uk_out [nope, lora] (latent to k), uv [v, lora].
 * Few tokens: absorbed (uk_in, uv). Many: K and V are expanded per page block (uk_out, uv). With a choice (of single
 * positions, or of windows): absorbed over the chosen positions alone, unless all are. Of windows a token also attends
 * to the positions behind the last that is complete with it. */
typedef struct kt_mla {
    int32_t heads, nope, rope, v, lora;
    float scale;
    size_t layer_offset;
    kt_weight uk_in, uk_out, uv;
    int32_t choice;         /* what kt_program_choose returned; 0: a token attends to all that it sees */
} kt_mla;
KT_API int kt_program_mla(kt_program *program, kt_view out, kt_view q, kt_view latent, const kt_mla *shape);

/* Attention of many heads over one key, rotated, which is its own value: that of the last `window` positions and, with
 * every > 0, pooled rows of windows of so many positions, as kt_program_pooling gives them; all that are complete with
 * the token, of position p the first (p + 1) / every, or those of them that were chosen. One softmax over both.
 * q and out [heads * dim], kv [dim], pooled [dim], or width 0 without windows. dim is even.
 * State: f32, [window][dim], position p in row p % window. A page holds, from layer_offset, rows [64 / every][dim]
 * of the windows that end in it, one where a window is longer than a page; bf16 (or f32). */
typedef struct kt_mqa {
    int32_t heads, dim;
    float scale;            /* of the scores, positive */
    int32_t window;         /* 1 at least: a token's own */
    const float *sinks;     /* [heads] or NULL, copied: one more score of each head, that of no key */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
    int32_t every;          /* 0: no pooled rows; else a divisor or a multiple of 64 */
    int32_t choice;         /* of windows: what kt_program_choose returned; 0: a token attends to all it sees */
    int64_t context;        /* positions that a sequence may have; a step may end in the window that is open there */
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
} kt_mqa;
KT_API int kt_program_mqa(kt_program *program, kt_view out, kt_view q, kt_view kv, kt_view pooled,
                          const kt_mqa *shape);

/* Causal convolution of each column by itself, then silu unless `linear`:
 * out[t][c] = silu(bias[c] + sum over i < width of weight[i][c] * x[t - width + 1 + i][c])
 * over the rows of the step and those before it. State: the last width - 1 rows, [width - 1][columns] f32. */
typedef struct kt_conv {
    int32_t width;          /* 2..16 */
    const float *weight;    /* [width][columns]; the last one multiplies the row itself */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
    const float *bias;      /* [columns] or NULL */
    int32_t linear;         /* 1: without silu */
} kt_conv;
KT_API int kt_program_conv(kt_program *program, kt_view out, kt_view x, const kt_conv *conv);

/* Windows of `every` positions, the first from position 0 on, each become one row: of each column c by itself
 *     out[c] = sum over the window's rows i of softmax_i(score[i][c] + bias[i][c]) * x[i][c]
 * which is in the row of the token that completes the window; the rows of other tokens are zero. overlap: x, score
 * and bias have twice as many columns as out, and a window is made of its own rows' second halves and of the first
 * halves of those of the window before, where there is one. State: f32, [3][out.width], with overlap [6][out.width]. */
typedef struct kt_pooling {
    int32_t every;          /* 1..65536 */
    int32_t overlap;
    const float *bias;      /* [every][x.width] */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
} kt_pooling;
KT_API int kt_program_pooling(kt_program *program, kt_view out, kt_view x, kt_view score, const kt_pooling *pooling);

/* Gated delta rule: a head keeps a state S [dk][dv] and for each token, with g, b, k, q, v of its own,
 *     S = g S;   S = S + k (b (v - S^T k))^T;   out = S^T q
 * where q and k are divided by sqrt(sum of squares + 1e-6), q by sqrt(dk) as well, b = sigmoid(beta) and
 * g = exp(-e^log_rate softplus(decay + bias)), or with a lowest logarithm g = exp(lowest sigmoid(e^log_rate (decay +
 * bias))). Sources: Gated Delta Networks, arXiv 2412.06464, section 3.1; Kimi Linear, arXiv 2510.26692.
 * Views: q and k [key_heads * dk], each head of them for heads / key_heads heads in a row; v and out [heads * dv];
 * beta [heads]; decay [heads], or [heads * dk]: one for each key. q, k, decay and beta are overwritten.
 * State: heads * dk * ceil16(dv) f32, S of each head in panels of 64 columns (the last perhaps fewer, rounded up
 * to 16 with zeros), each [dk][columns]. */
typedef struct kt_delta {
    int32_t heads, key_heads, dk, dv;
    const float *log_rate;  /* [heads], copied */
    const float *bias;      /* as many as decay has columns */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
    float lowest;           /* log g is above, negative; 0: nothing bounds it */
} kt_delta;
KT_API int kt_program_delta(kt_program *program, kt_view out, kt_view q, kt_view k, kt_view v, kt_view decay,
                            kt_view beta, const kt_delta *shape);

/* Selective state space model of Mamba-2: a head keeps a state S [state_dim][head_dim] and for each token, with b, c,
 * d and x of its own,
 *     S = e^(-e^log_rate d) S + b (d x)^T;   out = S^T c + skip x
 * where d = log(1 + e^(dt + bias)), kept within dt_min..dt_max. Source: arXiv 2405.21060.
 * Views: x and out [heads * head_dim]; b and c [groups * state_dim], each group of them for heads / groups heads in a
 * row; dt [heads], overwritten. State: as that of kt_program_delta with state_dim for dk and head_dim for dv. */
typedef struct kt_scan {
    int32_t heads, groups, state_dim, head_dim;
    const float *log_rate;  /* [heads], copied */
    const float *bias;      /* [heads] */
    const float *skip;      /* [heads] */
    float dt_min, dt_max;   /* 0 <= dt_min <= dt_max; dt_max may be infinite */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
} kt_scan;
KT_API int kt_program_scan(kt_program *program, kt_view out, kt_view x, kt_view b, kt_view c, kt_view dt,
                           const kt_scan *shape);

/* Lightning attention: a head keeps a state S [head_dim][head_dim], which decays alike in every token, and for each
 * token, with q, k and v of its own,
 *     S = e^-rate S + k v^T;   out = S^T q
 * Source: arXiv 2501.08313, section 2.2.
 * Views: q, k, v and out [heads * head_dim]. State: as that of kt_program_scan. */
typedef struct kt_lightning {
    int32_t heads, head_dim;
    const float *rates;     /* [heads], not negative, copied */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
} kt_lightning;
KT_API int kt_program_lightning(kt_program *program, kt_view out, kt_view q, kt_view k, kt_view v,
                                const kt_lightning *shape);

enum kt_score { KT_SCORE_SOFTMAX = 0, KT_SCORE_SIGMOID = 1, KT_SCORE_SQRT_SOFTPLUS = 2, KT_SCORE_SPARSEMIXER = 3 };
enum kt_group_score { KT_GROUP_MAX = 0, KT_GROUP_TOP2 = 1 };

/* Choose top_k experts per token from logits [T][experts]. score = softmax, sigmoid, or sqrt(log(1 + e^x)) of the
 * logits; chosen by score + bias, weighted by score alone. With n_group > 1 only the topk_group best groups
 * take part, a group scored by its maximum or by the sum of its two best. normalize: weights sum to 1;
 * then all are multiplied by `scale`, and each by its expert's factor. Ties go to the lower id. Slots are in descending choice order.
 * SparseMixer (arXiv 2409.12136) chooses by the logits. The weight of a chosen one, x, is its softmax among those not
 * chosen before it that are near: (x - other) / max(|other|, x) <= band. No bias, no groups, no table.
 * With a table the token's id says which experts it has, in this order, and nothing is chosen: no bias, no groups. */
typedef struct kt_route {
    int32_t experts, top_k, n_group, topk_group;
    int32_t score, group_score, normalize;
    float scale;
    float band;             /* of SparseMixer */
    const float *bias;      /* [experts] or NULL */
    const float *factors;   /* [experts] or NULL */
    const int32_t *table;   /* [vocab][top_k] or NULL */
    int64_t vocab;
} kt_route;
/* Returns the number of the routing (ids [T][top_k] int32, gate [T][top_k] f32) or KT_ERR_*. */
KT_API int32_t kt_program_route(kt_program *program, kt_view logits, const kt_route *route);
KT_API const int32_t *kt_program_routing(kt_program *program, int32_t routing, const float **gate);

/* A routing whose ids [T][top_k] and gate [T][top_k] the caller writes before each run, where kt_program_routing
 * says (its const cast away): something else chose the experts. -1: no expert. Any other id outside 0..experts-1
 * counts as -1 and makes the run fail with KT_ERR_RANGE, after it. Rows are tokens. Its number or KT_ERR_*. */
KT_API int32_t kt_program_given(kt_program *program, int32_t experts, int32_t top_k);

/* Two routings from one, immediate and deferred, which share its gate. A slot whose expert e has elsewhere[e] != 0 is
 * negative in both. Of a token's other slots (n), the min(step.defer, max(0, n - 2)) with the lowest gate are in
 * deferred, all others in immediate; of equal gates the later slot is deferred first. Slots keep their places.
 * Deferred experts are not computed at all in a step with defer 0: their output keeps what it holds. */
typedef struct kt_split {
    int32_t routing;
    const uint8_t *elsewhere;   /* [experts], read at each run, or NULL: nowhere */
    int32_t experts;            /* those of the routing, where there is elsewhere */
    int32_t defers;             /* 0: nothing is deferred, and there is only immediate */
} kt_split;
/* Returns the number of immediate, behind which that of deferred comes, or KT_ERR_*. */
KT_API int32_t kt_program_split(kt_program *program, const kt_split *split);

/* counts [*experts]: how often route, or a split of a given routing, met each expert since the program was made.
 * Counted while a step runs, to be read between steps. NULL: no such routing, or one that split made. */
KT_API const int64_t *kt_program_chosen(kt_program *program, int32_t routing, int32_t *experts);

/* The activation of a gated product. With g = min(gate, gate_limit) and u = up, kept within -limit..limit:
 * g / (1 + e^(-alpha * (g + cubic * g^3))) * (u + shift). NULL for a pointer to one: silu(gate) * up. Without a gate:
 * max(0, up)^2. */
typedef struct kt_glu {
    float alpha;            /* 1: silu; 1.702: an approximate gelu; 2 sqrt(2 / pi), with cubic 0.044715: gelu by tanh */
    float limit;            /* > 0; 0: none */
    float shift;
    float gate_limit;       /* > 0; 0: that of up */
    float cubic;            /* >= 0 */
    int32_t ungated;        /* 1: there is no gate, and nothing else counts */
} kt_glu;

/* out[t] = sum over k, by ascending id, of gate[t][k] * (down[id] * glu(gate_up[id] * x[t] + bias) + bias).
 * gate_up [2I', H] with I' = I rounded up to 16: panels of gate and up alternate, rows I..I' are zero;
 * down [H, I]. Without a gate it is up alone, [I, H]. Negative ids: the slot runs elsewhere and is skipped.
 * Each node of the pool has a part of the width, cut where kt_cut_columns says for down: gate_up [nodes] its
 * rows, down [nodes] the same of its columns; n and k are 0 where a node has none. Each multiplies with the
 * same 8-bit activations as one node would, sums in f32, and the sums are added in the order of the nodes. */
typedef struct kt_experts {
    int32_t routing;
    const kt_weight *gate_up;
    const kt_weight *down;
    const kt_glu *glu;              /* copied; NULL: silu(gate) * up */
    const float *gate_up_bias;      /* [experts][rows of gate_up] in their order, or NULL */
    const float *down_bias;         /* [experts][H], or NULL */
} kt_experts;
KT_API int kt_program_experts(kt_program *program, kt_view out, kt_view x, const kt_experts *experts);
/* Called before operations are recorded, on one node: experts leave what down reads, glu(...), to be looked at. */
KT_API int kt_program_keep_hidden(kt_program *program);
/* What the experts of the part that ran last left: a row for each slot of their routing, by expert and by token within
 * one, each I rounded up to 16 floats behind the one before; with a down that rotates what it reads, rotated. NULL:
 * nothing is kept. */
KT_API const float *kt_program_hidden(const kt_program *program);

/* out [I] = glu(gate, up);  x [2I'] with I' = I rounded up to 16: runs of 16 gate and 16 up columns
 * alternate, as the packed gate_up matrix gives them; without a gate x [I] is up. */
typedef struct kt_swiglu {
    const kt_glu *glu;              /* copied; NULL: silu(gate) * up */
} kt_swiglu;
KT_API int kt_program_swiglu(kt_program *program, kt_view out, kt_view x, const kt_swiglu *swiglu);

enum kt_gate_kind { KT_GATE_SIGMOID = 0, KT_GATE_SILU = 1, KT_GATE_SOFTPLUS = 2, KT_GATE_LINEAR = 3 };
/* out = x * sigmoid(by), x * by * sigmoid(by), x * log(1 + e^by), or x * by; by has one column for each of as many runs of
 * columns of x: for each column, for each head, or one for all of a row's. */
typedef struct kt_gate {
    int32_t kind;           /* KT_GATE_* */
} kt_gate;
KT_API int kt_program_gate(kt_program *program, kt_view out, kt_view x, kt_view by, const kt_gate *gate);

KT_API int kt_program_add(kt_program *program, kt_view out, kt_view a, kt_view b);

/* Hyper-connections: the residual is n streams side by side, [n * width], which a block reads as one and adds to
 * as many. Source: mHC, arXiv 2512.24880; transformers 5.23 (deepseek_v4). */

/* Each stream of out = x;  out.width a multiple of x.width. */
KT_API int kt_program_spread(kt_program *program, kt_view out, kt_view x);

/* How streams are mixed, in place from what a product made of them. Of x [(2 + n) * n] the columns become
 *     pre [n]      sigmoid(scale[0] x + base) + eps
 *     post [n]     2 sigmoid(scale[1] x + base)
 *     comb [n][n]  the softmax of each row of scale[2] x + base, + eps; then columns, and iterations - 1 times rows
 *                  and columns, are divided by their sums + eps
 * and of x [n] there is only pre. */
typedef struct kt_mix {
    int32_t streams;        /* n, 1..16 */
    int32_t iterations;     /* 1..1000 */
    float eps;              /* >= 0 */
    const float *scale;     /* [3]; of pre alone [1] */
    const float *base;      /* [x.width] */
} kt_mix;
KT_API int kt_program_mix(kt_program *program, kt_view x, const kt_mix *mix);

/* out = sum over streams s, ascending, of by[s] * x[s];  by [n], x [n * out.width]. */
KT_API int kt_program_collapse(kt_program *program, kt_view out, kt_view x, kt_view by);

/* Stream k of out = post[k] * y + sum over streams j, ascending, of comb[j][k] * x[j];  by: post [n], comb [n][n]. */
KT_API int kt_program_expand(kt_program *program, kt_view out, kt_view x, kt_view y, kt_view by);

/* out = x * by, a number, * factor, one that is stored; with a limit then limit * tanh(out / limit).  out may equal x. */
typedef struct kt_scale {
    float by;
    float limit;            /* > 0; 0: none */
    const float *factor;    /* [1] or NULL */
} kt_scale;
KT_API int kt_program_scale(kt_program *program, kt_view out, kt_view x, const kt_scale *scale);

/* out = x * (1 + beta * log(1 + floor((position + shift) / every))), by the position of the row;  out may equal x. */
typedef struct kt_temper {
    float beta;
    int64_t every;          /* positions, from 1 on */
    int64_t shift;          /* from 0 on */
} kt_temper;
KT_API int kt_program_temper(kt_program *program, kt_view out, kt_view x, const kt_temper *temper);

/* out, one column: the greatest of x's columns. */
KT_API int kt_program_greatest(kt_program *program, kt_view out, kt_view x);

/* x += deferred; nothing in a step with defer 0. What experts over a deferred routing gave joins the others here. */
KT_API int kt_program_carry(kt_program *program, kt_view x, kt_view deferred);

/* The caller writes this view before the run of the part that is recorded next, or of the whole program: what
 * was converted from it for products before is not used any more. */
KT_API int kt_program_input(kt_program *program, kt_view x);

/* What is recorded from here on forms the next part; its number (part 0 begins by itself) or KT_ERR_*. A part can
 * run by itself, at any time when what it reads is there: what earlier parts wrote, and the activations that the
 * part right before it converted, unless kt_program_input came between. */
KT_API int32_t kt_program_part(kt_program *program);

/* What is recorded from here on uses this row of kernels; NULL: the pool's, as at first. For finding faults: products of
 * integer formats have the same bits in every row, all others may differ in the last ones. KT_ERR_RANGE: this CPU does
 * not run it; the sentence says which it does. */
KT_API int kt_program_row(kt_program *program, const char *isa);

/* Output rows: out[i] = x[first_output + i] */
KT_API int kt_program_select(kt_program *program, kt_view out, kt_view x);

/* What choosing a token needs to know of each row of logits; B = ceil(logits.width / 64) blocks of 64
 * columns, the last perhaps shorter. The same bits for any number of threads.
 *   best  [1]  column of the greatest value, the first of equals (a whole number; at most 2^24 columns);
 *              a column of NaN or +Inf if there is any, so that the value there says whether all is well
 *   peaks [B]  greatest value of each block; +Inf if it holds NaN
 *   sums  [B]  sum of e^((value - peak) / step.temperature) over each block, in 1..64; a number without
 *              meaning where the peak is infinite, not written if the temperature is 0 */
KT_API int kt_program_summary(kt_program *program, kt_view best, kt_view peaks, kt_view sums, kt_view logits);

#ifdef __cplusplus
}
#endif
#endif
