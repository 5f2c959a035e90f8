"""Reading a target's config, and refusing what cannot be loaded before any weight is read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .errors import LoadError, UnsupportedModel

__all__ = ["check_weights", "missing_weights", "read_config", "text_config"]

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def read_config(
    target: Any, *, revision: str | None = None, trust_remote_code: bool = False, **_: Any
) -> Any:
    """The transformers config of a repo id, a directory, or a loaded module.

    Raises: LoadError, where there is none to read; UnsupportedModel, for a type transformers does not
    know or a module without a config.
    """
    if isinstance(target, torch.nn.Module):
        if hasattr(target, "_orig_mod"):
            raise UnsupportedModel(
                "a module compiled by torch.compile cannot be traced; wrap the module it was made of."
            )
        config = getattr(target, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise UnsupportedModel(
                f"{type(target).__name__} has no transformers config; pass a repo id, a directory written by "
                f"save_pretrained, or a module loaded by transformers."
            )
        return config
    if not isinstance(target, (str, Path)):
        raise LoadError(f"a model is a repo id, a directory or a module, not {type(target).__name__}.")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    place = Path(target)
    if place.is_dir() and not (place / "config.json").is_file():
        raise LoadError(f"{place} has no config.json; a model directory is what `save_pretrained` writes.")
    try:
        return AutoConfig.from_pretrained(str(target), revision=revision, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise UnsupportedModel(f"transformers does not know the model type of {target}: {error}") from error
    except StrictDataclassError as error:
        first = " ".join(str(error).split())
        raise UnsupportedModel(f"the config of {target} does not hold together: {first}") from error
    except OSError as error:
        kind = (
            "directory"
            if place.is_absolute() or str(target).startswith(".")
            else "directory or reachable repo id"
        )
        first = str(error).strip().split("\n")[0]
        raise LoadError(f"{target} is no {kind} with a config: {first}") from error


def text_config(config: Any) -> Any:
    """The config of the text stack: the config itself, or a wrapper's `text_config`."""
    return config.get_text_config()


def check_weights(target: Any) -> None:
    """Refuse a local directory that holds a config and no weights, and a module without a head.

    Raises: LoadError; UnsupportedModel.
    """
    if isinstance(target, torch.nn.Module):
        if not getattr(target, "can_generate", bool)():
            raise UnsupportedModel(
                f"{type(target).__name__} has no head, so it answers with no logits; wrap the "
                f"*ForCausalLM or *ForConditionalGeneration that it is part of."
            )
        return
    place = Path(target)
    if place.is_dir() and not any(any(place.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise LoadError(
            f"{place} has a config but no weights (*.safetensors); copy them beside config.json, or see "
            f"`python -m gemloupe inspect {place}`, which needs the config alone."
        )


@contextmanager
def missing_weights() -> Iterator[list[str]]:
    """The weights that a checkpoint loaded meanwhile lacks.

    transformers makes them up, and says so in its log alone, as a row of the load report
    (`transformers.modeling_utils`): `model.norm.weight | MISSING |`.
    """
    from transformers.utils import logging as transformers

    names: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            names.extend(re.findall(r"^(.+?)\s*\|\s*MISSING\b", record.getMessage(), re.MULTILINE))

    reader, before = Reader(), transformers.get_verbosity()
    transformers.add_handler(reader)
    transformers.disable_default_handler()
    transformers.set_verbosity_warning()
    try:
        yield names
    finally:
        transformers.set_verbosity(before)
        transformers.enable_default_handler()
        transformers.remove_handler(reader)
