"""Gemloupe: read and edit anything inside a Gemma 4 model by one stable name.

    from gemloupe import StandardizedTransformer

Importing the package imports neither torch nor nnsight; the names below do so on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from . import families as families
    from . import testing as testing
    from .geometry import ImageGeometry as ImageGeometry
    from .harvesting.run import harvest as harvest
    from .harvesting.store import Store as Store
    from .plan import ModelPlan as ModelPlan
    from .plan import plan as plan
    from .reference.report import Report as Report
    from .reference.verification import verify as verify
    from .references import Reference as Reference
    from .standardized import StandardizedTransformer as StandardizedTransformer

__version__ = "0.1.0"

# Where each public name lives.
_HOME = {
    "ImageGeometry": ".geometry",
    "ModelPlan": ".plan",
    "Reference": ".references",
    "Report": ".reference.report",
    "StandardizedTransformer": ".standardized",
    "Store": ".harvesting.store",
    "errors": ".errors",
    "families": ".families",
    "harvest": ".harvesting.run",
    "plan": ".plan",
    "testing": ".testing",
    "verify": ".reference.verification",
}

__all__ = [
    "ImageGeometry",
    "ModelPlan",
    "Reference",
    "Report",
    "StandardizedTransformer",
    "Store",
    "__version__",
    "errors",
    "families",
    "harvest",
    "plan",
    "testing",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gemloupe' has no attribute {name!r}")
    module = import_module(home, __name__)
    value = module if name in ("errors", "families", "testing") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
