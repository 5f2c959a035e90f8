"""What a call is given, refused where it cannot be meant.

nnsight looks at the first input alone, and a Gemma 4 forward takes any keyword in silence: what is
misspelt, or meant for `generate`, would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Final

from .errors import BadArgument

__all__ = ["check_inputs", "check_keywords"]

# Beside the parameters that a forward names: what transformers reads out of its `**kwargs`
# (`utils.deprecation`, `utils.generic.can_return_tuple`, older names of the cache).
ALWAYS: Final = frozenset({"return_dict", "past_key_values", "cache_position"})


def check_inputs(inputs: tuple) -> None:
    """Refuse inputs that are no prompt.

    Raises: BadArgument.
    """
    if len(inputs) > 1:
        raise BadArgument(
            f"one input is a call's whole batch, and {len(inputs)} were given. For several prompts give a "
            f"list, `trace([one, other])`, or one `tracer.invoke(...)` each; options go by keyword."
        )
    for prompt in inputs:
        if prompt is None or (isinstance(prompt, (str, list, tuple)) and not len(prompt)):
            raise BadArgument(f"the prompt is empty: {prompt!r}. Give text, or token ids with BOS first.")
        if isinstance(prompt, (bool, int, float)):
            raise BadArgument(
                f"a prompt is text, a list of texts, token ids `[batch seq]` or an encoding, not {prompt!r}."
            )


def check_keywords(parameters: Iterable[str], names: Iterable[str]) -> None:
    """Refuse keywords that a forward with these parameters would take and not look at.

    Raises: BadArgument.
    """
    if "input_ids" not in parameters:
        return  # an adapter's own forward, which names nothing
    known = {*parameters, *ALWAYS, *_read_by_transformers()}
    for name in names:
        if name in known:
            continue
        if name in _generation():
            raise BadArgument(f"`{name}` is an option of `generate`; this call runs one forward.")
        if name == "batch_size":
            raise BadArgument("`batch_size` does nothing here: what a call is given runs as one batch.")
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        meant = f" Did you mean `{near[0]}`?" if near else ""
        raise BadArgument(f"the model's forward has no argument `{name}`.{meant}")


@cache
def _read_by_transformers() -> frozenset[str]:
    from transformers.utils.generic import TransformersKwargs

    return frozenset(TransformersKwargs.__annotations__)


@cache
def _generation() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())
