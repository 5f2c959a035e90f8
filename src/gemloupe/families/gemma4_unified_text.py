"""Gemma 4 unified, text: 12B (`model_type` `gemma4_unified_text`), bare or inside the wrapper.

The same block as `gemma4_text` without per-layer embeddings and without a mixture; the wrapper has no
tower, an embedder projects raw patches and raw audio frames.
"""

from __future__ import annotations

from typing import Any, Final

from transformers.models.gemma4_unified import modeling_gemma4_unified as native

from ..envoys.attention import Attention
from ..envoys.audio import UnifiedAudio
from ..envoys.base import Blocks
from ..envoys.layer import Layer
from ..envoys.mlp import Mlp
from ..envoys.scatter import ImageScatter
from ..envoys.stack import Stack
from ..envoys.vision import Projector, UnifiedVision

RENAME: Final[dict[str, str | list[str]]] = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.language_model.embed_tokens": "embed_tokens",
    "model.language_model.layers": "layers",
    "model.language_model.norm": "norm",
    # There are no towers: an embedder is the whole way of an image, or of a sound, into the stream.
    "model.embed_vision": "vision",
    "model.embed_vision.multimodal_embedder": "projector",
    "patch_dense": "patch_embed",
    "model.embed_audio": ["audio", "audio_projector"],
}

ENVOYS: Final[dict[Any, Any]] = {
    native.Gemma4UnifiedTextModel: Stack,
    native.Gemma4UnifiedTextDecoderLayer: Layer,
    native.Gemma4UnifiedTextAttention: Attention,
    native.Gemma4UnifiedTextMLP: Mlp,
    native.Gemma4UnifiedModel: ImageScatter,
    native.Gemma4UnifiedVisionEmbedder: UnifiedVision,
    # One class embeds both; the path tells them apart.
    "embed_vision.multimodal_embedder": Projector,
    "embed_audio": UnifiedAudio,
    "layers": Blocks,
}
