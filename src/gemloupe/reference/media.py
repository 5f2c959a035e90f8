"""What is no text in a prompt: images, frames of video, sounds, and how their features enter the stream.

    stream[tokens of a medium] = that medium's features, row by row of the batch

Source: `Gemma4Model.forward` and `Gemma4UnifiedModel.forward`: images first, then frames, then sounds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadArgument
from ..layouts import ImageFeatures, Residual, TokenMask, Tokens
from .audio import audio_parts
from .steps import Given, taken
from .towers import AudioTower, Towers, VisionTower
from .unified import frames_parts, patches_parts
from .vision import vision_parts
from .weights import Weights

__all__ = ["Media", "ids_of_text", "runs_of_media", "scattered", "token_masks"]


@dataclass(frozen=True)
class Media:
    """The media of one forward, under the names that transformers' processors and wrappers give them."""

    pixel_values: Float[Tensor, "images patches numbers"] | None = None
    image_position_ids: Int[Tensor, "images patches 2"] | None = None
    pixel_values_videos: Float[Tensor, "frames patches numbers"] | None = None
    video_position_ids: Int[Tensor, "frames patches 2"] | None = None
    input_features: Float[Tensor, "audios frames numbers"] | None = None
    input_features_mask: Bool[Tensor, "audios frames"] | None = None

    def __post_init__(self) -> None:
        pairs = (
            ("pixel_values", "image_position_ids"),
            ("pixel_values_videos", "video_position_ids"),
            # transformers 5.24 leaves sounds out without a word where it is given no mask.
            ("input_features", "input_features_mask"),
        )
        for one, other in pairs:
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise BadArgument(f"{one} and {other} come together.")

    @classmethod
    def of(cls, encoding: Mapping[str, Any]) -> Media | None:
        """The media in what a processor returns, `None` where there are none."""
        found = {field.name: encoding.get(field.name) for field in fields(cls)}
        return cls(**found) if any(value is not None for value in found.values()) else None

    @property
    def kinds(self) -> frozenset[str]:
        """Which of `image`, `video` and `audio` there are."""
        given = {"image": self.pixel_values, "video": self.pixel_values_videos, "audio": self.input_features}
        return frozenset(kind for kind, values in given.items() if values is not None)


def token_masks(weights: Weights, input_ids: Tokens) -> dict[str, TokenMask]:
    """Which tokens stand for images, for frames of video and for sounds, by the masks' standard names.

    Raises: BadArgument, for weights without towers.
    """
    towers = _towers(weights)
    masks: dict[str, TokenMask] = {}
    if towers.vision is not None:
        masks["vision.image_token_mask"] = _stands_for(towers.image_token, input_ids)
        masks["vision.video_token_mask"] = _stands_for(towers.video_token, input_ids)
    if towers.audio is not None:
        masks["audio.audio_token_mask"] = _stands_for(towers.audio_token, input_ids)
    return masks


def ids_of_text(towers: Towers | None, input_ids: Tokens) -> Tokens:
    """The ids whose embeddings are looked up: the pad token's in the place of every medium's, in a wrapper.

    Their own may lie outside the vocabulary, and need no medium to stand for.
    """
    if towers is None:
        return input_ids
    for token in (towers.image_token, towers.video_token, towers.audio_token):
        input_ids = input_ids.masked_fill(_stands_for(token, input_ids), towers.pad_token)
    return input_ids


def runs_of_media(kinds: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Which image each token belongs to, -1 for none, as `sight` takes it.

    kinds: a processor's `mm_token_type_ids`, 1 for images and 2 for frames of video. Those with no token
        between them are one to the mask.
    Source: `get_block_sequence_ids_for_mask`.
    """
    seen = (kinds == 1) | (kinds == 2)
    begins = seen & ~torch.nn.functional.pad(seen, (1, -1))
    return (begins.cumsum(-1) - 1).masked_fill(~seen, -1)


def scattered(
    weights: Weights, media: Media, input_ids: Tokens, stream: Residual, *, given: Given | None = None
) -> Generator[dict[str, Tensor], None, Residual]:
    """Every value of every medium, piece by piece; returns the stream that enters the first block.

    given: see `block`. Values by name are those of the images, where frames of video pass the tower too.
    """
    masks = token_masks(weights, input_ids)
    for kind in ("image", "video", "audio"):
        if kind not in media.kinds:
            continue
        host = "audio" if kind == "audio" else "vision"
        of_kind = _beside_images(given) if kind == "video" and "image" in media.kinds else given
        name = f"{host}.{kind}_features"
        for found in _parts(weights, media, kind, of_kind):
            if name in found:
                features = weights.real(taken(of_kind, name, found[name]))
                stream = _replaced(kind, stream, masks[f"{host}.{kind}_token_mask"], features)
            yield found
    return stream


def _parts(weights: Weights, media: Media, kind: str, given: Given | None) -> Iterator[dict[str, Tensor]]:
    towers = _towers(weights)
    if (towers.audio if kind == "audio" else towers.vision) is None:
        raise BadArgument(f"this model takes no {kind}: its config has no tower or embedder for it.")
    if kind == "audio":
        assert media.input_features is not None
        assert media.input_features_mask is not None
        parts = audio_parts if isinstance(towers.audio, AudioTower) else frames_parts
        return parts(weights, media.input_features, media.input_features_mask, given=given)
    pixels, places = media.pixel_values, media.image_position_ids
    if kind == "video":
        pixels, places = media.pixel_values_videos, media.video_position_ids
    assert pixels is not None
    assert places is not None
    parts = vision_parts if isinstance(towers.vision, VisionTower) else patches_parts
    return parts(weights, pixels, places, features=f"{kind}_features", given=given)


def _replaced(kind: str, stream: Residual, mask: TokenMask, features: ImageFeatures) -> Residual:
    if int(mask.sum()) != len(features):
        raise BadArgument(
            f"the text has {int(mask.sum())} {kind} tokens, and the features are {len(features)}."
        )
    stream = stream.clone()
    stream[mask] = features
    return stream


def _beside_images(given: Given | None) -> Given | None:
    if not isinstance(given, Mapping):
        return given
    return {name: value for name, value in given.items() if name == "vision.video_features"}


def _stands_for(token: int | None, input_ids: Tokens) -> TokenMask:
    return torch.zeros_like(input_ids, dtype=torch.bool) if token is None else input_ids == token


def _towers(weights: Weights) -> Towers:
    if weights.towers is None:
        raise BadArgument("media are of a wrapper: pass the config and the state_dict() of the whole model.")
    return weights.towers
