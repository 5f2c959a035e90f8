"""What a target on the command line names: a repo id, a directory, or a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .errors import BadArgument

if TYPE_CHECKING:
    from .standardized import StandardizedTransformer

__all__ = ["is_tiny", "load", "tiny_target"]

_TINY: Final = "tiny:"


def is_tiny(target: str) -> bool:
    """Whether a target names a tiny model, a known one or not."""
    return target.startswith(_TINY)


def tiny_target(target: str) -> tuple[str, bool] | None:
    """The shape of `tiny:SHAPE` and `tiny:SHAPE:wrapper`, and whether it is the wrapper; `None` for others.

    Raises: BadArgument, for an unknown tiny model.
    """
    if not is_tiny(target):
        return None
    from .testing import SHAPES

    shape, *rest = target.removeprefix(_TINY).split(":")
    if shape not in SHAPES or rest not in ([], ["wrapper"]):
        known = ", ".join(_TINY + known for known in SHAPES)
        raise BadArgument(
            f"there is no {target}; the tiny models are {known}, each also as the whole multimodal model, as "
            f"in {_TINY}{SHAPES[0]}:wrapper."
        )
    return shape, bool(rest)


def load(target: str, *, text: bool = False, **options: Any) -> StandardizedTransformer:
    """The model of a target, its weights loaded; `options` say how those of a checkpoint are (`device_map`).

    Without `text` it takes token ids alone, so that a checkpoint need not have a tokenizer to be verified.

    Raises: as `StandardizedTransformer`; BadArgument, for an unknown tiny model and for options of one.
    """
    if (of_tiny := tiny_target(target)) is not None:
        if options:
            raise BadArgument(
                f"{target} is made in memory, on the CPU, and takes no {next(iter(options))}; leave it out."
            )
        from .testing import tiny

        return tiny(of_tiny[0], wrapper=of_tiny[1])
    from .loading import read_config, text_config
    from .standardized import StandardizedTransformer
    from .tokens import NoTokenizer

    if not text:
        options["tokenizer"] = NoTokenizer(text_config(read_config(target)))
    return StandardizedTransformer(target, dispatch=True, **options)
