"""Where images, frames and sound enter the text stream: the wrapper's inner model.

    inputs_embeds = embed_tokens(ids, the pad token's id at every placeholder)
    inputs_embeds[image_token_mask] = image_features     # row after row, image after image

and likewise for video frames and sound. The source is `Gemma4Model.forward`, and
`Gemma4UnifiedModel.forward`. The values are served on `model.vision` and `model.audio`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from ..layouts import AudioFeatures, ImageFeatures, TokenMask, VideoFeatures
from ..served import Item, served
from .base import Operation, StandardEnvoy

__all__ = ["KINDS", "ImageScatter", "SoundIntoStream", "VisionIntoStream"]

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "image_features": ("images",),
    "video_features": ("frames",),
    "frame_mask": ("audios",),
    "audio_features": ("audios",),
}
"""What the first axis counts at the operations that are not laid out by the rows of the batch."""

_PLACES: Final = "it says where the prompt has placeholders.\nChange the prompt."


class ImageScatter(StandardEnvoy):
    """The inner model of a wrapper, in whose forward features are scattered into the embeddings."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        "placeholders": Operation("self_get_placeholder_mask", "= self.get_placeholder_mask("),
        "image_features": Operation("image_features", "image_features = torch.cat("),
        "video_features": Operation("video_features", "video_features = torch.cat("),
        "frame_mask": Operation("audio_mask_from_encoder", "audio_mask_from_encoder = audio_output."),
        "audio_features": Operation("audio_features", "audio_features = audio_features["),
    }


class VisionIntoStream:
    """The values of `model.vision` that are found at the scatter."""

    @served("source.placeholders.output", of="scatter", piece=Item(0), read_only=_PLACES)
    def image_token_mask(self, value: Any) -> TokenMask:
        """Which tokens of the prompt an image stands in for.

        Layout: [batch seq], boolean. Read only. Known first of all, before `token_embeddings`.
        """
        return value

    @served("source.image_features.output", of="scatter")
    def image_features(self, value: Any) -> ImageFeatures:
        """What is put into the stream in the places of `image_token_mask`, row after row.

        Layout: [image_tokens hidden], padding left out: `layers[0].layer_input[image_token_mask]` is this
        very tensor. A write reaches the text model. Soft tokens are not scaled by `sqrt(hidden_size)`.
        """
        return value

    @served("source.placeholders.output", of="scatter", piece=Item(1), read_only=_PLACES)
    def video_token_mask(self, value: Any) -> TokenMask:
        """Which tokens of the prompt a frame of video stands in for.

        Layout: [batch seq], boolean. Read only. Known first of all, before `token_embeddings`.
        """
        return value

    @served("source.video_features.output", of="scatter")
    def video_features(self, value: Any) -> VideoFeatures:
        """What is put into the stream in the places of `video_token_mask`, frame after frame.

        Layout: [video_tokens hidden], padding left out. A write reaches the text model.
        """
        return value


class SoundIntoStream:
    """The values of `model.audio` that are found at the scatter."""

    @served("source.placeholders.output", of="scatter", piece=Item(2), read_only=_PLACES)
    def audio_token_mask(self, value: Any) -> TokenMask:
        """Which tokens of the prompt a sound stands in for.

        Layout: [batch seq], boolean. Read only. Known first of all, before `token_embeddings`.
        """
        return value

    @served("source.audio_features.output", of="scatter")
    def audio_features(self, value: Any) -> AudioFeatures:
        """What is put into the stream in the places of `audio_token_mask`, row after row.

        Layout: [audio_tokens hidden], padding left out. A write reaches the text model.
        """
        return value
