"""Which tokens of each sequence get a row."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, Literal, get_args

import torch

from ..errors import BadArgument
from ..loading import text_config
from .sequences import Sequences
from .sources import short

__all__ = ["NAMES", "Chooser", "choose", "described", "special_tokens"]

Named = Literal["all", "last", "content"]
Chooser = Named | Callable[[torch.Tensor], torch.Tensor]
"""`"all"` tokens, the `"last"` one, the `"content"` (neither BOS nor padding nor any special token), or a
function from a sequence's ids `[seq]` to a mask of them, `[seq]`."""

NAMES: Final = get_args(Named)


def check(positions: Chooser, sample: int | None, seed: int) -> None:
    """Refuse a choice that cannot be meant.

    Raises: BadArgument.
    """
    if not callable(positions) and positions not in NAMES:
        raise BadArgument(
            f"harvest: positions={short(positions)}; choose one of {', '.join(map(repr, NAMES))}, or give a "
            f"function from a sequence's ids [seq] to a mask [seq]."
        )
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 1):
        raise BadArgument(f"harvest: sample is a number of tokens per sequence, not {sample!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BadArgument(f"harvest: seed is a whole number, not {seed!r}.")


def choose(
    sequences: Sequences, positions: Chooser, *, sample: int | None, seed: int, special: frozenset[int]
) -> torch.Tensor:
    """The chosen tokens, `[tokens]`, of all sequences one after another.

    `sample` keeps so many of each sequence's chosen tokens, or all where they are fewer; which ones depends
    on the seed and the sequence's number alone.

    Raises: BadArgument, where no token at all is chosen, or a function gives something else than a mask.
    """
    if callable(positions):
        parts = [_asked(positions, sequences[at], at) for at in range(len(sequences))]
        chosen = torch.cat(parts)
    elif positions == "last":
        chosen = torch.zeros(len(sequences.ids), dtype=torch.bool)
        chosen[sequences.starts[1:] - 1] = True
    elif positions == "content":
        chosen = ~torch.isin(sequences.ids, torch.tensor(sorted(special), dtype=torch.int32))
    else:
        chosen = torch.ones(len(sequences.ids), dtype=torch.bool)
    if sample is not None:
        chosen = _sampled(sequences, chosen, sample, seed)
    if not bool(chosen.any()):
        raise BadArgument(f"harvest: positions={described(positions)!r} choose no token of any sequence.")
    return chosen


def special_tokens(model: Any) -> frozenset[int]:
    """The ids that are no content: the tokenizer's special tokens, and what the config calls BOS, EOS and
    padding."""
    config = text_config(model._module.config)
    ids = list(getattr(model.tokenizer, "all_special_ids", ()))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = getattr(config, name, None)
        ids += found if isinstance(found, (list, tuple)) else [found]
    return frozenset(token for token in ids if token is not None)


def described(positions: Chooser) -> str:
    """A choice as the index names it."""
    if not callable(positions):
        return positions
    name = getattr(positions, "__qualname__", type(positions).__qualname__)
    return f"{getattr(positions, '__module__', '')}.{name}"


def _asked(choose: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, at: int) -> torch.Tensor:
    given = choose(ids.to(torch.int64))
    try:
        mask = torch.as_tensor(given)
        gave = f"{mask.dtype} {tuple(mask.shape)}"
    except (TypeError, ValueError, RuntimeError):
        mask, gave = None, short(given)
    if mask is None or mask.dtype != torch.bool or mask.shape != ids.shape:
        raise BadArgument(
            f"harvest: positions gave {gave} for sequence {at}; it gives a mask, torch.bool "
            f"{tuple(ids.shape)} [seq]."
        )
    return mask.cpu().clone()  # the function may give one buffer again and again


def _sampled(sequences: Sequences, chosen: torch.Tensor, sample: int, seed: int) -> torch.Tensor:
    kept = torch.zeros_like(chosen)
    starts = sequences.starts.tolist()
    for at, (start, stop) in enumerate(pairwise(starts)):
        there = (chosen[start:stop].nonzero().flatten() + start).tolist()
        # Text seeds are the same on every machine and in every Python.
        drawn = there if len(there) <= sample else random.Random(f"{seed} {at}").sample(there, sample)
        kept[drawn] = True
    return kept
