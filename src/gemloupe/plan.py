"""What each block of a Gemma 4 model is, read from its transformers config alone: no tensor, no torch.

`plan(config)` answers with a `ModelPlan`, and in it one `BlockPlan` per block: its kind, its sizes, whose
keys and values it attends with, which weights it has. Whatever else needs such a fact reads it here.

A config field that could change the computation and that no table below lists is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from gemloupe.errors import UnsupportedModel

Kind = Literal["sliding", "full"]
Shapes = dict[str, tuple[int, ...]]

# ---- what can be planned ----------------------------------------------------------------------------------

# {a wrapper: the text stack that it holds}
WRAPPERS: Final = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}

KINDS: Final[dict[str, Kind]] = {"sliding_attention": "sliding", "full_attention": "full"}
ROPE_TYPES: Final = ("default", "proportional")
ROPE_FIELDS: Final = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")

# What `per_layer_config` may set: transformers reads every other size off the config that all blocks share.
PER_BLOCK_FIELDS: Final = ("head_dim", "num_key_value_heads")

# ---- the config's fields: each is considered, narrowed to some values, or ignored for a reason -------------

_TEXT_FIELDS: Final = frozenset(
    {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"}
    | {"num_attention_heads", "num_key_value_heads", "head_dim", "per_layer_config", "attention_k_eq_v"}
    | {"num_kv_shared_layers", "use_double_wide_mlp", "sliding_window", "is_causal", "rope_parameters"}
    | {"rms_norm_eps", "final_logit_softcapping", "max_position_embeddings", "tie_word_embeddings"}
)
_MIXTURE_FIELDS: Final = ("num_experts", "top_k_experts", "moe_intermediate_size")
_WRAPPER_FIELDS: Final = frozenset(
    {"model_type", "text_config", "vision_config", "audio_config", "tie_word_embeddings"}
)

CONSIDERED: Final[dict[str, frozenset[str]]] = {
    "gemma4_text": _TEXT_FIELDS
    | {"enable_moe_block", *_MIXTURE_FIELDS, "hidden_size_per_layer_input", "vocab_size_per_layer_input"},
    # These have no effect while their switches are off, to which NARROWED holds them.
    "gemma4_unified_text": _TEXT_FIELDS | {*_MIXTURE_FIELDS, "vocab_size_per_layer_input"},
    "gemma4": _WRAPPER_FIELDS,
    "gemma4_unified": _WRAPPER_FIELDS,
}

# (the values that a field may have, why not others)
Narrowed = tuple[tuple[Any, ...], str]
_NARROWED_TEXT: Final[dict[str, Narrowed]] = {
    "hidden_activation": (("gelu_pytorch_tanh",), "the definitions know this activation alone"),
    "attention_bias": ((False,), "no Gemma 4 projection has a bias, and the definitions add none"),
    "use_bidirectional_attention": ((None, "vision", "all"), "transformers knows these masks alone"),
}
NARROWED: Final[dict[str, dict[str, Narrowed]]] = {
    "gemma4_text": _NARROWED_TEXT,
    "gemma4_unified_text": {
        **_NARROWED_TEXT,
        "enable_moe_block": ((False, None), "Gemma4UnifiedTextDecoderLayer has no mixture of experts"),
        "hidden_size_per_layer_input": ((0, None), "Gemma4UnifiedTextModel has no per-layer inputs"),
    },
    "gemma4": {},
    "gemma4_unified": {},
}

# {field, or a pattern of fields: why the computation is the same whatever it says}
IGNORED: Final[dict[str, str]] = {
    "_name_or_path": "where the config came from",
    "architectures": "the class is chosen by who loads the model",
    "transformers_version": "who saved it",
    "unsloth_*": "who saved it",
    "dtype": "the weights' precision",
    "torch_dtype": "the weights' precision, in older files",
    "quantization_config": "how the weights are stored",
    "_pre_quantization_dtype": "how the weights were stored",
    "*attn_implementation*": "which kernel computes the attention, not what it computes",
    "*experts_implementation*": "which kernel computes the experts, not what it computes",
    "attention_dropout": "applied in training mode alone",
    "initializer_range": "loaded weights replace the initial ones",
    "use_cache": "a cached key is the key that would be computed again",
    "output_attentions": "what a forward returns, not what it computes",
    "output_hidden_states": "what a forward returns, not what it computes",
    "output_router_logits": "what a forward returns, not what it computes",
    "*_token_id": "which ids mark what in the input",
    "*_token_ids": "which ids mark what in the input",
    "*_token_index": "which id marks what in the input",
    "id2label": "a classification head's",
    "label2id": "a classification head's",
    "problem_type": "a classification head's",
    "allow_global_per_layer_attribute_access": "whether `config.head_dim` raises",
    "serialize_explicit_per_layer_config": "how the config is saved",
}

# ---- the plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RotaryPlan:
    """How a block's queries and keys turn with the position.

    Source: `Gemma4TextRotaryEmbedding.compute_default_rope_parameters` for "default", and
    `modeling_rope_utils._compute_proportional_rope_parameters` for "proportional".
    """

    kind: Literal["default", "proportional"]
    theta: float
    head_dim: int
    rotated: int
    """How many of a head's coordinates turn, half of them counted from 0 and half from `head_dim // 2`."""
    factor: float
    """What every frequency is divided by; 1 on all published checkpoints."""


@dataclass(frozen=True)
class BlockPlan:
    """What the config says of one block."""

    index: int
    kind: Kind
    window: int | None
    """How many positions a causal query sees, its own included; None on a full block."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """The dense MLP's width, doubled where `use_double_wide_mlp` and the block borrows."""
    rotary: RotaryPlan
    values_from_keys: bool
    """The values are the key projection's, so there is no `v_proj` (`attention_k_eq_v`, full blocks)."""
    kv_source: int
    """The block whose keys and values this one attends with: itself unless it borrows."""
    kv_borrowers: tuple[int, ...]
    """The blocks that attend with this one's keys and values, this one left out."""
    has_experts: bool
    num_experts: int | None
    top_k: int | None
    expert_intermediate_size: int | None
    has_per_layer_input: bool
    per_layer_input_size: int | None

    @property
    def borrows_keys(self) -> bool:
        """Whether the block attends with an earlier block's keys and values, and computes none."""
        return self.kv_source != self.index


@dataclass(frozen=True)
class TowerBlockPlan:
    """What the config says of one block of a tower, under the names of `BlockPlan`."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kind: Literal["full"] = "full"
    window: None = None
    """None: a patch sees every real patch of its image; a frame of sound only a few back, by the config."""


@dataclass(frozen=True)
class VisionPlan:
    """How images get into the stream."""

    hidden_size: int
    """The width of the tower's stream, or of the embedder's where there is no tower."""
    patch_size: int
    """Pixels along a side of what is one row of `patch_embeddings`."""
    pooling: int
    """How many patches along a side become one soft token; 1 where the patches are merged before."""
    blocks: tuple[TowerBlockPlan, ...]
    """None where an embedder takes the place of the tower."""


@dataclass(frozen=True)
class AudioPlan:
    """How sound gets into the stream."""

    hidden_size: int
    """The width of the tower's stream, or of a frame of raw samples where there is no tower."""
    blocks: tuple[TowerBlockPlan, ...]
    """None where frames of raw samples go to the projector."""


@dataclass(frozen=True)
class ModelPlan:
    """What the config says of the whole text model, and of each block in `blocks`."""

    model_type: str
    """The text config's, also when a wrapper was given."""
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    """The config's top-level one, the sliding blocks'; a full block's own is on the block."""
    num_kv_heads: int
    """The config's top-level one, the sliding blocks'; a full block's own is on the block."""
    intermediate_size: int
    """The config's; a block whose MLP is double-wide says so itself."""
    sliding_window: int
    logit_cap: float | None
    """`c` of `c * tanh(raw_logits / c)`; None where the logits are not capped."""
    norm_eps: float
    max_positions: int
    bidirectional: Literal["vision", "all"] | None
    """Which tokens see ahead: those of an image, all, or none."""
    tied: bool
    """Whether `lm_head` is the embedding's own weight."""
    per_layer_input_size: int | None
    vocab_size_per_layer_input: int | None
    blocks: tuple[BlockPlan, ...]
    wrapper: bool
    """Whether the config is a `*ForConditionalGeneration`'s: the stack is at `model.language_model`."""
    vision: VisionPlan | None
    """None where the load takes no images."""
    audio: AudioPlan | None
    """None where the load takes no sound."""

    @property
    def has_vision(self) -> bool:
        """Whether the load takes images."""
        return self.vision is not None

    @property
    def has_audio(self) -> bool:
        """Whether the load takes sound."""
        return self.audio is not None

    def kv_sharing(self) -> dict[int, tuple[int, ...]]:
        """Each block that lends its keys and values, with the blocks that borrow them."""
        return {block.index: block.kv_borrowers for block in self.blocks if block.kv_borrowers}

    def parameter_shapes(self) -> Shapes:
        """The text model's parameters, named as on `*ForCausalLM`; a tied `lm_head` is left out.

        Source: the `__init__` of `Gemma4TextModel`, `Gemma4TextDecoderLayer` and what they build.
        """
        return _model_shapes(self) | {
            f"model.layers.{block.index}.{name}": shape
            for block in self.blocks
            for name, shape in _block_shapes(block, self.hidden_size).items()
        }

    @property
    def num_parameters(self) -> int:
        """How many numbers the text model's parameters are, a tied head counted once; no buffer, no tower."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


def plan(config: Any) -> ModelPlan:
    """What each block of `config`'s model is.

    Takes a `Gemma4TextConfig`, a `Gemma4UnifiedTextConfig`, or a wrapper's `Gemma4Config` or
    `Gemma4UnifiedConfig`, whose `text_config` is planned. Reads attributes, changes nothing.

    Raises: UnsupportedModel, if the config is of another type, contradicts itself, or sets a field to
    something that could change the computation and is not known here. The message names the field.
    """
    reason = next(_refusals(config), None)
    if reason is not None:
        raise UnsupportedModel(reason)

    wrapper = config.model_type in WRAPPERS
    text = config.text_config if wrapper else config
    # transformers refuses a plain `config.head_dim` on these models; `to_dict` keeps what was stored.
    stored = text.to_dict()
    per_layer_input_size = getattr(text, "hidden_size_per_layer_input", 0) or None
    return ModelPlan(
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        head_dim=stored["head_dim"],
        num_kv_heads=stored["num_key_value_heads"],
        intermediate_size=text.intermediate_size,
        # Under "all" the attribute is what the attention is given; `to_dict` turns it back into the file's.
        sliding_window=text.sliding_window,
        logit_cap=text.final_logit_softcapping,
        norm_eps=text.rms_norm_eps,
        max_positions=text.max_position_embeddings,
        bidirectional=text.use_bidirectional_attention,
        # `PreTrainedModel.get_expanded_tied_weights_keys` asks the config of the model that has the head.
        tied=config.tie_word_embeddings,
        per_layer_input_size=per_layer_input_size,
        vocab_size_per_layer_input=text.vocab_size_per_layer_input if per_layer_input_size else None,
        blocks=_blocks(text, stored, per_layer_input_size),
        wrapper=wrapper,
        vision=_vision(getattr(config, "vision_config", None)),
        audio=_audio(getattr(config, "audio_config", None)),
    )


# ---- the blocks -------------------------------------------------------------------------------------------


def _blocks(text: Any, stored: dict[str, Any], per_layer_input_size: int | None) -> tuple[BlockPlan, ...]:
    kinds: list[Kind] = [KINDS[layer_type] for layer_type in text.layer_types]
    sources = _kv_sources(kinds, text.num_kv_shared_layers)
    sizes = _attention_sizes(stored)
    has_experts = bool(getattr(text, "enable_moe_block", False))

    def block(index: int) -> BlockPlan:
        kind, source = kinds[index], sources[index]
        head_dim, num_kv_heads = sizes[index]
        double_wide = text.use_double_wide_mlp and source != index
        return BlockPlan(
            index=index,
            kind=kind,
            window=text.sliding_window if kind == "sliding" else None,
            num_heads=text.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=text.intermediate_size * (2 if double_wide else 1),
            rotary=_rotary(text.rope_parameters[text.layer_types[index]], head_dim),
            values_from_keys=text.attention_k_eq_v and kind == "full",
            kv_source=source,
            kv_borrowers=tuple(i for i, s in enumerate(sources) if s == index and i != index),
            has_experts=has_experts,
            num_experts=text.num_experts if has_experts else None,
            top_k=text.top_k_experts if has_experts else None,
            expert_intermediate_size=text.moe_intermediate_size if has_experts else None,
            has_per_layer_input=per_layer_input_size is not None,
            per_layer_input_size=per_layer_input_size,
        )

    return tuple(block(index) for index in range(len(kinds)))


def _kv_sources(kinds: Sequence[Kind], num_shared: int) -> list[int]:
    """The block each block takes its keys from; source: `Gemma4TextConfig.kv_sharing_modes`."""
    first_shared = len(kinds) - num_shared
    last_of_kind = {kind: index for index, kind in enumerate(kinds[:first_shared])}
    return [index if index < first_shared else last_of_kind[kind] for index, kind in enumerate(kinds)]


def _attention_sizes(stored: dict[str, Any]) -> list[tuple[int, int]]:
    """Each block's (head_dim, num_key_value_heads)."""
    overrides = _overrides(stored)
    of_block = [{**stored, **overrides.get(index, {})} for index in range(stored["num_hidden_layers"])]
    return [(sizes["head_dim"], sizes["num_key_value_heads"]) for sizes in of_block]


def _overrides(stored: dict[str, Any]) -> dict[int, dict[str, Any]]:
    # The keys are zero-padded strings, as in the JSON; there are none where all blocks have one size.
    return {int(index): fields for index, fields in stored.get("per_layer_config", {}).items()}


def _rotary(parameters: dict[str, Any], head_dim: int) -> RotaryPlan:
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    if kind == "default":
        return RotaryPlan(kind, theta, head_dim, rotated=head_dim, factor=1.0)
    # In transformers' own order of operations, which decides how an odd product is cut.
    pairs = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return RotaryPlan(kind, theta, head_dim, rotated=2 * pairs, factor=parameters.get("factor", 1.0))


# ---- the towers -------------------------------------------------------------------------------------------


def _vision(config: Any) -> VisionPlan | None:
    if config is None:
        return None
    if config.model_type == "gemma4_unified_vision":
        return VisionPlan(config.mm_embed_dim, config.patch_size * config.pooling_kernel_size, 1, ())
    block = TowerBlockPlan(
        index=0,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
    )
    blocks = tuple(replace(block, index=index) for index in range(config.num_hidden_layers))
    return VisionPlan(config.hidden_size, config.patch_size, config.pooling_kernel_size, blocks)


def _audio(config: Any) -> AudioPlan | None:
    if config is None:
        return None
    if config.model_type == "gemma4_unified_audio":
        return AudioPlan(config.audio_embed_dim, ())
    heads = config.num_attention_heads
    block = TowerBlockPlan(
        index=0,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.hidden_size // heads,
        intermediate_size=4 * config.hidden_size,  # `Gemma4AudioFeedForward`
    )
    blocks = tuple(replace(block, index=index) for index in range(config.num_hidden_layers))
    return AudioPlan(config.hidden_size, blocks)


# ---- the weights ------------------------------------------------------------------------------------------


def _model_shapes(plan: ModelPlan) -> Shapes:
    hidden, size = plan.hidden_size, plan.per_layer_input_size
    shapes: Shapes = {"model.embed_tokens.weight": (plan.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not plan.tied:
        shapes["lm_head.weight"] = (plan.vocab_size, hidden)
    if size is not None and plan.vocab_size_per_layer_input is not None:
        shapes |= {
            "model.embed_tokens_per_layer.weight": (plan.vocab_size_per_layer_input, plan.num_layers * size),
            "model.per_layer_model_projection.weight": (plan.num_layers * size, hidden),
            "model.per_layer_projection_norm.weight": (size,),
        }
    return shapes


def _block_shapes(block: BlockPlan, hidden: int) -> Shapes:
    queries, keys = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_norm.weight": (block.head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (block.intermediate_size, hidden),
        "mlp.up_proj.weight": (block.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, block.intermediate_size),
        "post_feedforward_layernorm.weight": (hidden,),
    }
    if not block.borrows_keys:
        shapes |= {"self_attn.k_proj.weight": (keys, hidden), "self_attn.k_norm.weight": (block.head_dim,)}
        if not block.values_from_keys:
            shapes["self_attn.v_proj.weight"] = (keys, hidden)
    if (size := block.per_layer_input_size) is not None:
        shapes |= {
            "per_layer_input_gate.weight": (size, hidden),
            "per_layer_projection.weight": (hidden, size),
            "post_per_layer_input_norm.weight": (hidden,),
        }
    if (experts := block.num_experts) is not None and (width := block.expert_intermediate_size) is not None:
        shapes |= {
            "router.scale": (hidden,),
            "router.per_expert_scale": (experts,),
            "router.proj.weight": (experts, hidden),
            "experts.gate_up_proj": (experts, 2 * width, hidden),
            "experts.down_proj": (experts, hidden, width),
            "post_feedforward_layernorm_1.weight": (hidden,),
            "post_feedforward_layernorm_2.weight": (hidden,),
            "pre_feedforward_layernorm_2.weight": (hidden,),
        }
    return shapes


# ---- the refusals: checks yield reasons and `plan` raises the first; a check relies on those before it -----


def _refusals(config: Any) -> Iterator[str]:
    model_type = getattr(config, "model_type", None)
    if model_type not in CONSIDERED:
        yield f"model_type={model_type!r} is not one that Gemloupe knows: {', '.join(CONSIDERED)}."
    if not hasattr(config, "to_dict"):
        yield f"plan() takes a transformers config, not a {type(config).__name__}: pass model.config."
    yield from _own_field_refusals(config, "config")
    text = config
    if (expected := WRAPPERS.get(config.model_type)) is not None:
        text = config.text_config
        if (found := getattr(text, "model_type", None)) != expected:
            yield f"config.text_config.model_type={found!r}: {config.model_type} wraps {expected!r}."
        yield from _own_field_refusals(text, "config.text_config")
    stored = text.to_dict()
    for check in (_layer_refusals, _size_refusals, _rotary_refusals, _sharing_refusals, _mixture_refusals):
        yield from check(stored)


def _own_field_refusals(config: Any, path: str) -> Iterator[str]:
    return field_refusals(config, path, CONSIDERED[config.model_type], NARROWED[config.model_type])


def field_refusals(
    config: Any, path: str, considered: frozenset[str], narrowed: Mapping[str, Narrowed]
) -> Iterator[str]:
    """A reason for each field of a config that says what is not known, or what nobody has considered."""
    defaults = _base_defaults(config)
    for name, value in config.to_dict().items():
        if name in narrowed:
            allowed, why = narrowed[name]
            if value not in allowed:
                yield f"{path}.{name}={value!r}: {why}. It can be {' or '.join(map(repr, allowed))}."
        # An unknown field that is None says nothing, nor does a field of all configs at its default.
        elif value is None or name in considered or (name in defaults and defaults[name] == value):
            continue
        elif not any(fnmatchcase(name, pattern) for pattern in IGNORED):
            yield (
                f"{path}.{name}={value!r}: Gemloupe has not considered this field of {config.model_type}, "
                f"which may change the computation. If it does not, drop it: `del {path}.{name}`."
            )


def _base_defaults(config: Any) -> dict[str, Any]:
    # Found on the config itself: this module imports no transformers.
    base = next((c for c in type(config).__mro__ if c.__name__ == "PreTrainedConfig"), None)
    return {} if base is None else base().to_dict()


def _layer_refusals(stored: dict[str, Any]) -> Iterator[str]:
    types, count = stored["layer_types"], stored["num_hidden_layers"]
    if len(types) != count:
        yield f"layer_types names {len(types)} blocks and num_hidden_layers={count}."
    for index, layer_type in enumerate(types):
        if layer_type not in KINDS:
            yield f"layer_types[{index}]={layer_type!r} is not one that Gemloupe knows: {', '.join(KINDS)}."
    causal, bidirectional = stored.get("is_causal", True), stored["use_bidirectional_attention"]
    if causal != (bidirectional != "all"):
        yield f"is_causal={causal} contradicts use_bidirectional_attention={bidirectional!r}."


def _size_refusals(stored: dict[str, Any]) -> Iterator[str]:
    for index, fields in _overrides(stored).items():
        for name in sorted(set(fields) - set(PER_BLOCK_FIELDS)):
            yield (
                f"per_layer_config[{index}] sets {name}={fields[name]!r}: "
                f"of a block's own fields Gemloupe knows {' and '.join(PER_BLOCK_FIELDS)}."
            )
    heads, sizes = stored["num_attention_heads"], _attention_sizes(stored)
    for index, (head_dim, kv_heads) in enumerate(sizes):
        if kv_heads < 1 or heads % kv_heads:
            yield (
                f"block {index}: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={kv_heads}."
            )
        if head_dim < 2 or head_dim % 2:
            yield f"block {index}: head_dim={head_dim} is not even, and its coordinates turn in pairs."
        # Gemma4TextRotaryEmbedding and the borrowed keys take one size per layer type.
        layer_type = stored["layer_types"][index]
        first = stored["layer_types"].index(layer_type)
        if sizes[index] != sizes[first]:
            yield (
                f"per_layer_config gives blocks {first} and {index}, both {layer_type!r}, different sizes: "
                f"(head_dim, num_key_value_heads) = {sizes[first]} and {sizes[index]}."
            )


def _rotary_refusals(stored: dict[str, Any]) -> Iterator[str]:
    for layer_type in sorted(set(stored["layer_types"])):
        parameters = (stored["rope_parameters"] or {}).get(layer_type)
        where = f"rope_parameters[{layer_type!r}]"
        if not isinstance(parameters, dict):
            yield f"{where} is {parameters!r}, and blocks of that type need rotary parameters."
            continue
        if (rope_type := parameters.get("rope_type")) not in ROPE_TYPES:
            yield f"{where} has rope_type={rope_type!r}; Gemloupe knows {' and '.join(ROPE_TYPES)}."
        if parameters.get("rope_theta") is None:
            yield f"{where} has no rope_theta."
        for name, value in parameters.items():
            if value is not None and name not in ROPE_FIELDS:
                yield f"{where} sets {name}={value!r}, a field that Gemloupe has not considered."


def _sharing_refusals(stored: dict[str, Any]) -> Iterator[str]:
    types, shared = stored["layer_types"], stored["num_kv_shared_layers"]
    first_shared = len(types) - shared
    if not 0 <= shared < len(types):
        yield f"num_kv_shared_layers={shared} of {len(types)} blocks: at least one has to compute keys."
    for index in range(first_shared, len(types)):
        if types[index] not in types[:first_shared]:
            yield (
                f"num_kv_shared_layers={shared}: block {index} has no source, for no {types[index]!r} block "
                f"comes before block {first_shared}, where the sharing begins."
            )


def _mixture_refusals(stored: dict[str, Any]) -> Iterator[str]:
    if not stored.get("enable_moe_block", False):
        return
    for name in _MIXTURE_FIELDS:
        if not stored[name]:
            yield f"enable_moe_block=True needs {name}, which is {stored[name]!r}."
    if stored["top_k_experts"] > stored["num_experts"]:
        yield f"top_k_experts={stored['top_k_experts']} is more than num_experts={stored['num_experts']}."
