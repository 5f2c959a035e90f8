"""What a Gemma prompt must look like, and a warning where it does not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .errors import PromptWarning

__all__ = ["check_prompt"]


def check_prompt(tokenizer: Any, encoding: Mapping[str, Any]) -> None:
    """Warn where a row's first real token is not BOS, or where two follow one another.

    Gemma was trained with one BOS before every text; without it, or with two, activations are not
    those of the text.
    """
    ids = encoding.get("input_ids")
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not _concrete(ids):
        return
    if encoding.get("past_key_values") is not None or encoding.get("cache") is not None:
        return  # the continuation of a text, whose BOS is in the cache
    mask = encoding.get("attention_mask")
    first = _first_real(ids, mask)
    rows = torch.arange(ids.shape[0], device=ids.device)
    missing = (ids[rows, first] != bos).nonzero().flatten().tolist()
    if missing:
        warnings.warn(
            f"row {missing[0]} of the prompt does not begin with BOS ({tokenizer.bos_token}), which Gemma "
            f"was trained with; give text, or put token id {bos} first.",
            PromptWarning,
            stacklevel=2,
        )
    second = (first + 1).clamp(max=ids.shape[1] - 1)
    double = ((ids[rows, first] == bos) & (ids[rows, second] == bos) & (second > first)).nonzero().flatten()
    if len(double):
        warnings.warn(
            f"row {int(double[0])} of the prompt begins with BOS twice; the tokenizer adds it, so leave "
            f"{tokenizer.bos_token} out of the text.",
            PromptWarning,
            stacklevel=2,
        )


def _first_real(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return mask.to(torch.int64).argmax(-1)
    return torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)


def _concrete(ids: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(ids, FakeTensor) and ids.device.type != "meta" and ids.numel() > 0
