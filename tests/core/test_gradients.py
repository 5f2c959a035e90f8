"""Rule 4: the gradient of every floating value served equals the finite difference of writing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.core.models import SEED, Case, every_case, ids
from tests.core.places import ATTENTION_CALL, Place, first_of_each, writable
from tests.wide import WIDE, all_in_float64  # noqa: F401  # the fixture is used by its name

pytestmark = pytest.mark.usefixtures("all_in_float64")
# A block that lends its keys and values, or the first; and the last, which borrows where blocks do.
BLOCKS = {"e2b": (3, 9), "e4b": (4, 11), "26b-a4b": (0, 5), "31b": (0, 5), "12b": (0, 5)}
STEP = 1e-6


def weights(like: Tensor) -> Tensor:
    """What the loss adds the logits up with."""
    random = torch.Generator().manual_seed(SEED)
    return torch.randn(like.shape, generator=random, dtype=like.dtype)


def direction(gradient: Tensor) -> Tensor:
    """Along the gradient and across it, so that neither a wrong size nor a wrong direction is missed."""
    noise = torch.randn(
        gradient.shape, generator=torch.Generator().manual_seed(SEED + 1), dtype=gradient.dtype
    )
    return gradient / gradient.norm() + noise / noise.norm()


def loss_of(model: Any, last: int = 13) -> Any:
    """A weighted sum of the logits of the last tokens, which are to be real ones.

    What a query of padding attends to is no function of anything: its scores drown in the mask.
    """
    logits = model.logits[:, -last:]
    return (logits * weights(logits)).sum()


def gradient(case: Case, place: Place) -> tuple[Tensor, Tensor]:
    """The value and its gradient, in the invoke that is differentiated."""
    model, rows = case.model(), case.prompts
    if len(rows) == 1:
        with model.trace(rows[0]):
            value = place.read(model)
            loss = loss_of(model)
            with loss.backward():
                found = value.grad.save()
            kept = value.detach().save()
        return kept, found
    with model.trace() as tracer:
        with tracer.invoke(rows[0]):
            model.layers[0].layer_output.save()
        with tracer.invoke(rows[1]):
            value = place.read(model)
            loss = loss_of(model, rows[1].shape[1])
            with loss.backward():
                found = value.grad.save()
            kept = value.detach().save()
        with tracer.invoke(rows[2]):
            model.layers[0].layer_output.save()
    return kept, found


@torch.no_grad()
def loss_with(case: Case, place: Place, value: Tensor) -> float:
    """The loss of a trace in which the value is written."""
    model, rows = case.model(), case.prompts
    if len(rows) == 1:
        with model.trace(rows[0]):
            place.write(model, value)
            loss = loss_of(model).save()
        return loss.item()
    with model.trace() as tracer:
        with tracer.invoke(rows[0]):
            model.layers[0].layer_output.save()
        with tracer.invoke(rows[1]):
            place.write(model, value)
            loss = loss_of(model, rows[1].shape[1]).save()
        with tracer.invoke(rows[2]):
            model.layers[0].layer_output.save()
    return loss.item()


EXPERTS = ("eager", "batched_mm")  # grouped_mm refuses float64
CASES = [
    *every_case(wrapper=(False,), attention=("sdpa",), dtypes=(WIDE,), experts=EXPERTS, batched=(False,)),
    Case("e4b", wrapper=True, attention="eager", dtype=WIDE, batched=True),
    Case("26b-a4b", attention="eager", dtype=WIDE, experts="eager", batched=True),
    Case("26b-a4b", wrapper=True, dtype=WIDE, experts="batched_mm", batched=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_finite_difference(case):
    model = case.model()
    blocks = BLOCKS[case.shape][-1:] if case.batched else BLOCKS[case.shape]
    for place in first_of_each(writable(model), blocks):
        if place.name in ATTENTION_CALL:
            continue
        value, found = gradient(case, place)
        assert found.shape == value.shape, place
        assert found.norm() > 0, place
        along = direction(found)
        step = STEP * value.norm().item()
        up, down = (loss_with(case, place, value + sign * step * along) for sign in (1, -1))
        difference = (up - down) / (2 * step)
        assert (found * along).sum().item() == pytest.approx(difference, rel=1e-5), place


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_all_values_come_in_one_backward(shape):
    """Each equal to the one taken alone, in reverse order of the forward."""
    case = Case(shape, dtype=WIDE, experts="eager" if shape == "26b-a4b" else None)
    model = case.model()
    places = [p for p in first_of_each(writable(model), (1, 4)) if p.name not in ATTENTION_CALL]
    found: dict[Place, Tensor] = {}
    with model.trace(case.prompts[0]):
        values = {place: place.read(model) for place in places}
        loss = loss_of(model)
        with loss.backward():
            for place in reversed(places):
                found[place] = values[place].grad.save()
    for place in places[:: len(places) // 5]:
        assert torch.allclose(found[place], gradient(case, place)[1], rtol=1e-12, atol=1e-12), place


def test_a_per_layer_input_s_gradient_comes_with_its_block():
    case = Case("e2b", dtype=WIDE)
    model = case.model()
    with model.trace(case.prompts[0]):
        stream = model.layers[4].layer_input
        given = model.layers[4].per_layer_input
        loss = loss_of(model)
        with loss.backward():
            given.grad.save()
            found = stream.grad.save()
    assert torch.allclose(found, gradient(case, Place("layer_input", 4))[1], rtol=1e-12, atol=1e-12)


def test_gradient_of_a_loss_on_the_next_token_s_distribution():
    case = Case("e2b", dtype=WIDE)
    model, place = case.model(), Place("layer_output", 4)
    with model.trace(case.prompts[0]):
        value = place.read(model)
        loss = model.next_token_probs[0, 65].log()
        with loss.backward():
            found = value.grad.save()
        kept = value.detach().save()
    along = direction(found)
    step = STEP * kept.norm().item()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            with model.trace(case.prompts[0]):
                place.write(model, kept + sign * step * along)
                ends.append(model.next_token_probs[0, 65].log().item())
    assert (found * along).sum().item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("name", ["mlp_output", "mid_stream", "layer_output"])
def test_gradient_of_a_value_after_it_was_written(name):
    """The write stays in the graph: the gradient passes through it to what it was made of."""
    case = Case("12b", dtype=WIDE)
    model = case.model()
    place = Place(name, 3, "mlp" if name == "mlp_output" else "")
    with model.trace(case.prompts[0]):
        early = model.layers[1].layer_output
        place.write(model, place.read(model) * 0 + 2 * early)
        late = place.read(model)
        loss = loss_of(model)
        with loss.backward():
            of_late = late.grad.save()
            of_early = early.grad.save()
    assert of_late.norm() > 0
    assert torch.allclose(of_early, 2 * of_late + passing_by(case, place), rtol=1e-9, atol=1e-12)


def passing_by(case: Case, place: Place) -> Tensor:
    """The gradient that reaches block 1's output past the place, which is held at a constant."""
    model = case.model()
    with model.trace(case.prompts[0]):
        early = model.layers[1].layer_output
        place.write(model, (2 * early).detach() + 0 * place.read(model))
        loss = loss_of(model)
        with loss.backward():
            of_early = early.grad.save()
    return of_early


def test_a_gradient_can_be_edited_on_its_way():
    case = Case("31b", dtype=WIDE)  # no block borrows, so that all passes through the stream
    model = case.model()
    found = []
    for factor in (1.0, 0.0, 3.0):
        with model.trace(case.prompts[0]):
            early = model.layers[3].layer_output
            late = model.layers[4].layer_output
            loss = loss_of(model)
            with loss.backward():
                late.grad = late.grad * factor
                found.append(early.grad.save())
    assert found[0].norm() > 0
    assert found[1].norm() == 0
    assert torch.allclose(found[2], 3 * found[0])


def test_each_invoke_can_go_backward_by_itself():
    """One graph holds all rows; each block's gradients are of its own loss and its own rows."""
    case = Case("e2b", dtype=WIDE, batched=True)
    model, rows = case.model(), case.prompts
    found: list[Tensor] = []
    with model.trace() as tracer:
        for row in rows:
            with tracer.invoke(row):
                value = model.layers[5].mlp.mlp_neurons
                loss = loss_of(model, row.shape[1])
                with loss.backward(retain_graph=True):
                    found.append(value.grad.save())
    for row, of_row in zip(rows, found, strict=True):
        assert of_row.shape[1] == 13
        with model.trace(row):
            value = model.layers[5].mlp.mlp_neurons
            loss = loss_of(model, row.shape[1])
            with loss.backward():
                wanted = value.grad.save()
        real = of_row[:, 13 - row.shape[1] :]
        assert torch.allclose(real, wanted, rtol=1e-9, atol=1e-12)


def test_integers_have_no_gradient_and_change_none():
    case = Case("26b-a4b", dtype=WIDE, experts="eager")
    model = case.model()
    with model.trace(ids(6)):
        indices = model.layers[0].mlp.expert_indices.save()
        value = model.layers[0].mlp.routed_output
        loss = loss_of(model)
        with loss.backward():
            found = value.grad.save()
    assert not indices.requires_grad
    assert found.norm() > 0
