"""Gemma 4, text: E2B, E4B, 26B-A4B and 31B (`model_type` `gemma4_text`), bare or inside the wrapper.

`RENAME` maps native paths to standard names, in both spellings of the stack: at `model.*` in
`Gemma4ForCausalLM`, at `model.language_model.*` in `Gemma4ForConditionalGeneration`. `ENVOYS` maps
module classes to the envoys that serve their values; a string key is the end of a path.
"""

from __future__ import annotations

from typing import Any, Final

from transformers.models.gemma4 import modeling_gemma4 as native

from ..envoys.attention import Attention
from ..envoys.audio import (
    Audio,
    AudioAttention,
    AudioConvolution,
    AudioLayer,
    AudioProjector,
    HalfFeedForward,
)
from ..envoys.base import Blocks
from ..envoys.experts import Experts
from ..envoys.layer import Layer
from ..envoys.mlp import Mlp, Router
from ..envoys.scatter import ImageScatter
from ..envoys.stack import PerLayerStack
from ..envoys.vision import Projector, Vision, VisionAttention, VisionLayer, VisionMlp

RENAME: Final[dict[str, str]] = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.language_model.embed_tokens": "embed_tokens",
    "model.language_model.layers": "layers",
    "model.language_model.norm": "norm",
    "model.vision_tower": "vision",
    "model.embed_vision": "projector",
    "patch_embedder.input_proj": "patch_embed",
    "encoder.layers": "layers",
    "model.audio_tower": "audio",
    "model.embed_audio": "audio_projector",
}

ENVOYS: Final[dict[Any, Any]] = {
    native.Gemma4TextModel: PerLayerStack,
    native.Gemma4TextDecoderLayer: Layer,
    native.Gemma4TextAttention: Attention,
    native.Gemma4TextMLP: Mlp,
    native.Gemma4TextRouter: Router,
    native.Gemma4TextExperts: Experts,
    native.Gemma4Model: ImageScatter,
    native.Gemma4VisionModel: Vision,
    native.Gemma4VisionEncoderLayer: VisionLayer,
    native.Gemma4VisionAttention: VisionAttention,
    native.Gemma4VisionMLP: VisionMlp,
    native.Gemma4AudioModel: Audio,
    native.Gemma4AudioLayer: AudioLayer,
    native.Gemma4AudioFeedForward: HalfFeedForward,
    native.Gemma4AudioAttention: AudioAttention,
    native.Gemma4AudioLightConv1d: AudioConvolution,
    # One class embeds both; the path tells them apart.
    "embed_vision": Projector,
    "embed_audio": AudioProjector,
    "layers": Blocks,
}
