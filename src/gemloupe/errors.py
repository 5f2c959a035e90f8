"""Every error and warning the package raises.

Each message makes three moves: what was asked, what is there, and what to write instead. The two
errors that mean "this name is not here" are also `AttributeError`, so that `hasattr` answers truly;
`envoys.base.StandardEnvoy.__getattr__` keeps their text from being lost on the way out.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "BadArgument",
    "BadWrite",
    "DamagedStore",
    "GemloupeError",
    "HarvestStopped",
    "LateEdit",
    "LoadError",
    "NeverRan",
    "NoSuchBlock",
    "NothingEdited",
    "OutOfOrder",
    "OutsideTrace",
    "PromptWarning",
    "ReadOnly",
    "StepsWarning",
    "StoreWarning",
    "Unavailable",
    "UnknownName",
    "UnsupportedModel",
    "UnsupportedRelease",
]


class GemloupeError(Exception):
    """The base of every error of this package."""


class UnsupportedModel(GemloupeError, ValueError):
    """The config describes a model this package does not know, or a setting it did not consider."""


class UnsupportedRelease(GemloupeError, RuntimeError):
    """The installed transformers spells an operation that a value is served from differently."""


class LoadError(GemloupeError, OSError):
    """The target cannot be loaded: no such directory, no config in it, or no weights."""


class Unavailable(GemloupeError, AttributeError):
    """A standard value that this checkpoint, block or kernel does not have."""


class UnknownName(GemloupeError, AttributeError):
    """A name that is neither a standard one nor a native one; the nearest is suggested.

    The message may be given as a function: names are also probed to learn that they are not there, and
    looking for the nearest is dear.
    """

    def __init__(self, message: str | Callable[[], str]) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        (message,) = self.args
        return message if isinstance(message, str) else message()


class OutsideTrace(GemloupeError, RuntimeError):
    """A value was used as a tensor, or written, where no forward is running."""


class OutOfOrder(GemloupeError, RuntimeError):
    """A value was asked for after the forward had passed it."""


class NeverRan(GemloupeError, RuntimeError):
    """A value was asked for whose module this call does not run."""


class LateEdit(GemloupeError, RuntimeError):
    """A tensor was edited in place after the forward had moved on, so the edit could not reach it."""


class ReadOnly(GemloupeError, TypeError):
    """A value that nothing in the model reads was written."""


class BadWrite(GemloupeError, ValueError):
    """A write of the wrong shape, dtype, device or range."""


class NoSuchBlock(GemloupeError, IndexError):
    """A block number past the end of the stack."""


class BadArgument(GemloupeError, ValueError):
    """An argument that cannot be meant: a layer out of range, a vector of the wrong width."""


class HarvestStopped(GemloupeError, RuntimeError):
    """A harvest ended before its end: the disk is full, or a value is not finite. What is complete stays."""


class DamagedStore(GemloupeError, OSError):
    """A file of a store is gone, was cut or was changed."""


class NothingEdited(UserWarning):
    """A verb that edits found no token to edit in its call."""


class PromptWarning(UserWarning):
    """The prompt is not what a Gemma model was trained on (no BOS, or two)."""


class StepsWarning(UserWarning):
    """A loop asked for more steps than the call made, or a kept edit was made in the first step alone."""


class StoreWarning(UserWarning):
    """A store that a harvest goes on with is not, bit for bit, what the model computes now."""
