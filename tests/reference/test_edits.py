"""Values given to the reference: each step from the model's own, and the model's answer to every edit."""

from __future__ import annotations

import os
from itertools import count
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from gemloupe.paths import find
from gemloupe.reference import forward, names
from gemloupe.reference.steps import SINGLE
from gemloupe.testing import SHAPES
from tests.reference.served import Case, case, difference, layout, routes_clearly

BY_STEP: Final = 5e-6
END_TO_END: Final = 2e-4

# A sliding and a full block that compute their keys, and one of each that borrows them.
EDITED: Final = {"e2b": (3, 4, 7, 9), "e4b": (4, 5, 7, 11), "26b-a4b": (3, 5), "31b": (3, 5), "12b": (3, 5)}


def with_given(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return forward(case.config, case.state, case.inputs["input_ids"], case.mask, given=given)


@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_is_one_step_from_those_that_the_model_serves(shape: str, batched: bool):
    one = case(shape, batched=batched)
    found = with_given(one, one.collected)
    far = {name: difference(name, one.collected[name], value, one.mask) for name, value in found.items()}
    assert not {name: by for name, by in far.items() if not by <= BY_STEP}


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
def test_a_function_may_say_what_is_given(shape: str):
    one, told = case(shape), []

    def half(name: str, value: Tensor) -> Tensor:
        told.append(name)
        return value / 2 if name.endswith("mid_stream") else value

    by_function = forward(one.config, one.state, one.inputs["input_ids"], one.mask, given=half)
    given = {name: value / 2 for name, value in by_function.items() if name.endswith("mid_stream")}
    by_name = with_given(one, given)
    assert all(torch.equal(by_name[name], value) for name, value in by_function.items())
    # It is told every value but the inputs, and what has no name beside them.
    inputs = {"input_ids", "attention_mask"}
    unnamed = {SINGLE} | ({""} if one.plan.per_layer_input_size else set())
    assert set(told) == (set(names(one.plan)) - inputs) | unnamed


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_given_changes_what_follows_and_nothing_before(shape: str):
    one, block = case(shape), EDITED[shape][-1]
    before = with_given(one, {})
    order = list(before)
    for name in order:
        if not before[name].is_floating_point() or ("layers[" in name and f"[{block}]" not in name):
            continue
        after = with_given(one, {name: before[name] + 1})
        for earlier in order[: order.index(name) + 1]:
            assert torch.equal(after[earlier], before[earlier]), (name, earlier)
        if name not in ("logits", "next_token_probs"):
            assert not torch.equal(after["logits"], before["logits"]), name


# ---- the answer of the model to an edit -------------------------------------------------------------------

ROOTED: Final = ("token_embeddings", "per_layer_token_inputs", "per_layer_context_inputs", "per_layer_inputs")


def edited(name: str, value: Tensor, random: torch.Generator) -> Tensor:
    """Another value that the name could have."""
    noise = torch.randn(value.shape, generator=random, dtype=value.dtype)
    if name.endswith("probabilities"):
        return value * noise.abs()
    return value + 0.5 * value[value.isfinite()].std() * noise


def answer(model: Any, inputs: dict[str, Tensor], path: str, value: Tensor) -> Tensor:
    """The logits of the wrapped model, `path` written."""
    host, _ = find(model, path)
    with model.trace(inputs):
        setattr(host, path.rpartition(".")[2], value)
        logits = model.logits.save()
    return logits.detach()


def check(one: Case, name: str) -> None:
    random = torch.Generator().manual_seed(int(os.environ["GEMLOUPE_TEST_SEED"]))
    for _ in count():
        value = edited(name, one.collected[name], random)
        expected = with_given(one, {name: value})
        if all(routes_clearly(one.plan, expected, index) for index in range(one.plan.num_layers)):
            break
    found = answer(one.model, one.inputs, name, value)
    assert difference("logits", one.collected["logits"], expected["logits"], one.mask) > 1e-3, name
    assert difference("logits", found, expected["logits"], one.mask) < END_TO_END, name


@pytest.mark.parametrize(("shape", "block"), [(s, b) for s in SHAPES for b in EDITED[s]])
def test_the_model_answers_to_an_edit_in_a_block_as_the_reference_does(shape: str, block: int):
    one = case(shape, batched=True)
    for name in names(one.plan):
        if name.startswith(f"layers[{block}].") and layout(name).kind == "float":
            check(one, name)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_answers_to_an_edit_of_its_own_values_as_the_reference_does(shape: str):
    one = case(shape, batched=True)
    for name in {*ROOTED, "raw_logits"} & set(names(one.plan)):
        check(one, name)


@pytest.mark.parametrize("block", EDITED["26b-a4b"])
def test_the_model_sends_tokens_to_chosen_experts_as_the_reference_does(block: int):
    one = case("26b-a4b", batched=True)
    name = f"layers[{block}].mlp.expert_indices"
    chosen = (one.collected[name] + 1) % 8
    with one.model.trace(one.inputs):
        one.model.layers[block].mlp.reroute(chosen)
        logits = one.model.logits.save()
    expected = with_given(one, {name: chosen})["logits"]
    assert difference("logits", logits.detach(), expected, one.mask) < END_TO_END
