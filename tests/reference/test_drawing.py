"""The drawing of a block: what it says is read is what the reference reads, and nothing lies on anything."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.plan import BlockPlan
from gemloupe.reference import block as computed
from gemloupe.reference import forward, sight
from gemloupe.reference.drawing import FLOWS, arrows, boxes, drawing, flows
from gemloupe.reference.names import names_of
from tests.reference.served import LAYOUTS, Case, case

LAYOUT_TEXTS = {name: str(layout) for name, layout in LAYOUTS.items()}
# One of each kind of block: lends, borrows, has a mixture, takes its values from its keys.
BLOCKS = [("e2b", 0), ("e2b", 3), ("e2b", 4), ("e2b", 7), ("26b-a4b", 2), ("26b-a4b", 5), ("31b", 5)]


def plan_of(shape: str, index: int) -> BlockPlan:
    return case(shape).plan.blocks[index]


def ids(one: Case) -> Tensor:
    return one.inputs["input_ids"]


def run(one: Case, index: int, values: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Block `index`, each step of it from what is given."""
    at, plan = f"layers[{index}]", one.plan.blocks[index]
    source = f"layers[{plan.kv_source}].self_attn"
    return computed(
        one.weights,
        index,
        values[f"{at}.layer_input"],
        sight(one.plan, one.mask),
        per_layer_input=values.get(f"{at}.per_layer_input"),
        borrowed=(values[f"{source}.own_keys"], values[f"{source}.own_values"])
        if plan.borrows_keys
        else None,
        given=given,
    )


def changed(name: str, value: Tensor, experts: int | None) -> Tensor:
    if name.endswith("expert_indices"):
        assert experts is not None
        return (value + 1) % experts
    return value * (
        1 + 0.1 * torch.rand(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
    )


@pytest.mark.parametrize(("shape", "index"), BLOCKS)
def test_what_a_value_reads_is_what_changes_it(shape: str, index: int):
    one, plan, at = case(shape), plan_of(shape, index), f"layers[{index}]."
    values = forward(one.config, one.state, ids(one), one.mask)
    given = {name: value for name, value in values.items() if name.startswith(at)}
    before = run(one, index, values, given)
    reads: dict[str, set[str]] = {name: set() for name in names_of(plan)}
    for name in reads:
        other = given | {at + name: changed(name, given[at + name], plan.num_experts)}
        for reader, value in run(one, index, values, other).items():
            if not torch.equal(value, before[reader]):
                reads[reader.removeprefix(at)].add(name)
    assert reads == {name: set(flow.reads) for name, flow in flows(plan).items()}


def test_every_value_of_a_block_is_drawn_and_no_other():
    assert set().union(*(names_of(plan_of(*which)) for which in BLOCKS)) == set(FLOWS)
    for which in BLOCKS:
        assert set(boxes(plan_of(*which))) == set(names_of(plan_of(*which)))


@pytest.mark.parametrize(("shape", "index"), BLOCKS)
def test_the_drawing_has_every_name_with_its_layout(shape: str, index: int):
    text = drawing(plan_of(shape, index), LAYOUT_TEXTS, "a block")
    for name in names_of(plan_of(shape, index)):
        short = name.rpartition(".")[2]
        assert text.count(f">{short}</text>") == 1
        assert re.search(rf">{short}</text>\n<text [^>]*>{re.escape(LAYOUT_TEXTS[short])}</text>", text)
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    # An operation fits into its box: 7.2 is the width of a letter at 12 pixels.
    assert all(len(box.operation) * 7.2 < 204 for box in boxes(plan_of(shape, index)).values())


def segments(corners: Any) -> list[tuple[int, int, int, int]]:
    return [(*min(a, b), *max(a, b)) for a, b in itertools.pairwise(corners)]


@pytest.mark.parametrize(("shape", "index"), BLOCKS)
def test_no_arrow_runs_through_a_box_and_no_two_are_one(shape: str, index: int):
    plan = plan_of(shape, index)
    drawn = list(arrows(plan))
    assert len(drawn) == sum(len(flow.reads) for flow in flows(plan).values())
    for read, name, corners in drawn:
        for box in boxes(plan).values():
            for left, top, right, bottom in segments(corners):
                inside = left < box.x + 204 and right > box.x and top < box.foot and bottom > box.y
                assert not inside, (read, name, box.name)
    ends = [corners[-1] for _, _, corners in drawn]
    assert len(ends) == len(set(ends))
