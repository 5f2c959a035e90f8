"""Bad writes: refused with what was asked, what is there and what to write instead."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from gemloupe import errors
from gemloupe.errors import BadWrite, GemloupeError, ReadOnly, UnknownName
from gemloupe.testing import tiny
from tests.core.models import Case, ids
from tests.core.places import Place, first_of_each, writable

SHAPES = ["e2b", "26b-a4b"]
LENGTH = 5


def refused(model: Any, place: Place, value: Any) -> str:
    with pytest.raises(BadWrite) as caught:
        with model.trace(ids(LENGTH)):
            place.write(model, value(place.read(model)) if callable(value) else value)
            model.logits.save()
    return str(caught.value)


def clean(model: Any) -> torch.Tensor:
    with model.trace(ids(LENGTH)):
        logits = model.logits.save()
    return logits


@pytest.mark.parametrize("shape", SHAPES)
def test_another_shape_is_refused(shape):
    model = Case(shape).model()
    before = clean(model)
    for place in first_of_each(writable(model), (1,)):
        text = refused(model, place, lambda value: value[:, :-1].contiguous())
        assert text.startswith(f"{place} has shape (1, "), place
        assert f"{place.read(model).layout}; the write has (1, " in text
        assert f"To broadcast, write in place: `model.{place}[:] = ...`." in text
        assert "the write has ()" in refused(model, place, torch.tensor(0.0)), place
        assert refused(model, place, lambda value: torch.cat([value, value])).startswith(str(place)), place
    assert torch.equal(clean(model), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_another_dtype_is_refused_and_the_conversion_named(shape):
    model = Case(shape).model()
    for place in first_of_each(writable(model), (1,)):
        text = refused(model, place, lambda value: value.double())
        assert text == (
            f"{place} is torch.float32; the write is torch.float64. Write `value.to(torch.float32)`."
        )


def test_ids_and_masks_stay_whole_numbers():
    model = Case("e2b").model()
    for name in ("input_ids", "attention_mask"):
        text = refused(model, Place(name), lambda value: value.float())
        assert text == (f"{name} is torch.int64; the write is torch.float32. Write `value.to(torch.int64)`.")


@pytest.mark.parametrize("shape", SHAPES)
def test_another_device_is_refused(shape):
    model = Case(shape).model()
    for place in first_of_each(writable(model), (1,)):
        text = refused(model, place, lambda value: value.to("meta"))
        assert text == f"{place} is on cpu; the write is on meta. Write `value.to('cpu')`.", place


@pytest.mark.parametrize("value", [0, 1.5, None, [0.0], "zero", True], ids=str)
def test_what_is_no_tensor_is_refused(value):
    model = Case("e2b").model()
    text = refused(model, Place("layer_output", 1), value)
    assert text == (
        f"layers[1].layer_output takes a tensor of layout [batch seq hidden], not {type(value).__name__}. "
        "To fill it: `model.layers[1].layer_output[:] = ...`."
    )


def test_in_place_what_broadcasts_is_taken():
    model = Case("e2b").model()
    with model.trace(ids(LENGTH)):
        model.layers[1].layer_output[:] = 1.5
        one = model.layers[2].layer_input.save()
        model.layers[2].layer_output[:] = torch.arange(40.0)
        two = model.layers[3].layer_input.save()
    assert (one == 1.5).all()
    assert torch.equal(two, torch.arange(40.0).expand(1, LENGTH, 40))


def test_in_place_another_shape_is_torch_s_own_error():
    model = Case("e2b").model()
    with pytest.raises(RuntimeError, match=r"must match|expand"):
        with model.trace(ids(LENGTH)):
            model.layers[1].layer_output[:] = torch.ones(3)


@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("when", ["moved on", "last statement"])
def test_a_read_only_value_is_refused_and_says_what_to_write(style, when):
    model = Case("e2b").model()
    verb = "written" if style == "assigned" else "edited"
    with pytest.raises(ReadOnly) as caught:
        with model.trace(ids(LENGTH)) as tracer:
            if style == "assigned":
                model.next_token_probs = torch.ones(1, 288)
            else:
                model.next_token_probs[:] = 0
            if when == "moved on":
                tracer.result.save()
    assert str(caught.value) == (
        f"next_token_probs cannot be {verb}: it is computed from the logits, and nothing in the model "
        "reads it.\nWrite logits."
    )


def test_a_tensor_under_no_name_is_refused():
    model = tiny("e2b")
    for host, place in (
        (model, "the model"),
        (model.layers[0], "layers[0]"),
        (model.layers[0].mlp, "layers[0].mlp"),
    ):
        with pytest.raises(UnknownName, match=re.escape(f"{place} has no `mlp_outputs`")):
            host.mlp_outputs = torch.zeros(1)
    model.layers[0].note = "text is the user's own"
    assert model.layers[0].note == "text is the user's own"


def test_a_module_can_still_be_attached():
    model = tiny("e2b")
    probe = torch.nn.Linear(40, 3)
    model.layers[0].probe = probe
    with model.trace(ids(LENGTH)):
        scores = model.layers[0].probe(model.layers[0].layer_output).save()
    assert scores.shape == (1, LENGTH, 3)


def test_every_error_is_the_package_s_and_documented():
    kinds = [getattr(errors, name) for name in errors.__all__]
    for kind in kinds:
        assert kind.__doc__, kind
        if not issubclass(kind, UserWarning):
            assert issubclass(kind, GemloupeError), kind
    defined = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert {*defined} == {*kinds}
    assert issubclass(errors.Unavailable, AttributeError)
    assert issubclass(errors.UnknownName, AttributeError)
