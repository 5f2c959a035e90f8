"""The way of a sound into the stream: frames, the Conformer's blocks, the projector.

    h1  = x  + feed_forward1.mlp_output         # half of a feed-forward: `residual_weight` is in it
    h2  = h1 + self_attn.attention_output
    h3  = h2 + lconv1d.convolution_output
    h4  = h3 + feed_forward2.mlp_output
    out = norm_out(h4)
    audio_features = audio_projector(output_proj(out)), padding left out

The source is `Gemma4AudioLayer.forward`; h4 is clamped to `gradient_clipping` before its norm. Sounds are
padded to one number of frames (`frame_mask`). 12B has no tower: frames of raw samples go to the projector.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch

from ..layouts import FrameMask, Frames, ProjectedFrames
from ..served import Argument, Item, served
from .absence import no_audio_tower
from .facts import TowerFacts
from .scatter import SoundIntoStream
from .tower import PartOfBlockOfTower, PartOfTower

__all__ = [
    "Audio",
    "AudioAttention",
    "AudioConvolution",
    "AudioLayer",
    "AudioProjector",
    "HalfFeedForward",
    "UnifiedAudio",
]

_PADDED: Final = "it says which frames the processor padded.\nChange the sound."


class Audio(SoundIntoStream, PartOfTower):
    """`model.audio`: the tower of E2B and E4B."""

    FEEDS: ClassVar = ("audios",)
    FEEDS_OF: ClassVar = {"audio_token_mask": ()}
    PARTS: ClassVar = {"layers": no_audio_tower}

    @property
    def standard_path(self) -> str:
        return "audio"

    @served("subsample_conv_projection.output", piece=Item(0), needs=no_audio_tower)
    def frame_embeddings(self, value: Any) -> Frames:
        """The frames as they enter the tower's first block: the spectrogram, subsampled fourfold in time.

        Layout: [audios frames audio_hidden], padded frames included.
        Raises: Unavailable, on 12B, whose frames are raw samples.
        """
        return value

    @served("output_proj.input", piece=Argument(0, "input"))
    def tower_output(self, value: Any) -> Frames:
        """The stream that leaves the tower's last block, before `output_proj`.

        Layout: [audios frames audio_hidden], padded frames included.
        """
        return value

    # What the processor made may be a view of the caller's own mask: this is a copy.
    @served("source.frame_mask.output", of="scatter", read_only=_PADDED, private=True)
    def frame_mask(self, value: Any) -> FrameMask:
        """Which frames are real, and not padding to the batch's number of frames.

        Layout: [audios frames], boolean. Read only. Known after `soft_tokens`.
        """
        return value


class AudioProjector(PartOfTower):
    """`model.audio_projector`: to the text stream's width, the last module before the scatter."""

    FEEDS: ClassVar = ("audios",)

    @property
    def standard_path(self) -> str:
        return "audio_projector"

    @served("input", piece=Argument(0, "inputs_embeds"), needs=no_audio_tower)
    def soft_tokens(self, value: Any) -> ProjectedFrames:
        """The tower's answer, after `output_proj`, as the projector takes it.

        Layout: [audios frames projected], padded frames included.
        Raises: Unavailable, on 12B, where it is `tower_output`.
        """
        return value


class UnifiedAudio(Audio, AudioProjector):
    """`model.audio` on 12B, which is its `audio_projector` too: frames of raw samples, no tower."""

    # The frames are the caller's own tensor: this is a copy.
    @served("input", piece=Argument(0, "inputs_embeds"), private=True)
    def tower_output(self, value: Any) -> Frames:
        """The frames of raw samples, as the projector takes them.

        Layout: [audios frames audio_hidden], padded frames included.
        """
        # A gradient is taken of what the processor made, too.
        wanted = torch.is_grad_enabled() and not value.requires_grad and value.is_floating_point()
        return value.detach().clone().requires_grad_() if wanted else value


class AudioLayer(TowerFacts, PartOfBlockOfTower):
    """A block of the tower, a Conformer's; `audio.layers[i]`."""

    FEEDS: ClassVar = ("audios",)

    @property
    def block(self) -> AudioLayer:
        return self

    @property
    def index(self) -> int:
        """The block's place in the tower, from 0."""
        return int(self.path.rpartition(".")[2])

    @property
    def standard_path(self) -> str:
        return f"audio.layers[{self.index}]"

    @served("input", piece=Argument(0, "hidden_states"), renamed=True)
    def layer_input(self, value: Any) -> Frames:
        """The stream entering the block.

        Layout: [audios frames audio_hidden].
        """
        return value

    @served("output")
    def layer_output(self, value: Any) -> Frames:
        """The stream leaving the block, after its norm: what was added before is not found in it unscaled.

        Layout: [audios frames audio_hidden].
        """
        return value


class HalfFeedForward(PartOfBlockOfTower):
    """`audio.layers[i].feed_forward1` and `feed_forward2`."""

    FEEDS: ClassVar = ("audios",)

    # The model scales and adds in place on what its norm made: this is a copy, which goes back if edited.
    @served("post_layer_norm.output", private=True)
    def mlp_output(self, value: Any) -> Frames:
        """What this half of a feed-forward adds to the stream, its weight of a half included.

        Layout: [audios frames audio_hidden].
        """
        return value * self._module.post_layer_scale

    mlp_output.back(lambda host, new, piece: unscaled(new, host._module.post_layer_scale, piece))


def unscaled(new: torch.Tensor, scale: Any, piece: torch.Tensor) -> torch.Tensor:
    """What `scale` makes `new` of: `piece`, bit for bit, where `new` was made of it."""
    before = new / scale
    same = new == piece * scale
    return torch.where(same, piece.detach() + (before - before.detach()), before)


class AudioAttention(PartOfBlockOfTower):
    """`audio.layers[i].self_attn`: chunks of frames that see a few frames back."""

    FEEDS: ClassVar = ("audios",)

    @served("norm_post_attn.output", of="block", private=True)
    def attention_output(self, value: Any) -> Frames:
        """What the attention adds to the stream, after its post-norm.

        Layout: [audios frames audio_hidden].
        """
        return value

    attention_output.back(lambda host, new, piece: new.clone())  # the model adds to it in place


class AudioConvolution(PartOfBlockOfTower):
    """`audio.layers[i].lconv1d`: a causal depthwise convolution between two gated projections."""

    FEEDS: ClassVar = ("audios",)

    @served("linear_end.output", private=True)
    def convolution_output(self, value: Any) -> Frames:
        """What the convolution adds to the stream.

        Layout: [audios frames audio_hidden].
        """
        return value

    convolution_output.back(lambda host, new, piece: new.clone())  # the model adds to it in place
