"""What a Gemma prompt must look like, and what a text that continues a cache must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from nnsight.modeling.processing import positions

from .errors import BadArgument, PromptWarning
from .notices import warn

__all__ = ["CACHES", "cached_tokens", "check_prompt", "hides_new_tokens", "text_positions"]

CACHES: Final = ("cache", "past_key_values")
"""What transformers calls the cache that a call is given: 5.24, and older releases."""


def cached_tokens(encoding: Mapping[str, Any]) -> int:
    """How many tokens the cache that a call is given holds."""
    known = next((encoding[name] for name in CACHES if encoding.get(name) is not None), None)
    return 0 if known is None else int(known.get_seq_length())


def hides_new_tokens(encoding: Mapping[str, Any], *, given: bool) -> bool:
    """Whether the mask beside a cache is one that nnsight added and that has to go.

    nnsight 0.8.1 adds a mask over the new tokens to a call that is given a `cache`. transformers takes it
    for one of the whole text that ends in padding, and hides the new tokens from themselves.
    Raises: BadArgument, where a mask that was `given`, or padding, would do so.
    """
    before = cached_tokens(encoding)
    mask, ids = encoding.get("attention_mask"), encoding.get("input_ids", encoding.get("inputs_embeds"))
    if not before or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or ids is None:
        return False
    total = before + ids.shape[1]
    if mask.shape[1] >= total:
        return False
    if given or not bool(mask.all()):
        raise BadArgument(
            f"the cache holds {before} tokens and the call brings {ids.shape[1]}; the attention_mask covers "
            f"{mask.shape[1]}. Give one of {total} columns: `attention_mask=` [batch {total}]."
        )
    return True


def text_positions(encoding: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The `position_ids` of a call whose mask has padding on the left, where it is given none.

    As nnsight's for a padded batch, for what it leaves out: a mask that covers a cache too, or that is given
    beside the invokes. Without them transformers counts the columns, the padding included. Empty where that
    is right.
    """
    mask, ids = encoding.get("attention_mask"), encoding.get("input_ids", encoding.get("inputs_embeds"))
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not isinstance(ids, torch.Tensor):
        return {}
    if "position_ids" in encoding or not _concrete(mask):
        return {}
    before = cached_tokens(encoding)
    if mask.shape != (ids.shape[0], before + ids.shape[1]):
        return {}
    place = positions(mask)[:, before:]
    columns = torch.arange(before, mask.shape[1], device=mask.device)
    return {} if bool((place == columns).all()) else {"position_ids": place}


def check_prompt(tokenizer: Any, encoding: Mapping[str, Any]) -> None:
    """Warn where a row's first real token is not BOS, or where two follow one another.

    Gemma was trained with one BOS before every text; without it, or with two, activations are not
    those of the text.
    """
    ids = encoding.get("input_ids")
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not _concrete(ids):
        return
    if cached_tokens(encoding):
        return  # the continuation of a text, whose BOS is in the cache
    mask = encoding.get("attention_mask")
    first = _first_real(ids, mask)
    rows = torch.arange(ids.shape[0], device=ids.device)
    missing = (ids[rows, first] != bos).nonzero().flatten().tolist()
    if missing:
        warn(
            f"row {missing[0]} of the prompt does not begin with BOS ({tokenizer.bos_token}), which Gemma "
            f"was trained with; give text, or put token id {bos} first.",
            PromptWarning,
        )
    second = (first + 1).clamp(max=ids.shape[1] - 1)
    double = ((ids[rows, first] == bos) & (ids[rows, second] == bos) & (second > first)).nonzero().flatten()
    if len(double):
        warn(
            f"row {int(double[0])} of the prompt begins with BOS twice; the tokenizer adds it, so leave "
            f"{tokenizer.bos_token} out of the text.",
            PromptWarning,
        )


def _first_real(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return mask.to(torch.int64).argmax(-1)
    return torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)


def _concrete(ids: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(ids, FakeTensor) and ids.device.type != "meta" and ids.numel() > 0
