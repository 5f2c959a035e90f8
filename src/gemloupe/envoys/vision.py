"""The way of an image into the stream: patches, the tower's blocks, pooling, the projector.

    x    = patch_embeddings + position embeddings        # zero on padded rows
    x    = block(x), for each block of the tower: the text block's sandwich, attention in both directions
    soft = standardize(sqrt(vision_hidden) * mean over pooling x pooling patches of x)
    image_features = projector(soft)

Images are padded to one number of patches (`patch_mask`), and the padded rows run through every block, seen
by no query. The names are the text block's. 12B has no tower: an embedder's `tower_output` goes to the
projector unpooled.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch

from ..layouts import Patches, PatchMask, PooledPatches
from ..served import Argument, Field, served
from .absence import no_pattern, no_tower
from .attention import Attention
from .base import Operation
from .facts import TowerFacts
from .layer import Layer
from .mlp import Mlp
from .scatter import VisionIntoStream
from .tower import IMAGES, PartOfBlockOfTower, PartOfTower

__all__ = ["Projector", "UnifiedVision", "Vision", "VisionAttention", "VisionLayer", "VisionMlp"]

_PADDED: Final = "it says which rows the processor padded.\nChange the image."


class Vision(VisionIntoStream, PartOfTower):
    """`model.vision`: the tower of E2B, E4B, 26B-A4B and 31B."""

    FEEDS: ClassVar = ("images", "frames")
    FEEDS_OF: ClassVar = {
        "image_token_mask": (),
        "video_token_mask": (),
        "image_features": ("images",),
        "video_features": ("frames",),
    }
    PARTS: ClassVar = {"layers": no_tower}

    @property
    def standard_path(self) -> str:
        return "vision"

    @served("input", piece=Argument(1, "pixel_position_ids"), read_only=_PADDED, private=True)
    def patch_mask(self, value: Any) -> PatchMask:
        """Which patches are real, and not padding to the batch's number of patches.

        Layout: [images patches], boolean. Read only.
        """
        return is_real(value)

    @served("patch_embedder.input_proj.output")
    def patch_embeddings(self, value: Any) -> Patches:
        """The patches' embeddings, before the 2D position embedding is added.

        Layout: [images patches vision_hidden], padded rows included.
        """
        return value

    @served("encoder.output", piece=Field("last_hidden_state"))
    def tower_output(self, value: Any) -> Patches:
        """The stream that leaves the tower's last block, before it is pooled.

        Layout: [images patches vision_hidden], padded rows included; a write to those changes nothing.
        """
        return value


class UnifiedVision(Vision):
    """`model.vision` on 12B: an embedder of patches, no tower."""

    @served("input", piece=Argument(1, "image_position_ids"), read_only=_PADDED, private=True)
    def patch_mask(self, value: Any) -> PatchMask:
        """Which patches are real, and not padding to the batch's number of patches.

        Layout: [images patches], boolean. Read only.
        """
        return is_real(value)

    @served("patch_ln2.output")
    def patch_embeddings(self, value: Any) -> Patches:
        """The patches' embeddings, before the 2D position embedding is added.

        Layout: [images patches vision_hidden], padded rows included.
        """
        return value

    @served("pos_norm.output")
    def tower_output(self, value: Any) -> Patches:
        """The embedder's stream as it goes to the projector.

        Layout: [images patches vision_hidden], padded rows included; a write to those changes nothing.
        """
        return value


def is_real(position_ids: torch.Tensor) -> torch.Tensor:
    """Which patches have a place in the image; source: `Gemma4VisionModel.forward`."""
    return ~(position_ids == -1).all(-1)


class Projector(PartOfTower):
    """`model.projector`: from the tower's width to the stream's, the last module before the scatter."""

    FEEDS: ClassVar = ("images", "frames")

    @property
    def standard_path(self) -> str:
        return "projector"

    @served("input", piece=Argument(0, "inputs_embeds"), needs=no_tower)
    def soft_tokens(self, value: Any) -> PooledPatches:
        """The pooled patches, scaled by `sqrt(vision_hidden)` and, where the config says so, standardized.

        Layout: [image_tokens vision_hidden], padding left out, image after image (frame after frame).
        Raises: Unavailable, on 12B, which pools nothing.
        """
        return value


class VisionLayer(TowerFacts, PartOfBlockOfTower):
    """A block of the tower; `vision.layers[i]`."""

    FEEDS: ClassVar = ("images", "frames")
    OPERATIONS: ClassVar[dict[str, Operation]] = Layer.OPERATIONS

    @property
    def block(self) -> VisionLayer:
        return self

    @property
    def index(self) -> int:
        """The block's place in the tower, from 0."""
        return int(self._module.layer_idx)  # pyright: ignore[reportArgumentType]  # torch types it as a tensor

    @property
    def standard_path(self) -> str:
        return f"vision.layers[{self.index}]"

    layer_input = Layer.layer_input.on(IMAGES)
    mid_stream = Layer.mid_stream.on(
        IMAGES,
        doc="""The stream after the attention's add.

        Layout: [images patches vision_hidden], equal to `layer_input + attention_output`. A write reaches
        the MLP and the residual.
        """,
    )
    layer_output = Layer.layer_output.on(
        IMAGES,
        doc="""The stream leaving the block.

        Layout: [images patches vision_hidden], padded rows included.
        """,
    )


class VisionAttention(TowerFacts, PartOfBlockOfTower):
    """`vision.layers[i].self_attn`: attention in both directions, under any implementation."""

    FEEDS: ClassVar = ("images", "frames")
    OPERATIONS: ClassVar[dict[str, Operation]] = Attention.OPERATIONS

    attention_input = Attention.attention_input.on(IMAGES)
    own_keys = Attention.own_keys.on(
        IMAGES,
        doc="""The keys this block computes, normed and rotated.

        Layout: [images kv_heads patches head_dim].
        """,
    )
    own_values = Attention.own_values.on(
        IMAGES,
        doc="""The values this block computes, after `v_norm`.

        Layout: [images kv_heads patches head_dim].
        """,
    )
    attention_queries = Attention.attention_queries.on(IMAGES)
    attention_keys = Attention.attention_keys.on(
        IMAGES,
        doc="""The keys this block attends with, as its private copy.

        Layout: [images kv_heads key head_dim]. There is no cache: they are `own_keys`.
        """,
    )
    attention_values = Attention.attention_values.on(
        IMAGES,
        doc="""The values this block attends with, as its private copy.

        Layout: [images kv_heads key head_dim]. There is no cache: they are `own_values`.
        """,
    )
    attention_scores = Attention.attention_scores.on(IMAGES, needs=no_pattern)
    attention_probabilities = Attention.attention_probabilities.on(IMAGES, needs=no_pattern)
    visible_keys = Attention.visible_keys.on(
        IMAGES,
        needs=no_pattern,
        doc="""Which keys each query may see: all but the padding, in both directions.

        Layout: [images heads query key], true where the key is seen. Read only.
        Raises: Unavailable, under flash attention.
        """,
    )
    attention_head_outputs = Attention.attention_head_outputs.on(IMAGES)
    attention_projection = Attention.attention_projection.on(IMAGES)
    attention_output = Attention.attention_output.on(IMAGES)


class VisionMlp(TowerFacts, PartOfBlockOfTower):
    """`vision.layers[i].mlp`."""

    FEEDS: ClassVar = ("images", "frames")

    mlp_input = Mlp.mlp_input.on(
        IMAGES,
        doc="""The normed stream that the MLP reads.

        Layout: [images patches vision_hidden].
        """,
    )
    mlp_neurons = Mlp.mlp_neurons.on(
        IMAGES,
        doc="""The MLP's activations, entering `down_proj`.

        Layout: [images patches intermediate].
        """,
    )
    mlp_projection = Mlp.mlp_projection.on(
        IMAGES,
        doc="""What the post-norm receives: `down_proj`'s output.

        Layout: [images patches vision_hidden].
        """,
    )
    mlp_output = Mlp.mlp_output.on(
        IMAGES,
        doc="""What the MLP adds to the stream, after the post-norm.

        Layout: [images patches vision_hidden].
        """,
    )
