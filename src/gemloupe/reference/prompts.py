"""What a verification runs a model on: token ids and the mask of real tokens, from whatever a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import BadArgument
from ..plan import ModelPlan

__all__ = ["Prompt", "default_prompts", "prompt_of"]

Prompt = tuple[Tensor, Tensor]
"""Token ids and the mask of real tokens, both `[batch seq]`, padded on the left."""

# The longest of the default prompts overruns the window by so many tokens; the others make a padded batch.
_BEYOND_THE_WINDOW: Final = 7
_LENGTHS: Final = (12, 7, 3)
# Coprime to every vocabulary, so that the tokens of a prompt go all over it before one comes twice.
_STRIDE: Final = 7_919


def default_prompts(plan: ModelPlan, special: frozenset[int], bos: int) -> list[Prompt]:
    """The fixed tokens that a model is verified on: a sequence longer than its window, and a padded batch.

    Each begins with `bos`; the rest are tokens from all over the vocabulary, but for the `special` ones,
    which stand for images and the like.
    """
    count = min(plan.sliding_window + _BEYOND_THE_WINDOW, plan.max_positions)
    return [_batch(plan, special, bos, [count]), _batch(plan, special, bos, list(_LENGTHS))]


def _batch(plan: ModelPlan, special: frozenset[int], bos: int, lengths: list[int]) -> Prompt:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    tokens = (token for i in range(plan.vocab_size * _STRIDE) if (token := _nth(plan, i)) not in special)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.tensor([bos, *(next(tokens) for _ in range(length - 1))])
        mask[row, -length:] = 1
    return ids, mask


def _nth(plan: ModelPlan, i: int) -> int:
    return (1 + i) * _STRIDE % plan.vocab_size


def prompt_of(inputs: Any, tokenizer: Any) -> Prompt:
    """The token ids and the mask of what a user gives.

    Text or several texts, token ids (`[seq]` or `[batch seq]`, a tensor or lists), or a mapping of
    `input_ids` and `attention_mask`, as a tokenizer returns it.

    Raises: BadArgument, for anything else, and for padding that is not on the left.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Sequence) and inputs and all(isinstance(text, str) for text in inputs):
        inputs = tokenizer(list(inputs), return_tensors="pt", padding=True, padding_side="left")
    mask = None
    if isinstance(inputs, Mapping):
        if unknown := sorted(inputs.keys() - {"input_ids", "attention_mask"}):
            raise BadArgument(
                f"verify takes input_ids and attention_mask, not {', '.join(unknown)}: the reference is of "
                f"the text model, and counts positions from each row's first real token."
            )
        inputs, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    ids = _integers("input_ids", inputs)
    mask = torch.ones_like(ids) if mask is None else _integers("attention_mask", mask).to(ids.device)
    if mask.shape != ids.shape:
        raise BadArgument(f"attention_mask is {list(mask.shape)}; input_ids are {list(ids.shape)}.")
    if bool((mask.ne(0).int().diff(dim=-1) < 0).any()) or not bool(mask[:, -1].all()):
        raise BadArgument(
            "attention_mask has padding after a real token; pad on the left: tokenizer.padding_side = 'left'."
        )
    return ids, mask


def _integers(name: str, given: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        raise BadArgument(
            f"{name}: verify takes text, or token ids [batch seq], not {type(given).__name__}. "
            f"Write verify(model, 'The capital of France is')."
        )
    return tensor.long()
