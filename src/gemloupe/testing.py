"""Gemma 4 models small enough for a unit test: every shape, seeded random weights, no network.

One shape per published checkpoint (`SHAPES`), each with that checkpoint's kinds of block: what a real model
shows, its tiny one shows in milliseconds. Weights are drawn so that no mistake hides: a freshly initialised
model has every norm weight and every scalar at one and nearly flat attention patterns; these have neither.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

from gemloupe.plan import WRAPPERS

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from gemloupe.composed import ComposedProcessor
    from gemloupe.standardized import StandardizedTransformer

SHAPES: Final[tuple[str, ...]] = ("e2b", "e4b", "26b-a4b", "31b", "12b")

# The first four ids are the real tokenizer's; `{attribute: token}` of the rest are the names that
# transformers' Gemma4Processor reads off the tokenizer.
_SPECIAL_TOKENS: Final = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
}
_EXTRA_TOKENS: Final = {
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
_NAMED_TOKENS: Final = (*_SPECIAL_TOKENS.values(), *_EXTRA_TOKENS.values())
_NUM_BYTES: Final = 256
_VOCAB_SIZE: Final = 288
# Real Gemma vocabularies are padded with these too, so that every id a model can answer with has a text.
_UNUSED_TOKENS: Final = tuple(f"<unused{i}>" for i in range(_VOCAB_SIZE - _NUM_BYTES - len(_NAMED_TOKENS)))

_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)

# Sizes are pairwise different wherever a mix-up would otherwise go unseen: heads * head_dim is never
# hidden_size, the two kinds of block differ in head_dim, and a 12-token prompt overruns the window.
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_NO_PER_LAYER_INPUT: Final[dict[str, Any]] = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": _VOCAB_SIZE,
}
_PER_LAYER_INPUT: Final[dict[str, Any]] = _NO_PER_LAYER_INPUT | {"hidden_size_per_layer_input": 8}
_KEYS_AS_VALUES: Final[dict[str, Any]] = {
    "attention_k_eq_v": True,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
_MIXTURE: Final[dict[str, Any]] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,  # two would not show the order in which the experts' outputs are added
    "moe_intermediate_size": 24,  # grouped_mm on a GPU wants rows of a multiple of 16 bytes
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,  # the longest side that the processor makes is 140 patches
    "use_clipped_linears": False,
    "standardize": True,
}
_CLIPPED_VISION: Final[dict[str, Any]] = _VISION | {"use_clipped_linears": True, "standardize": False}
_AUDIO: Final[dict[str, Any]] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    # transformers sizes the projection after the convolutions as (channels[0] // 4) * channels[1], which is
    # right only if channels[0] is also the number of mel bins: here input_features are [audios, frames, 16].
    "subsampling_conv_channels": [16, 4],
    "conv_kernel_size": 3,
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "attention_context_right": 0,
    "use_clipped_linears": True,
    "output_proj_dims": 20,
}
# The unified model's patches are merged: an image row has 3 * (4 * 2) ** 2 numbers; an audio frame has 20.
_UNIFIED_VISION: Final[dict[str, Any]] = {
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 24,
    "mm_posemb_size": 80,
    "output_proj_dims": 24,
}
_UNIFIED_AUDIO: Final[dict[str, Any]] = {"audio_embed_dim": 20}
_AUDIO_BINS: Final = _AUDIO["subsampling_conv_channels"][0]
_SOFT_TOKENS: Final = 70  # the fewest that transformers' processors allow
_SAMPLING_RATE: Final = 16_000


class _Shape(NamedTuple):
    """One checkpoint in small: its config classes' family, its layer pattern and its sizes."""

    family: Literal["Gemma4", "Gemma4Unified"]
    num_hidden_layers: int
    sliding_per_full: int
    text: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any] | None


_TABLE: Final[dict[str, _Shape]] = {
    "e2b": _Shape(
        "Gemma4",
        num_hidden_layers=10,
        sliding_per_full=4,
        text=_TEXT
        | _PER_LAYER_INPUT
        | {"num_key_value_heads": 1, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
        vision=_CLIPPED_VISION,
        audio=_AUDIO,
    ),
    "e4b": _Shape(
        "Gemma4",
        num_hidden_layers=12,
        sliding_per_full=5,
        text=_TEXT | _PER_LAYER_INPUT | {"num_key_value_heads": 2, "num_kv_shared_layers": 6},
        vision=_CLIPPED_VISION,
        audio=_AUDIO,
    ),
    "26b-a4b": _Shape(
        "Gemma4",
        num_hidden_layers=6,
        sliding_per_full=5,
        text=_TEXT | _NO_PER_LAYER_INPUT | _KEYS_AS_VALUES | _MIXTURE,
        vision=_VISION,
        audio=None,
    ),
    "31b": _Shape(
        "Gemma4",
        num_hidden_layers=6,
        sliding_per_full=5,
        text=_TEXT
        | _NO_PER_LAYER_INPUT
        | _KEYS_AS_VALUES
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
        vision=_VISION,
        audio=None,
    ),
    "12b": _Shape(
        "Gemma4Unified",
        num_hidden_layers=6,
        sliding_per_full=5,
        text=_TEXT | _KEYS_AS_VALUES,
        vision=_UNIFIED_VISION,
        audio=_UNIFIED_AUDIO,
    ),
}

# Taken by the config classes, which fold them into the full blocks' settings, but not fields of theirs.
_FIELDS_OF_FULL_BLOCKS: Final = frozenset({"global_head_dim", "num_global_key_value_heads"})

_MODEL_CLASSES: Final = {
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}

_Draw = Callable[[torch.Size, torch.Generator], Tensor]


def _uniform(low: float, high: float) -> _Draw:
    return lambda shape, random: torch.rand(shape, generator=random) * (high - low) + low


def _normal(std: float, divided_by: Literal["nothing", "last axis", "inputs"]) -> _Draw:
    """Normal numbers, their deviation divided by the root of the count of what one output sums over."""

    def draw(shape: torch.Size, random: torch.Generator) -> Tensor:
        inputs = {"nothing": 1, "last axis": shape[-1], "inputs": shape[1:].numel()}[divided_by]
        return torch.randn(shape, generator=random) * (std * inputs**-0.5)

    return draw


def _norm_or_projection(shape: torch.Size, random: torch.Generator) -> Tensor:
    draw = _uniform(0.5, 1.5) if len(shape) == 1 else _normal(1.0, divided_by="inputs")
    return draw(shape, random)


# The first pattern found in a weight's name decides how it is drawn; a name that none knows is refused.
_DRAWS: Final[tuple[tuple[str, _Draw], ...]] = (
    (r"layer_scalar$", _uniform(0.7, 1.3)),
    (r"router\.scale$|per_expert_scale$|std_scale$", _uniform(0.5, 1.5)),
    # The router divides its input by sqrt(hidden_size): with the usual deviation experts would nearly tie.
    (r"router\.proj\.weight$", _normal(1.5, divided_by="nothing")),
    (r"experts\.(gate_up|down)_proj$", _normal(1.0, divided_by="last axis")),
    # Gemma 4 scales scores by 1, not by head_dim ** -0.5: weights around one would make patterns one-hot.
    (r"[qk]_norm\.weight$", _uniform(0.3, 1.0)),
    # The head is the embedding, which is small lest it drown the blocks: the last norm spreads the logits.
    (r"^norm\.weight$", _uniform(1.5, 3.5)),
    (r"embed_tokens\.weight$", _normal(1.2, divided_by="last axis")),
    (r"embed_tokens_per_layer\.weight$", _normal(4.0, divided_by="last axis")),  # a row holds all the blocks'
    (r"position_embedding_table$|pos_embedding$", _normal(0.5, divided_by="nothing")),
    # Tight enough that some of what passes is clipped: a clipping left out shows.
    (r"(input|output)_min$", _uniform(-2.5, -1.5)),
    (r"(input|output)_max$", _uniform(1.5, 2.5)),
    (r"\.bias$|per_dim_scale$", _uniform(-0.5, 0.5)),
    (r"std_bias$", _uniform(-1.0, 1.0)),
    (r"\.weight$", _norm_or_projection),
)


def tiny_config(shape: str, *, wrapper: bool = False, **overrides: Any) -> PreTrainedConfig:
    """The config that `tiny_module` builds.

    shape: one of `SHAPES`.
    wrapper: the config of the whole multimodal model, small vision and audio parts included, whose special
        token ids are `tiny_tokenizer`'s; otherwise the text model's config alone.
    overrides: fields of the text config. With another `num_hidden_layers` the pattern of sliding and full
        blocks is continued or cut, and at least one pattern's blocks keep keys and values of their own.
    Raises: ValueError, on an unknown shape; TypeError, on a field that the text config does not have.
    """
    row = _row(shape)
    text_class = getattr(transformers, f"{row.family}TextConfig")
    _refuse_unknown_fields(text_class, overrides)
    text = text_class(**_text_fields(row, overrides))
    if not wrapper:
        return text
    vision = getattr(transformers, f"{row.family}VisionConfig")(**row.vision)
    audio = getattr(transformers, f"{row.family}AudioConfig")(**row.audio) if row.audio else None
    return getattr(transformers, f"{row.family}Config")(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=text.tie_word_embeddings,
        **_modality_token_ids(),
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 288 tokens, made in memory: a token per UTF-8 byte, so every text comes back as it was.

    It has the real tokenizer's special tokens under their attributes (`bos_token`, `image_token_id`, ...),
    puts `<bos>` before every text, pads on the left, and has a chat template with the real turn markers.
    """
    # One fixed order, whatever the tokenizers release: ids are part of what a seeded test sees.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = (*_NAMED_TOKENS, *alphabet, *_UNUSED_TOKENS)
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _NAMED_TOKENS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in _UNUSED_TOKENS])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", _NAMED_TOKENS.index("<bos>"))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **_SPECIAL_TOKENS,
        extra_special_tokens=dict(_EXTRA_TOKENS),
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def tiny_processor(shape: str) -> ComposedProcessor:
    """The processor of this shape's wrapper: `tiny_tokenizer`, images of up to 70 soft tokens, sound.

    As transformers' own, it has a part for sound whether or not the wrapper hears.
    """
    from gemloupe.composed import compose

    return compose(_processor_settings(_row(shape)), tiny_tokenizer())


def tiny_image(width: int = 48, height: int = 32, seed: int = 0) -> Image:
    """A random RGB picture."""
    from PIL import Image

    return Image.fromarray(tiny_video(1, width, height, seed)[0])


def tiny_video(frames: int = 3, width: int = 48, height: int = 32, seed: int = 0) -> np.ndarray:
    """A random RGB video: its frames, `[frames height width 3]`, in bytes."""
    random = _generator(seed, f"video {frames} {width} {height}")
    return torch.randint(256, (frames, height, width, 3), generator=random, dtype=torch.uint8).numpy()


def tiny_sound(seconds: float = 0.2, seed: int = 0) -> np.ndarray:
    """A random sound: samples between -1 and 1, 16,000 a second."""
    samples = torch.rand(round(seconds * _SAMPLING_RATE), generator=_generator(seed, "sound"))
    return (2 * samples - 1).numpy()


def tiny_module(
    shape: str,
    *,
    wrapper: bool = False,
    seed: int = 0,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """transformers' own model of this shape, unwrapped, on the CPU, in eval mode, with `scramble`d weights.

    The text weights of one shape and seed are the same with and without the wrapper, under every attention
    and experts implementation, and up to rounding in every dtype. The global random state stays as it was.

    config: build this config's model instead (it is copied); shape, wrapper and overrides have no say then.
    overrides: fields of the text config, see `tiny_config`.
    Raises: as `tiny_config`; TypeError, on overrides beside a config.
    """
    if config is None:
        config = tiny_config(shape, wrapper=wrapper, **overrides)
    elif overrides:
        raise TypeError(f"tiny_module: set {', '.join(overrides)} on the config that you pass, not beside it")
    implementations = {
        "attn_implementation": attn_implementation,
        "experts_implementation": experts_implementation,
    }
    chosen = {name: value for name, value in implementations.items() if value is not None}
    model_class = getattr(transformers, _MODEL_CLASSES[config.model_type])
    # transformers draws its own initial weights, which `scramble` then overwrites.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        module = model_class._from_config(copy.deepcopy(config), dtype=dtype, **chosen)
        # Once more under the default dtype, as loading a checkpoint does: built under bfloat16, the audio
        # tower's position constants would be computed in bfloat16.
        module.apply(module._init_weights)
    scramble(module, seed)
    return module.eval()


def tiny(
    shape: str,
    *,
    wrapper: bool = False,
    seed: int = 0,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> StandardizedTransformer:
    """A tiny model of this shape, ready to trace: `tiny_module` and `tiny_tokenizer`, wrapped.

    The whole multimodal model comes with its `tiny_processor`, where pillow is installed.

        model = tiny("e2b")
        with model.trace("The quick brown fox"):
            pattern = model.layers[4].self_attn.attention_probabilities.save()

    Arguments and errors: see `tiny_module`.
    """
    from gemloupe.standardized import StandardizedTransformer

    module = tiny_module(
        shape,
        wrapper=wrapper,
        seed=seed,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
        dtype=dtype,
        **overrides,
    )
    if wrapper and find_spec("PIL"):
        processor = tiny_processor(shape)
        return StandardizedTransformer(module, tokenizer=processor.tokenizer, processor=processor)
    return StandardizedTransformer(module, tokenizer=tiny_tokenizer())


def save_tiny(path: str | Path, shape: str, **kwargs: Any) -> Path:
    """Writes a tiny model and its tokenizer as a directory that every `from_pretrained` loads, offline.

    Beside the whole multimodal model lie the settings of its processor.
    kwargs: see `tiny_module`. Returns the directory, made if it was not there.
    """
    path = Path(path)
    module = tiny_module(shape, **kwargs)
    module.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    if module.config.model_type in WRAPPERS:
        settings = json.dumps(_processor_settings(_row(shape)), indent=2)
        (path / "processor_config.json").write_text(settings, encoding="utf-8")
    return path


@torch.no_grad()
def scramble(module: nn.Module, seed: int) -> None:
    """Gives every weight of a Gemma 4 model a random value that depends on the seed and on its name alone.

    Every tensor that a checkpoint holds is drawn, buffers included: norm weights, `layer_scalar` and the
    other scales spread around one, projections sized so that activations keep their size, attention patterns
    are not flat and every block adds about as much to the stream. Computed constants (rotary frequencies,
    embedding scales) are no part of a checkpoint and stay.

    Raises: ValueError, naming a weight that it does not know, before anything has changed.
    """
    weights = {_name_in_stack(name): tensor for name, tensor in _checkpoint_tensors(module)}
    draws = {name: _draw_for(name) for name in weights}
    for name, tensor in weights.items():
        # A generator per tensor, drawing in float32 on the CPU: neither the dtype nor the device nor the
        # weights beside it (a vision tower's) change what a tensor gets.
        tensor.copy_(draws[name](tensor.shape, _generator(seed, name)))


def _row(shape: str) -> _Shape:
    if shape not in _TABLE:
        raise ValueError(f"no tiny model has the shape {shape!r}; the shapes are {', '.join(SHAPES)}")
    return _TABLE[shape]


def _processor_settings(row: _Shape) -> dict[str, Any]:
    """What a published checkpoint's `processor_config.json` says, for this shape's sizes."""
    sizes = {name: row.vision[name] for name in ("patch_size", "pooling_kernel_size")}
    pictures = sizes | {"max_soft_tokens": _SOFT_TOKENS}
    width = row.audio["audio_embed_dim"] if row.family == "Gemma4Unified" and row.audio else _AUDIO_BINS
    sound = {"feature_size": width, "sampling_rate": _SAMPLING_RATE}
    if row.family == "Gemma4Unified":
        sound["audio_samples_per_token"] = width
    return {
        "processor_class": f"{row.family}Processor",
        "image_processor": {"image_processor_type": f"{row.family}ImageProcessor", **pictures},
        "video_processor": {"video_processor_type": f"{row.family}VideoProcessor", **pictures},
        "feature_extractor": {"feature_extractor_type": f"{row.family}AudioFeatureExtractor", **sound},
    }


def _refuse_unknown_fields(config_class: type, overrides: dict[str, Any]) -> None:
    # transformers keeps a field that it does not know without a word: a misspelt override would do nothing.
    known = {field.name for field in dataclasses.fields(config_class)} | _FIELDS_OF_FULL_BLOCKS
    if unknown := sorted(overrides.keys() - known):
        raise TypeError(f"{config_class.__name__} has no field {', '.join(unknown)}")


def _text_fields(row: _Shape, overrides: dict[str, Any]) -> dict[str, Any]:
    fields = {"num_hidden_layers": row.num_hidden_layers, **row.text, **overrides}
    num_layers, pattern = fields["num_hidden_layers"], row.sliding_per_full + 1
    fields.setdefault("layer_types", _layer_types(num_layers, pattern))
    if "num_kv_shared_layers" not in overrides:
        borrowers = min(row.text.get("num_kv_shared_layers", 0), num_layers - pattern)
        fields["num_kv_shared_layers"] = max(borrowers, 0)
    return fields


def _layer_types(num_layers: int, pattern: int) -> list[str]:
    """Sliding blocks, then a full one, repeated; the last block is full, which transformers insists on."""
    full = {*range(pattern - 1, num_layers, pattern), num_layers - 1}
    return ["full_attention" if i in full else "sliding_attention" for i in range(num_layers)]


def _modality_token_ids() -> dict[str, int]:
    """The wrapper config's token fields, from the tokenizer's table."""
    ids = {name: _NAMED_TOKENS.index(text) for name, text in _EXTRA_TOKENS.items()}
    fields = {f"{name}_id": ids[name] for name in ids if name not in ("sot_token", "eot_token", "eoa_token")}
    return fields | {"eoa_token_index": ids["eoa_token"]}  # so spelt in transformers


def _checkpoint_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state dict, a tied one once, under its first name."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _name_in_stack(name: str) -> str:
    """The name without the path to the text stack, which differs between the text model and the wrapper."""
    return name.removeprefix("model.").removeprefix("language_model.")


def _draw_for(name: str) -> _Draw:
    for pattern, draw in _DRAWS:
        if re.search(pattern, name):
            return draw
    raise ValueError(f"scramble does not know how to draw {name}; it knows the weights of Gemma 4 models")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
