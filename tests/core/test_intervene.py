"""A function of a value in its place, and edits that are kept: in which steps, and who is told."""

from __future__ import annotations

import warnings
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, BadWrite, NothingEdited, OutOfOrder, OutsideTrace, StepsWarning
from gemloupe.testing import SHAPES
from tests.core.models import Case, continued, ids

GREEDY = {"do_sample": False, "eos_token_id": None}
LENGTH = 9


def squash(value: Tensor) -> Tensor:
    """Not linear, and different at every token."""
    return torch.tanh(value) * value.shape[0] ** 0.5


def halve(value: Tensor) -> Tensor:
    return value * 0.5


def scores(model: Any, edit: Any, steps: int = 4, **options: Any) -> list[Tensor]:
    """The logits of every step of a generation in which `edit(model, tracer)` runs."""
    with torch.no_grad():
        with model.generate(
            ids(LENGTH),
            max_new_tokens=steps,
            output_logits=True,
            return_dict_in_generate=True,
            **GREEDY,
            **options,
        ) as tracer:
            edit(model, tracer)
            result = tracer.result.save()
    return list(result.logits)


# -- intervene ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "at", ["layer_output", "mlp_output", "attention_output", "mlp_neurons", "attention_head_outputs"]
)
def test_a_function_of_a_value_is_the_edit_made_by_hand(shape, at):
    model = Case(shape).model()
    host = "self_attn." if at.startswith("attention") else "mlp." if at.startswith("mlp") else ""
    given: list[tuple[int, ...]] = []

    def function(value: Tensor) -> Tensor:
        given.append(tuple(value.shape))
        return halve(value)

    with torch.no_grad():
        with model.trace(ids(LENGTH)):
            report = model.intervene([1, -1], function, positions=[2, -1], at=at)
            logits = model.logits.save()
        with model.trace(ids(LENGTH)):
            for block in (1, model.num_layers - 1):
                owner = model.layers[block]
                for name in filter(None, host.split(".")):
                    owner = getattr(owner, name)
                getattr(owner, at)[:, [2, LENGTH - 1]] *= 0.5
            wanted = model.logits.save()
    assert torch.equal(logits, wanted)
    assert not torch.equal(logits, Case(shape).bare()(ids(LENGTH)).logits)
    assert [shape[0] for shape in given] == [2, 2]
    assert report.counts == {1: 2, model.num_layers - 1: 2}
    assert str(report).startswith(f"intervene {at}: positions edited in layers[1]: 2")


def test_padding_is_left_out_and_each_invoke_is_its_own():
    model = Case("e2b").model()
    alone = []
    for row in (ids(9), ids(5)):
        with torch.no_grad():
            with model.trace(row):
                model.intervene(2, squash)
                alone.append(model.logits.save())
    found, reports = [], []
    with torch.no_grad():
        with model.trace() as tracer:
            for row in (ids(9), ids(5)):
                with tracer.invoke(row):
                    reports.append(nnsight.save(model.intervene(2, squash)))
                    found.append(model.logits[:, -row.shape[1] :].save())
    for logits, wanted in zip(found, alone, strict=True):
        assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert [report.positions for report in reports] == [9, 5]


@pytest.mark.parametrize(("when", "positions"), [("prompt", 9), ("new", 3), ("both", 12)])
def test_when_chooses_the_steps(when, positions):
    model, reports = Case("e2b").model(), []

    def edit(model: Any, _tracer: Any) -> None:
        reports.append(model.intervene(3, squash, when=when))

    def by_hand(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:4]:
            if (when != "new" and step == 0) or (when != "prompt" and step > 0):
                stream = model.layers[3].layer_output
                model.layers[3].layer_output = squash(stream[0])[None]

    for mine, other in zip(scores(model, edit), scores(model, by_hand), strict=True):
        assert torch.equal(mine, other)
    assert reports[0].positions == positions


def test_a_gradient_flows_through_the_function():
    model = Case("12b").model()
    scale = torch.ones(40, requires_grad=True)

    def loss(factor: Tensor) -> Tensor:
        with model.trace(ids(5)):
            model.intervene(2, lambda value: value * factor)
            logits = model.logits.save()
        return logits[0, -1, 7]

    loss(scale).backward()
    gradient = scale.grad
    assert gradient is not None
    with torch.no_grad():
        step = torch.zeros(40)
        step[3] = 1e-2
        difference = (loss(scale + step) - loss(scale - step)) / 2e-2
    assert abs(gradient[3] - difference) <= 2e-2 * gradient.abs().max()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"function": torch.zeros(40)}, "takes a function"),
        ({"layers": 99}, "layer 99 does not exist"),
        ({"at": "attention_keys"}, r"laid out \[batch seq \.\.\.\]"),
        ({"at": "layer_outptu"}, "no value 'layer_outptu'"),
        ({"at": "router_logits"}, "no mixture"),
        ({"when": "later"}, "choose one of prompt, new, both"),
        ({"positions": 40}, "past the sequence"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_meant_is_refused(options, named):
    model = Case("e2b").model()
    given = {"layers": 2, "function": halve, **options}
    with pytest.raises(BadArgument, match=named):
        with model.trace(ids(5)):
            model.intervene(**given)


@pytest.mark.parametrize(
    "function",
    [lambda v: v[:1], lambda v: v.double(), lambda _: 0, lambda v: v.sum(-1)],
    ids=["short", "double", "number", "narrow"],
)
def test_a_function_that_returns_something_else_is_refused(function):
    model = Case("e2b").model()
    with pytest.raises(BadWrite, match="intervene: the function"):
        with model.trace(ids(5)):
            model.intervene(2, function)
            model.logits.save()
    with torch.no_grad():
        with model.trace(ids(5)):
            logits = model.logits.save()
        assert torch.equal(logits, Case("e2b").bare()(ids(5)).logits)


def test_it_has_its_order_and_needs_a_trace():
    model = Case("e2b").model()
    with pytest.raises(OutsideTrace, match="intervene"):
        model.intervene(2, halve)
    with pytest.raises(OutOfOrder, match=r"layers\[1\]\.layer_output comes too late"):
        with model.trace(ids(5)):
            model.layers[4].layer_output
            model.intervene(1, halve)


@pytest.mark.parametrize("verb", ["steer", "intervene"])
@pytest.mark.parametrize(
    ("call", "options"), [("trace", {"when": "new"}), ("generate", {"positions": [99]})], ids=["new", "99"]
)
def test_an_edit_of_nothing_is_told(verb, call, options):
    model = Case("e2b").model()
    given = torch.ones(40) if verb == "steer" else halve
    arguments = {} if call == "trace" else {"max_new_tokens": 3, **GREEDY}
    with pytest.warns(NothingEdited, match=f"{verb} edited nothing") as told:
        with getattr(model, call)(ids(5), **arguments):
            getattr(model, verb)(3, given, **options)
    assert told[0].filename == __file__


def test_an_edit_of_something_is_not_remarked_on():
    model = Case("e2b").model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
            model.steer(3, torch.ones(40), when="new")
            for _ in tracer.iter[:3]:
                model.steer(2, torch.ones(40), when="new")


def test_a_vector_that_does_not_broadcast_is_refused():
    model = Case("e2b").model()
    with pytest.raises(BadArgument, match=r"a vector of shape \(2, 40\) does not broadcast"):
        with model.trace(ids(5)):
            model.steer(4, torch.ones(2, 40))


# -- edits that are kept -----------------------------------------------------------------------------


def test_a_kept_edit_outside_a_loop_is_made_in_the_first_step_and_says_so():
    model = Case("e2b").model()
    with model.edit() as (_tracer, edited):
        edited.layers[3].layer_output[:] *= 0.5

    def first(model: Any, _tracer: Any) -> None:
        model.layers[3].layer_output[:] *= 0.5

    with pytest.warns(StepsWarning, match=r"edit of layers\[3\]\.layer_output .* was made in the first step"):
        found = scores(edited, lambda *_: None)
    for mine, other in zip(found, scores(model, first), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("how", ["loop", "intervene", "assigned in a loop"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_kept_edit_of_every_step_is_quiet(how, inplace):
    case = Case("e2b")
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if inplace:
            with model.edit(inplace=True) as tracer:
                if how == "intervene":
                    model.intervene(3, halve)
                else:
                    for _ in tracer.iter[:]:
                        model.layers[3].layer_output *= 0.5
            edited = model
        else:
            with model.edit() as (tracer, edited):
                if how == "loop":
                    for _ in tracer.iter[:]:
                        edited.layers[3].layer_output[:] *= 0.5
                elif how == "intervene":
                    edited.intervene(3, halve)
                else:
                    for _ in tracer.iter[:]:
                        edited.layers[3].layer_output = edited.layers[3].layer_output * 0.5
        try:
            found = scores(edited, lambda *_: None)
            with torch.no_grad():
                with edited.trace(ids(LENGTH)):
                    logits = edited.logits.save()
        finally:
            model.clear_edits()

    def every(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:4]:
            model.layers[3].layer_output[:] *= 0.5

    wanted = scores(model, every)
    assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))
    assert (logits[:, -1] - wanted[0]).abs().max() <= 1e-5 * wanted[0].abs().max()  # the head over one row
    with torch.no_grad():
        with model.trace(ids(LENGTH)):
            logits = model.logits.save()
        assert torch.equal(logits, case.bare()(ids(LENGTH)).logits)


def test_a_late_read_in_a_kept_loop_is_refused_and_not_the_next_step_s():
    model = Case("e2b").model()
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.layers[4].layer_output
            edited.layers[2].layer_output[:] = 0
    with pytest.raises(OutOfOrder, match=r"layers\[2\]\.layer_output comes too late"):
        scores(edited, lambda *_: None)


# -- a text that continues a cache ---------------------------------------------------------------------


def test_positions_of_an_intervention_count_the_cached_tokens():
    model, row = Case("e2b").model(), ids(LENGTH)
    with torch.no_grad():
        with model.trace(row[:, 4:], **continued(Case("e2b"), row[:, :4])):
            report = model.intervene(3, halve, positions=[5, -1])
            logits = model.logits.save()
        with model.trace(row[:, 4:], **continued(Case("e2b"), row[:, :4])):
            model.layers[3].layer_output[:, [1, -1]] *= 0.5
            wanted = model.logits.save()
    assert torch.equal(logits, wanted)
    assert report.positions == 2
