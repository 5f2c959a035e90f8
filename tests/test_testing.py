"""The tiny models themselves: what every other test stands on."""

from __future__ import annotations

import copy
import json
import random
import time
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from gemloupe.testing import (
    SHAPES,
    save_tiny,
    scramble,
    tiny,
    tiny_config,
    tiny_image,
    tiny_module,
    tiny_processor,
    tiny_sound,
    tiny_tokenizer,
    tiny_video,
)

# What a block of each shape can be, as in the published checkpoints.
KINDS = {
    "e2b": {"sliding", "full", "source", "borrower", "per-layer input", "double-wide"},
    "e4b": {"sliding", "full", "source", "borrower", "per-layer input"},
    "26b-a4b": {"sliding", "full", "mixture", "keys as values", "fewer full heads", "vision both ways"},
    "31b": {"sliding", "full", "keys as values", "fewer full heads", "vision both ways"},
    "12b": {"sliding", "full", "keys as values", "fewer full heads", "vision both ways"},
}
CLASSES = {
    "12b": ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    None: ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
}
TOKEN_FIELDS = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "audio_token_id": "<|audio|>",
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
    "video_token_id": "<|video|>",
}
TEXTS = [
    "",
    " leading, trailing ",
    "tabs\tand\r\nlines\n\n",
    "naïve Ångström — “quotes”",
    "日本語 и русский עברית",
    "👩\u200d👩\u200d👧 \U0001f9ea e\u0301 \ufeff \u2028",
    "\x00\x1f\x7f\x85",
    "<bos> <|image|><unused3> <turn|",
]
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_loads = pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])


@cache
def shared(shape: str, wrapper: bool = False, **kwargs: Any) -> Any:
    """A tiny model for tests that only read it."""
    return tiny_module(shape, wrapper=wrapper, **kwargs)


def stack(module: Any) -> Any:
    return getattr(module.model, "language_model", module.model)


def prompts() -> Tensor:
    """Two rows of 12 tokens, one more than twice over the window."""
    ids = torch.randint(20, 280, (2, 12), generator=torch.Generator().manual_seed(7))
    ids[:, 0] = 2
    return ids


@torch.no_grad()
def logits(module: Any, **inputs: Any) -> Tensor:
    return module(**(inputs or {"input_ids": prompts()})).logits


def assert_agree(left: Tensor, right: Tensor) -> None:
    """Within float32 rounding, which twelve blocks and sharp patterns carry to about 1e-5 of the logits."""
    assert (left - right).abs().max() < 3e-5 * left.abs().max()


def kinds(module: Any) -> set[str]:
    """The kinds of block, told from the modules that are there and not from the config's flags."""
    text = stack(module)
    blocks = list(text.layers)
    borrowers = {i for i, block in enumerate(blocks) if not hasattr(block.self_attn, "k_proj")}
    sources = {
        max(
            j
            for j in range(min(borrowers))
            if blocks[j].self_attn.is_sliding == blocks[i].self_attn.is_sliding
        )
        for i in borrowers
    }
    widths = [block.mlp.gate_proj.out_features for block in blocks]
    found = set()
    for i, block in enumerate(blocks):
        attention = block.self_attn
        found.add("sliding" if attention.is_sliding else "full")
        if i in borrowers:
            found.add("borrower")
        if i in sources:
            found.add("source")
        if widths[i] == 2 * widths[0]:
            assert i in borrowers
            found.add("double-wide")
        if hasattr(block, "per_layer_input_gate"):
            found.add("per-layer input")
        if hasattr(block, "router"):
            found.add("mixture")
        if i not in borrowers and attention.v_proj is None:
            assert not attention.is_sliding
            found.add("keys as values")
        if attention.num_key_value_groups > blocks[0].self_attn.num_key_value_groups:
            found.add("fewer full heads")
    if text.config.use_bidirectional_attention == "vision":
        found.add("vision both ways")
    return found


@every_shape
@both_loads
def test_has_the_blocks_of_its_checkpoint(shape, wrapper):
    assert kinds(shared(shape, wrapper)) == KINDS[shape]


@every_shape
@both_loads
def test_is_transformers_own_class_in_eval_mode(shape, wrapper):
    module = shared(shape, wrapper)
    assert type(module).__name__ == CLASSES.get(shape, CLASSES[None])[wrapper]
    assert type(module).__module__.startswith("transformers.")
    assert not any(part.training for part in module.modules())
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_borrowers_and_sources_are_of_both_kinds():
    for shape, borrowers, full in [("e2b", range(5, 10), {4, 9}), ("e4b", range(6, 12), {5, 11})]:
        blocks = shared(shape).model.layers
        assert [i for i, block in enumerate(blocks) if block.self_attn.is_kv_shared_layer] == [*borrowers]
        assert {i for i, block in enumerate(blocks) if not block.self_attn.is_sliding} == full


@every_shape
def test_sizes_tell_apart_what_is_easily_mixed_up(shape):
    module = shared(shape)
    config, blocks = module.config, module.model.layers
    head_dims = {block.self_attn.is_sliding: block.self_attn.head_dim for block in blocks}
    assert head_dims[True] != head_dims[False]
    for block in blocks:
        assert block.self_attn.o_proj.in_features != config.hidden_size
        assert block.self_attn.num_key_value_groups > 1
    assert 2 * config.sliding_window <= prompts().shape[1]
    assert config.num_hidden_layers >= 6
    assert config.final_logit_softcapping == 30.0
    rope = config.rope_parameters["full_attention"]
    assert (rope["rope_type"], rope["partial_rotary_factor"]) == ("proportional", 0.25)
    for load in (module, shared(shape, True)):
        assert load.lm_head.weight is stack(load).embed_tokens.weight


def test_mixture_adds_more_than_two_experts():
    config = shared("26b-a4b").config
    assert 2 < config.top_k_experts < config.num_experts


@every_shape
def test_wrapper_config_has_the_tokenizers_ids(shape):
    config, tokenizer = tiny_config(shape, wrapper=True), tiny_tokenizer()
    for field, text in TOKEN_FIELDS.items():
        assert getattr(config, field) == tokenizer.convert_tokens_to_ids(text)
    text_config = config.get_text_config()
    assert text_config.vocab_size == len(tokenizer)
    assert getattr(text_config, "vocab_size_per_layer_input", len(tokenizer)) == len(tokenizer)
    for name in ("pad", "eos", "bos"):
        assert getattr(text_config, f"{name}_token_id") == getattr(tokenizer, f"{name}_token_id")


def test_towers_are_those_of_the_checkpoints():
    for shape in SHAPES:
        parts = dict(shared(shape, True).model.named_children())
        towers = {
            name for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio") if parts.get(name)
        }
        assert (
            towers
            == {
                "e2b": {"vision_tower", "audio_tower", "embed_vision", "embed_audio"},
                "e4b": {"vision_tower", "audio_tower", "embed_vision", "embed_audio"},
                "26b-a4b": {"vision_tower", "embed_vision"},
                "31b": {"vision_tower", "embed_vision"},
                "12b": {"embed_vision", "embed_audio"},
            }[shape]
        )


def test_another_number_of_layers_keeps_the_pattern():
    longer = tiny_config("e2b", num_hidden_layers=15)
    assert [i for i, kind in enumerate(longer.layer_types) if kind == "full_attention"] == [4, 9, 14]
    assert longer.num_kv_shared_layers == 5
    shorter = tiny_config("e2b", num_hidden_layers=7)
    assert [i for i, kind in enumerate(shorter.layer_types) if kind == "full_attention"] == [4, 6]
    assert shorter.num_kv_shared_layers == 2
    for num_layers in (1, 3, 5, 7):
        module: Any = tiny_module("e2b", num_hidden_layers=num_layers)
        assert len(module.model.layers) == num_layers
        assert logits(module).isfinite().all()


@both_loads
def test_overrides_are_fields_of_the_text_config(wrapper):
    module = tiny_module(
        "31b", wrapper=wrapper, final_logit_softcapping=None, sliding_window=3, global_head_dim=8
    )
    config = module.config.get_text_config()
    assert (config.final_logit_softcapping, config.sliding_window) == (None, 3)
    assert stack(module).layers[5].self_attn.head_dim == 8


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"'27b'.*e2b, e4b, 26b-a4b, 31b, 12b"):
        tiny_module("27b")
    with pytest.raises(TypeError, match="no field slidingwindow"):
        tiny_config("e2b", slidingwindow=3)
    with pytest.raises(TypeError, match="sliding_window"):
        tiny_module("e2b", config=tiny_config("e2b"), sliding_window=3)


def test_builds_the_config_it_is_given_and_leaves_it_alone():
    config = tiny_config("12b", wrapper=True, num_hidden_layers=3)
    before = config.to_dict()
    module: Any = tiny_module("e2b", config=config, dtype=torch.bfloat16, attn_implementation="eager")
    assert type(module).__name__ == "Gemma4UnifiedForConditionalGeneration"
    assert len(stack(module).layers) == 3
    assert config.to_dict() == before


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_implementations_are_those_asked_for(experts):
    module: Any = tiny_module("26b-a4b", attn_implementation="eager", experts_implementation=experts)
    assert module.config._attn_implementation == "eager"
    assert module.config._experts_implementation == experts
    assert_agree(logits(module), logits(shared("26b-a4b")))


def state(module: nn.Module) -> dict[str, Tensor]:
    return module.state_dict()


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    assert state(left).keys() == state(right).keys()
    for name, tensor in state(left).items():
        assert torch.equal(tensor, state(right)[name]), name


@every_shape
@both_loads
def test_same_seed_same_weights(shape, wrapper):
    torch.manual_seed(random.randrange(2**31))  # what the global generator holds must not matter
    assert_same_state(
        tiny_module(shape, wrapper=wrapper, seed=3), tiny_module(shape, wrapper=wrapper, seed=3)
    )


@every_shape
@both_loads
def test_other_seed_changes_every_weight(shape, wrapper):
    other = state(shared(shape, wrapper, seed=1))
    for name, tensor in state(shared(shape, wrapper)).items():
        assert (tensor != other[name]).float().mean() > 0.99, name


@every_shape
@both_loads
def test_global_random_state_is_untouched(shape, wrapper):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    scramble(tiny_module(shape, wrapper=wrapper), seed=1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


@every_shape
@both_loads
def test_weights_do_not_depend_on_dtype_or_implementation(shape, wrapper):
    exact = state(shared(shape, wrapper))
    for dtype in (torch.bfloat16, torch.float64):
        for name, tensor in state(shared(shape, wrapper, dtype=dtype)).items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, exact[name].to(dtype)), name
    assert_same_state(shared(shape, wrapper), shared(shape, wrapper, attn_implementation="eager"))


@every_shape
def test_text_weights_are_the_same_inside_the_wrapper(shape):
    assert_same_state(stack(shared(shape, True)), stack(shared(shape)))
    assert torch.equal(logits(shared(shape, True)), logits(shared(shape)))


@every_shape
@both_loads
def test_no_weight_is_left_as_initialised(shape, wrapper):
    """Nothing that a checkpoint holds is constant, alike in two places, or what transformers put there."""
    module = shared(shape, wrapper)
    initial = state(type(module)(module.config))
    scalars = []
    for name, tensor in state(module).items():
        assert tensor.isfinite().all(), name
        assert (tensor != initial[name]).float().mean() > 0.99, name
        if tensor.numel() == 1:
            scalars.append(tensor.item())
        else:
            assert tensor.unique().numel() > 0.95 * tensor.numel(), name
        if tensor.ndim == 1 and "bias" not in name and "per_dim" not in name and "put_m" not in name:
            # Scales spread around one, so that a scale left out or applied twice shows.
            assert tensor.min() > 0.25, name
            assert tensor.max() < 4.0, name
            assert tensor.numel() == 1 or tensor.std() > 0.1, name
    assert len({*scalars}) == len(scalars) >= len(stack(module).layers)


@pytest.mark.parametrize("name", ["layer_scalar", "router.scale", "per_expert_scale"])
def test_the_named_scales_are_drawn(name):
    """By name, lest the loop above ever miss them."""
    found = [tensor for key, tensor in state(shared("26b-a4b")).items() if key.endswith(name)]
    assert len(found) == 6
    assert all((tensor != 1).all() for tensor in found)
    assert not torch.equal(found[0], found[1])


@every_shape
@both_loads
def test_computed_constants_stay(shape, wrapper):
    module = shared(shape, wrapper)
    constants = {name: buffer for name, buffer in module.named_buffers() if name not in state(module)}
    initial = dict(type(module)(module.config).named_buffers())
    assert any(name.endswith("inv_freq") for name in constants)
    assert any(name.endswith("embed_scale") for name in constants)
    for name, buffer in constants.items():
        assert torch.equal(buffer, initial[name]), name


def test_scramble_refuses_a_weight_it_does_not_know_and_changes_nothing():
    module: Any = tiny_module("31b")
    before = {name: tensor.clone() for name, tensor in state(module).items()}
    module.model.layers[5].mystery = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"layers\.5\.mystery"):
        scramble(module, seed=5)
    for name, tensor in before.items():
        assert torch.equal(tensor, state(module)[name]), name


@every_shape
@both_loads
def test_is_quick(shape, wrapper):
    shared(shape, wrapper)  # the imports are not counted

    def seconds() -> float:
        start = time.perf_counter()
        tiny_module(shape, wrapper=wrapper)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0  # the best of three: the machine may be busy


def is_contribution(name: str) -> bool:
    ends = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
    return name.endswith(ends)


def rms(tensor: Tensor) -> float:
    return tensor.float().square().mean().sqrt().item()


@every_shape
def test_logits_vary_and_stay_under_the_cap(shape):
    answer = logits(shared(shape))
    assert 1.0 < answer.std() < 5.0
    assert answer.abs().max() < 25.0
    assert answer.std(dim=-1).min() > 1.0
    # The head is the embedding: a stream that the blocks hardly move would answer with its own token.
    assert (answer.argmax(-1) == prompts()).float().mean() < 0.5


@every_shape
def test_every_block_adds_about_as_much(shape):
    module = tiny_module(shape)
    sizes: dict[str, float] = {}
    for name, part in stack(module).named_modules():
        if is_contribution(name):
            part.register_forward_hook(lambda _, args, out, name=name: sizes.__setitem__(name, rms(out)))
    logits(module)
    assert len(sizes) == (3 if shape in ("e2b", "e4b") else 2) * module.config.num_hidden_layers
    assert min(sizes.values()) > 0.5
    assert max(sizes.values()) < 2.0


@every_shape
def test_patterns_are_neither_flat_nor_one_hot(shape):
    with torch.no_grad():
        patterns = shared(shape, attn_implementation="eager")(prompts(), output_attentions=True).attentions
    for pattern in patterns:
        rows = pattern[:, :, 6:]  # queries that see six keys or more
        entropy = torch.special.entr(rows).sum(-1) / (rows > 0).sum(-1).log()
        assert 0.2 < entropy.mean() < 0.85


def test_experts_are_all_used():
    module: Any = tiny_module("26b-a4b")
    routings: list[tuple[Tensor, ...]] = []
    for block in module.model.layers:
        block.router.register_forward_hook(lambda _, args, out: routings.append(out))
    logits(module, input_ids=torch.arange(24, 88)[None])
    for probabilities, _, indices in routings:
        assert indices.unique().numel() == 8
        assert 0.25 < probabilities.max(-1).values.mean() < 0.9


@every_shape
@both_loads
def test_finite_in_bfloat16(shape, wrapper):
    answer = logits(shared(shape, wrapper, dtype=torch.bfloat16))
    assert answer.dtype == torch.bfloat16
    assert answer.isfinite().all()


@every_shape
@both_loads
def test_eager_and_sdpa_agree(shape, wrapper):
    sdpa, eager = shared(shape, wrapper), shared(shape, wrapper, attn_implementation="eager")
    text_configs = (module.config.get_text_config() for module in (sdpa, eager))
    assert [config._attn_implementation for config in text_configs] == ["sdpa", "eager"]
    assert_agree(logits(sdpa), logits(eager))


@every_shape
@both_loads
def test_generates(shape, wrapper):
    tokenizer = tiny_tokenizer()
    inputs = tokenizer(["Hello", "A longer prompt, over the window"], return_tensors="pt", padding=True)
    module = shared(shape, wrapper)
    answer = module.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert answer.shape == (2, inputs["input_ids"].shape[1] + 3)
    # Left padding changes nothing: the short prompt alone gets the same answer.
    alone = module.generate(
        **tokenizer("Hello", return_tensors="pt"), max_new_tokens=3, min_new_tokens=3, do_sample=False
    )
    assert torch.equal(answer[0, -3:], alone[0, -3:])


def grid(columns: int, rows: int) -> Tensor:
    """Patch positions (x, y) of one image, row by row."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)[None]


def prompt_with(token: str, count: int) -> Tensor:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(f"Look: {token * count} there", return_tensors="pt")["input_ids"]
    assert (ids == tokenizer.convert_tokens_to_ids(token)).sum() == count
    return ids


def image_inputs(shape: str) -> dict[str, Tensor]:
    """A picture of six soft tokens: the unified model takes its patches merged, the others pool 2 by 2."""
    columns, rows, row_size = (3, 2, 192) if shape == "12b" else (6, 4, 48)
    return {
        "input_ids": prompt_with("<|image|>", 6),
        "pixel_values": torch.rand(1, columns * rows, row_size, generator=torch.Generator().manual_seed(1)),
        "image_position_ids": grid(columns, rows),
    }


def audio_inputs(shape: str) -> dict[str, Tensor]:
    """Sound of five soft tokens: raw frames for the unified model, four mel frames a token for the others."""
    frames, size = (5, 20) if shape == "12b" else (20, 16)
    return {
        "input_ids": prompt_with("<|audio|>", 5),
        "input_features": torch.randn(1, frames, size, generator=torch.Generator().manual_seed(2)),
        "input_features_mask": torch.ones(1, frames, dtype=torch.bool),
    }


@every_shape
def test_images_reach_the_logits(shape):
    module, inputs = shared(shape, True), image_inputs(shape)
    before = logits(module, **inputs)
    assert before.isfinite().all()
    # Not merely darker: the unified model's first norm takes brightness and contrast away.
    other = logits(module, **inputs | {"pixel_values": inputs["pixel_values"].flip(-1)})
    assert (before - other)[:, -1].abs().max() > 0.01
    moved = logits(module, **inputs | {"image_position_ids": inputs["image_position_ids"].flip(1)})
    assert (before - moved)[:, -1].abs().max() > 0.01
    features = torch.cat(
        module.get_image_features(
            inputs["pixel_values"], inputs["image_position_ids"], return_dict=True
        ).pooler_output
    )
    assert features.shape == (6, module.config.get_text_config().hidden_size)
    assert 0.5 < rms(features) < 2.0


@pytest.mark.parametrize("shape", ["26b-a4b", "31b", "12b"])
def test_image_tokens_see_each_other_both_ways(shape):
    module, inputs = shared(shape, True), image_inputs(shape)
    types = (inputs["input_ids"] == module.config.image_token_id).long()
    both_ways = logits(module, **inputs, mm_token_type_ids=types)
    assert (both_ways - logits(module, **inputs)).abs().max() > 0.01


@pytest.mark.parametrize("shape", ["e2b", "e4b", "12b"])
def test_sound_reaches_the_logits(shape):
    module, inputs = shared(shape, True), audio_inputs(shape)
    before = logits(module, **inputs)
    assert before.isfinite().all()
    reversed_ = logits(module, **inputs | {"input_features": inputs["input_features"].flip(1)})
    assert (before - reversed_)[:, -1].abs().max() > 0.01


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
@pytest.mark.parametrize("inputs", [image_inputs, audio_inputs])
@pytest.mark.parametrize("bound", ["input_min", "input_max", "output_min", "output_max"])
def test_clipping_bites_in_every_tower(shape, inputs, bound):
    module: Any = tiny_module(shape, wrapper=True)
    before = logits(module, **inputs(shape))
    for name, buffer in module.named_buffers():
        if name.endswith(bound):
            buffer.mul_(100)
    assert (logits(module, **inputs(shape)) - before).abs().max() > 1e-3


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_token_is_a_byte():
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(0x80))) + "\xe9\u0436\uffff\U0010ffff"
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == len(text.encode())
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 288
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256
    assert all(tokenizer.decode([i]) for i in range(288))  # whatever a model answers has a text


def test_bos_comes_once():
    tokenizer = tiny_tokenizer()
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id == 2
    assert tokenizer("hi")["input_ids"].count(2) == 1
    assert tokenizer.decode(tokenizer("hi")["input_ids"], skip_special_tokens=True) == "hi"
    chat: Any = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=True)
    assert chat["input_ids"].count(2) == 1


def test_special_ids_and_attributes():
    tokenizer = tiny_tokenizer()
    assert [
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    ] == [*range(4)]
    assert [tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token] == [
        "<|image|>",
        "<|image>",
        "<image|>",
    ]
    assert tokenizer.image_token_id == tokenizer.convert_tokens_to_ids("<|image|>")
    ids = tokenizer("<|turn>user\na<|image|><turn|>", add_special_tokens=False)["input_ids"]
    named = [tokenizer.sot_token_id, tokenizer.image_token_id, tokenizer.eot_token_id]
    assert [i for i in ids if i in named] == named
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\na"


def test_pads_on_the_left():
    batch = tiny_tokenizer()(["a", "abc"], padding=True, return_tensors="pt")
    assert {*batch} == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0, :3].tolist() == [0, 0, 2]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_chat_template():
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "This."},
    ]
    chat = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<bos><|turn>user\n<|image|>What?<turn|>\n<|turn>model\nThis.<turn|>\n<|turn>model\n"


@every_shape
@both_loads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_saved_model_loads_as_it_was(shape, wrapper, dtype, tmp_path):
    path = save_tiny(tmp_path / "deep" / "model", shape, wrapper=wrapper, dtype=dtype)
    assert path == tmp_path / "deep" / "model"
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    auto = transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    module = auto.from_pretrained(path, local_files_only=True)
    original = shared(shape, wrapper, dtype=dtype)
    assert type(module) is type(original)
    assert_same_state(module, original)
    # A copy, because a loaded weight lies where the file has it, and kernels round by alignment.
    assert torch.equal(logits(copy.deepcopy(module)), logits(original))
    # Built and loaded alike to the last constant, whose dtype is not always the weights'.
    constants = dict(original.named_buffers())
    for name, buffer in module.named_buffers():
        assert buffer.dtype == constants[name].dtype, name
        assert torch.equal(buffer, constants[name]), name


@both_loads
def test_saved_tokenizer_loads_as_it_was(wrapper, tmp_path):
    loaded = transformers.AutoTokenizer.from_pretrained(save_tiny(tmp_path, "e2b", wrapper=wrapper))
    tokenizer = tiny_tokenizer()
    assert type(loaded) is type(tokenizer)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.padding_side, loaded.model_input_names) == ("left", ["input_ids", "attention_mask"])
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.image_token_id == tokenizer.image_token_id
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(tokenizer(text)["input_ids"]) == "<bos>" + text


@both_loads
def test_tiny_is_the_module_wrapped_with_its_tokenizer(wrapper):
    from gemloupe.standardized import StandardizedTransformer

    model: Any = tiny("e4b", wrapper=wrapper, seed=4, attn_implementation="eager", num_hidden_layers=7)
    assert model.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert_same_state(
        model._module,
        tiny_module("e4b", wrapper=wrapper, seed=4, attn_implementation="eager", num_hidden_layers=7),
    )
    assert isinstance(model, StandardizedTransformer)


@every_shape
def test_the_wrapper_comes_with_its_processor(shape):
    model: Any = tiny(shape, wrapper=True)
    vision = model._module.config.vision_config
    assert model.processor.tokenizer is model.tokenizer
    assert model.task == "text-generation"
    side = vision.patch_size * (vision.pooling_kernel_size if shape == "12b" else 1)
    given = tiny_processor(shape)(text="a <|image|>", images=tiny_image(), return_tensors="pt")
    assert given["pixel_values"].shape[-1] == 3 * side**2
    assert logits(shared(shape, True), **given).isfinite().all()
    assert tiny(shape).processor is None


@pytest.mark.parametrize("shape", ["e2b", "e4b", "12b"])
def test_the_processor_hears_what_the_wrapper_hears(shape):
    given = tiny_processor(shape)(text="a <|audio|>", audio=tiny_sound(), return_tensors="pt")
    assert given["input_features"].shape[-1] == (20 if shape == "12b" else 16)
    assert logits(shared(shape, True), **given).isfinite().all()


@every_shape
def test_the_largest_pictures_have_positions(shape):
    for size in ((2000, 9), (9, 2000), (600, 600)):
        given = tiny_processor(shape)(images=tiny_image(*size), return_tensors="pt")
        assert logits(shared(shape, True), **given).isfinite().all()


@every_shape
def test_the_settings_of_the_processor_are_saved(shape, tmp_path):
    save_tiny(tmp_path / "wrapper", shape, wrapper=True)
    save_tiny(tmp_path / "text", shape)
    settings = json.loads((tmp_path / "wrapper" / "processor_config.json").read_text())
    family = "Gemma4Unified" if shape == "12b" else "Gemma4"
    assert settings == tiny_processor(shape).to_dict()
    assert settings["processor_class"] == f"{family}Processor"
    assert settings["image_processor"]["image_processor_type"] == f"{family}ImageProcessor"
    assert not (tmp_path / "text" / "processor_config.json").exists()


def test_media_are_seeded():
    import numpy as np

    assert tiny_image(30, 20).size == (30, 20)
    assert tiny_image(30, 20).mode == "RGB"
    assert tiny_video(4, 30, 20).shape == (4, 20, 30, 3)
    assert tiny_video().dtype == np.uint8
    assert tiny_sound(0.5).shape == (8000,)
    assert tiny_sound().dtype == np.float32
    assert -1 <= tiny_sound().min() < -0.9
    assert 0.9 < tiny_sound().max() <= 1
    makers: list[Any] = [lambda seed: np.asarray(tiny_image(seed=seed))]
    makers += [lambda seed: tiny_video(seed=seed), lambda seed: tiny_sound(seed=seed)]
    for make in makers:
        assert (make(1) == make(1)).all()
        assert (make(1) != make(2)).mean() > 0.9
    frames = tiny_video()
    assert (frames[0] != frames[1]).any()
