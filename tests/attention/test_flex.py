"""The same values under flex attention, on few shapes: torch compiles its kernel for each.

On a CPU it has no backward, so nothing here asks for gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.values import CALL, OWN, attention, of_block, sources, with_heads
from tests.core.models import LENGTHS, Case
from tests.core.places import Place, forward_order, reading

pytestmark = [
    pytest.mark.flex,
    # 2026-11-29, torch 2.13: dynamo makes an instance of an autograd function as it compiles a padding mask.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # 2026-11-29, transformers 5.24: it runs flex attention uncompiled where a step has another length.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

CASES = [
    Case("e2b", attention="flex_attention", batched=True),
    Case("12b", attention="flex_attention", batched=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@torch.no_grad()
def run(case: Case, touch=None, names=()) -> tuple[Tensor, list[dict[tuple[int, str], Tensor]]]:
    """The logits, and every block's `names` in each invoke; `touch` edits the second."""
    model = case.model()
    logits: list[Tensor] = []
    found: list[dict[tuple[int, str], Tensor]] = [{} for _ in case.prompts]
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                for block in range(model.num_layers):
                    host = attention(model, block)
                    if touch is not None and i == 1:
                        touch(host)
                    for name in names:
                        if model.has(f"layers[{block}].self_attn.{name}"):
                            found[i][block, name] = getattr(host, name).clone().save()
                logits.append(model.logits.save())
    return torch.cat(logits), found


def under_sdpa(case: Case) -> tuple[dict[Place, Tensor], ...]:
    return reading(Case(case.shape, batched=True))


@every_case
def test_reads_move_no_bit_and_are_those_of_sdpa(case):
    plain, _ = run(case)
    for names in ((*OWN, *CALL), *((name,) for name in (*OWN, *CALL))):
        logits, _ = run(case, names=names)
        assert torch.equal(logits, plain), names
    _, found = run(case, names=(*OWN, *CALL))
    for values, wanted, length in zip(found, under_sdpa(case), LENGTHS, strict=True):
        for (block, name), value in values.items():
            other = of_block(wanted, block)[name]
            assert not value.isnan().any(), (block, name)
            if name in CALL and "keys" not in name and "values" not in name:
                axis = 1 if name == "attention_head_outputs" else 2
                value, other = (x.narrow(axis, 13 - length, length) for x in (value, other))
            seen = other > -1e30
            assert torch.equal(seen, value > -1e30), (block, name)
            assert (value - other)[seen].abs().max() <= 1e-4 * other[seen].abs().max(), (block, name)


@every_case
def test_head_outputs_are_the_pattern_times_the_values(case):
    _, found = run(case, names=CALL)
    for values, length in zip(found, LENGTHS, strict=True):
        for block in range(case.model().num_layers):
            pattern, of_heads = values[block, "attention_probabilities"], values[block, "attention_values"]
            wanted = torch.einsum("bhqk,bhkd->bqhd", pattern, with_heads(of_heads, pattern.shape[1]))
            difference = (values[block, "attention_head_outputs"] - wanted)[:, 13 - length :]
            assert difference.abs().max() <= 5e-6 * wanted.abs().max(), block
            assert (pattern[:, :, 13 - length :].sum(-1) - 1).abs().max() <= 1e-6
            assert not pattern[:, :, : 13 - length].any()


@every_case
@pytest.mark.parametrize("name", [*OWN, *CALL])
@pytest.mark.parametrize("style", ["assigned", "in place"])
def test_an_edit_reaches_its_invoke_and_no_other(case, name, style):
    block = max(sources(case)) if name in CALL else 3

    axis = 1 if name in ("attention_scores", "attention_probabilities") else -1

    def touch(host) -> None:
        if host.block.index != block:
            return
        value = getattr(host, name)
        if style == "assigned":
            setattr(host, name, value.flip(axis) * 0.5)
        else:
            value[:] = value.flip(axis) * 0.5

    plain, _ = run(case)
    logits, _ = run(case, touch)
    assert torch.equal(logits[[0, 2]], plain[[0, 2]])
    # The same edit under sdpa.
    wanted, _ = run(Case(case.shape, batched=True), touch)
    real = slice(13 - LENGTHS[1], None)
    assert (logits - plain)[1, real].abs().max() > 1e-2
    assert (logits - wanted)[1, real].abs().max() <= 1e-4 * wanted.abs().max()
    assert not logits.isnan().any()


@every_case
def test_zeroed_values_silence_source_and_borrowers(case):
    source = sources(case)
    lends = source[max(source)]
    for name, silent in (
        ("own_values", [b for b in source if source[b] == lends]),
        ("attention_values", [lends]),
    ):

        def touch(host, name=name) -> None:
            if host.block.index == lends:
                getattr(host, name)[:] = 0

        _, found = run(case, touch, names=("attention_head_outputs",))
        assert [block for block in source if not found[1][block, "attention_head_outputs"].any()] == silent
        assert all(value.any() for value in found[0].values())


def test_collect_gives_everything_at_once():
    case = CASES[0]
    model = case.model()
    inputs = {name: case.inputs[name] for name in ("input_ids", "attention_mask")}
    paths = [str(place) for place in forward_order(model) if place.part == "self_attn"]
    found = model.collect(inputs, paths)
    _, wanted = run(case, names=(*OWN, *CALL))
    for (block, name), value in wanted[1].items():
        assert torch.equal(found[f"layers[{block}].self_attn.{name}"][1:2], value)
