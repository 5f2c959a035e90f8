"""What a wrapper's config says of its towers: their sizes, and the tensors that they hold. No torch.

A `gemma4` wrapper has a vision tower, and on some checkpoints an audio tower; a `gemma4_unified` one embeds
merged patches and raw frames of sound without a tower. What stands for either in a text are tokens of three
ids, one for each kind of medium.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UnsupportedModel
from ..plan import WRAPPERS, Narrowed, Shapes, field_refusals

__all__ = ["AudioTower", "PatchEmbedder", "RawFrames", "Towers", "VisionTower", "towers"]


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of a `gemma4` wrapper. Source: `Gemma4VisionModel`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    patch_size: int
    """In pixels."""
    pooling: int
    """A soft token is the mean of so many by so many patches."""
    table_size: int
    """How many places along each axis have an embedding."""
    clipped: bool
    standardized: bool
    norm_eps: float

    def shapes(self) -> Shapes:
        """The tensors under `model.vision_tower`."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        shapes: Shapes = {
            "patch_embedder.input_proj.weight": (hidden, 3 * self.patch_size**2),
            "patch_embedder.position_embedding_table": (2, self.table_size, hidden),
        }
        if self.standardized:
            shapes |= {"std_bias": (hidden,), "std_scale": (hidden,)}
        keys, wide = self.num_kv_heads * self.head_dim, self.intermediate_size
        block = _norms(
            hidden,
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        block |= _norms(self.head_dim, "self_attn.q_norm", "self_attn.k_norm")
        for name, shape in {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }.items():
            block |= _clipped_linear(name, shape, self.clipped)
        for index in range(self.num_layers):
            shapes |= _under(f"encoder.layers.{index}.", block)
        return shapes


@dataclass(frozen=True)
class PatchEmbedder:
    """The patch embedder of a `gemma4_unified` wrapper. Source: `Gemma4UnifiedVisionEmbedder`."""

    patch_size: int
    """Of a merged patch, in pixels."""
    hidden_size: int
    table_size: int
    """How many places along each axis have an embedding."""
    norm_eps: float
    """The projector's; that of the layer norms is torch's own."""

    def shapes(self) -> Shapes:
        """The tensors under `model.embed_vision`, the projector's left out."""
        pixels, hidden = 3 * self.patch_size**2, self.hidden_size
        shapes: Shapes = {
            "patch_dense.weight": (hidden, pixels),
            "patch_dense.bias": (hidden,),
            "pos_embedding": (self.table_size, 2, hidden),
        }
        for name, width in {"patch_ln1": pixels, "patch_ln2": hidden, "pos_norm": hidden}.items():
            shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
        return shapes


@dataclass(frozen=True)
class AudioTower:
    """The audio tower of a `gemma4` wrapper. Source: `Gemma4AudioModel`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    channels: tuple[int, int]
    """Of the two convolutions that make one frame of four."""
    kernel: int
    """How many frames the light convolution sees: the last so many."""
    residual_weight: float
    chunk: int
    left: int
    """One more than how many frames back a frame sees, its own included."""
    right: int
    """One more than how many frames ahead it sees; 0 for none."""
    logit_cap: float
    hidden_logit: float
    """What stands for the score of a frame that is not seen."""
    clipped: bool
    norm_eps: float
    """Of the convolutions' norms and the projector's; that of the others is transformers' default."""
    clipping: float
    """The largest magnitude that is let into some of the norms."""
    output_size: int

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def context(self) -> int:
        """How many frames a chunk is scored against."""
        return self.left - 1 + self.chunk + self.right

    def shapes(self) -> Shapes:
        """The tensors under `model.audio_tower`."""
        hidden, (first, second) = self.hidden_size, self.channels
        shapes: Shapes = {
            "subsample_conv_projection.layer0.conv.weight": (first, 1, 3, 3),
            "subsample_conv_projection.layer0.norm.weight": (first,),
            "subsample_conv_projection.layer1.conv.weight": (second, first, 3, 3),
            "subsample_conv_projection.layer1.norm.weight": (second,),
            # transformers sizes it as if there were as many mel bins as channels.
            "subsample_conv_projection.input_proj_linear.weight": (hidden, first // 4 * second),
            "output_proj.weight": (self.output_size, hidden),
            "output_proj.bias": (self.output_size,),
        }
        block: Shapes = {
            "self_attn.per_dim_scale": (self.head_dim,),
            "self_attn.relative_k_proj.weight": (hidden, hidden),
            "lconv1d.depthwise_conv1d.weight": (hidden, 1, self.kernel),
        }
        block |= _norms(hidden, "norm_pre_attn", "norm_post_attn", "norm_out")
        block |= _norms(hidden, "lconv1d.pre_layer_norm", "lconv1d.conv_norm")
        linears = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "post")}
        linears |= {"lconv1d.linear_start": (2 * hidden, hidden), "lconv1d.linear_end": (hidden, hidden)}
        for of in ("feed_forward1", "feed_forward2"):
            block |= _norms(hidden, f"{of}.pre_layer_norm", f"{of}.post_layer_norm")
            linears |= {f"{of}.ffw_layer_1": (4 * hidden, hidden), f"{of}.ffw_layer_2": (hidden, 4 * hidden)}
        for name, shape in linears.items():
            block |= _clipped_linear(name, shape, self.clipped)
        for index in range(self.num_layers):
            shapes |= _under(f"layers.{index}.", block)
        return shapes


@dataclass(frozen=True)
class RawFrames:
    """The frames of sound that a `gemma4_unified` wrapper projects as they are."""

    output_size: int
    """How many samples a frame has."""
    norm_eps: float


@dataclass(frozen=True)
class Towers:
    """What a wrapper's config says beside its text model."""

    vision: VisionTower | PatchEmbedder | None
    audio: AudioTower | RawFrames | None
    image_token: int | None
    video_token: int | None
    audio_token: int | None
    pad_token: int
    """Whose embedding stands in the place of every medium's token until it is replaced."""
    text_size: int
    """The width of the stream that the features replace tokens in."""

    def shapes(self) -> Shapes:
        """The tensors of a wrapper's state dict beside the text model's, by their names there."""
        shapes: Shapes = {}
        projector = "embedding_projection.weight"
        if isinstance(self.vision, VisionTower):
            shapes |= _under("model.vision_tower.", self.vision.shapes())
            shapes[f"model.embed_vision.{projector}"] = (self.text_size, self.vision.hidden_size)
        elif self.vision is not None:
            shapes |= _under("model.embed_vision.", self.vision.shapes())
            shapes[f"model.embed_vision.multimodal_embedder.{projector}"] = (
                self.text_size,
                self.vision.hidden_size,
            )
        if isinstance(self.audio, AudioTower):
            shapes |= _under("model.audio_tower.", self.audio.shapes())
        if self.audio is not None:
            shapes[f"model.embed_audio.{projector}"] = (self.text_size, self.audio.output_size)
        return shapes


def towers(config: Any) -> Towers | None:
    """What `config` says of the towers; `None` for a text model's, which has none.

    Raises: UnsupportedModel, if a tower's config sets a field to what could change the computation and is
    not known here. The message names the field.
    """
    if getattr(config, "model_type", None) not in WRAPPERS:
        return None
    reason = next(_refusals(config), None)
    if reason is not None:
        raise UnsupportedModel(reason)
    vision, audio = config.vision_config, config.audio_config
    return Towers(
        vision=None if vision is None else _PLANS[vision.model_type](vision),
        audio=None if audio is None else _PLANS[audio.model_type](audio),
        image_token=config.image_token_id,
        video_token=config.video_token_id,
        audio_token=config.audio_token_id,
        pad_token=config.text_config.pad_token_id,
        text_size=config.text_config.hidden_size,
    )


# ---- a config's fields ------------------------------------------------------------------------------------


def _vision(config: Any) -> VisionTower:
    return VisionTower(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        patch_size=config.patch_size,
        pooling=config.pooling_kernel_size,
        table_size=config.position_embedding_size,
        clipped=config.use_clipped_linears,
        standardized=config.standardize,
        norm_eps=config.rms_norm_eps,
    )


def _patches(config: Any) -> PatchEmbedder:
    return PatchEmbedder(
        patch_size=config.patch_size * config.pooling_kernel_size,
        hidden_size=config.mm_embed_dim,
        table_size=config.mm_posemb_size,
        norm_eps=config.rms_norm_eps,
    )


def _audio(config: Any) -> AudioTower:
    first, second = config.subsampling_conv_channels
    return AudioTower(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        channels=(first, second),
        kernel=config.conv_kernel_size,
        residual_weight=config.residual_weight,
        chunk=config.attention_chunk_size,
        left=config.attention_context_left,
        right=config.attention_context_right,
        logit_cap=config.attention_logit_cap,
        hidden_logit=config.attention_invalid_logits_value,
        clipped=config.use_clipped_linears,
        norm_eps=config.rms_norm_eps,
        clipping=config.gradient_clipping,
        output_size=config.output_proj_dims,
    )


def _frames(config: Any) -> RawFrames:
    return RawFrames(output_size=config.audio_embed_dim, norm_eps=config.rms_norm_eps)


_PLANS: Final = {
    "gemma4_vision": _vision,
    "gemma4_unified_vision": _patches,
    "gemma4_audio": _audio,
    "gemma4_unified_audio": _frames,
}

_CONSIDERED: Final[dict[str, frozenset[str]]] = {
    "gemma4_vision": frozenset(
        {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
        | {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "pooling_kernel_size"}
        | {"patch_size", "position_embedding_size", "use_clipped_linears", "standardize"}
        | {"max_position_embeddings"}  # which nothing reads
    ),
    "gemma4_unified_vision": frozenset(
        {"model_type", "patch_size", "pooling_kernel_size", "mm_embed_dim", "mm_posemb_size"}
        | {"rms_norm_eps", "output_proj_dims"}
    ),
    "gemma4_audio": frozenset(
        {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "conv_kernel_size"}
        | {"subsampling_conv_channels", "residual_weight", "attention_chunk_size", "attention_context_left"}
        | {"attention_context_right", "attention_logit_cap", "attention_invalid_logits_value"}
        | {"use_clipped_linears", "rms_norm_eps", "gradient_clipping", "output_proj_dims"}
    ),
    "gemma4_unified_audio": frozenset({"model_type", "audio_embed_dim", "rms_norm_eps"}),
}
_NARROWED: Final[dict[str, dict[str, Narrowed]]] = {
    "gemma4_vision": {
        "hidden_activation": (("gelu_pytorch_tanh",), "the definitions know this activation alone"),
        "attention_bias": ((False, None), "no projection of the tower has a bias"),
    },
    "gemma4_audio": {"hidden_act": (("silu",), "the definitions know this activation alone")},
    "gemma4_unified_vision": {},
    "gemma4_unified_audio": {},
}


# ---- the refusals: checks yield reasons and `towers` raises the first -------------------------------------


def _refusals(config: Any) -> Iterator[str]:
    if config.text_config.pad_token_id is None:
        yield "config.text_config.pad_token_id=None: the wrapper puts that token in every medium's place."
    for of in ("vision_config", "audio_config"):
        tower, path = getattr(config, of), f"config.{of}"
        if tower is None:
            continue
        kind = f"{config.model_type}_{of.removesuffix('_config')}"
        if tower.model_type != kind:
            yield f"{path}.model_type={tower.model_type!r}: {config.model_type} has {kind!r}."
        yield from field_refusals(tower, path, _CONSIDERED[kind], _NARROWED[kind])
        if kind == "gemma4_vision":
            yield from _vision_refusals(tower, path)
        if kind == "gemma4_unified_vision" and tower.output_proj_dims != tower.mm_embed_dim:
            yield (
                f"{path}.output_proj_dims={tower.output_proj_dims}: the projector reads mm_embed_dim, "
                f"{tower.mm_embed_dim}."
            )


def _vision_refusals(tower: Any, path: str) -> Iterator[str]:
    rotary = tower.rope_parameters or {}
    if rotary.get("rope_type") != "axial" or rotary.keys() - {"rope_type", "rope_theta"}:
        yield f"{path}.rope_parameters={rotary}: the vision tower turns by 'axial' and a rope_theta alone."
    if tower.head_dim % 4:
        yield f"{path}.head_dim={tower.head_dim}: it is a multiple of 4, for pairs of each half turn."
    if tower.pooling_kernel_size < 2:
        # `Gemma4VisionPooler` then returns the mask of padding, which is taken for that of what is real.
        yield f"{path}.pooling_kernel_size={tower.pooling_kernel_size}: transformers keeps the padding then."


# ---- the tensors ------------------------------------------------------------------------------------------


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _norms(width: int, *names: str) -> Shapes:
    return {f"{name}.weight": (width,) for name in names}


def _clipped_linear(name: str, shape: tuple[int, ...], clipped: bool) -> Shapes:
    bounds: Shapes = {f"{name}.{of}_{end}": () for of in ("input", "output") for end in ("min", "max")}
    return {f"{name}.linear.weight": shape} | (bounds if clipped else {})
