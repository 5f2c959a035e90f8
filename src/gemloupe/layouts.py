"""Named axes, and the layouts that values are served in.

A layout is the order of a value's axes, in the words every docstring uses:
`batch seq hidden heads kv_heads head_dim query key vocab layers ple experts top_k intermediate images
patches`.
Each has a jaxtyping alias of the same name for annotations: `Residual` is
`Float[Tensor, "batch seq hidden"]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["LAYOUTS", "Layout"]


@dataclass(frozen=True)
class Layout:
    """The axes of a value, in order, and the kind of number it holds."""

    name: str
    axes: tuple[str, ...]
    kind: str = "float"

    def __str__(self) -> str:
        return f"[{' '.join(self.axes)}]"

    def axis(self, name: str) -> int:
        """The index of the axis called `name`."""
        return self.axes.index(name)


Residual = Float[Tensor, "batch seq hidden"]
Tokens = Int[Tensor, "batch seq"]
TokenMask = Bool[Tensor, "batch seq"]
Logits = Float[Tensor, "batch seq vocab"]
Distribution = Float[Tensor, "batch vocab"]
PerLayerInputs = Float[Tensor, "batch seq layers ple"]
PerLayerInput = Float[Tensor, "batch seq ple"]
Neurons = Float[Tensor, "batch seq intermediate"]
ExpertScores = Float[Tensor, "batch seq experts"]
ExpertWeights = Float[Tensor, "batch seq top_k"]
ExpertIndices = Int[Tensor, "batch seq top_k"]
ExpertOutputs = Float[Tensor, "batch seq top_k hidden"]
Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
OwnKeys = Float[Tensor, "batch kv_heads seq head_dim"]
Pattern = Float[Tensor, "batch heads query key"]
VisibleKeys = Bool[Tensor, "batch heads query key"]
HeadOutputs = Float[Tensor, "batch query heads head_dim"]
Patches = Float[Tensor, "images patches vision_hidden"]
PatchMask = Bool[Tensor, "images patches"]
PooledPatches = Float[Tensor, "image_tokens vision_hidden"]
ImageFeatures = Float[Tensor, "image_tokens hidden"]
VideoFeatures = Float[Tensor, "video_tokens hidden"]
Frames = Float[Tensor, "audios frames audio_hidden"]
FrameMask = Bool[Tensor, "audios frames"]
ProjectedFrames = Float[Tensor, "audios frames projected"]
AudioFeatures = Float[Tensor, "audio_tokens hidden"]

_KINDS: Final = {Float: "float", Int: "int", Bool: "bool"}

LAYOUTS: Final = {
    name: Layout(name, tuple(alias.dim_str.split()), _KINDS[alias.dtype])
    for name, alias in list(globals().items())
    if getattr(alias, "array_type", None) is Tensor
}
"""Every layout by the name of its alias; a value's stub names its alias as its return annotation."""
