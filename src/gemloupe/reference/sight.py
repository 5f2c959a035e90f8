"""Where each token stands and which keys it sees, from the mask of real tokens.

A key is seen by its place in the row, padding counted; a position is counted from the row's first real
token. Distances are the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..plan import Kind, ModelPlan

__all__ = ["Sight", "sight"]


@dataclass(frozen=True)
class Sight:
    """What a forward knows of its tokens beside their ids."""

    positions: Int[Tensor, "batch seq"]
    """Counted from each row's first real token; 0 on the padding before it."""
    visible: dict[Kind, Bool[Tensor, "batch query key"]]
    """Whether a query sees a key, on the blocks of each kind. Padding is seen by none."""


def sight(
    plan: ModelPlan,
    attention_mask: Int[Tensor, "batch key"],
    length: int | None = None,
    images: Int[Tensor, "batch key"] | None = None,
) -> Sight:
    """The sight of the last `length` tokens of `attention_mask`, all of them if it is not given.

    A full block's query sees every token up to its own, a sliding block's the last `window` of these.
    Where the config's `use_bidirectional_attention` is "all", both see ahead as well, a sliding block's
    query `window` tokens either way.

    images: which image each token belongs to, -1 for none. Where the config says "vision", the tokens of one
    image see each other: on `gemma4_unified_text` in both kinds of block, whatever the window; on
    `gemma4_text` in the sliding blocks alone, `window` still limiting how far back.

    Source: `masking_utils.create_causal_mask` and its kin, `modeling_gemma4.create_causal_mask_mapping`.
    """
    total = attention_mask.shape[-1]
    key = torch.arange(total, device=attention_mask.device)
    query = key[total - (total if length is None else length) :]
    padding = attention_mask.cumsum(-1).eq(0).sum(-1, keepdim=True)  # before the row's first real token
    back = query[:, None] - key  # how far behind the query a key lies
    behind = back >= 0
    if plan.bidirectional == "all":
        full, near = torch.ones_like(behind), back.abs() <= plan.sliding_window
    else:
        full, near = behind, behind & (back < plan.sliding_window)
    if images is not None and plan.bidirectional == "vision":
        together = (images[:, query, None] == images[:, None]) & (images[:, None] >= 0)
        if plan.model_type == "gemma4_unified_text":
            full, near = full | together, near | together
        else:
            near = (behind | together) & (back < plan.sliding_window)

    real = attention_mask.ne(0)[:, None]
    return Sight(
        positions=(query - padding).clamp(min=0), visible={"full": full & real, "sliding": near & real}
    )
