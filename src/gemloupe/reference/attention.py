"""The attention of a block: from the normed stream to `o_proj`'s output.

    queries = rope(rmsnorm(heads of q_proj(x)))
    keys    = rope(rmsnorm(heads of k_proj(x)))       # or another block's
    values  = rmsnorm_unit(heads of v_proj(x))        # or another block's, or k_proj's heads
    pattern = softmax(queries . keys, over the keys that are seen)
    output  = o_proj(pattern mixed with values)

Each key head serves a group of query heads; which keys are seen is what `sight` says.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..layouts import HeadOutputs, Keys, Queries, Residual
from ..plan import BlockPlan, RotaryPlan
from .cache import Cache
from .ops import gqa_logits, gqa_mix, linear, rmsnorm, rmsnorm_unit, rope, softmax
from .sight import Sight
from .steps import SINGLE, Steps
from .weights import PartWeights

__all__ = ["attend", "mix"]

ByHead = Float[Tensor, "batch seq heads head_dim"]
Positions = Int[Tensor, "batch seq"]

# Queries and keys are normed, and their norms' weights do what `head_dim ** -0.5` does elsewhere.
SCALE: Final = 1.0


def attend(
    steps: Steps,
    plan: BlockPlan,
    weights: PartWeights,
    x: Residual,
    sight: Sight,
    eps: float,
    borrowed: tuple[Keys, Keys] | None = None,
    cache: Cache | None = None,
) -> Residual:
    """`o_proj`'s output.

    x: the normed stream. borrowed: the keys and values of the block that `plan` borrows from, all of them.
    cache: the tokens before these, to which this block's keys and values are appended.
    """
    if borrowed is None:
        keys, values = _own(steps, plan, weights, x, sight, eps)
        if cache is not None:
            keys, values = cache.extend(plan.index, keys, values)
    else:
        keys, values = borrowed
    queries = _normed(weights, "q", _heads(plan, weights, "q", x), eps)
    queries = _turned(steps, plan.rotary, queries, sight).transpose(1, 2)
    mixed = mix(steps, queries, keys, values, sight.visible[plan.kind])
    return steps(
        "self_attn.attention_projection", linear(weights["self_attn.o_proj.weight"], mixed.flatten(2))
    )


def mix(
    steps: Steps, queries: Queries, keys: Keys, values: Keys, visible: Bool[Tensor, "batch query key"]
) -> HeadOutputs:
    """Each head's mix of the values that its queries see, which a vision tower's blocks compute alike."""
    queries = steps("self_attn.attention_queries", queries)
    keys = steps("self_attn.attention_keys", keys)
    values = steps("self_attn.attention_values", values)

    # Query head `c * group + g` reads key head `c`.
    num_kv_heads = keys.shape[1]
    grouped = queries.transpose(1, 2).unflatten(2, (num_kv_heads, -1))
    logits = gqa_logits(SCALE, grouped, keys.transpose(1, 2)).flatten(1, 2)
    scores = steps("self_attn.attention_scores", logits.masked_fill(~visible[:, None], -torch.inf))
    pattern = steps("self_attn.attention_probabilities", softmax(scores, scores > -torch.inf))
    mixed = gqa_mix(pattern.unflatten(1, (num_kv_heads, -1)), values.transpose(1, 2)).flatten(2, 3)
    return steps("self_attn.attention_head_outputs", mixed)


def _own(
    steps: Steps, plan: BlockPlan, weights: PartWeights, x: Residual, sight: Sight, eps: float
) -> tuple[Keys, Keys]:
    """The keys and values of these tokens, by a block that computes them."""
    projected = _heads(plan, weights, "k", x)
    keys = _turned(steps, plan.rotary, _normed(weights, "k", projected, eps), sight)
    # Where there is no `v_proj` the values are the keys' projection, neither weighted nor turned.
    values = rmsnorm_unit(eps, projected if plan.values_from_keys else _heads(plan, weights, "v", x))
    return (
        steps("self_attn.own_keys", keys.transpose(1, 2)),
        steps("self_attn.own_values", values.transpose(1, 2)),
    )


def _heads(plan: BlockPlan, weights: PartWeights, of: str, x: Residual) -> ByHead:
    return linear(weights[f"self_attn.{of}_proj.weight"], x).unflatten(-1, (-1, plan.head_dim))


def _normed(weights: PartWeights, of: str, heads: ByHead, eps: float) -> ByHead:
    return rmsnorm(eps, heads, weights[f"self_attn.{of}_norm.weight"])


def _turned(steps: Steps, rotary: RotaryPlan, heads: ByHead, sight: Sight) -> ByHead:
    """The rotary embedding: of every pair of a head's coordinates, or of the first `rotated / 2` pairs."""
    # To divide every frequency by a number is to divide every position by it.
    place = steps.between(sight.positions[..., None].double() / rotary.factor, SINGLE)
    return rope(rotary.theta, rotary.head_dim, rotary.head_dim, rotary.rotated // 2, place, heads)
