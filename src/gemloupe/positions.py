"""Which tokens an edit or a capture means.

A position is a token's place in its own text: 0 is the first real token of each row, whatever padding
stands before it, and -1 the last. In `generate` positions go on counting through the new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch

from .errors import BadArgument
from .prompts import cached_tokens

__all__ = ["Positions", "real_tokens", "select"]

Positions = int | slice | Sequence[int] | torch.Tensor | None


def real_tokens(encoding: Any, rows: slice, *, generating: bool = False) -> torch.Tensor | None:
    """Which columns of a text hold real tokens, `[batch seq]`, or `None` where the call does not say.

    A call that is given a cache continues a text: the columns that it holds come first. (`generate` is
    given the whole text with it.)
    """
    mask = encoding.get("attention_mask")
    ids = encoding.get("input_ids", encoding.get("inputs_embeds"))
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask[rows].bool()
    if isinstance(ids, torch.Tensor) and ids.dim() >= 2:
        before = 0 if generating else cached_tokens(encoding)
        return torch.ones(ids.shape[0], before + ids.shape[1], dtype=torch.bool)[rows]
    return None


def check(
    positions: Positions, real: torch.Tensor | None, *, verb: str, growing: bool, whole: bool = False
) -> None:
    """Refuse a position that no row, or not every row, has.

    `growing`: the text grows (`generate`), so a position past the prompt may come yet. `whole`: positions
    are chosen when it has grown, so they count from the end of what it will be.
    Raises: BadArgument.
    """
    if isinstance(positions, torch.Tensor):
        if is_mask(positions):
            if real is not None and not _broadcasts(positions, real, longer=whole):
                raise BadArgument(
                    f"{verb}: the mask of positions is {tuple(positions.shape)}; it covers "
                    f"{positions.shape[-1]} columns, the batch has {real.shape[-1]}, in {real.shape[0]} rows."
                )
            return
        positions = positions.flatten().tolist()
    if positions is None or isinstance(positions, slice):
        return
    given: Any = positions
    many = isinstance(given, Iterable) and not isinstance(given, str)
    wanted: list[Any] = list(given) if many else [given]
    if any(isinstance(p, bool) or not isinstance(p, int) for p in wanted):
        raise BadArgument(
            f"{verb}: positions are whole numbers, a slice, or a boolean mask, not {positions!r}."
        )
    if real is None:
        return
    shortest = int(real.sum(-1).min())
    for position in wanted:
        past = position >= shortest and not growing
        before = position < -shortest and not whole
        if past or before:
            raise BadArgument(
                f"{verb}: position {position} is past the sequence: the shortest text has {shortest} tokens, "
                f"0 to {shortest - 1}, or -{shortest} to -1 from its end."
            )


def _broadcasts(mask: torch.Tensor, real: torch.Tensor, *, longer: bool) -> bool:
    rows = mask.shape[0] if mask.dim() == 2 else 1
    width, wanted = mask.shape[-1] if mask.dim() else 0, real.shape[-1]
    fits = width == wanted or (longer and width > wanted)
    return mask.dim() in (1, 2) and fits and rows in (1, real.shape[0])


def is_mask(positions: Positions) -> TypeGuard[torch.Tensor]:
    """Whether positions are chosen by a boolean mask."""
    return isinstance(positions, torch.Tensor) and positions.dtype == torch.bool


def fitted(positions: Positions, text: torch.Tensor) -> Positions:
    """A mask over a prompt as one over all columns of a text that has grown: what it does not cover is not
    chosen. Other positions are as they were.

    Raises: BadArgument, where it covers more.
    """
    if not is_mask(positions):
        return positions
    rows, width = text.shape
    if positions.shape[-1] > width:
        raise BadArgument(
            f"the mask of positions covers {positions.shape[-1]} columns; the text has {width}."
        )
    mask = torch.nn.functional.pad(positions, (0, width - positions.shape[-1]))
    # Several returned sequences repeat each row of the prompt.
    return mask if mask.dim() == 1 else mask.repeat_interleave(rows // mask.shape[0], 0)


def columns(positions: int | Sequence[int], real: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """The columns of chosen tokens in the order given, `[batch chosen]`.

    `dropped` says how many real tokens of each row stand before the first column, and are not there.
    Raises: BadArgument, for a position that is not there, which says which are.
    """
    wanted = torch.as_tensor([positions] if isinstance(positions, int) else list(positions))
    found = []
    for row, mask in enumerate(real):
        there = mask.nonzero().flatten()
        before = int(dropped[row])
        total = before + len(there)
        place = torch.where(wanted >= 0, wanted, wanted + total).to(there.device) - before
        if len(place) and (int(place.min()) < 0 or int(place.max()) >= len(there)):
            raise BadArgument(
                f"position {positions} of row {row} is not there: this value has those from {before} to "
                f"{total - 1}."
            )
        found.append(there[place])
    return torch.stack(found)


def select(positions: Positions, real: torch.Tensor, start: torch.Tensor | int = 0) -> torch.Tensor:
    """The chosen tokens as a mask, `[batch seq]`.

    `real` marks this forward's real tokens; `start` is the position of the first of them, for a
    forward that continues a text.
    """
    if is_mask(positions):
        # Of a mask over the whole text, the columns that this value still has.
        return positions[..., -real.shape[-1] :].to(real.device).expand_as(real) & real
    place = real.cumsum(-1) - 1 + start
    if positions is None:
        return real
    length = place.max(-1, keepdim=True).values + 1
    if isinstance(positions, slice):
        chosen = torch.zeros_like(real)
        for row, size in enumerate(length.flatten().tolist()):
            wanted = torch.tensor(range(*positions.indices(size)), dtype=place.dtype, device=place.device)
            chosen[row] = torch.isin(place[row], wanted)
        return chosen & real
    if isinstance(positions, torch.Tensor):
        positions = positions.flatten().tolist()
    wanted = [positions] if isinstance(positions, int) else list(positions)
    chosen = torch.zeros_like(real)
    for position in wanted:
        chosen |= place == (position if position >= 0 else length + position)
    return chosen & real
