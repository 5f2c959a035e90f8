"""The logit lens: reading a residual stream as the model reads its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import BadArgument
from .tokens import NoTokenizer

__all__ = ["TopTokens", "project_on_vocab", "top_tokens"]


def project_on_vocab(model: Any, hidden: torch.Tensor, cap: bool = True) -> torch.Tensor:
    """`hidden` through the final norm, the head and, with `cap`, the soft cap.

    `hidden` is a residual stream, `[... hidden]`; the result is `[... vocab]`. On the last block's
    `layer_output` it equals `logits` bit for bit. `hidden` is moved to the head's device and dtype.
    Works inside a trace, where it uses nothing up, and outside one.

    Raises: BadArgument, where the last axis is not `hidden_size` wide.
    Source: `Gemma4ForCausalLM.forward`; cap 30 is the text config's `final_logit_softcapping`.
    """
    if not isinstance(hidden, torch.Tensor) or hidden.dim() == 0 or hidden.shape[-1] != model.hidden_size:
        got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
        raise BadArgument(
            f"project_on_vocab takes a residual stream [... hidden], hidden = {model.hidden_size}, not {got}."
        )
    if not model.dispatched:
        model.dispatch()
    norm, head = model.norm, model.lm_head
    hidden = hidden.to(norm.device, head._module.weight.dtype)
    logits = head(norm(hidden).to(head.device))
    limit = model.plan.logit_cap
    if cap and limit is not None:
        logits = torch.tanh(logits / limit) * limit
    return logits


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens at each position: `ids`, `probabilities` and `tokens`, all `[... k]`."""

    ids: torch.Tensor
    probabilities: torch.Tensor
    tokens: list

    def __str__(self) -> str:
        return str(self.tokens)


def top_tokens(model: Any, hidden_or_logits: torch.Tensor, k: int = 5) -> TopTokens:
    """The `k` likeliest tokens, likeliest first, with their probabilities in float32.

    Takes logits, `[... vocab]`, or a residual stream, `[... hidden]`, which is projected first.

    Raises: BadArgument, where the last axis is neither, or where hidden and vocabulary are equally
    wide and it could be both; for a `k` out of range.
    """
    width = hidden_or_logits.shape[-1] if isinstance(hidden_or_logits, torch.Tensor) else None
    if model.hidden_size == model.vocab_size and width == model.vocab_size:
        raise BadArgument(
            "hidden and vocabulary are equally wide; project with project_on_vocab and use torch.topk."
        )
    if width not in (model.hidden_size, model.vocab_size):
        raise BadArgument(
            f"top_tokens takes logits [... {model.vocab_size}] or a residual stream "
            f"[... {model.hidden_size}], not a last axis of {width}."
        )
    if not 1 <= k <= model.vocab_size:
        raise BadArgument(f"k = {k}: choose 1 to {model.vocab_size}, the size of the vocabulary.")
    logits = project_on_vocab(model, hidden_or_logits) if width == model.hidden_size else hidden_or_logits
    probabilities, ids = logits.float().softmax(-1).topk(k, dim=-1)
    return TopTokens(ids, probabilities, _text(model.tokenizer, ids))


def _text(tokenizer: Any, ids: torch.Tensor) -> list:
    if ids.dim() > 1:
        return [_text(tokenizer, row) for row in ids]
    if tokenizer is None or isinstance(tokenizer, NoTokenizer):
        return [str(int(i)) for i in ids]
    return [tokenizer.decode([int(i)]) for i in ids]
