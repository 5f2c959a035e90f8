"""The gradient of every value inside the attention is the finite difference of writing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.attention.values import CALL, OWN, attention, sources
from tests.core.models import SEED, Case
from tests.wide import WIDE, all_in_float64  # noqa: F401  # the fixture is used by its name

pytestmark = pytest.mark.usefixtures("all_in_float64")
STEP = 1e-6


def loss_of(logits: Tensor, length: int) -> Any:
    """A weighted sum of the logits of the real tokens."""
    logits = logits[:, -length:]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(SEED), dtype=logits.dtype)
    return (logits * weights).sum()


def gradients(case: Case, block: int, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """The value in each invoke, and the gradient there of that invoke's loss."""
    model, rows = case.model(), case.prompts
    values: list[Tensor] = []
    found: list[Tensor] = []
    if len(rows) == 1:
        with model.trace(rows[0]):
            value = getattr(attention(model, block), name)
            values.append(value.detach().clone().save())
            loss = loss_of(model.logits, rows[0].shape[1])
            with loss.backward():
                found.append(value.grad.save())
        return values, found
    with model.trace() as tracer:
        for row in rows:
            with tracer.invoke(row):
                value = getattr(attention(model, block), name)
                values.append(value.detach().clone().save())
                loss = loss_of(model.logits, row.shape[1])
                with loss.backward(retain_graph=True):
                    found.append(value.grad.save())
    return values, found


@torch.no_grad()
def losses_with(case: Case, block: int, name: str, values: list[Tensor]) -> list[float]:
    """Each invoke's loss in a trace in which each writes its value."""
    model, rows = case.model(), case.prompts
    losses: list[float] = []
    if len(rows) == 1:
        with model.trace(rows[0]):
            setattr(attention(model, block), name, values[0])
            losses.append(loss_of(model.logits, rows[0].shape[1]).item())
        return losses
    with model.trace() as tracer:
        for row, value in zip(rows, values, strict=True):
            with tracer.invoke(row):
                setattr(attention(model, block), name, value)
                losses.append(loss_of(model.logits, row.shape[1]).item())
    return losses


def direction(gradient: Tensor) -> Tensor:
    """Along the gradient and across it, so that neither a wrong size nor a wrong direction is missed."""
    random = torch.Generator().manual_seed(SEED + 1)
    noise = torch.randn(gradient.shape, generator=random, dtype=gradient.dtype)
    return gradient / gradient.norm() + noise / noise.norm()


def check(case: Case, block: int, name: str, values: list[Tensor], found: list[Tensor]) -> None:
    """That the gradients predict what writing other values does to the losses."""
    along = []
    for value, gradient, row in zip(values, found, case.prompts, strict=True):
        assert gradient.shape == value.shape
        if name == "attention_scores":
            # Padded queries see nothing (a test below), and what is hidden stays hidden.
            gradient = gradient.clone()
            gradient[:, :, : gradient.shape[2] - row.shape[1]] = 0
        assert gradient.norm() > 0
        step = direction(gradient)
        along.append(torch.where(value > -1e30, step, 0) if name == "attention_scores" else step)
    size = [STEP * value[value > -1e30].norm() for value in values]
    up, down = (
        losses_with(
            case, block, name, [v + sign * h * d for v, h, d in zip(values, size, along, strict=True)]
        )
        for sign in (1, -1)
    )
    for gradient, d, h, above, below in zip(found, along, size, up, down, strict=True):
        predicted = (gradient.nan_to_num() * d).sum().item()
        assert predicted == pytest.approx((above - below) / (2 * h.item()), rel=1e-5), (block, name)


def wide(shape: str, kernel: str, batched: bool = False) -> Case:
    experts = "eager" if shape == "26b-a4b" else None  # the fused functions refuse float64, or are slow in it
    return Case(shape, attention=kernel, dtype=WIDE, experts=experts, batched=batched)


def lender(case: Case) -> int:
    """A block that lends its keys and values where the shape has one, else any."""
    source = sources(case)
    return source[max(source)] if source[max(source)] != max(source) else 2


CASES = [
    wide(shape, kernel, batched)
    for shape in SHAPES
    for kernel in ("sdpa", "eager")
    for batched in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", [*OWN, *CALL])
def test_gradient_is_the_finite_difference(case, name):
    source = sources(case)
    for block in (lender(case), max(source)):
        if name in CALL or source[block] == block:
            check(case, block, name, *gradients(case, block, name))


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*OWN, *CALL])
def test_no_gradient_comes_from_padding(kernel, name):
    case = wide("e2b", kernel, batched=True)
    axis = 1 if name == "attention_head_outputs" else 2
    for gradient, row in zip(gradients(case, 3, name)[1], case.prompts, strict=True):
        padding = gradient.narrow(axis, 0, gradient.shape[axis] - row.shape[1])
        assert not padding.isnan().any()
        assert not padding.any()
        assert gradient.any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_gradients_of_one_attention_come_in_one_backward(shape, kernel):
    """In reverse: heads, pattern, scores, values, keys, what these were made of, and the queries."""
    case = wide(shape, kernel)
    model, block = case.model(), lender(case)
    values: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    with model.trace(case.prompts[0]):
        live = {name: getattr(attention(model, block), name) for name in (*OWN, *CALL)}
        for name, value in live.items():
            values[name] = value.detach().clone().save()
        loss = loss_of(model.logits, 13)
        with loss.backward():
            for name in (*reversed(CALL[1:]), *reversed(OWN), CALL[0]):
                found[name] = live[name].grad.save()
    for name, gradient in found.items():
        check(case, block, name, [values[name]], [gradient])


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_reading_with_gradients_leaves_the_weights_gradients_as_they_were(kernel):
    """What is computed beside the kernel for the gradient of scores and pattern counts no weight twice."""
    case = wide("e2b", kernel)
    model = case.model()
    bare = case.bare()
    bare.zero_grad()
    loss_of(bare(**case.inputs).logits, 13).backward()
    for names in ((), ("attention_scores",), ("attention_keys", "attention_values"), CALL):
        model._module.zero_grad()
        with model.trace(case.prompts[0]):
            for block in range(model.num_layers):
                for name in names:
                    getattr(attention(model, block), name)
            loss = loss_of(model.logits, 13)
            with loss.backward():
                pass
        for (name, mine), (_, wanted) in zip(
            model._module.named_parameters(), bare.named_parameters(), strict=True
        ):
            assert (mine.grad is None) == (wanted.grad is None), name
            if wanted.grad is not None:
                assert torch.allclose(mine.grad, wanted.grad, rtol=1e-8, atol=1e-10), (names, name)
    model._module.zero_grad()
    bare.zero_grad()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*OWN, *CALL])
def test_gradient_passes_through_a_write(kernel, name):
    """A written value stays in the graph: what it was made of has its gradient."""
    case = wide("12b", kernel)
    model = case.model()

    def loss_at(scale: Tensor) -> Any:
        with model.trace(case.prompts[0]):
            host = attention(model, 3)
            value = getattr(host, name)
            heads = 2 if name == "attention_head_outputs" else 1
            by_head = scale[: value.shape[heads]].view(-1, *[1] * (3 - heads))
            setattr(host, name, value * torch.where(value > -1e30, by_head, 1.0))  # hidden scores stay hidden
            loss = loss_of(model.logits, 13).save()
        return loss

    scale = torch.tensor([0.5, 1.5, 2, 0.2], dtype=WIDE, requires_grad=True)
    loss_at(scale).backward()
    gradient = scale.grad
    assert gradient is not None
    with torch.no_grad():
        step = 1e-6 * torch.eye(4, dtype=WIDE)[0]
        difference = (loss_at(scale + step) - loss_at(scale - step)) / 2e-6
    assert gradient[0].item() == pytest.approx(difference.item(), rel=1e-5)
    assert gradient[0].item() != 0
    model._module.zero_grad()
