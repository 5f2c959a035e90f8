"""The families: one module per text model type, imported on first use.

A family is what differs between checkpoints, as data: `RENAME` (native path to standard name) and
`ENVOYS` (module class to envoy class).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..errors import UnsupportedModel
from ..plan import ModelPlan, plan

__all__ = ["Family", "family", "known_families", "register"]


@dataclass(frozen=True)
class Family:
    """The two tables of a family, and the reader of its config."""

    model_type: str
    rename: Mapping[Any, Any]
    envoys: Mapping[Any, Any]
    plan: Callable[[Any], ModelPlan]

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        """Itself: it cannot change, and the tables that it shows are their module's."""
        return self


_MODULES: dict[str, str] = {
    "gemma4_text": "gemloupe.families.gemma4_text",
    "gemma4_unified_text": "gemloupe.families.gemma4_unified_text",
}


def known_families() -> tuple[str, ...]:
    """The text model types that can be loaded."""
    return tuple(_MODULES)


def family(model_type: str) -> Family:
    """The family of a text `model_type`.

    Raises: UnsupportedModel, naming the known types.
    """
    if model_type not in _MODULES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported; known are {', '.join(known_families())}.\n"
            f"A new one is a module with RENAME and ENVOYS: `gemloupe.families.register(model_type, module)`."
        )
    module = import_module(_MODULES[model_type])
    return Family(
        model_type,
        rename=MappingProxyType(module.RENAME),
        envoys=MappingProxyType(module.ENVOYS),
        plan=getattr(module, "plan", plan),
    )


def register(model_type: str, module: str) -> None:
    """Add a family: `module` is the import path of a module with `RENAME` and `ENVOYS`.

    A module may also have a `plan(config)` of its own, which returns a `gemloupe.plan.ModelPlan`.

    Raises: UnsupportedModel, for a type that is registered already.
    """
    if model_type in _MODULES:
        raise UnsupportedModel(f"model type {model_type!r} is registered already, by {_MODULES[model_type]}.")
    _MODULES[model_type] = module
