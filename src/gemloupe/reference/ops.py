"""The operations that a Gemma 4 text model is made of, over the reals.

Each function is one definition of the Lean 4 library `TheFormalEra/Ops`, under its name in snake case, with
its arguments in its order; the docstring gives the formula and names the definition. The order is the
library's: what its base file leaves open, then attention, linear maps, norms, rotary embedding.

A tensor stands for the real numbers that it holds: whatever its precision, the arithmetic is float64 and
so is the result. Leading axes, written `...`, are rows that an operation treats alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "causal",
    "causal_gqa",
    "decode_gqa",
    "embed",
    "gate_up",
    "gelu_mul",
    "gelu_tanh",
    "gqa_logits",
    "gqa_mix",
    "inv_freq",
    "l2norm",
    "linear",
    "lm_head",
    "residual",
    "rms",
    "rmsnorm",
    "rmsnorm_gated",
    "rmsnorm_offset",
    "rmsnorm_unit",
    "rope",
    "rope_std",
    "sigmoid",
    "sigmoid_gate",
    "silu",
    "silu_mul",
    "sliding",
    "sliding_gqa",
    "softcap",
    "softmax",
]

Arguments = ParamSpec("Arguments")

# Of any shape.
Reals = Float[Tensor, "..."]
Integers = Int[Tensor, "..."]


def over_the_reals(operation: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """The operation on the numbers that its tensors hold: floating-point arguments become float64."""

    formula: Callable[..., Tensor] = operation

    def real(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    @wraps(operation)
    def exact(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor:
        return formula(*map(real, args), **{name: real(value) for name, value in kwargs.items()})

    return exact


# ---- Ops/Basic.lean ---------------------------------------------------------------------------------------


@over_the_reals
def sigmoid(x: Reals) -> Reals:
    """`1 / (1 + exp(-x))`, coordinate by coordinate.

    Shapes: x [...] -> [...].
    Lean: `sigmoid`, which the definitions use and their base file defines.
    """
    return 1 / (1 + torch.exp(-x))


@over_the_reals
def silu(x: Reals) -> Reals:
    """`x * sigmoid(x)`, coordinate by coordinate.

    Shapes: x [...] -> [...].
    Lean: `silu`, which the definitions use and their base file defines.
    """
    return x * sigmoid(x)


@over_the_reals
def gelu_tanh(x: Reals) -> Reals:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`, coordinate by coordinate.

    Shapes: x [...] -> [...].
    Lean: `geluTanh`, which the definitions use and their base file defines. Source: Hendrycks and Gimpel,
    "Gaussian Error Linear Units" (2016), section 2; transformers calls it `gelu_pytorch_tanh`.
    """
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@over_the_reals
def softcap(cap: float, x: Reals) -> Reals:
    """`cap * tanh(x / cap)`: almost `x` where it is small, never beyond `cap`.

    Shapes: x [...] -> [...].
    Lean: `softcap`, which the definitions use and their base file defines.
    """
    return cap * torch.tanh(x / cap)


# ---- Ops/Attention.lean -----------------------------------------------------------------------------------


@over_the_reals
def softmax(
    scores: Float[Tensor, "... key"], visible: Bool[Tensor, "... key"] | None = None
) -> Float[Tensor, "... key"]:
    """`exp(scores[l]) / sum of exp(scores[m]) over visible m` where `l` is visible, 0 elsewhere.

    `visible` broadcasts against the scores; all are where it is not given. A row that sees nothing is zero.
    Shapes: scores [... key], visible [... key] -> [... key].
    Lean: `softmax`.
    """
    if visible is None:
        visible = torch.ones_like(scores, dtype=torch.bool)
    seen = scores.masked_fill(~visible, -torch.inf)
    # The quotient is the same for `scores` and `scores - top`, and the exponentials of these stay below one.
    top = seen.amax(-1, keepdim=True)
    powers = torch.exp(seen - top.masked_fill(top == -torch.inf, 0))
    # The largest visible power is exp(0) = 1: only the sum over nothing is less.
    return powers / powers.sum(-1, keepdim=True).clamp(min=1)


def causal(pos: Int[Tensor, "... query"], keys: int) -> Bool[Tensor, "... query key"]:
    """Whether a query at `pos` sees key `l` of `keys`: `l <= pos`.

    Shapes: pos [... query] -> [... query key].
    Lean: the `visible` of `causalGQA`.
    """
    key = torch.arange(keys, device=pos.device)
    return key <= pos[..., None]


def sliding(pos: Int[Tensor, "... query"], keys: int, window: int) -> Bool[Tensor, "... query key"]:
    """Whether a query at `pos` sees key `l` of `keys`: `l <= pos < l + window`.

    Shapes: pos [... query] -> [... query key].
    Lean: the `visible` of `slidingGQA`.
    """
    key = torch.arange(keys, device=pos.device)
    return causal(pos, keys) & (pos[..., None] < key + window)


@over_the_reals
def gqa_logits(
    scale: float,
    q: Float[Tensor, "... query kv_heads group head_dim"],
    k: Float[Tensor, "... key kv_heads head_dim"],
) -> Float[Tensor, "... kv_heads group query key"]:
    """`scale * sum over e of q[s, c, g, e] * k[l, c, e]`: a key head serves the query heads of its group.

    Shapes: q [... query kv_heads group head_dim], k [... key kv_heads head_dim] -> [... kv_heads group
    query key].
    Lean: the `logit` of `causalGQA`.
    """
    return scale * torch.einsum("...scge,...lce->...cgsl", q, k)


@over_the_reals
def gqa_mix(
    pattern: Float[Tensor, "... kv_heads group query key"], v: Float[Tensor, "... key kv_heads head_dim"]
) -> Float[Tensor, "... query kv_heads group head_dim"]:
    """`sum over l of pattern[c, g, s, l] * v[l, c, d]`: the values that a query attends to, mixed.

    Shapes: pattern [... kv_heads group query key], v [... key kv_heads head_dim] -> [... query kv_heads
    group head_dim].
    Lean: the last line of `causalGQA`.
    """
    return torch.einsum("...cgsl,...lcd->...scgd", pattern, v)


def causal_gqa(
    scale: float,
    pos: Int[Tensor, "... query"],
    q: Float[Tensor, "... query kv_heads group head_dim"],
    k: Float[Tensor, "... key kv_heads head_dim"],
    v: Float[Tensor, "... key kv_heads head_dim"],
) -> Float[Tensor, "... query kv_heads group head_dim"]:
    """Attention in which a query at `pos` sees the keys `l <= pos`, each key head serving a group of queries.

    `out[s, c, g] = sum over l of softmax(scale * q[s, c, g] . k[:, c])[l] * v[l, c]`; a key's place is its
    position. Query head `c * group + g` is `q[:, c, g]`.
    Shapes: pos [... query], q [... query kv_heads group head_dim], k [... key kv_heads head_dim], v [...
    key kv_heads head_dim] -> [... query kv_heads group head_dim].
    Lean: `causalGQA`.
    """
    visible = causal(pos, k.shape[-3])[..., None, None, :, :]
    return gqa_mix(softmax(gqa_logits(scale, q, k), visible), v)


def sliding_gqa(
    scale: float,
    window: int,
    pos: Int[Tensor, "... query"],
    q: Float[Tensor, "... query kv_heads group head_dim"],
    k: Float[Tensor, "... key kv_heads head_dim"],
    v: Float[Tensor, "... key kv_heads head_dim"],
) -> Float[Tensor, "... query kv_heads group head_dim"]:
    """As `causal_gqa`, but a query at `pos` sees the keys `pos - window < l <= pos`: `window` of them.

    Shapes: pos [... query], q [... query kv_heads group head_dim], k [... key kv_heads head_dim], v [...
    key kv_heads head_dim] -> [... query kv_heads group head_dim].
    Lean: `slidingGQA`.
    """
    visible = sliding(pos, k.shape[-3], window)[..., None, None, :, :]
    return gqa_mix(softmax(gqa_logits(scale, q, k), visible), v)


def decode_gqa(
    scale: float,
    q: Float[Tensor, "... kv_heads group head_dim"],
    k: Float[Tensor, "... key kv_heads head_dim"],
    v: Float[Tensor, "... key kv_heads head_dim"],
) -> Float[Tensor, "... kv_heads group head_dim"]:
    """`causal_gqa` of one query at the last position, `key - 1`: it sees every key.

    Shapes: q [... kv_heads group head_dim], k [... key kv_heads head_dim], v [... key kv_heads head_dim] ->
    [... kv_heads group head_dim].
    Lean: `decodeGQA`.
    """
    last = torch.tensor([k.shape[-3] - 1], device=k.device)
    return causal_gqa(scale, last, q.unsqueeze(-4), k, v).squeeze(-4)


@over_the_reals
def sigmoid_gate(out: Float[Tensor, "... n"], gate: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """`out * sigmoid(gate)`, the output gate of gated attention; Gemma 4 has none.

    Shapes: out [... n], gate [... n] -> [... n].
    Lean: `sigmoidGate`.
    """
    return out * sigmoid(gate)


# ---- Ops/Linear.lean --------------------------------------------------------------------------------------


@over_the_reals
def linear(weight: Float[Tensor, "n k"], x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
    """`y[n] = sum over k of x[k] * weight[n, k]`: a bias-free `nn.Linear(k, n)`, whose weight is `[n k]`.

    Shapes: weight [n k], x [... k] -> [... n].
    Lean: `linear`.
    """
    return x @ weight.T


def gate_up(
    gate: Float[Tensor, "intermediate k"], up: Float[Tensor, "intermediate k"], x: Float[Tensor, "... k"]
) -> Float[Tensor, "... 2*intermediate"]:
    """Both projections in one row, gate first: `linear(gate, x)`, then `linear(up, x)`.

    Shapes: gate [intermediate k], up [intermediate k], x [... k] -> [... 2*intermediate].
    Lean: `gateUp`.
    """
    return torch.cat([linear(gate, x), linear(up, x)], -1)


@over_the_reals
def silu_mul(gate_and_up: Float[Tensor, "... 2*intermediate"]) -> Float[Tensor, "... intermediate"]:
    """`silu(gate) * up` of a row that holds both, gate first: SwiGLU; Gemma 4 has GeGLU.

    Shapes: gate_and_up [... 2*intermediate] -> [... intermediate].
    Lean: `siluMul`.
    """
    gate, up = gate_and_up.chunk(2, -1)
    return silu(gate) * up


@over_the_reals
def gelu_mul(gate_and_up: Float[Tensor, "... 2*intermediate"]) -> Float[Tensor, "... intermediate"]:
    """`gelu_tanh(gate) * up` of a row that holds both, gate first: GeGLU.

    Shapes: gate_and_up [... 2*intermediate] -> [... intermediate].
    Lean: `geluMul`.
    """
    gate, up = gate_and_up.chunk(2, -1)
    return gelu_tanh(gate) * up


@over_the_reals
def residual(
    multiplier: float, x: Float[Tensor, "... hidden"], h: Float[Tensor, "... hidden"]
) -> Float[Tensor, "... hidden"]:
    """`x + multiplier * h`: what is added to the stream; Gemma 4's multiplier is 1.

    Shapes: x [... hidden], h [... hidden] -> [... hidden].
    Lean: `residual`.
    """
    return x + multiplier * h


def embed(
    multiplier: float, table: Float[Tensor, "vocab hidden"], tokens: Integers
) -> Float[Tensor, "... hidden"]:
    """`multiplier * table[token]`, for each token.

    Only the rows that are looked up become float64: a table is large.
    Shapes: table [vocab hidden], tokens [...] -> [... hidden].
    Lean: `embed`.
    """
    return multiplier * table[tokens].double()


@over_the_reals
def lm_head(
    multiplier: float,
    cap: float | None,
    weight: Float[Tensor, "vocab hidden"],
    x: Float[Tensor, "... hidden"],
) -> Float[Tensor, "... vocab"]:
    """`multiplier * linear(weight, x)`, soft-capped where there is a `cap`.

    Shapes: weight [vocab hidden], x [... hidden] -> [... vocab].
    Lean: `lmHead`.
    """
    logits = multiplier * linear(weight, x)
    return logits if cap is None else softcap(cap, logits)


# ---- Ops/Norm.lean: every norm is over the last axis ------------------------------------------------------


@over_the_reals
def rms(eps: float, x: Float[Tensor, "... hidden"]) -> Reals:
    """`sqrt(mean(x**2) + eps)`, of each row.

    Shapes: x [... hidden] -> [...].
    Lean: `rms`.
    """
    return torch.sqrt(x.square().mean(-1) + eps)


@over_the_reals
def rmsnorm(
    eps: float, x: Float[Tensor, "... hidden"], weight: Float[Tensor, " hidden"]
) -> Float[Tensor, "... hidden"]:
    """`x / rms(x) * weight`. Gemma 4 multiplies by the weight; Gemma 1 to 3 are `rmsnorm_offset`.

    Shapes: x [... hidden], weight [hidden] -> [... hidden].
    Lean: `rmsnorm`.
    """
    return x / rms(eps, x)[..., None] * weight


def rmsnorm_offset(
    eps: float, x: Float[Tensor, "... hidden"], weight: Float[Tensor, " hidden"]
) -> Float[Tensor, "... hidden"]:
    """`x / rms(x) * (1 + weight)`.

    Shapes: x [... hidden], weight [hidden] -> [... hidden].
    Lean: `rmsnormOffset`.
    """
    return rmsnorm(eps, x, 1 + weight.double())


@over_the_reals
def rmsnorm_unit(eps: float, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
    """`x / rms(x)`, without a weight: the norm of Gemma 4's values and of its router's input.

    Shapes: x [... hidden] -> [... hidden].
    Lean: `rmsnormUnit`.
    """
    return x / rms(eps, x)[..., None]


@over_the_reals
def rmsnorm_gated(
    eps: float,
    x: Float[Tensor, "... hidden"],
    gate: Float[Tensor, "... hidden"],
    weight: Float[Tensor, " hidden"],
) -> Float[Tensor, "... hidden"]:
    """`weight * x / rms(x) * silu(gate)`, the norm of a gated delta net's output; Gemma 4 has none.

    Shapes: x [... hidden], gate [... hidden], weight [hidden] -> [... hidden].
    Lean: `rmsnormGated`.
    """
    return rmsnorm(eps, x, weight) * silu(gate)


@over_the_reals
def l2norm(eps: float, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
    """`x / sqrt(sum(x**2) + eps)`; Gemma 4 has none.

    Shapes: x [... hidden] -> [... hidden].
    Lean: `l2norm`.
    """
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


# ---- Ops/Rope.lean ----------------------------------------------------------------------------------------


def inv_freq(theta: float, denom: int, active: int, pair: Int[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """How far pair `i` turns per position, in radians: `theta ** (-2 * i / denom)` if `i < active`, else 0.

    Shapes: pair [pairs] -> [pairs].
    Lean: `invFreq`.
    """
    return torch.where(pair < active, theta ** (-2 * pair.double() / denom), 0)


@over_the_reals
def rope(
    theta: float,
    rot: int,
    denom: int,
    active: int,
    pos: Integers | Reals,
    x: Float[Tensor, "... head_dim"],
) -> Float[Tensor, "... head_dim"]:
    """The first `rot` coordinates turned: pair `(i, i + rot / 2)` by the angle `pos * inv_freq(i)`.

    `(a, b)` becomes `(a * cos - b * sin, b * cos + a * sin)`. `pos` broadcasts against the rows of `x`.
    The sliding blocks of Gemma 4 turn every pair of a head; its full blocks keep the first `active` pairs'
    frequencies and leave the rest of the head as it is (proportional rotary embedding).
    Shapes: pos [...], x [... head_dim] -> [... head_dim].
    Lean: `rope`.
    """
    half, head_dim = rot // 2, x.shape[-1]
    angle = pos[..., None] * inv_freq(theta, denom, active, torch.arange(half, device=x.device))
    # Were `rot` larger than the head, a partner past its end would count as zero.
    padded = pad(x, (0, max(0, 2 * half - head_dim)))
    first, second, rest = padded.tensor_split([half, 2 * half], -1)
    turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.cat([*turned, rest], -1)[..., :head_dim]


def rope_std(
    theta: float,
    rot: int,
    pos: Integers | Reals,
    x: Float[Tensor, "... head_dim"],
) -> Float[Tensor, "... head_dim"]:
    """`rope` over the first `rot` coordinates, in which every pair turns.

    Shapes: pos [...], x [... head_dim] -> [... head_dim].
    Lean: `ropeStd`.
    """
    return rope(theta, rot, rot, rot // 2, pos, x)
