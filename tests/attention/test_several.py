"""Several blocks of code at one attention call: edits stand or are refused, and reads move nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.errors import OutOfOrder
from tests.attention.values import CALL, attention
from tests.core.models import Case, ids, stack

BLOCK = 3
every_kernel = pytest.mark.parametrize("kernel", ["sdpa", "eager"])
Work = Callable[[Any], None]


def two(kernel: str, first: Work, second: Work, how: str = "invokes", *, grad: bool = False) -> Tensor:
    """The logits of a trace in which both work at one attention call, one after the other."""
    model = Case("e2b", attention=kernel).model()
    found: list[Tensor] = []
    with torch.set_grad_enabled(grad):
        if how == "kept":
            with model.edit() as (_tracer, edited):
                first(attention(edited, BLOCK))
            with edited.trace(ids(8)):
                second(attention(edited, BLOCK))
                found.append(edited.logits.save())
        elif how == "invokes":
            with model.trace() as tracer:
                with tracer.invoke(ids(8)):
                    first(attention(model, BLOCK))
                with tracer.invoke():
                    second(attention(model, BLOCK))
                    found.append(model.logits.save())
        else:
            with model.trace(ids(8)):
                first(attention(model, BLOCK))
                second(attention(model, BLOCK))
                found.append(model.logits.save())
    return found[0].detach()


def sharpen(head: int) -> Work:
    def work(host: Any) -> None:
        host.attention_scores[:, head, :, 0] = 30.0

    return work


def silence(head: int) -> Work:
    def work(host: Any) -> None:
        host.attention_probabilities[:, head] = 0

    return work


def both(*works: Work) -> Work:
    def work(host: Any) -> None:
        for one in works:
            one(host)

    return work


def look(name: str) -> Work:
    def work(host: Any) -> None:
        getattr(host, name).sum()

    return work


@every_kernel
@pytest.mark.parametrize("how", ["invokes", "kept"])
@pytest.mark.parametrize("looks", [False, True], ids=["", "then the pattern is read"])
def test_scores_edited_by_both_are_both_edited(kernel, how, looks):
    second = both(sharpen(2), look("attention_probabilities")) if looks else sharpen(2)
    found = two(kernel, sharpen(1), second, how)
    wanted = two(kernel, sharpen(1), sharpen(2), "one")
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (two(kernel, sharpen(1), look("attention_queries"), how) - wanted).abs().max() > 1e-2


@every_kernel
@pytest.mark.parametrize("how", ["invokes", "kept"])
def test_patterns_edited_by_both_are_both_edited(kernel, how):
    found, wanted = two(kernel, silence(1), silence(2), how), two(kernel, silence(1), silence(2), "one")
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    mixed, wanted = two(kernel, sharpen(1), silence(2), how), two(kernel, sharpen(1), silence(2), "one")
    assert (mixed - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@every_kernel
@pytest.mark.parametrize("how", ["invokes", "kept"])
@pytest.mark.parametrize("looks", [False, True], ids=["", "then the pattern is read"])
def test_scores_are_not_edited_where_the_pattern_was_fixed(kernel, how, looks):
    second = both(sharpen(2), look("attention_probabilities")) if looks else sharpen(2)
    with pytest.raises(OutOfOrder, match=r"attention_scores was edited after an earlier block of code"):
        two(kernel, silence(1), second, how)


def cut_head(host: Any) -> None:
    host.attention_head_outputs[:, :, 1] = 0


@every_kernel
@pytest.mark.parametrize("how", ["invokes", "kept"])
@pytest.mark.parametrize("second", [sharpen(2), silence(2)], ids=["scores", "pattern"])
def test_a_pattern_is_not_edited_where_its_heads_were(kernel, how, second):
    with pytest.raises(OutOfOrder, match=r"attention_head_outputs was edited by an earlier block of code"):
        two(kernel, cut_head, second, how)


@every_kernel
@pytest.mark.parametrize("how", ["invokes", "kept"])
@pytest.mark.parametrize("name", CALL)
@pytest.mark.parametrize("grad", [False, True])
def test_a_read_beside_edited_heads_moves_nothing(kernel, how, name, grad):
    found = two(kernel, cut_head, look(name), how, grad=grad)
    assert torch.equal(found, two(kernel, cut_head, lambda _: None, how, grad=grad))
    assert not torch.equal(found, Case("e2b", attention=kernel).bare()(ids(8)).logits)


@pytest.mark.parametrize("looks", [False, True], ids=["", "the pattern is read"])
def test_the_gradient_of_what_a_kept_edit_adds_does_not_depend_on_what_is_read(looks):
    model = Case("e2b").model()
    added = torch.zeros(32, requires_grad=True)
    with model.edit() as (_tracer, edited):
        host = attention(edited, 4)
        host.attention_head_outputs = host.attention_head_outputs + added
    found: list[Tensor] = []
    with edited.trace(ids(8)):
        if looks:
            attention(edited, 4).attention_probabilities
        found.append(edited.logits.save())
    found[0][0, -1, 7].backward()
    gradient = added.grad
    assert gradient is not None

    def loss(vector: Tensor) -> Tensor:
        logits: list[Tensor] = []
        with torch.no_grad():
            with model.trace(ids(8)):
                attention(model, 4).attention_head_outputs += vector
                logits.append(model.logits.save())
        return logits[0][0, -1, 7]

    step = 1e-2 * torch.eye(32)[5]
    assert abs(gradient[5] - (loss(step) - loss(-step)) / 2e-2) <= 2e-2 * gradient.abs().max()


@every_kernel
@pytest.mark.parametrize("again", ["read", "values", "queries"])
@pytest.mark.parametrize("before", CALL[:-1])
def test_what_another_edits_at_a_barrier_is_not_reverted(kernel, again, before):
    model = Case("e2b", attention=kernel).model()

    def after(host: Any) -> None:
        if again == "read":
            host.attention_queries.sum()
        else:
            getattr(host, f"attention_{again}")[:] *= 0.5

    found: list[Tensor] = []
    with torch.no_grad():
        with model.trace() as tracer:
            one, other = tracer.barrier(2), tracer.barrier(2)
            with tracer.invoke(ids(8)):
                getattr(attention(model, BLOCK), before)
                one()
                other()
                after(attention(model, BLOCK))
                found.append(model.logits.save())
            with tracer.invoke():
                one()
                attention(model, BLOCK).attention_keys[:] *= -1
                other()
        with model.trace(ids(8)):
            attention(model, BLOCK).attention_keys[:] *= -1
            after(attention(model, BLOCK))
            found.append(model.logits.save())
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()


@every_kernel
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALL)
def test_any_value_is_patched_from_one_prompt_into_another(kernel, grad, name):
    model = Case("e2b", attention=kernel).model()
    source, target = ids(8), ids(8, salt=1)
    handed: dict[str, Tensor] = {}
    found: list[Tensor] = []
    with torch.set_grad_enabled(grad):
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(source):
                handed["value"] = getattr(attention(model, BLOCK), name).detach().clone()
                barrier()
            with tracer.invoke(target):
                barrier()
                setattr(attention(model, BLOCK), name, handed["value"])
                found.append(model.logits.save())
        with model.trace(source):
            value = getattr(attention(model, BLOCK), name).detach().clone().save()
        with model.trace(target):
            setattr(attention(model, BLOCK), name, value)
            found.append(model.logits.save())
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()
    assert (found[0] - Case("e2b", attention=kernel).bare()(target).logits).abs().max() > 1e-3


@every_kernel
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("names", [CALL[:2], CALL[3:5], (CALL[4], CALL[0]), (CALL[4], CALL[4])], ids=str)
def test_two_that_edit_at_a_barrier_are_each_given_their_own(kernel, grad, names):
    """A barrier hands a worker from one to another, in the midst of what it puts back."""
    model = Case("e2b", attention=kernel).model()
    rows = [ids(8), ids(8, salt=1)]
    first, second = names
    found: list[Tensor] = []
    with torch.set_grad_enabled(grad):
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(rows[0]):
                attention(model, BLOCK).attention_queries
                barrier()
                getattr(attention(model, BLOCK), first)[..., 0] *= 0.5
                found.append(model.logits.save())
            with tracer.invoke(rows[1]):
                attention(model, BLOCK).attention_queries
                barrier()
                getattr(attention(model, BLOCK), second)[..., 0] *= 0.5
                found.append(model.logits.save())
        for row, name in zip(rows, names, strict=True):
            with model.trace(row):
                getattr(attention(model, BLOCK), name)[..., 0] *= 0.5
                found.append(model.logits.save())
    for mine, alone in zip(found[:2], found[2:], strict=True):
        assert (mine - alone).abs().max() <= 1e-5 * alone.abs().max()


@every_kernel
@pytest.mark.parametrize("name", CALL)
def test_what_was_edited_in_place_may_be_assigned(kernel, name):
    model = Case("e2b", attention=kernel).model()
    found: list[Tensor] = []
    with torch.no_grad():
        with model.trace(ids(8)):
            value = getattr(attention(model, BLOCK), name)
            value[..., 0] *= 0.5
            setattr(attention(model, BLOCK), name, value * 0.5)
            found.append(model.logits.save())
        with model.trace(ids(8)):
            value = getattr(attention(model, BLOCK), name).clone()
            value[..., 0] *= 0.5
            setattr(attention(model, BLOCK), name, value * 0.5)
            found.append(model.logits.save())
    assert torch.equal(*found)


@every_kernel
@pytest.mark.parametrize("name", [*CALL, "own_keys", "own_values"])
def test_an_edit_in_place_leaves_a_backward_pass_that_works(kernel, name):
    model = Case("e2b", attention=kernel).model()
    found: list[Tensor] = []
    for in_place in (True, False):
        weight = stack(model._module).layers[1].mlp.down_proj.weight
        weight.requires_grad_(True)
        with model.trace(ids(8)):
            value = getattr(attention(model, BLOCK), name)
            if in_place:
                value[..., 0] *= 0.5
            else:
                factor = torch.ones(value.shape[-1])
                factor[0] = 0.5
                setattr(attention(model, BLOCK), name, value * factor)
            logits = model.logits.save()
        (gradient,) = torch.autograd.grad(logits[0, -1, 7], weight)
        found.append(gradient)
        weight.requires_grad_(False)
    assert found[0].abs().max() > 0
    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max()


@every_kernel
@pytest.mark.parametrize("name", ["attention_scores", "attention_probabilities"])
def test_under_dropout_a_read_changes_no_gradient(kernel, name):
    model = Case("e2b", attention=kernel).model()
    module = model._module
    weight = stack(module).layers[1].self_attn.q_proj.weight
    weight.requires_grad_(True)
    host = stack(module).layers[BLOCK].self_attn
    before, host.attention_dropout = host.attention_dropout, 0.5
    found: list[Tensor] = []
    try:
        module.train()
        for reads in (False, True):
            torch.manual_seed(3)
            with model.trace(ids(8)):
                if reads:
                    getattr(attention(model, BLOCK), name)
                logits = model.logits.save()
            found.append(torch.autograd.grad(logits[0, -1, 7], weight)[0])
    finally:
        module.eval()
        host.attention_dropout = before
        weight.requires_grad_(False)
    assert torch.equal(*found)
    assert found[0].abs().max() > 0
