"""The attention's arithmetic, for the block that is asked for its scores or its pattern.

    scores  = scaling * queries @ keys^T, masked
    pattern = softmax(scores) over the keys, in float32
    heads   = pattern @ values

Queries are grouped over key heads without copying the keys. The source is transformers'
`eager_attention_forward`; a fused kernel computes the same and keeps none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from ..ledger import is_fake

__all__ = ["Mask", "heads_of", "pattern_from", "pattern_of", "read_mask", "scores_of", "visible_in"]

PARTS: Final = 4
"""In how many parts a pattern is computed, at least."""


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


def visible_in(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A mask as a boolean of its own memory, which broadcasts to `[batch heads query key]`.

    What eager attention adds where nothing is to be seen is the least number there is.
    """
    if mask.visible is not None:
        return mask.visible.clone()
    if mask.added is not None:
        return mask.added > torch.finfo(mask.added.dtype).min / 2
    return torch.ones(queries.shape[-2], keys.shape[-2], dtype=torch.bool, device=queries.device)


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
    """The pattern without the scores: the same numbers, in little more than the memory of one pattern.

    Where no gradient is wanted, a part of one row's heads at a time (`_parts`), whose scores fit a
    processor's cache and are all that is held beside the pattern.
    """
    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad):
        return pattern_of(scores_of(queries, keys, scaling, mask))
    batch, heads, length, width = queries.shape
    total, group = keys.shape[-2], heads // keys.shape[1]
    pattern = queries.new_empty(batch, heads, length, total)
    blind = None if mask.visible is None else ~mask.visible.any(-1, keepdim=True)
    if blind is not None and (is_fake(blind) or not bool(blind.any())):
        blind = None
    step = _parts(batch, heads, group)
    shared = max(step // group, 1)
    bias = _bias(mask, queries)
    scores = queries.new_empty(shared, step // shared * length, total)
    for row in range(batch):
        for first in range(0, heads, step):
            some = slice(first, first + step)
            seen = keys[row, first // group : first // group + shared].transpose(-1, -2)
            torch.bmm(queries[row, some].reshape(shared, -1, width), seen, out=scores)
            by_head = scores.view(step, length, total)
            if scaling != 1.0:
                by_head *= scaling
            if bias is not None:
                by_head += _of(bias, row, some)
            shares = pattern[row, some]
            if shares.dtype == torch.float32:
                torch.softmax(by_head, dim=-1, out=shares)
            else:
                shares.copy_(torch.softmax(by_head, dim=-1, dtype=torch.float32))
            if blind is not None:
                shares.masked_fill_(_of(blind, row, some), 0.0)
    return pattern


def _parts(batch: int, heads: int, group: int) -> int:
    """How many heads of a row are done at once: whole groups that share a key head, or a fraction of one."""
    wanted = max(heads * batch // max(PARTS, batch), 1)
    if wanted < group:
        return max(size for size in range(1, wanted + 1) if group % size == 0)
    return max(size for size in range(group, wanted + 1, group) if heads % size == 0)


def _bias(mask: Mask, queries: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores: minus infinity where nothing may be seen."""
    if mask.visible is None:
        return mask.added
    nothing = queries.new_zeros(mask.visible.shape)
    return nothing.masked_fill_(~mask.visible, -torch.inf)


def _of(mask: torch.Tensor, row: int, heads: slice) -> torch.Tensor:
    """A mask's part for some heads of a row, `[heads query key]`; masks broadcast, and may lack the axes."""
    if mask.dim() < 4:
        return mask
    mask = mask[row if mask.shape[0] > 1 else 0]
    return mask[heads] if mask.shape[0] > 1 else mask


def heads_of(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each head's mix of values, `[batch query heads head_dim]`."""
    mixed = _grouped(pattern, values).matmul(values)
    return mixed.view(*pattern.shape[:3], values.shape[-1]).transpose(1, 2).contiguous()


def _grouped(by_head: torch.Tensor, by_kv_head: torch.Tensor) -> torch.Tensor:
    """`[batch heads query n]` as `[batch kv_heads group*query n]`: heads that share a key head together."""
    batch, heads, length, width = by_head.shape
    kv_heads = by_kv_head.shape[1]
    return by_head.reshape(batch, kv_heads, heads // kv_heads * length, width)
