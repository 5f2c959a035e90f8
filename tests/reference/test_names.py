"""The names of the reference's values: those that the wrapped model says it has, and no others."""

from __future__ import annotations

from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import jaxtyped

import gemloupe.layouts
from gemloupe import StandardizedTransformer
from gemloupe.capture import _rank
from gemloupe.reference import forward, names
from gemloupe.reference.names import place
from gemloupe.support import TEXT_HOSTS
from gemloupe.testing import SHAPES, tiny_tokenizer
from tests.reference.served import case, layout
from tests.test_plan import PUBLISHED, on_meta

# What the forward does not compute, but is told: the mask is built before it.
UNDEFINED = {"visible_keys"}


def supported(model: Any) -> set[str]:
    """Every value of the text model that it says it has, on each block that has it, if it is defined."""
    places = set()
    for row in model.support():
        place, _, name = row.path.rpartition(".")
        if place not in TEXT_HOSTS or name in UNDEFINED:
            continue
        if row.blocks is not None:
            places |= {row.path.replace("[i]", f"[{block}]") for block in row.blocks}
        elif row.available:
            places.add(row.path)
    return places


@pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_values_are_those_that_the_model_has(shape: str, wrapper: bool):
    one = case(shape, wrapper=wrapper)
    assert set(names(one.plan)) == supported(one.model)
    assert tuple(forward(one.config, one.state, one.inputs["input_ids"])) == names(one.plan)


@pytest.mark.parametrize("checkpoint", PUBLISHED.values(), ids=PUBLISHED)
def test_the_values_are_those_that_a_published_model_has(checkpoint: Any):
    module = on_meta(checkpoint.text_config())
    model = StandardizedTransformer(module, tokenizer=tiny_tokenizer(), device="meta")
    assert set(names(model.plan)) == supported(model)
    assert len(names(model.plan)) == len(set(names(model.plan)))


def test_the_place_of_a_name():
    assert place("layers[12].mlp.mlp_output") == (12, "mlp.mlp_output")
    assert place("layers[3].layer_input") == (3, "layer_input")
    assert place("per_layer_inputs") == (None, "per_layer_inputs")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_names_are_in_forward_order(shape: str):
    # The model's router returns both at once; the weights are computed from the choice.
    ranked = [_rank(name.replace("expert_indices", "expert_weights")) for name in names(case(shape).plan)]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_has_the_layout_that_its_name_says(shape: str):
    one = case(shape, batched=True)
    values = forward(one.config, one.state, one.inputs["input_ids"], one.mask)
    inputs = {name: values[name] for name in ("input_ids", "attention_mask")}
    by_host: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_host.setdefault(name.partition(".")[0] if "." in name else "", dict(inputs))[name] = value
    for found in by_host.values():
        check(found)


def check(values: dict[str, Any]) -> None:
    # In one context an axis has one size, whichever value it is of.
    with jaxtyped("context"):
        for name, value in values.items():
            alias = getattr(gemloupe.layouts, layout(name).name)
            assert isinstance(value, alias), f"{name} is {list(value.shape)}: {jaxtyping.print_bindings()}"
            assert value.dtype == (torch.float64 if layout(name).kind == "float" else torch.int64)
