"""`verify` on models that are right: every value holds, whatever runs them, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gemloupe
from gemloupe import StandardizedTransformer, verify
from gemloupe.reference import names, towers
from gemloupe.reference.compare import FLOOR
from gemloupe.reference.looks import LOOKS
from gemloupe.testing import SHAPES, tiny, tiny_module, tiny_tokenizer
from tests.core.models import SEED
from tests.reference.test_names import supported

MIXTURE = "26b-a4b"


def hooks(module: Any) -> dict[str, tuple[int, int]]:
    return {
        name: (len(part._forward_hooks), len(part._forward_pre_hooks))
        for name, part in module.named_modules()
    }


def wrapper_names(model: Any) -> set[str]:
    """Every value that a model serves of a forward with images, and a sound where it takes any."""
    own = towers(model._module.config)
    assert own is not None
    media = frozenset({"image", "audio"} if own.audio else {"image"})
    return {name for name in names(model.plan, own, media) if model.has(name)}


@pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_of_a_float32_model_holds(shape: str, wrapper: bool):
    model = tiny(shape, wrapper=wrapper, seed=SEED)
    report = verify(model)
    assert report.held, report.first
    of_media = wrapper_names(model) if wrapper else set()
    assert {row.name for row in report if row.look == "step"} == supported(model) | of_media
    for row in report:
        # A token whose per-layer gates are all but shut is beyond float32: one in a hundred seeds has one.
        assert row.relative <= FLOOR[row.look] or row.value == "per_layer_output", row
    assert report.seconds < (9 if wrapper else 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_holds_in_every_precision(shape: str, dtype: torch.dtype):
    # grouped_mm knows no float64.
    experts = "eager" if shape == MIXTURE and dtype == torch.float64 else None
    report = verify(tiny(shape, seed=SEED, dtype=dtype, experts_implementation=experts))
    assert report.held, report.first
    assert report.precision == str(dtype).removeprefix("torch.")
    if dtype == torch.float64:
        assert report.rounding == 2**-53
    else:
        # A value by itself is within a few roundings, and what is allowed is no more than that.
        steps = sorted(row.tolerance / report.rounding for row in report if row.look == "step")
        assert steps[len(steps) // 2] < 16


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_value_holds_under_every_implementation(attention: str, experts: str):
    model = tiny(MIXTURE, seed=SEED, attn_implementation=attention, experts_implementation=experts)
    report = verify(model)
    assert report.held, report.first
    assert {row.name for row in report} == set(names(model.plan))


def test_each_look_sees_every_value():
    report = verify(tiny("e2b"))
    for look in LOOKS:
        assert [row.name for row in report if row.look == look] == list(names(tiny("e2b").plan))


def test_errors_pile_up_in_the_whole_alone():
    report = verify(tiny("e4b", seed=SEED))
    last = "layers[11].layer_output"
    assert report.row(last, "step").relative < report.row(last, "whole").relative
    # What a block is fed by is the model's own.
    assert report.row("layers[11].layer_input", "block").relative == 0
    assert report.row("layers[11].layer_input", "whole").relative > 0
    # Block 11 borrows: by step these are its source's own.
    assert report.row("layers[11].self_attn.attention_keys", "step").relative == 0


@pytest.mark.parametrize(
    "inputs",
    [
        "The capital of France is",
        ["The capital of France is", "Hello"],
        [2, 30, 40, 50],
        torch.tensor([[2, 30, 40], [2, 50, 60]]),
        {
            "input_ids": torch.tensor([[0, 2, 30], [2, 50, 60]]),
            "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        },
        tiny_tokenizer()(["The capital", "of"], return_tensors="pt", padding=True),
    ],
    ids=["text", "texts", "ids", "tensor", "mapping", "encoding"],
)
def test_any_text_can_be_verified_on(inputs: Any):
    report = verify(tiny("e2b"), inputs)
    assert report.held, report.first
    assert len(report.tokens) == 1


def test_far_positions_are_as_exact_as_float32_tables_allow():
    model = tiny("12b", seed=SEED, num_hidden_layers=2, max_position_embeddings=2048)
    report = verify(model, [[2, *(20 + i % 200 for i in range(999))]])
    assert report.held, report.first
    queries = report.row("layers[1].self_attn.attention_queries")
    assert queries.relative > FLOOR["step"] / 2
    # An angle of a thousand radians is off by up to 1.2e-4, and that is allowed four times.
    assert FLOOR["step"] < queries.tolerance < 6e-4
    # What does not turn is held to the floor.
    assert report.row("layers[1].self_attn.own_values").tolerance == FLOOR["step"]


def test_padding_is_not_compared():
    ids = torch.tensor([[0, 0, 2, 30, 40], [2, 50, 60, 70, 80]])
    padded = verify(tiny("e2b"), {"input_ids": ids, "attention_mask": ids.ne(0).long()})
    assert padded.held, padded.first
    assert padded.tokens == ((2, 5),)


def test_the_default_inputs_are_longer_than_the_window_and_padded():
    model = tiny("12b")
    report = verify(model)
    assert [length for rows, length in report.tokens if rows == 1] == [model.plan.sliding_window + 7]
    assert any(rows > 1 for rows, _ in report.tokens)


def test_what_is_absent_says_why():
    report = verify(tiny("e2b"))
    absent = {(absent.name, absent.blocks): absent.reason for absent in report.absent}
    # Each run of blocks has its own reason: the last one borrows another block's.
    assert absent["layers[i].self_attn.own_keys", (5, 6, 7, 8)] == (
        "each computes no keys, it borrows block 3's."
    )
    assert absent["layers[i].self_attn.own_keys", (9,)] == "block 9 computes no keys, it borrows block 4's."
    assert "own_keys on block 9: block 9 computes" in str(report)
    assert "no mixture of experts" in absent["layers[i].mlp.router_logits", tuple(range(10))]
    # What takes no images is said of the tower, not of each of its values.
    assert [name for name, _ in absent if "vision" in name or "audio" in name] == ["vision", "audio"]
    assert {"per_layer_inputs", "layers[i].per_layer_output"} <= {a.name for a in verify(tiny("12b")).absent}


def test_what_a_kernel_does_not_keep_is_left_out_and_the_rest_is_compared(monkeypatch: pytest.MonkeyPatch):
    model = tiny("31b")
    gone = ("attention_scores", "attention_probabilities")
    has = model.has
    monkeypatch.setattr(model, "has", lambda name: not name.endswith(gone) and has(name))
    report = verify(model)
    assert report.held, report.first
    assert {row.name for row in report} == {name for name in names(model.plan) if not name.endswith(gone)}


def test_nothing_is_left_behind():
    module = tiny_module("e2b")
    model = StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    ids = torch.tensor([[2, 30, 40, 50]])
    with torch.no_grad():
        before = module(input_ids=ids).logits
    with model.trace(ids):
        pass
    found = hooks(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    verify(model)
    assert hooks(module) == found
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, before)


def test_the_global_random_state_stays():
    before = torch.get_rng_state()
    verify(tiny("12b"))
    assert torch.equal(torch.get_rng_state(), before)


def test_two_reports_say_the_same():
    one, other = verify(tiny("26b-a4b")), verify(tiny("26b-a4b"))
    assert replace(one, seconds=0) == replace(other, seconds=0)


def test_a_model_is_loaded_when_it_is_verified(tmp_path: Any):
    gemloupe.testing.save_tiny(tmp_path, "31b")
    model = StandardizedTransformer(tmp_path)
    assert not model.dispatched
    assert verify(model).held


def test_nothing_is_printed_where_nobody_looks(capfd: pytest.CaptureFixture[str]):
    verify(tiny("12b"))
    assert capfd.readouterr() == ("", "")
