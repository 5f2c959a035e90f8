"""The media of a `gemma4_unified` wrapper, which has no towers: merged patches and raw frames of sound.

    patch_embeddings = layer_norm(patch_dense(layer_norm(pixels)))
    tower_output     = layer_norm(patch_embeddings + table[x][0] + table[y][1])
    feature          = projection(tower_output / rms)

A frame of sound is projected as it is. Padded rows leave no feature.
Source: `Gemma4UnifiedVisionEmbedder` and `Gemma4UnifiedMultimodalEmbedder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadArgument
from .ops import linear
from .steps import Given, Steps
from .tower_ops import check_patches, layer_norm, project
from .towers import PatchEmbedder, RawFrames
from .weights import Weights

__all__ = ["frames_parts", "patches_parts"]

# torch's own: these layer norms are given none.
_EPS: Final = 1e-5


def patches_parts(
    weights: Weights,
    pixels: Float[Tensor, "images patches numbers"],
    places: Int[Tensor, "images patches 2"],
    *,
    features: str,
    given: Given | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Every value of some images, by standard name, in one piece; the arguments are `vision_parts`'."""
    plan = _patches_plan(weights)
    of, steps = weights.under("model.embed_vision."), Steps("", given, weights.real)
    check_patches(pixels, places, patch_size=plan.patch_size, table_size=plan.table_size)
    places = places.to(weights.device)

    def normed(name: str, x: Tensor) -> Tensor:
        return layer_norm(_EPS, x, of[f"{name}.weight"], of[f"{name}.bias"])

    real = places.ne(-1).all(-1)
    steps("vision.patch_mask", real)
    x = steps.between(normed("patch_ln1", steps.between(weights.real(pixels))))
    x = steps.between(linear(of["patch_dense.weight"], x) + of["patch_dense.bias"].double())
    x = steps("vision.patch_embeddings", normed("patch_ln2", x))
    table = of["pos_embedding"]
    for axis in range(2):
        place = places[..., axis]
        x = x + table[place.clamp(min=0), axis].double() * place.ne(-1)[..., None]
    x = steps("vision.tower_output", normed("pos_norm", steps.between(x)))
    projected = project(weights.under("model.embed_vision.multimodal_embedder."), plan.norm_eps, x)
    steps(f"vision.{features}", projected[real])
    yield steps.found


def frames_parts(
    weights: Weights,
    sounds: Float[Tensor, "audios frames samples"],
    real: Bool[Tensor, "audios frames"],
    *,
    given: Given | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Every value of some sounds, by standard name, in one piece; the arguments are `audio_parts`'."""
    plan = _frames_plan(weights)
    steps = Steps("", given, weights.real)
    if sounds.dim() != 3 or sounds.shape[-1] != plan.output_size or real.shape != sounds.shape[:2]:
        raise BadArgument(
            f"input_features are [audios frames {plan.output_size}] and their mask [audios frames], "
            f"not {list(sounds.shape)} and {list(real.shape)}."
        )
    real = real.to(weights.device).bool()
    frames = steps("audio.tower_output", weights.real(sounds))
    steps("audio.frame_mask", real)
    projected = project(weights.under("model.embed_audio."), plan.norm_eps, steps.between(frames))
    steps("audio.audio_features", projected[real])
    yield steps.found


def _patches_plan(weights: Weights) -> PatchEmbedder:
    plan = None if weights.towers is None else weights.towers.vision
    if not isinstance(plan, PatchEmbedder):
        raise BadArgument(
            "these weights embed no patches; pass a gemma4_unified wrapper's config and weights."
        )
    return plan


def _frames_plan(weights: Weights) -> RawFrames:
    plan = None if weights.towers is None else weights.towers.audio
    if not isinstance(plan, RawFrames):
        raise BadArgument(
            "these weights embed no frames; pass a gemma4_unified wrapper's config and weights."
        )
    return plan
