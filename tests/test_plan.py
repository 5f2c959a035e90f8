"""The plan against the published checkpoints' sizes, and against the models that transformers builds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

import gemloupe.plan
from gemloupe.errors import UnsupportedModel
from gemloupe.plan import CONSIDERED, IGNORED, NARROWED, BlockPlan, ModelPlan, plan

# ---- the published checkpoints: their text configs, and the layer tables written out by hand --------------


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    model_type: str
    fields: dict[str, Any]
    sliding_per_full: int
    num_parameters: int
    full_blocks: tuple[int, ...]
    kv_heads: dict[str, int]
    sharing: dict[int, tuple[int, ...]]
    double_wide: tuple[int, ...] = ()

    def text_config(self, **changes: Any) -> PreTrainedConfig:
        period = ["sliding_attention"] * self.sliding_per_full + ["full_attention"]
        layer_types = period * (self.fields["num_hidden_layers"] // len(period))
        return AutoConfig.for_model(self.model_type, **{"layer_types": layer_types, **self.fields, **changes})


PUBLISHED: Final = {
    "E2B": Checkpoint(
        "gemma4_text",
        {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8}
        | {"num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 131072}
        | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
        | {"final_logit_softcapping": 30.0},
        sliding_per_full=4,
        num_parameters=4_628_569_344,
        full_blocks=(4, 9, 14, 19, 24, 29, 34),
        kv_heads={"sliding": 1, "full": 1},
        sharing={13: (15, 16, 17, 18, 20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32, 33), 14: (19, 24, 29, 34)},
        double_wide=tuple(range(15, 35)),
    ),
    "E4B": Checkpoint(
        "gemma4_text",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "sliding_window": 512, "max_position_embeddings": 131072}
        | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0},
        sliding_per_full=5,
        num_parameters=7_463_013_376,
        full_blocks=(5, 11, 17, 23, 29, 35, 41),
        kv_heads={"sliding": 2, "full": 2},
        sharing={22: (24, 25, 26, 27, 28, 30, 31, 32, 33, 34, 36, 37, 38, 39, 40), 23: (29, 35, 41)},
    ),
    "26B-A4B": Checkpoint(
        "gemma4_text",
        {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
        | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
        sliding_per_full=5,
        num_parameters=25_233_141_760,
        full_blocks=(5, 11, 17, 23, 29),
        kv_heads={"sliding": 8, "full": 2},
        sharing={},
    ),
    "31B": Checkpoint(
        "gemma4_text",
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
        | {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
        | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
        sliding_per_full=5,
        num_parameters=30_697_345_280,
        full_blocks=(5, 11, 17, 23, 29, 35, 41, 47, 53, 59),
        kv_heads={"sliding": 16, "full": 4},
        sharing={},
    ),
    "12B": Checkpoint(
        "gemma4_unified_text",
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"sliding_window": 1024, "max_position_embeddings": 262144}
        | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
        sliding_per_full=5,
        num_parameters=11_907_350_272,
        full_blocks=(5, 11, 17, 23, 29, 35, 41, 47),
        kv_heads={"sliding": 8, "full": 1},
        sharing={},
    ),
}
WRAPPERS: Final[dict[str, Any]] = {
    "gemma4_text": Gemma4Config,
    "gemma4_unified_text": Gemma4UnifiedConfig,
}
ROTATED: Final = {"sliding": ("default", 10_000.0, 256, 256), "full": ("proportional", 1_000_000.0, 512, 128)}

each_checkpoint = pytest.mark.parametrize("checkpoint", PUBLISHED.values(), ids=PUBLISHED)


@each_checkpoint
def test_the_model_is_what_its_config_says(checkpoint: Checkpoint):
    fields, model = checkpoint.fields, plan(checkpoint.text_config())
    assert model.model_type == checkpoint.model_type
    assert model.num_layers == len(model.blocks) == fields["num_hidden_layers"]
    assert (model.hidden_size, model.vocab_size) == (fields["hidden_size"], 262_144)
    assert (model.num_heads, model.head_dim) == (fields["num_attention_heads"], 256)
    assert model.num_kv_heads == fields["num_key_value_heads"]
    assert model.intermediate_size == fields["intermediate_size"]
    assert model.sliding_window == fields["sliding_window"]
    assert model.max_positions == fields["max_position_embeddings"]
    assert (model.logit_cap, model.norm_eps, model.tied) == (30.0, 1e-6, True)
    assert model.bidirectional == fields.get("use_bidirectional_attention")
    assert model.per_layer_input_size == (fields.get("hidden_size_per_layer_input") or None)
    assert model.vocab_size_per_layer_input == (262_144 if model.per_layer_input_size else None)
    assert (model.wrapper, model.has_vision, model.has_audio) == (False, False, False)
    assert model.kv_sharing() == checkpoint.sharing
    assert model.num_parameters == checkpoint.num_parameters


@each_checkpoint
def test_every_block_is_what_the_layer_table_says(checkpoint: Checkpoint):
    fields, source_of = checkpoint.fields, {b: s for s, bs in checkpoint.sharing.items() for b in bs}
    has_experts, size = (
        fields.get("enable_moe_block", False),
        fields.get("hidden_size_per_layer_input") or None,
    )
    for index, block in enumerate(plan(checkpoint.text_config()).blocks):
        kind = "full" if index in checkpoint.full_blocks else "sliding"
        assert (block.index, block.kind) == (index, kind)
        assert block.window == (None if kind == "full" else fields["sliding_window"])
        assert block.num_heads == fields["num_attention_heads"]
        assert block.num_kv_heads == checkpoint.kv_heads[kind]
        assert block.head_dim == {"sliding": 256, "full": 512}[kind]
        assert block.intermediate_size == fields["intermediate_size"] * (
            1 + (index in checkpoint.double_wide)
        )
        rotary = block.rotary
        assert (rotary.kind, rotary.theta, rotary.head_dim, rotary.rotated) == ROTATED[kind]
        assert rotary.factor == 1.0
        assert block.values_from_keys is (kind == "full" and fields.get("attention_k_eq_v", False))
        assert block.kv_source == source_of.get(index, index)
        assert block.borrows_keys is (index in source_of)
        assert block.kv_borrowers == checkpoint.sharing.get(index, ())
        assert block.has_experts is has_experts
        mixture = (block.num_experts, block.top_k, block.expert_intermediate_size)
        assert mixture == ((128, 8, 704) if has_experts else (None, None, None))
        assert (block.has_per_layer_input, block.per_layer_input_size) == (size is not None, size)


# ---- the models that transformers builds ------------------------------------------------------------------


def on_meta(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def assert_block_matches(block: BlockPlan, layer: Any) -> None:
    attention, heads = layer.self_attn, block.num_heads * block.head_dim
    assert attention.is_sliding == (block.kind == "sliding")
    assert attention.sliding_window == block.window
    assert attention.head_dim == block.head_dim
    assert attention.num_key_value_groups == block.num_heads // block.num_kv_heads
    assert attention.is_kv_shared_layer == block.borrows_keys
    assert attention.store_full_length_kv or not block.kv_borrowers
    assert tuple(attention.q_proj.weight.shape) == (heads, layer.hidden_size)
    assert hasattr(attention, "k_proj") != block.borrows_keys
    if not block.borrows_keys:
        assert attention.k_proj.out_features == block.num_kv_heads * block.head_dim
        assert (attention.v_proj is None) == block.values_from_keys
    assert layer.mlp.gate_proj.out_features == layer.mlp.down_proj.in_features == block.intermediate_size
    assert hasattr(layer, "router") == hasattr(layer, "experts") == block.has_experts
    if block.has_experts:
        assert layer.router.proj.out_features == layer.experts.num_experts == block.num_experts
        assert layer.router.config.top_k_experts == block.top_k
        assert layer.experts.intermediate_dim == block.expert_intermediate_size
    assert hasattr(layer, "per_layer_input_gate") == block.has_per_layer_input
    if block.has_per_layer_input:
        assert layer.per_layer_input_gate.out_features == block.per_layer_input_size


@each_checkpoint
def test_transformers_builds_the_modules_that_the_plan_names(checkpoint: Checkpoint):
    config = checkpoint.text_config()
    model, planned = on_meta(config), plan(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == checkpoint.num_parameters
    assert shapes(model) == planned.parameter_shapes()
    for block, layer in zip(planned.blocks, model.model.layers, strict=True):
        assert_block_matches(block, layer)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.3, "factor": 4.0},
        {"rope_type": "proportional", "rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 500.0},
        # "default" turns every coordinate, whatever these say.
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0},
    ],
    ids=["quarter", "odd-and-stretched", "whole", "default", "default-ignores"],
)
def test_the_rotary_plan_is_the_table_that_transformers_computes(parameters: dict[str, Any]):
    config = small(rope_parameters={"sliding_attention": SLIDING_ROPE, "full_attention": dict(parameters)})
    rotary = plan(config).blocks[-1].rotary
    frequencies: Any = Gemma4TextRotaryEmbedding(config).full_attention_inv_freq
    assert rotary.head_dim == 2 * len(frequencies) == 24
    assert rotary.rotated == 2 * int((frequencies != 0).sum())
    exponents = torch.arange(0, rotary.rotated, 2, dtype=torch.float64) / rotary.head_dim
    expected = rotary.theta**-exponents / rotary.factor
    torch.testing.assert_close(frequencies[: rotary.rotated // 2].double(), expected)


# ---- small models of any shape ----------------------------------------------------------------------------

SLIDING_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
FULL_ROPE: Final = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
SLIDING, FULL = "sliding_attention", "full_attention"
SMALL: Final = {
    "vocab_size": 40,
    "vocab_size_per_layer_input": 36,
    "hidden_size": 20,
    "hidden_size_per_layer_input": 6,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 8,
}
UNIFIED: Final = {name: value for name, value in SMALL.items() if "per_layer_input" not in name}


def small(**changes: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**{**SMALL, **changes})


def small_unified(**changes: Any) -> Gemma4UnifiedTextConfig:
    return Gemma4UnifiedTextConfig(**{**UNIFIED, **changes})


MIXTURE: Final = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}


@st.composite
def configs(draw: st.DrawFn) -> PreTrainedConfig:
    """Any config that transformers can build: both kinds, any sharing that has its sources, every switch."""
    kinds = [SLIDING, FULL, *draw(st.lists(st.sampled_from([SLIDING, FULL]), max_size=6))]
    kinds = [*draw(st.permutations(kinds)), FULL]  # the config forces the last block to be a full one
    earliest = max(kinds.index(SLIDING), kinds.index(FULL)) + 1
    changes: dict[str, Any] = {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": len(kinds) - draw(st.integers(earliest, len(kinds))),
        "use_double_wide_mlp": draw(st.booleans()),
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from([None, 1, 4])),
        "head_dim": draw(st.sampled_from([8, 24])),  # 24 is the full blocks' too: then no size is per block
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return small_unified(**changes)
    changes |= draw(st.sampled_from([{}, MIXTURE]))
    return small(**changes, hidden_size_per_layer_input=draw(st.sampled_from([0, 6])))


@given(configs())
@settings(max_examples=40, deadline=None)
def test_any_model_that_transformers_builds_has_the_planned_weights(config: PreTrainedConfig):
    model, planned = on_meta(config), plan(config)
    assert shapes(model) == planned.parameter_shapes()
    assert planned.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for block, layer in zip(planned.blocks, model.model.layers, strict=True):
        assert_block_matches(block, layer)


@given(configs())
@settings(max_examples=100, deadline=None)
def test_sources_and_borrowers_are_inverse_and_never_cross_kinds(config: PreTrainedConfig):
    blocks = plan(config).blocks
    borrowed = {(borrower, source.index) for source in blocks for borrower in source.kv_borrowers}
    assert borrowed == {(block.index, block.kv_source) for block in blocks if block.borrows_keys}
    assert len(borrowed) == config.to_dict()["num_kv_shared_layers"]
    for block in blocks:
        source = blocks[block.kv_source]
        assert source.index <= block.index
        assert not source.borrows_keys
        assert (source.kind, source.head_dim, source.num_kv_heads) == (
            block.kind,
            block.head_dim,
            block.num_kv_heads,
        )
        between = blocks[source.index + 1 : block.index] if block.borrows_keys else ()
        assert all(other.borrows_keys or other.kind != block.kind for other in between)


# ---- where a config comes from ----------------------------------------------------------------------------


def wrapped(text: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    return WRAPPERS[text.model_type](text_config=text, **changes)


def as_text(planned: ModelPlan) -> ModelPlan:
    return dataclasses.replace(planned, wrapper=False, vision=None, audio=None)


@each_checkpoint
def test_a_wrapper_has_the_plan_of_its_text_config(checkpoint: Checkpoint):
    text = checkpoint.text_config()
    planned = plan(wrapped(text))
    assert planned.wrapper
    assert as_text(planned) == plan(text)


@pytest.mark.parametrize(
    ("make", "vision", "audio"),
    [
        (small, Gemma4VisionConfig, Gemma4AudioConfig),
        (small_unified, Gemma4UnifiedVisionConfig, Gemma4UnifiedAudioConfig),
    ],
    ids=["gemma4", "gemma4_unified"],
)
def test_a_wrapper_says_which_modalities_it_has(
    make: Callable[[], PreTrainedConfig], vision: Any, audio: Any
):
    for has_vision in (True, False):
        for has_audio in (True, False):
            towers = {"vision_config": vision() if has_vision else None}
            towers |= {"audio_config": audio() if has_audio else None}
            planned = plan(wrapped(make(), **towers))
            assert (planned.has_vision, planned.has_audio) == (has_vision, has_audio)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("make", "model_class"),
    [(small, Gemma4ForConditionalGeneration), (small_unified, Gemma4UnifiedForConditionalGeneration)],
    ids=["gemma4", "gemma4_unified"],
)
def test_a_wrapper_ties_its_head_as_its_own_config_says(
    make: Callable[..., Any], model_class: Any, tied: bool
):
    config = wrapped(make(tie_word_embeddings=not tied), tie_word_embeddings=tied)
    with torch.device("meta"):
        model = model_class(config)
    built = {name.replace("model.language_model.", "model."): shape for name, shape in shapes(model).items()}
    assert plan(config).tied is tied
    assert plan(config).parameter_shapes() == built


@each_checkpoint
@pytest.mark.parametrize("in_a_wrapper", [False, True], ids=["text", "wrapper"])
def test_a_saved_config_has_the_same_plan(checkpoint: Checkpoint, in_a_wrapper: bool, tmp_path: Path):
    config = checkpoint.text_config()
    config = wrapped(config) if in_a_wrapper else config
    config.save_pretrained(tmp_path)
    assert plan(AutoConfig.from_pretrained(tmp_path)) == plan(config)


def test_a_window_that_transformers_halves_is_halved_once(tmp_path: Path):
    config = small(use_bidirectional_attention="all", sliding_window=512)
    config.save_pretrained(tmp_path)
    for planned in (plan(config), plan(AutoConfig.from_pretrained(tmp_path))):
        assert planned.bidirectional == "all"
        assert planned.sliding_window == planned.blocks[0].window == 257


def test_a_config_as_published_is_planned(tmp_path: Path):
    checkpoint = PUBLISHED["E2B"]
    text = checkpoint.text_config().to_dict()
    del text["per_layer_config"]  # published files say it so:
    text |= {"global_head_dim": 512, "num_global_key_value_heads": None, "expert_intermediate_size": None}
    text |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "_name_or_path": "somewhere"}
    published = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "eoa_token_id": 258_883,
        "eoa_token_index": 258_883,
        "transformers_version": "5.5.0.dev0",
        "unsloth_fixed": True,
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "text_config": text,
        "vision_config": Gemma4VisionConfig().to_dict() | {"default_output_length": 280},
        "audio_config": Gemma4AudioConfig().to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    planned = plan(AutoConfig.from_pretrained(tmp_path))
    assert as_text(planned) == plan(checkpoint.text_config())
    assert (planned.wrapper, planned.has_vision, planned.has_audio) == (True, True, True)


def test_the_config_of_a_loaded_model_is_planned(tmp_path: Path):
    config = small(num_kv_shared_layers=2, **MIXTURE)
    Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype="bfloat16")
    model.config._pre_quantization_dtype = torch.float16
    assert plan(model.config) == plan(config)


def test_a_unified_config_may_say_that_it_has_no_mixture_and_no_per_layer_inputs():
    for fields in (
        {"enable_moe_block": False, "num_experts": None, "hidden_size_per_layer_input": 0},
        {"enable_moe_block": None, "num_experts": 4, "hidden_size_per_layer_input": None},
    ):
        assert plan(small_unified(**fields, vocab_size_per_layer_input=36)) == plan(small_unified())


def test_a_cap_and_an_epsilon_are_the_configs_own():
    planned = plan(small(final_logit_softcapping=None, rms_norm_eps=1e-5))
    assert (planned.logit_cap, planned.norm_eps) == (None, 1e-5)


def test_planning_changes_nothing_and_a_plan_is_frozen():
    config = small(num_kv_shared_layers=2)
    before = config.to_dict()
    planned = plan(config)
    assert config.to_dict() == before
    assert hash(planned) == hash(plan(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.blocks[0].head_dim = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_top_level_sizes_are_the_stored_ones_whether_or_not_transformers_guards_them():
    config = small()
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = config.head_dim
    assert (plan(config).head_dim, plan(config).blocks[1].head_dim) == (16, 24)
    config.allow_global_per_layer_attribute_access = True
    config.serialize_explicit_per_layer_config = True
    assert plan(config) == plan(small())
    assert {block.head_dim for block in plan(small(head_dim=24)).blocks} == {24}


# ---- the tables -------------------------------------------------------------------------------------------

CONFIG_CLASSES: Final = (Gemma4TextConfig, Gemma4UnifiedTextConfig, Gemma4Config, Gemma4UnifiedConfig)


def own_fields(config_class: Any) -> set[str]:
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name for field in dataclasses.fields(config_class)} - base


def ignored(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in IGNORED)


@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=lambda c: c.model_type)
def test_every_field_of_the_class_is_in_one_table(config_class: Any):
    considered, narrowed = CONSIDERED[config_class.model_type], set(NARROWED[config_class.model_type])
    own = own_fields(config_class)
    for name in own:
        assert (name in considered) + (name in narrowed) + ignored(name) == 1, name
    # Beyond those: what `to_dict` adds, and what a unified config may say only to switch it off.
    beyond = {"model_type"}
    if "text" in config_class.model_type:
        beyond |= {"per_layer_config", "is_causal"}
    if config_class is Gemma4UnifiedTextConfig:
        beyond |= own_fields(Gemma4TextConfig) - own
    assert (considered | narrowed) - own == beyond


def test_the_tables_are_of_the_same_model_types_and_say_why():
    assert set(CONSIDERED) == set(NARROWED) == {c.model_type for c in CONFIG_CLASSES}
    assert all(reason for reason in IGNORED.values())
    assert all(reason for table in NARROWED.values() for _, reason in table.values())


IGNORED_VALUES: Final[dict[str, Any]] = {
    "architectures": ["Anything"],
    "attention_dropout": 0.5,
    "id2label": {0: "a"},
    "initializer_range": 0.5,
    "label2id": {"a": 0},
    "problem_type": "regression",
    "quantization_config": {"quant_method": "any"},
    "use_cache": False,
}


@pytest.mark.parametrize("pattern", IGNORED)
@pytest.mark.parametrize("make", [small, small_unified])
def test_an_ignored_field_changes_nothing(make: Callable[[], PreTrainedConfig], pattern: str):
    name, config = pattern.replace("*", "any_"), make()
    setattr(config, name, IGNORED_VALUES.get(pattern, True))
    assert plan(config) == plan(make())
    assert as_text(plan(wrapped(config))) == plan(make())


# ---- the refusals -----------------------------------------------------------------------------------------


def changed(config: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        object.__setattr__(config, name, value)  # past the config's own validation
    return config


def with_rope(**full: Any) -> Gemma4TextConfig:
    return changed(small(), rope_parameters={SLIDING: SLIDING_ROPE, FULL: FULL_ROPE | full})


class NoConfig:
    model_type = "gemma4_text"


KNOWN: Final = ("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified")
REFUSALS: Final[dict[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    "another model": (LlamaConfig, ("model_type='llama'", *KNOWN)),
    "a tower": (Gemma4VisionConfig, ("model_type='gemma4_vision'", *KNOWN)),
    "no model type": (object, ("model_type=None", *KNOWN)),
    "no config": (NoConfig, ("takes a transformers config", "NoConfig", "model.config")),
    "unknown field": (
        lambda: small(attn_logit_softcapping=50.0),
        (
            "config.attn_logit_softcapping=50.0",
            "not considered",
            "gemma4_text",
            "`del config.attn_logit_softcapping`",
        ),
    ),
    "unknown field that is off": (
        lambda: small_unified(use_new_thing=False),
        ("config.use_new_thing=False",),
    ),
    "unknown field of the wrapper": (
        lambda: wrapped(small(), soft_token_scale=2.0),
        ("config.soft_token_scale=2.0", "of gemma4,"),
    ),
    "unknown field inside the wrapper": (
        lambda: wrapped(small_unified(query_scale=2.0)),
        (
            "config.text_config.query_scale=2.0",
            "of gemma4_unified_text,",
            "`del config.text_config.query_scale`",
        ),
    ),
    "base field": (
        lambda: small(is_encoder_decoder=True),
        ("config.is_encoder_decoder=True", "not considered"),
    ),
    "base field, tuples": (lambda: small(return_dict=False), ("config.return_dict=False", "not considered")),
    "activation": (
        lambda: small(hidden_activation="silu"),
        ("hidden_activation='silu'", "It can be 'gelu_pytorch_tanh'."),
    ),
    "bias": (lambda: small_unified(attention_bias=True), ("attention_bias=True", "bias", "It can be False.")),
    "mask": (
        lambda: changed(small(), use_bidirectional_attention="audio"),
        ("use_bidirectional_attention='audio'", "It can be None or 'vision' or 'all'."),
    ),
    "mask, undone": (
        lambda: changed(small(), is_causal=False),
        ("is_causal=False", "contradicts use_bidirectional_attention=None"),
    ),
    "mask, half set": (
        lambda: changed(small(), use_bidirectional_attention="all"),
        ("is_causal=True", "contradicts use_bidirectional_attention='all'"),
    ),
    "unified with a mixture": (
        lambda: small_unified(**MIXTURE),
        ("enable_moe_block=True", "Gemma4UnifiedTextDecoderLayer has no mixture", "False or None."),
    ),
    "unified with per-layer inputs": (
        lambda: small_unified(hidden_size_per_layer_input=6),
        ("hidden_size_per_layer_input=6", "Gemma4UnifiedTextModel has no per-layer inputs"),
    ),
    "wrong text config": (
        lambda: changed(Gemma4Config(text_config=small()), text_config=small_unified()),
        ("config.text_config.model_type='gemma4_unified_text'", "gemma4 wraps 'gemma4_text'"),
    ),
    "layer type": (
        lambda: small(layer_types=[SLIDING, "chunked_attention", SLIDING, FULL]),
        ("layer_types[1]='chunked_attention'", SLIDING, FULL),
    ),
    "too few layer types": (
        lambda: changed(small(), layer_types=[SLIDING, FULL, FULL]),
        ("layer_types names 3 blocks", "num_hidden_layers=4"),
    ),
    "a block's own window": (
        lambda: small(per_layer_config={0: {"sliding_window": 4}}),
        ("per_layer_config[0]", "sliding_window=4", "head_dim and num_key_value_heads"),
    ),
    "a block's own skip": (
        lambda: small(per_layer_config={2: {"skip": ["mlp"]}}),
        ("per_layer_config[2]", "skip=['mlp']", "head_dim and num_key_value_heads"),
    ),
    "two sizes of one kind": (
        lambda: small(per_layer_config={1: {"head_dim": 24}}),
        ("blocks 1 and 3", FULL, "(24, 2) and (16, 2)"),
    ),
    "kv heads": (
        lambda: small(num_key_value_heads=3),
        ("block 0", "num_attention_heads=4", "num_key_value_heads=3"),
    ),
    "kv heads of the full blocks": (
        lambda: small(num_global_key_value_heads=3, attention_k_eq_v=True),
        ("block 1", "num_attention_heads=4", "num_key_value_heads=3"),
    ),
    "no kv heads": (lambda: small(num_key_value_heads=0), ("block 0", "num_key_value_heads=0")),
    "odd head": (lambda: small(global_head_dim=15), ("block 1", "head_dim=15", "pairs")),
    "rope type": (
        lambda: with_rope(rope_type="yarn"),
        ("rope_parameters['full_attention']", "rope_type='yarn'", "default and proportional"),
    ),
    "rope field": (
        lambda: with_rope(beta_fast=32.0),
        ("rope_parameters['full_attention']", "beta_fast=32.0", "not considered"),
    ),
    "rope theta": (
        lambda: with_rope(rope_theta=None),
        ("rope_parameters['full_attention']", "no rope_theta"),
    ),
    "rope of one kind": (
        lambda: changed(small(), rope_parameters={FULL: FULL_ROPE}),
        ("rope_parameters['sliding_attention'] is None", "need rotary parameters"),
    ),
    "no rope": (
        lambda: changed(small(), rope_parameters=None),
        ("rope_parameters['full_attention'] is None",),
    ),
    "all blocks borrow": (
        lambda: small(num_kv_shared_layers=4),
        ("num_kv_shared_layers=4 of 4 blocks", "at least one"),
    ),
    "more borrow than there are": (
        lambda: small(num_kv_shared_layers=5),
        ("num_kv_shared_layers=5 of 4 blocks",),
    ),
    "fewer than none borrow": (
        lambda: small(num_kv_shared_layers=-1),
        ("num_kv_shared_layers=-1 of 4 blocks",),
    ),
    "no source": (
        lambda: small(num_kv_shared_layers=3),
        ("num_kv_shared_layers=3", "block 1 has no source", FULL, "before block 1"),
    ),
    "experts without their number": (
        lambda: small(**MIXTURE | {"num_experts": None}),
        ("enable_moe_block=True needs num_experts", "None"),
    ),
    "experts without top_k": (
        lambda: small(**MIXTURE | {"top_k_experts": None}),
        ("enable_moe_block=True needs top_k_experts", "None"),
    ),
    "experts without a width": (
        lambda: small(**MIXTURE | {"moe_intermediate_size": None}),
        ("enable_moe_block=True needs moe_intermediate_size", "None"),
    ),
    "more experts than there are": (
        lambda: small(**MIXTURE | {"top_k_experts": 6}),
        ("top_k_experts=6 is more than num_experts=5",),
    ),
}


@pytest.mark.parametrize(("make", "pieces"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_not_known_is_refused_by_name(make: Callable[[], Any], pieces: tuple[str, ...]):
    config = make()
    with pytest.raises(UnsupportedModel) as refusal:
        plan(config)
    for piece in pieces:
        assert piece in str(refusal.value)


def test_a_refusal_is_a_value_error_and_goes_away_as_it_says():
    config = small(attn_logit_softcapping=50.0)
    with pytest.raises(ValueError, match="attn_logit_softcapping"):
        plan(config)
    del config.attn_logit_softcapping  # pyright: ignore[reportAttributeAccessIssue]
    assert plan(config) == plan(small())


# ---- importing it is light --------------------------------------------------------------------------------

# The package's own __init__ is kept out by a module of its name that has only its path.
IMPORTS: Final = """
import sys, types
sys.modules["gemloupe"] = types.ModuleType("gemloupe")
sys.modules["gemloupe"].__path__ = [{folder!r}]
import {module}
sys.exit(" ".join(name for name in ("torch", "transformers", "nnsight") if name in sys.modules))
"""


def heavy_imports(module: str) -> str:
    code = IMPORTS.format(folder=str(Path(gemloupe.plan.__file__).parent), module=module)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip()


def test_importing_the_plan_imports_no_torch():
    assert heavy_imports("gemloupe.plan") == ""


def test_the_test_of_light_imports_can_fail():
    assert heavy_imports("gemloupe.plan, torch") == "torch"
