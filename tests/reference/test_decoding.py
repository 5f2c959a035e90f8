"""Decoding with a cache gives what one pass gives."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from gemloupe.reference import Cache, forward, names
from gemloupe.testing import SHAPES
from tests.reference.served import Case, case, difference, layout

# Of thirteen tokens: a prompt within the window of six and one past it, then steps of one and of several.
SPLITS: Final = [(5, 1, 1, 1, 1, 1, 1, 1, 1), (9, 1, 1, 1, 1), (12, 1), (1, 7, 2, 3)]


def one_pass(case: Case) -> dict[str, Tensor]:
    return forward(case.config, case.state, case.inputs["input_ids"], case.mask)


def part(name: str, whole: Tensor, start: int, stop: int) -> Tensor:
    """What a step over the tokens from `start` to `stop` has of a value of one pass."""
    for axis in layout(name).axes:
        if axis in ("seq", "query"):
            whole = whole.narrow(layout(name).axis(axis), start, stop - start)
        elif axis == "key":
            whole = whole.narrow(layout(name).axis(axis), 0, stop)
    return whole


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_is_one_pass_in_steps(shape: str, batched: bool, split: tuple[int, ...]):
    one = case(shape, batched=batched)
    whole, cache, start = one_pass(one), Cache(), 0
    for length in split:
        stop = start + length
        ids, mask = (one.inputs[name][:, start:stop] for name in ("input_ids", "attention_mask"))
        step = forward(one.config, one.state, ids, mask, cache=cache)
        assert tuple(step) == names(one.plan)
        for name in step.keys() - {"next_token_probs"}:
            torch.testing.assert_close(
                step[name], part(name, whole[name], start, stop), rtol=1e-10, atol=1e-10
            )
        start = stop
    last = step["next_token_probs"]
    torch.testing.assert_close(last, whole["next_token_probs"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", ["12b", "31b"])
def test_an_image_may_come_in_a_later_step(shape: str):
    one, cache = case(shape, batched=True), Cache()
    images = torch.full_like(one.mask, -1)
    images[0, 1:3], images[0, 7:11], images[1, 9:12] = 0, 1, 0
    ids = one.inputs["input_ids"]
    whole = forward(one.config, one.state, ids, one.mask, images=images)["logits"]
    steps = [
        forward(one.config, one.state, ids[:, at], one.mask[:, at], images=images[:, at], cache=cache)[
            "logits"
        ]
        for at in (slice(0, 6), slice(6, 12), slice(12, 13))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(forward(one.config, one.state, ids, one.mask)["logits"], whole)


def test_a_cache_holds_the_keys_of_the_blocks_that_compute_them():
    one, cache = case("e2b"), Cache()
    values = forward(one.config, one.state, one.inputs["input_ids"], cache=cache)
    assert list(cache.keys) == list(cache.values) == [b.index for b in one.plan.blocks if not b.borrows_keys]
    for index in cache.keys:
        assert torch.equal(cache.keys[index], values[f"layers[{index}].self_attn.own_keys"])
    assert cache.attention_mask is not None
    assert torch.equal(cache.attention_mask, one.mask)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_generation_is_served_as_one_pass_over_its_tokens(shape: str):
    one = case(shape, batched=True)
    # Keys are left out: a sliding block's cache drops what its window has passed.
    served = [
        name for name in names(one.plan) if "key" not in layout(name).axes and name != "next_token_probs"
    ]
    inputs = {name: one.inputs[name] for name in ("input_ids", "attention_mask")}
    found = one.model.collect(inputs, served, generate={"max_new_tokens": 5, "do_sample": False})
    assert found.input_ids.shape == (3, one.mask.shape[1] + 4)
    expected = forward(one.config, one.state, found.input_ids, found.attention_mask)
    far = {name: difference(name, found[name], expected[name], found.attention_mask) for name in served}
    assert not {name: by for name, by in far.items() if not by <= 2e-4}
