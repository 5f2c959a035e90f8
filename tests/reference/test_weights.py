"""Which weights the reference takes, and what it says of those that it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, GemloupeError, UnsupportedModel
from gemloupe.reference import Weights, block, forward, parts, sight
from gemloupe.testing import SHAPES
from tests.reference.served import Case, case

State = dict[str, Tensor]
IDS: Final = torch.tensor([[2, 30, 40, 50]])


class Sharded(torch.Tensor):
    """A tensor as torch's `DTensor` is seen: a subclass that says where its parts are."""

    placements = ("Shard(dim=0)",)


class Packed(torch.Tensor):
    """A tensor as quantized ones of torchao are seen: a subclass of a floating-point precision."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrappers_state_is_the_text_models(shape: str):
    text, wrapper = (case(shape, wrapper=wrapper) for wrapper in (False, True))
    assert any(name.startswith("model.language_model.") for name in wrapper.state)
    one, other = (forward(of.config, of.state, IDS)["logits"] for of in (text, wrapper))
    assert torch.equal(one, other)
    assert torch.equal(forward(text.config, wrapper.state, IDS)["logits"], one)


def test_a_config_and_its_plan_say_the_same():
    one = case("e2b")
    assert torch.equal(
        forward(one.plan, one.state, IDS)["logits"], forward(one.config, one.state, IDS)["logits"]
    )


def test_a_tied_head_may_be_left_out_and_another_is_used():
    one = case("31b")
    state = dict(one.state)
    logits = forward(one.config, state, IDS)["raw_logits"]
    head = state.pop("lm_head.weight")
    assert torch.equal(forward(one.config, state, IDS)["raw_logits"], logits)
    state["lm_head.weight"] = 2 * head
    torch.testing.assert_close(forward(one.config, state, IDS)["raw_logits"], 2 * logits)


def test_what_a_borrowing_block_does_not_use_may_be_there():
    one = case("e2b")
    spare = {
        f"model.layers.9.self_attn.{name}.weight": torch.ones(3, 3) for name in ("k_proj", "v_proj", "k_norm")
    }
    extra = forward(one.config, one.state | spare, IDS)["logits"]
    assert torch.equal(extra, forward(one.config, one.state, IDS)["logits"])


def test_nothing_is_copied_and_nothing_written():
    one = case("26b-a4b", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in one.state.items()}
    weights = Weights(one.config, one.state)
    assert all(weights[name].data_ptr() == one.state[name].data_ptr() for name in one.state)
    forward(one.config, one.state, IDS)
    assert all(torch.equal(before[name], tensor) for name, tensor in one.state.items())


def test_a_block_reads_its_own_weights_alone():
    one = case("e4b")
    others = {
        name: torch.full_like(w, torch.nan) for name, w in one.state.items() if ".layers.2." not in name
    }
    weights = Weights(one.config, one.state | others)
    stream = torch.randn(1, 4, 40)
    found = block(weights, 2, stream, sight(one.plan, torch.ones(1, 4)), per_layer_input=torch.randn(1, 4, 8))
    assert found["layers[2].layer_output"].isfinite().all()


# ---- refusals ---------------------------------------------------------------------------------------------

UP: Final = "model.layers.3.mlp.up_proj.weight"


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, name: change(state[name])}


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_nan(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight.view(-1)[-1] = torch.nan
    return weight


REFUSED: Final[dict[str, tuple[Callable[[State], State], type[GemloupeError], str]]] = {
    "missing": (without(UP), BadArgument, f"{UP} is missing"),
    "no embedding": (
        without("model.embed_tokens.weight"),
        BadArgument,
        "model.embed_tokens.weight is missing",
    ),
    "no scalar": (without("model.layers.0.layer_scalar"), BadArgument, "layers.0.layer_scalar is missing"),
    "turned": (
        changed(UP, lambda w: w.T),
        BadArgument,
        f"{UP} has the shape [40, 56]; by the config it is [56, 40]",
    ),
    "an adapter": (
        lambda state: {**state, "model.layers.3.mlp.up_proj.lora_A.weight": torch.ones(2, 40)},
        BadArgument,
        "model.layers.3.mlp.up_proj.lora_A.weight: the reference knows no such weight of gemma4_text",
    ),
    "a block too many": (
        lambda state: {**state, "model.layers.12.self_attn.k_proj.weight": torch.ones(2, 40)},
        BadArgument,
        "model.layers.12.self_attn.k_proj.weight: the reference knows no such weight",
    ),
    "a bias": (
        lambda state: {**state, "model.layers.3.self_attn.q_proj.bias": torch.ones(64)},
        BadArgument,
        "q_proj.bias: the reference knows no such weight",
    ),
    "int8": (changed(UP, lambda w: w.to(torch.int8)), UnsupportedModel, f"{UP} is quantized (torch.int8)"),
    "fp8": (
        changed(UP, lambda w: w.to(torch.float8_e4m3fn)),
        UnsupportedModel,
        f"{UP} is quantized (torch.float8_e4m3fn)",
    ),
    "packed": (changed(UP, lambda w: w.as_subclass(Packed)), UnsupportedModel, f"{UP} is quantized (Packed)"),
    "sharded": (
        changed(UP, lambda w: w.as_subclass(Sharded)),
        UnsupportedModel,
        f"{UP} is sharded over devices (Sharded)",
    ),
    "a sharded head": (
        changed("lm_head.weight", lambda w: w.as_subclass(Sharded)),
        UnsupportedModel,
        "lm_head.weight is sharded",
    ),
    "absent": (changed(UP, lambda w: w.to("meta")), UnsupportedModel, f"{UP} holds no numbers"),
    "NaN": (changed(UP, with_nan), BadArgument, f"{UP} holds NaN"),
    "infinity": (changed(UP, lambda w: w / 0), BadArgument, f"{UP} holds"),
    "NaN in a row": (
        changed("model.embed_tokens.weight", with_nan),
        BadArgument,
        "embed_tokens.weight holds NaN",
    ),
    "NaN in a scalar": (
        changed("model.layers.2.layer_scalar", with_nan),
        BadArgument,
        "layer_scalar holds NaN",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_weight_that_cannot_be_read_is_named(why: str):
    change, error, message = REFUSED[why]
    one = case("e4b")
    with pytest.raises(error, match=re.escape(message)):
        forward(one.config, change(one.state), IDS)


@pytest.mark.parametrize("name", ["router.proj.weight", "experts.down_proj", "experts.gate_up_proj"])
def test_nan_in_any_part_of_a_mixture_is_named(name: str):
    one = case("26b-a4b")
    state = changed(f"model.layers.5.{name}", with_nan)(one.state)
    with pytest.raises(BadArgument, match=re.escape(f"model.layers.5.{name} holds NaN")):
        forward(one.config, state, IDS)


def test_a_config_of_another_kind_is_refused():
    one = case("31b")
    config = type(one.config)(**one.config.to_dict() | {"hidden_activation": "silu"})
    with pytest.raises(UnsupportedModel, match="hidden_activation='silu'"):
        forward(config, one.state, IDS)


INPUTS: Final[dict[str, tuple[Any, dict[str, Any], str]]] = {
    "one axis": (IDS[0], {}, r"input_ids is \[batch seq\] of token ids, not int64\[4\]"),
    "not whole": (IDS.float(), {}, r"not float32\[1, 4\]"),
    "nothing": (IDS[:, :0], {}, r"not int64\[1, 0\]"),
    "too large": (IDS + 250, {}, "input_ids go from 252 to 300; the vocabulary is 0 to 287"),
    "negative": (-IDS, {}, "input_ids go from -50 to -2"),
    "a longer mask": (IDS, {"attention_mask": torch.ones(1, 5)}, r"attention_mask is float32\[1, 5\]"),
    "fewer images": (IDS, {"images": torch.ones(1, 3)}, r"images is float32\[1, 3\]"),
}


@pytest.mark.parametrize("why", INPUTS)
def test_inputs_that_do_not_fit_are_refused(why: str):
    ids, options, message = INPUTS[why]
    one = case("31b")
    with pytest.raises(BadArgument, match=message):
        forward(one.config, one.state, ids, **options)


def run(one: Case, index: int, **given: Any) -> None:
    block(one.weights, index, torch.ones(1, 4, 40), sight(one.plan, torch.ones(1, 4)), **given)


def test_a_block_says_what_it_needs():
    kv = torch.ones(1, 1, 4, 16)
    with pytest.raises(BadArgument, match="block 0 needs per_layer_input"):
        run(case("e2b"), 0)
    with pytest.raises(BadArgument, match="block 0 takes no per_layer_input"):
        run(case("31b"), 0, per_layer_input=torch.ones(1, 4, 8))
    with pytest.raises(BadArgument, match="block 5 computes no keys, it borrows block 3's"):
        run(case("e2b"), 5, per_layer_input=torch.ones(1, 4, 8))
    with pytest.raises(BadArgument, match="block 0 computes its own keys and values"):
        run(case("e2b"), 0, per_layer_input=torch.ones(1, 4, 8), borrowed=(kv, kv))


def test_the_parts_come_one_by_one():
    one = case("e2b")
    walk = parts(one.weights, IDS)
    assert list(next(walk)) == ["input_ids", "attention_mask"]
    assert "per_layer_inputs" in next(walk)
    for index in range(one.plan.num_layers):
        assert all(name.startswith(f"layers[{index}].") for name in next(walk))
    assert list(next(walk)) == ["raw_logits", "logits", "next_token_probs"]
