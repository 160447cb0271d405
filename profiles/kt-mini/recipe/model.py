"""The network of kt-mini: a small DeepSeek-V3, written for fast training on a CPU.

Owns the shapes, the initial weights, the forward and the names used in the checkpoint. It is the same
function as transformers' `DeepseekV3ForCausalLM` (`evaluate.py --parity` compares the logits); only the
experts differ in how they are computed: tokens are sorted by expert, so that each expert is three matrix
products over all its tokens. Weights are a plain dict of tensors; the expert weights of a layer are stacked.

Shape letters: B sequences, S positions, T = B*S tokens, H hidden, I expert width, E experts, K per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Every size of the network; the defaults are kt-mini."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 256  # the dense first layer
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 32
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def is_dense(self, layer: int) -> bool:
        """The first layers have one MLP instead of experts."""
        return layer < self.first_k_dense_replace

    def hub_config(self, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """The content of `config.json`, in the spelling of the hub."""
        fixed = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }
        return dict(sorted((asdict(self) | fixed).items()))


def layer_shapes(s: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Names (without prefix) and shapes of the weights of one layer."""
    h, n = s.hidden_size, s.num_attention_heads
    out: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_a_proj": (s.q_lora_rank, h),
        "self_attn.q_a_layernorm": (s.q_lora_rank,),
        "self_attn.q_b_proj": (n * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa": (s.kv_lora_rank + s.qk_rope_head_dim, h),
        "self_attn.kv_a_layernorm": (s.kv_lora_rank,),
        "self_attn.kv_b_proj": (n * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank),
        "self_attn.o_proj": (h, n * s.v_head_dim),
    }
    if s.is_dense(layer):
        return out | mlp_shapes("mlp", h, s.intermediate_size)
    e, i = s.n_routed_experts, s.moe_intermediate_size
    return (
        out
        | {"mlp.gate": (e, h), "mlp.experts.gate_up": (e, 2 * i, h), "mlp.experts.down": (e, h, i)}
        | mlp_shapes("mlp.shared_experts", h, i * s.n_shared_experts)
    )


def mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """The three matrices of one gated MLP."""
    return {
        f"{name}.gate_proj": (width, hidden),
        f"{name}.up_proj": (width, hidden),
        f"{name}.down_proj": (hidden, width),
    }


def weight_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """All trained weights, in the order of the checkpoint."""
    out: dict[str, tuple[int, ...]] = {"embed_tokens": (s.vocab_size, s.hidden_size)}
    for layer in range(s.num_hidden_layers):
        out |= {f"layers.{layer}.{k}": v for k, v in layer_shapes(s, layer).items()}
    return out | {"norm": (s.hidden_size,), "lm_head": (s.vocab_size, s.hidden_size)}


def init_weights(s: Shape, seed: int) -> Weights:
    """Fresh f32 weights: norms are one, matrices normal; outputs into the residual start smaller."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in weight_shapes(s).items():
        if len(shape) == 1:
            out[name] = torch.ones(shape)
            continue
        std = shape[-1] ** -0.5 if name not in ("embed_tokens", "lm_head") else 0.05
        if name.endswith(("o_proj", "down_proj", "experts.down")):
            std *= (2 * s.num_hidden_layers) ** -0.5
        out[name] = torch.randn(shape, generator=gen) * std
    return out


class Experts(torch.autograd.Function):
    """out[t] = sum over k of gate[t, k] * expert(ids[t, k], x[t]), with a hand-written backward.

    Slot (t, k) gets a row in a buffer sorted by expert. The rows of each expert are padded to a multiple of
    PAD with rows of weight zero: the matrix library compiles a kernel for each new shape it meets.
    """

    PAD = 64

    @staticmethod
    def forward(ctx, x: Tensor, ids: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """x [T, H], ids and gate [T, K], w13 [E, 2I, H], w2 [E, H, I] -> [T, H]."""
        place, counts = Experts.places(ids, len(w13))  # [T*K] and rows per expert
        token = place.new_zeros(sum(counts))
        token[place] = torch.arange(ids.numel(), device=x.device) // ids.shape[1]
        scale = gate.new_zeros(sum(counts))
        scale[place] = gate.reshape(-1)
        xs = x[token]
        hidden = [xe @ w.T for xe, w in zip(xs.split(counts), w13, strict=True)]
        outs = [swiglu(h) @ w.T for h, w in zip(hidden, w2, strict=True)]
        ctx.save_for_backward(xs, token, scale, place, w13, w2, *hidden)
        ctx.counts = counts
        return gather_sum(torch.cat(outs), place.view_as(ids), gate.to(x.dtype))

    @staticmethod
    def places(ids: Tensor, n_experts: int) -> tuple[Tensor, list[int]]:
        """The row of every slot, and the padded number of rows of every expert."""
        flat = ids.reshape(-1)
        used = torch.bincount(flat, minlength=n_experts)
        padded = (used + Experts.PAD - 1) // Experts.PAD * Experts.PAD
        shift = (padded.cumsum(0) - padded) - (
            used.cumsum(0) - used
        )  # how far an expert moved down
        order = flat.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=ids.device) + shift[flat[order]]
        return place, padded.tolist()

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        """Gradients of x, gate and both weights; the activations are recomputed from `hidden`."""
        xs, token, scale, place, w13, w2, *hidden = ctx.saved_tensors
        shape = (len(grad_out), -1)
        grads = grad_out[token].split(ctx.counts)
        scales = scale.to(xs.dtype)[:, None].split(ctx.counts)
        d_x, d_gate, d_w13, d_w2 = [], [], torch.empty_like(w13), torch.empty_like(w2)
        for e, (g, xe, h, s) in enumerate(
            zip(grads, xs.split(ctx.counts), hidden, scales, strict=True)
        ):
            a, b = h.chunk(2, dim=-1)
            act = F.silu(a)
            y = act * b
            d_y = g @ w2[e]  # before the gate
            d_gate.append((d_y * y).sum(-1, dtype=torch.float32))
            d_y = d_y * s
            torch.mm(g.T, y * s, out=d_w2[e])
            d_h = torch.cat((torch.ops.aten.silu_backward(d_y * b, a), d_y * act), dim=-1)
            torch.mm(d_h.T, xe, out=d_w13[e])
            d_x.append(d_h @ w13[e])
        d_x = gather_sum(torch.cat(d_x), place.view(shape), None)
        return d_x, None, torch.cat(d_gate)[place].view(shape), d_w13, d_w2


def swiglu(h: Tensor) -> Tensor:
    """silu(first half) * second half."""
    a, b = h.chunk(2, dim=-1)
    return F.silu(a) * b


class HeadLoss(torch.autograd.Function):
    """Weighted mean cross entropy of `h @ head.T`; the gradient is made in the forward, in place."""

    @staticmethod
    def forward(ctx, h: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """h [N, H], head [V, H], target [N], weight [N] f32 -> scalar."""
        weight = weight / weight.sum()
        d_head = torch.zeros_like(head, dtype=torch.float32)
        d_h, loss = [], torch.zeros((), device=h.device)
        for x, y, s in zip(h.split(1024), target.split(1024), weight.split(1024), strict=True):
            p = (x @ head.T).float().softmax(-1)
            loss -= (p.gather(1, y[:, None])[:, 0].clamp_min(1e-30).log() * s).sum()
            p.scatter_add_(1, y[:, None], torch.full_like(p[:, :1], -1.0))
            grad = p.mul_(s[:, None]).to(h.dtype)
            d_h.append(grad @ head)
            d_head += grad.T @ x
        ctx.save_for_backward(torch.cat(d_h), d_head.to(head.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        """Scale what the forward made."""
        d_h, d_head = ctx.saved_tensors
        return d_h * grad_out, d_head * grad_out, None, None


def gather_sum(rows: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
    """Sum over k of weight[t, k] * rows[index[t, k]], in one pass over memory."""
    return F.embedding_bag(index, rows, per_sample_weights=weight, mode="sum")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in f32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def route(x: Tensor, weight: Tensor, bias: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; groups and experts are chosen with the bias, weighted without it."""
    scores = (x.float() @ weight.float().T).sigmoid()  # [T, E]
    with torch.no_grad():
        choice = (scores + bias).view(len(x), s.n_group, -1)
        groups = choice.topk(2, dim=-1)[0].sum(-1).topk(s.topk_group, dim=-1, sorted=False)[1]
        keep = torch.zeros(choice.shape[:2], dtype=torch.bool, device=x.device).scatter_(
            1, groups, True
        )
        choice = choice.masked_fill(~keep[..., None], float("-inf")).flatten(1)
        ids = choice.topk(s.num_experts_per_tok, dim=-1, sorted=False)[1]
    gate = scores.gather(1, ids)
    return ids, gate / (gate.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor


def rope_tables(s: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [S, rope/2]."""
    freq = s.rope_theta ** (
        -torch.arange(0, s.qk_rope_head_dim, 2, device=device) / s.qk_rope_head_dim
    )
    angle = torch.arange(length, device=device)[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last axis; x is [B, heads, S, rope]."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention(x: Tensor, w: Weights, s: Shape, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """MLA in its expanded form, causal; x is [B, S, H]."""
    batch, length, _ = x.shape
    nope, rot, v_dim = s.qk_nope_head_dim, s.qk_rope_head_dim, s.v_head_dim
    q_low = rms_norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], s.rms_norm_eps).to(x.dtype)
    q = (q_low @ w["q_b_proj"].T).view(batch, length, -1, nope + rot).transpose(1, 2)
    low = x @ w["kv_a_proj_with_mqa"].T
    kv_low = rms_norm(low[..., : s.kv_lora_rank], w["kv_a_layernorm"], s.rms_norm_eps).to(x.dtype)
    kv = (kv_low @ w["kv_b_proj"].T).view(batch, length, -1, nope + v_dim).transpose(1, 2)
    k_rot = rotate(low[:, None, :, s.kv_lora_rank :], *rope).expand(-1, q.shape[1], -1, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], *rope)), dim=-1)
    k = torch.cat((kv[..., :nope], k_rot), dim=-1)
    out = masked(*(t.flatten(0, 1) for t in (q, k, kv[..., nope:])), mask)  # [B*heads, S, v]
    return (
        out.view(batch, -1, length, v_dim).transpose(1, 2).reshape(batch, length, -1)
        @ w["o_proj"].T
    )


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block: int = 128) -> Tensor:
    """Softmax attention by blocks of queries; on a CPU 3-5 times torch's fused kernel.

    q, k, v are [B * heads, S, D]; mask [B, S, S] is added to the scores, and nothing later is seen.
    """
    out = []
    for i in range(0, q.shape[1], block):
        end = min(i + block, q.shape[1])
        score = (q[:, i:end] * q.shape[-1] ** -0.5) @ k[:, :end].transpose(1, 2)
        score.unflatten(0, (len(mask), -1)).add_(mask[:, None, i:end, :end])
        out.append(score.softmax(-1) @ v[:, :end])
    return torch.cat(out, dim=1)


def conversation_mask(ids: Tensor, bos: int, dtype: torch.dtype) -> Tensor:
    """[B, S, S]: 0 where a token may look, else -inf. A row may hold several texts, each begins with `bos`."""
    text = (ids == bos).cumsum(1)
    seen = (text[:, :, None] == text[:, None, :]).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(
        ~seen, float("-inf")
    )


def mlp(x: Tensor, w: Weights, name: str) -> Tensor:
    """One gated MLP."""
    hidden = F.silu(x @ w[f"{name}.gate_proj"].T) * (x @ w[f"{name}.up_proj"].T)
    return hidden @ w[f"{name}.down_proj"].T


def in_8_bits(x: Tensor) -> Tensor:
    """x as rows of 8-bit integers with a scale each would hold it; the gradient is that of x itself."""
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 127
        change = ((x / scale).round() * scale - x).to(x.dtype)
    return x + change


def forward(
    w: Weights, bias: Tensor, ids: Tensor, s: Shape, *, bos: int = 0, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the network up to the last norm.

    Args:
        w: weights as in `weight_shapes`; matrices in the compute type (bf16 or f32).
        bias: correction bias of the routers, [L, E] f32.
        ids: [B, S] token ids.
        rounded: whether what enters a layer's matrices is rounded to 8 bits, as kernels for integers do it.
    Returns:
        Normed hidden states [B, S, H] and how many tokens each expert of each layer got, [L, E].
    """
    dtype = w["lm_head"].dtype

    def low(h: Tensor) -> Tensor:
        return in_8_bits(h.to(dtype)) if rounded else h.to(dtype)

    load = torch.zeros_like(bias)
    x = F.embedding(ids, w["embed_tokens"]).float()  # the residual stays f32
    mask = conversation_mask(ids, bos, dtype)
    rope = rope_tables(s, ids.shape[1], ids.device)
    for n in range(s.num_hidden_layers):
        prefix = f"layers.{n}."
        lw = {
            k[len(prefix) :].removeprefix("self_attn."): v
            for k, v in w.items()
            if k.startswith(prefix)
        }
        normed = low(rms_norm(x, lw["input_layernorm"], s.rms_norm_eps))
        x = x + attention(normed, lw, s, rope, mask)
        h = rms_norm(x, lw["post_attention_layernorm"], s.rms_norm_eps)
        if s.is_dense(n):
            x = x + mlp(low(h), lw, "mlp")
            continue
        flat = h.flatten(0, 1)
        chosen, gate = route(flat, lw["mlp.gate"], bias[n], s)
        load[n] = torch.bincount(chosen.flatten(), minlength=s.n_routed_experts)
        read = low(flat)
        y = Experts.apply(read, chosen, gate, lw["mlp.experts.gate_up"], lw["mlp.experts.down"])
        x = x + (y + mlp(read, lw, "mlp.shared_experts")).view_as(x)
    return low(rms_norm(x, w["norm"], s.rms_norm_eps)), load
