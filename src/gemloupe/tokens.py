"""The tokenizer a model is wrapped with, and what stands in its place where there is none."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .errors import LoadError

__all__ = ["NoTokenizer", "find_tokenizer"]


class NoTokenizer:
    """Stands in for a tokenizer: token ids work, text says what is missing.

    transformers' pipelines, which nnsight prepares inputs by, do not start without a tokenizer.
    """

    padding_side = "left"
    pad_token = None
    eos_token = None
    bos_token_id = None
    chat_template = None
    model_max_length = int(1e30)  # transformers' own "no limit"

    def __init__(self, config: Any) -> None:
        self.pad_token_id = config.pad_token_id
        self.eos_token_id = config.eos_token_id

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise LoadError(
            "this model was wrapped without a tokenizer, so it takes token ids and no text.\n"
            "Give `tokenizer=AutoTokenizer.from_pretrained(...)` when wrapping it."
        )

    decode = batch_decode = encode = apply_chat_template = __call__


def find_tokenizer(
    target: Any, config: Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer that lies beside the weights of a repo id, a directory or a loaded module.

    A module without one gets a `NoTokenizer`.

    Raises: LoadError, for a directory or repo id whose tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    name = getattr(target, "name_or_path", None) if isinstance(target, torch.nn.Module) else str(target)
    if name:
        try:
            return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            if not isinstance(target, torch.nn.Module):
                first = str(error).strip().split("\n")[0]
                raise LoadError(
                    f"{name} has no tokenizer that loads; give `tokenizer=...`. ({first})"
                ) from error
    return NoTokenizer(config)
