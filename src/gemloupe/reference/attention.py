"""The attention of a block: from the normed stream to `o_proj`'s output.

    queries = rope(rmsnorm(heads of q_proj(x)))
    keys    = rope(rmsnorm(heads of k_proj(x)))       # or another block's
    values  = rmsnorm_unit(heads of v_proj(x))        # or another block's, or k_proj's heads
    pattern = softmax(queries . keys, over the keys that are seen)
    output  = o_proj(pattern mixed with values)

Each key head serves a group of query heads, and `seen` is what `sight` says.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..layouts import Keys, Residual
from ..plan import BlockPlan, RotaryPlan
from .cache import Cache
from .ops import gqa_logits, gqa_mix, linear, rmsnorm, rmsnorm_unit, rope, softmax
from .sight import Sight
from .weights import BlockWeights

__all__ = ["attend"]

ByHead = Float[Tensor, "batch seq heads head_dim"]
Positions = Int[Tensor, "batch seq"]

# Queries and keys are normed, and their norms' weights do what `head_dim ** -0.5` does elsewhere.
SCALE: Final = 1.0


def attend(
    plan: BlockPlan,
    weights: BlockWeights,
    x: Residual,
    sight: Sight,
    eps: float,
    borrowed: tuple[Keys, Keys] | None = None,
    cache: Cache | None = None,
) -> dict[str, Tensor]:
    """The values of `self_attn` between its input norm and its post-norm, by name.

    x: the normed stream. borrowed: the keys and values of the block that `plan` borrows from, all of them.
    cache: the tokens before these, to which this block's keys and values are appended.
    """
    queries = _normed_and_turned(plan, weights, "q", _heads(plan, weights, "q", x), sight, eps)
    if borrowed is None:
        projected = _heads(plan, weights, "k", x)
        own_keys = _normed_and_turned(plan, weights, "k", projected, sight, eps).transpose(1, 2)
        # Where there is no `v_proj` the values are the keys' projection, neither turned nor weighted.
        values = projected if plan.values_from_keys else _heads(plan, weights, "v", x)
        own_values = rmsnorm_unit(eps, values).transpose(1, 2)
        found = {"own_keys": own_keys, "own_values": own_values}
        keys, values = own_keys, own_values
        if cache is not None:
            keys, values = cache.extend(plan.index, own_keys, own_values)
    else:
        found = {}
        keys, values = borrowed
    scores, pattern, mixed = _mixed(plan, queries, keys, values, sight.visible[plan.kind])
    return found | {
        "attention_queries": queries.transpose(1, 2),
        "attention_keys": keys,
        "attention_values": values,
        "attention_scores": scores,
        "attention_probabilities": pattern,
        "attention_head_outputs": mixed,
        "attention_projection": linear(weights["self_attn.o_proj.weight"], mixed.flatten(-2)),
    }


def _heads(plan: BlockPlan, weights: BlockWeights, of: str, x: Residual) -> ByHead:
    return linear(weights[f"self_attn.{of}_proj.weight"], x).unflatten(-1, (-1, plan.head_dim))


def _normed_and_turned(
    plan: BlockPlan, weights: BlockWeights, of: str, heads: ByHead, sight: Sight, eps: float
) -> ByHead:
    return turned(plan.rotary, rmsnorm(eps, heads, weights[f"self_attn.{of}_norm.weight"]), sight.positions)


def turned(rotary: RotaryPlan, heads: ByHead, positions: Positions) -> ByHead:
    """The rotary embedding: of every pair of a head's coordinates, or of the first `rotated / 2` pairs."""
    # To divide every frequency by a number is to divide every position by it.
    place = positions[..., None].double() / rotary.factor
    return rope(rotary.theta, rotary.head_dim, rotary.head_dim, rotary.rotated // 2, place, heads)


def _mixed(
    plan: BlockPlan, queries: ByHead, keys: Keys, values: Keys, visible: Bool[Tensor, "batch query key"]
) -> tuple[Tensor, Tensor, ByHead]:
    """The scores and the pattern, `[batch heads query key]`, and each head's mix of values."""
    # Query head `c * group + g` reads key head `c`.
    grouped = queries.unflatten(2, (plan.num_kv_heads, -1))
    seen = visible[:, None, None]
    logits = gqa_logits(SCALE, grouped, keys.transpose(1, 2))
    pattern = softmax(logits, seen)
    mixed = gqa_mix(pattern, values.transpose(1, 2))
    scores = logits.masked_fill(~seen, -torch.inf)
    return scores.flatten(1, 2), pattern.flatten(1, 2), mixed.flatten(2, 3)
