"""Warnings that point at the user's line: not at ours, nor at one of the libraries between."""

from __future__ import annotations

import sys
import warnings
from typing import Final

__all__ = ["warn"]

# Packages whose frames stand between a user's `with model.trace(...)` and what warns.
BETWEEN: Final = frozenset({"gemloupe", "nnsight", "torch", "transformers", "contextlib", "greenlet"})


def warn(message: str, category: type[Warning]) -> None:
    """`warnings.warn`, at the innermost frame that is not of `BETWEEN`."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth + 1)
