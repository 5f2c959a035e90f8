"""Several invokes in one run are each a run of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.values import CALL, EXPERTS, attention, of_block, with_heads
from tests.core.models import LENGTHS, Case, every_case, ids
from tests.core.places import BLOCK, Place, read_all, reading

CASES = [
    *every_case(wrapper=(False,), dtypes=(torch.float32,), experts=EXPERTS, batched=(True,)),
    Case("e2b", wrapper=True, batched=True),
    Case("12b", wrapper=True, batched=True),
]


def real_part(place: Place, value: Tensor, length: int) -> Tensor:
    """The rows, columns and tokens of a left-padded value that are not padding."""
    layout = BLOCK[f"{place.part}.{place.name}"] if place.block is not None else "batch seq vocab"
    for axis, name in enumerate(layout.split()):
        if name in ("seq", "query", "key"):
            value = value.narrow(axis, value.shape[axis] - length, length)
    return value


def relative(value: Tensor, wanted: Tensor) -> float:
    return ((value - wanted).abs().max() / wanted.abs().max()).item()


def lost_by_padding(case: Case, row: int) -> float:
    """By how much of their scale the bare model's module outputs differ between the batch and one prompt."""
    module, found = case.bare(), ([], [])
    inputs = {"input_ids": case.prompts[row]}
    length = inputs["input_ids"].shape[1]
    stack = getattr(module.model, "language_model", module.model)
    parts = [part for name, part in stack.layers.named_modules() if not isinstance(part, torch.nn.ModuleList)]
    for outputs, given in zip(found, (case.inputs, inputs), strict=True):

        def keep(_module: Any, _args: Any, output: Any, outputs=outputs) -> None:
            if isinstance(output, Tensor) and output.dim() == 3:
                outputs.append(output)

        handles = [part.register_forward_hook(keep) for part in parts]
        with torch.no_grad():
            module(**given)
        for handle in handles:
            handle.remove()
    return max(relative(a[row : row + 1, -length:], b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_value_is_that_of_the_prompt_alone(case):
    model = case.model()
    for row, (length, together) in enumerate(zip(LENGTHS, reading(case), strict=True)):
        (alone,) = read_all(model, [case.prompts[row]])
        allowed = max(1e-5, 3 * lost_by_padding(case, row))
        for place, value in alone.items():
            if place.block is None and place.name not in ("logits", "raw_logits"):
                continue
            mine, value = real_part(place, together[place].detach(), length), value.detach()
            assert mine.shape == value.shape, place
            if value.is_floating_point():  # a choice of experts may tie
                seen = value > -1e30  # what the scores of a hidden key are is up to the kernel
                assert torch.equal(seen, mine > -1e30), place
                assert relative(mine[seen], value[seen]) <= allowed, place


def mix(pattern: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqhd", pattern, with_heads(values, pattern.shape[1]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edits_of_several_invokes_meet_in_the_whole_batch(case):
    """Two invokes edit, one reads, and an invoke of all rows sees what each of them made."""
    model, block = case.model(), 3
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        with model.trace() as tracer:
            with tracer.invoke(case.prompts[0]):
                host = attention(model, block)
                host.attention_probabilities = host.attention_probabilities.flip(1)
            with tracer.invoke(case.prompts[1]):
                host = attention(model, block)
                host.attention_scores[:] *= 0.5
                host.attention_values[:] *= 2
            with tracer.invoke(case.prompts[2]):
                host = attention(model, block)
                for name in CALL:
                    found[f"alone {name}"] = getattr(host, name).clone().save()
            with tracer.invoke():
                host = attention(model, block)
                for name in CALL:
                    found[name] = getattr(host, name).clone().save()
            with tracer.invoke():
                attention(model, block).attention_probabilities[:, -1] = 0
            with tracer.invoke():
                host = attention(model, block)
                found["last pattern"] = host.attention_probabilities.clone().save()
                found["last heads"] = host.attention_head_outputs.clone().save()
    pattern, values = found["attention_probabilities"], found["attention_values"]
    before = [of_block(values, block) for values in reading(case)]
    assert torch.equal(pattern[:1], before[0]["attention_probabilities"].flip(1))
    assert torch.equal(found["attention_scores"][1:2], before[1]["attention_scores"] * 0.5)
    real = case.inputs["attention_mask"][1].bool()
    wanted = (before[1]["attention_scores"] * 0.5).softmax(-1)
    assert (pattern[1:2] - wanted)[:, :, real].abs().max() <= 1e-6
    assert torch.equal(values[1:2], before[1]["attention_values"] * 2)
    for name in CALL:
        assert torch.equal(found[f"alone {name}"], before[2][name]), name
        assert torch.equal(found[name][2:], before[2][name]), name
    assert relative(found["attention_head_outputs"][:2], mix(pattern, values)[:2]) <= 2e-6
    assert torch.equal(found["last pattern"][:, :-1], pattern[:, :-1])
    assert not found["last pattern"][:, -1].any()
    assert relative(found["last heads"], mix(found["last pattern"], values)) <= 2e-6


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_an_invoke_of_several_rows_has_its_own(kernel):
    case = Case("e2b", attention=kernel)
    model = case.model()
    pair, single = torch.cat([ids(9), ids(9, salt=1)]), ids(4)
    found: list[Tensor] = []
    with torch.no_grad():
        with model.trace() as tracer:
            with tracer.invoke(pair):
                attention(model, 4).own_values[1] = 0
                patterns = attention(model, 4).attention_probabilities.clone().save()
                found.append(attention(model, 9).attention_head_outputs.clone().save())
            with tracer.invoke(single):
                attention(model, 4).attention_probabilities[:, :, -1] = 1 / 4
                found.append(attention(model, 9).attention_head_outputs.clone().save())
    assert patterns.shape == (2, 4, 9, 9)
    assert found[0][0].any()
    assert not found[0][1].any()
    assert found[1].any()
