"""Rule 11: outside a trace a value's name is a reference; used as a tensor it says where it can be read."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gemloupe import Reference
from gemloupe.errors import OutsideTrace
from gemloupe.layouts import LAYOUTS
from gemloupe.testing import SHAPES
from tests.core.models import Case, ids
from tests.core.places import AFTER, BEFORE, BLOCK, READ_ONLY, Place, forward_order, writable


def reference() -> Any:
    return Case("e2b").model().layers[3].mlp.mlp_output


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
def test_every_value_is_a_reference_to_itself(shape, load):
    model = Case(shape, wrapper=load).model()
    for place in forward_order(model):
        value = place.read(model)
        assert isinstance(value, Reference)
        assert (value.path, str(value)) == (str(place), str(place))
        axes = (BEFORE | AFTER).get(place.name) or BLOCK[f"{place.part}.{place.name}"]
        assert value.layout.axes == tuple(axes.split())
        assert value.layout == LAYOUTS[value.layout.name]
        assert value.writable == (place.name not in READ_ONLY)
        assert value == place.read(model)
        assert len({value, place.read(model)}) == 1


def test_its_text_says_path_layout_and_meaning():
    assert repr(reference()) == (
        "<layers[3].mlp.mlp_output [batch seq hidden]: "
        "What the MLP adds to the stream, experts included, after the post-norm, unscaled.>"
    )
    assert f"{reference()}" == "layers[3].mlp.mlp_output"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_two_values_have_one_path_or_meaning(shape):
    model = Case(shape).model()
    places = [place for place in forward_order(model) if place.block in (None, 2)]
    assert len({place.read(model).path for place in places}) == len(places)
    assert len({place.read(model).meaning for place in places}) == len(places)


USES: dict[str, Callable[[Any], Any]] = {
    "+": lambda r: r + 1,
    "right +": lambda r: 1 + r,
    "+ tensor": lambda r: torch.ones(2) + r,
    "-": lambda r: r - r,
    "*": lambda r: 2 * r,
    "/": lambda r: r / 2,
    "right /": lambda r: 1 / r,
    "**": lambda r: r**2,
    "@": lambda r: r @ torch.ones(2, 2),
    "right @": lambda r: torch.ones(2, 2) @ r,
    "neg": operator.neg,
    "abs": abs,
    "<": lambda r: r < 0,
    ">=": lambda r: r >= 0,
    "index": lambda r: r[0],
    "slice": lambda r: r[:, -1],
    "set": lambda r: operator.setitem(r, slice(None), 0),
    "+=": lambda r: operator.iadd(r, 1),
    "*=": lambda r: operator.imul(r, 2),
    "len": len,
    "iter": list,
    "float": float,
    "int": int,
    "bool": bool,
    "if": lambda r: 1 if r else 2,
    "numpy": np.asarray,
    "math": math.exp,
    "save": lambda r: r.save(),
    "shape": lambda r: r.shape,
    "method": lambda r: r.softmax(-1),
    "grad": lambda r: r.grad,
    "torch": torch.exp,
    "torch of several": lambda r: torch.stack([torch.ones(2), r]),
    "torch by keyword": lambda r: torch.add(torch.ones(2), other=r),
    "functional": torch.nn.functional.gelu,
}


WRITES = {"set", "+=", "*="}


@pytest.mark.parametrize("name", USES)
def test_used_as_a_tensor_it_says_where_it_can_be_read(name):
    """Or written, where the use was a write."""
    with pytest.raises(OutsideTrace) as refused:
        USES[name](reference())
    text = str(refused.value)
    path = "model.layers[3].mlp.mlp_output"
    line = f"{path}[:] = ..." if name in WRITES else f"value = {path}.save()"
    assert "outside a trace `layers[3].mlp.mlp_output` is a reference, not a tensor" in text
    assert f"    with model.trace(prompt):\n        {line}\n" in text


def test_it_can_be_copied_compared_and_probed_like_any_object():
    import copy
    import pickle

    value = reference()
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    assert value != "layers[3].mlp.mlp_output"
    assert not hasattr(value, "__cuda_array_interface__")


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
def test_writing_it_outside_a_trace_says_where_it_can_be_written(shape):
    model = Case(shape).model()
    for place in writable(model):
        with pytest.raises(OutsideTrace) as refused:
            place.write(model, torch.zeros(1))
        text = str(refused.value)
        assert f"`{place}` was written where no forward is running" in text
        assert f"    with model.trace(prompt):\n        model.{place} = value\n" in text
        assert "with model.edit()" in text


def test_a_value_inside_a_backward_block_says_when_to_read_it():
    model = Case("e2b").model()
    for what in ("read", "write"):
        with pytest.raises(
            OutsideTrace, match=re.escape("layers[2].layer_output was asked for inside a block")
        ):
            with model.trace(ids(4)):
                loss = model.logits.sum()
                with loss.backward():
                    if what == "read":
                        model.layers[2].layer_output.save()
                    else:
                        Place("layer_output", 2).write(model, torch.zeros(1))
    model._module.zero_grad(set_to_none=True)


def test_another_model_s_value_cannot_be_touched_inside_a_trace():
    """Neither a tensor nor, in a block that means to read tensors, a reference."""
    one, other = Case("e2b").model(), Case("31b").model()
    place = Place("layer_output", 0)
    for touch in (place.read, lambda model: place.write(model, torch.zeros(1))):
        with pytest.raises(OutsideTrace, match="another model's trace"):
            with one.trace(ids(4)):
                one.layers[0].layer_output.save()
                touch(other)


def test_inside_a_trace_a_name_is_the_tensor():
    model = Case("e2b").model()
    kinds = []
    with model.trace(ids(4)):
        kinds.append(type(model.layers[2].layer_output))
    assert kinds == [torch.Tensor]
