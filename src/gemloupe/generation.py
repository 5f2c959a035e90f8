"""Ways of generating that break what an edit or a capture counts on, refused before anything runs."""

from __future__ import annotations

from typing import Any, Final

from .errors import BadArgument
from .prompts import CACHES

__all__ = ["one_row_each", "one_step_each", "uses_cache"]

# Forwards of several tokens that are no prompt, or a prompt in several forwards.
_UNEVEN: Final = ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model")


def one_row_each(model: Any) -> None:
    """Refuse several invokes whose rows transformers multiplies.

    Raises: BadArgument, for beams or several returned sequences: rows could not be told apart.
    """
    for name in ("num_beams", "num_return_sequences"):
        if (_option(model, name) or 1) > 1:
            raise BadArgument(
                f"{name}={_option(model, name)} repeats the rows of a batch, so several invokes cannot be "
                f"told apart. Generate from one invoke at a time."
            )


def one_step_each(model: Any, verb: str, *, joins: bool) -> None:
    """Refuse a generation whose steps are not the prompt and then one token each.

    `joins`: the verb also joins the steps, which beams reorder and a static cache pads.
    Raises: BadArgument.
    """
    if not model.interleaver.generating:
        return
    names = (*_UNEVEN, "cache_implementation") if joins else _UNEVEN
    for name in names:
        value = _option(model, name)
        if value and value != "dynamic":
            raise BadArgument(
                f"{verb} does not know where the tokens stand under {name}={value!r}; leave it out."
            )
    given = [model.interleaver.encoding.get(name) for name in CACHES] if joins else []
    fixed = next((cache for cache in given if getattr(cache, "is_compileable", False)), None)
    if fixed is not None:
        raise BadArgument(
            f"{verb} does not know where the tokens stand in a {type(fixed).__name__}, longer than its "
            f"text; give a DynamicCache."
        )
    if joins and (_option(model, "num_beams") or 1) > 1:
        raise BadArgument(
            f"{verb} cannot follow beams, whose rows change places; generate without num_beams."
        )


def uses_cache(model: Any) -> bool:
    """Whether a generation's later steps run on the new tokens alone."""
    return _option(model, "use_cache") is not False


def _option(model: Any, name: str) -> Any:
    options = model.interleaver.options
    config = options.get("generation_config") or getattr(model._module, "generation_config", None)
    return options[name] if name in options else getattr(config, name, None)
