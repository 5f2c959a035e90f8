"""The attention's arithmetic, for the block that is asked for its scores or its pattern.

    scores  = scaling * queries @ keys^T, masked
    pattern = softmax(scores) over the keys, in float32
    heads   = pattern @ values

Queries are grouped over key heads without copying the keys. The source is transformers'
`eager_attention_forward`; a fused kernel computes the same and keeps none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ledger import is_fake

__all__ = ["Mask", "heads_of", "pattern_from", "pattern_of", "read_mask", "scores_of"]


@dataclass(frozen=True)
class Mask:
    """What may be seen: `visible` (boolean) or `added` (to the scores), broadcasting to
    `[batch heads query key]`; neither where everything is visible."""

    visible: torch.Tensor | None = None
    added: torch.Tensor | None = None


def read_mask(mask: Any, queries: torch.Tensor, keys: torch.Tensor, *, causal: bool, rows: slice) -> Mask:
    """The mask of one attention call, whichever form the implementation gave it.

    A boolean or an additive tensor, flex attention's `BlockMask` (of the whole batch, cut to `rows`), or
    nothing: sdpa is then causal by a flag (`integrations.sdpa_attention.sdpa_attention_forward`).
    """
    length, total = queries.shape[-2], keys.shape[-2]
    if mask is None:
        if not causal or length == 1:
            return Mask()
        ones = torch.ones(length, total, dtype=torch.bool, device=queries.device)
        return Mask(visible=ones.tril())
    if isinstance(mask, torch.Tensor):
        mask = mask[..., :total]
        return Mask(visible=mask) if mask.dtype == torch.bool else Mask(added=mask)
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.shape[:2]
    dense = create_mask(mask.mask_mod, batch, heads, length, total, device=str(queries.device))
    return Mask(visible=dense if batch == 1 else dense[rows])


def scores_of(queries: torch.Tensor, keys: torch.Tensor, scaling: float, mask: Mask) -> torch.Tensor:
    """The scaled, masked scores, `[batch heads query key]`."""
    scores = _grouped(queries, keys).matmul(keys.transpose(-1, -2))
    scores = scores.view(*queries.shape[:3], keys.shape[-2])
    if scaling != 1.0:
        scores = scores * scaling
    if mask.added is not None:
        return scores + mask.added
    if mask.visible is not None:
        return scores.masked_fill(~mask.visible, -torch.inf)
    return scores


def pattern_of(scores: torch.Tensor) -> torch.Tensor:
    """The pattern, `[batch heads query key]`: softmax in float32, in the scores' dtype.

    A row that sees nothing (padding under a fused kernel) is zero, as the kernel leaves it.
    """
    blind = scores.detach().amax(-1, keepdim=True) == -torch.inf
    if is_fake(scores) or not bool(blind.any()):
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    # Filled before the softmax too, whose gradient would not be a number there.
    pattern = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1, dtype=torch.float32)
    return pattern.masked_fill(blind, 0.0).to(scores.dtype)


def pattern_from(queries: torch.Tensor, keys: torch.Tensor, scaling: float, mask: Mask) -> torch.Tensor:
    """The pattern without the scores: the same numbers, in the memory of one pattern.

    Where no gradient is wanted, head by head, so that only one head's scores are held at a time.
    """
    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad):
        return pattern_of(scores_of(queries, keys, scaling, mask))
    batch, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    pattern = queries.new_empty(batch, heads, length, keys.shape[-2])
    blind = None if mask.visible is None else ~mask.visible.any(-1, keepdim=True)
    if blind is not None and (is_fake(blind) or not bool(blind.any())):
        blind = None
    hidden = None if mask.visible is None else ~mask.visible
    for head in range(heads):
        # In the pattern's own memory: nothing but one head's shares is held beside it.
        scores = pattern[:, head]
        torch.matmul(queries[:, head], keys[:, head // group].transpose(-1, -2), out=scores)
        if scaling != 1.0:
            scores *= scaling
        if mask.added is not None:
            scores += _of_head(mask.added, head)
        elif hidden is not None:
            scores.masked_fill_(_of_head(hidden, head), -torch.inf)
        scores.copy_(torch.softmax(scores, dim=-1, dtype=torch.float32))
        if blind is not None:
            scores.masked_fill_(_of_head(blind, head), 0.0)
    return pattern


def _of_head(mask: torch.Tensor, head: int) -> torch.Tensor:
    """A mask's part for one head, `[batch query key]`; masks broadcast over heads, and may lack the axes."""
    if mask.dim() < 4:
        return mask
    return mask[:, head if mask.shape[1] > 1 else 0]


def heads_of(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each head's mix of values, `[batch query heads head_dim]`."""
    mixed = _grouped(pattern, values).matmul(values)
    return mixed.view(*pattern.shape[:3], values.shape[-1]).transpose(1, 2).contiguous()


def _grouped(by_head: torch.Tensor, by_kv_head: torch.Tensor) -> torch.Tensor:
    """`[batch heads query n]` as `[batch kv_heads group*query n]`: heads that share a key head together."""
    batch, heads, length, width = by_head.shape
    kv_heads = by_kv_head.shape[1]
    return by_head.reshape(batch, kv_heads, heads // kv_heads * length, width)
