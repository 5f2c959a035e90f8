"""A read changes nothing, and every value is what its definition says."""

from __future__ import annotations

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.core.models import Case, every_case, ids, stack
from tests.core.oracle import Oracle
from tests.core.places import (
    AFTER,
    ATTENTION_CALL,
    BEFORE,
    BLOCK,
    INTEGERS,
    READ_ONLY,
    Place,
    forward_order,
    reading,
    rows_of,
)

CASES = every_case()
# Largest difference allowed, in units of the dtype's eps and of the largest expected number: each value is
# recomputed from the ones before it, so it is one step's rounding (5.4 and 2.0 are the largest seen).
ROUNDINGS = {torch.float32: 20, torch.bfloat16: 6}
MEDIA = {"vision", "projector", "audio", "audio_projector"}
"""Hosts whose values the tests of media know."""

every_case_once = pytest.mark.parametrize("case", CASES, ids=str)


def test_the_places_are_the_descriptors():
    """Values that the tests do not know would go untested; names that nothing serves would be skipped."""
    known = {*BEFORE, *AFTER, *(f"layers[i].{path}".replace("..", ".") for path in BLOCK)}
    model = Case("26b-a4b").model()
    served = {row.path for row in model.support() if row.path.partition(".")[0] not in MEDIA}
    assert served <= known
    assert {path.rpartition(".")[2] for path in known - served} <= ATTENTION_CALL


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_say_layout_kind_and_writability(shape):
    axes = BEFORE | AFTER | {f"layers[i].{path}".replace("..", "."): layout for path, layout in BLOCK.items()}
    for row in Case(shape).model().support():
        if row.path.partition(".")[0] in MEDIA:
            continue
        assert " ".join(row.layout.axes) == axes[row.path], row.path
        name = row.path.rpartition(".")[2]
        assert (row.layout.kind != "float") == (name in INTEGERS), row.path
        assert row.writable == (name not in READ_ONLY), row.path
        assert row.meaning.endswith("."), row.path


@every_case_once
def test_reading_everything_moves_no_bit_of_the_logits(case):
    served = torch.cat([values[Place("logits")] for values in reading(case)])
    assert torch.equal(served, case.logits())


@every_case_once
def test_every_value_equals_its_recomputation(case):
    oracle, inputs = Oracle(case.bare()), case.inputs
    for invoke, values in enumerate(reading(case)):
        mine = rows_of(inputs, invoke)
        expected = oracle.expected(values, mine)
        missing = {place.name for place in values} - {place.name for place in expected}
        assert missing <= ATTENTION_CALL
        for place, wanted in expected.items():
            value = values[place].detach()
            assert value.shape == wanted.shape, place
            if not value.is_floating_point():
                assert torch.equal(value, wanted), place
                continue
            if place.name == "attention_projection":  # what a padded query attends to is anybody's guess
                real = mine["attention_mask"][0].bool()
                value, wanted = value[:, real], wanted[:, real]
            dtype = value.dtype
            if place.name == "expert_outputs":  # in float32 where the fused functions multiply by the weights
                dtype = case.dtype
            eps = torch.finfo(dtype).eps
            allowed = ROUNDINGS[dtype] * eps * torch.ones_like(wanted[..., :1])
            if place.name == "per_layer_output":
                assert place.block is not None
                given = values[place._replace(name="per_layer_input")].detach().double()
                allowed += oracle.blur(place.block, stream_before(values, place.block), given, eps)
            assert ((value.double() - wanted).abs() <= allowed * wanted.abs().max()).all(), place


def stream_before(values: dict[Place, Tensor], block: int | None) -> Tensor:
    """What the per-layer branch reads."""
    return (values[Place("mid_stream", block)] + values[Place("mlp_output", block, "mlp")]).detach().double()


@pytest.mark.parametrize("case", every_case(wrapper=(False,), attention=("sdpa",)), ids=str)
def test_values_have_the_sizes_of_their_axes(case):
    model = case.model()
    config = case.bare().config.get_text_config()
    width = case.inputs["input_ids"].shape[1]
    sizes = {
        "batch": 1,
        "seq": width,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab": config.vocab_size,
        "ple": getattr(config, "hidden_size_per_layer_input", None),
        "experts": getattr(config, "num_experts", None),
        "top_k": getattr(config, "top_k_experts", None),
    }
    for values in reading(case):
        for place, value in values.items():
            layout = type(place.host(model)).__dict__.get(place.name)
            axes = (BEFORE | AFTER).get(place.name) or BLOCK[f"{place.part}.{place.name}"]
            if place.name in ATTENTION_CALL:
                continue
            here = sizes
            if "intermediate" in axes:
                mlp = stack(case.bare()).layers[place.block].mlp
                here = sizes | {"intermediate": mlp.gate_proj.out_features}
            assert tuple(value.shape) == tuple(here[axis] for axis in axes.split()), place
            if layout is not None:
                assert value.is_floating_point() == (layout.layout.kind == "float"), place


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_reading_without_gradients_moves_no_bit_either(shape, batched):
    case = Case(shape, batched=batched)
    model = case.model()
    order = forward_order(model)
    found = []
    with torch.no_grad():
        if batched:
            with model.trace() as tracer:
                for row in case.prompts:
                    with tracer.invoke(row):
                        values = [nnsight.save(place.read(model)) for place in order]
                        found.append(values[order.index(Place("logits"))])
        else:
            with model.trace(case.prompts[0]):
                values = [nnsight.save(place.read(model)) for place in order]
                found.append(values[order.index(Place("logits"))])
    assert torch.equal(torch.cat(found), case.logits())


@pytest.mark.parametrize("shape", SHAPES)
def test_each_value_read_alone_is_the_value_read_among_all(shape):
    """Nothing that a read leaves behind, or needs to have been read before, changes the next one."""
    case = Case(shape, batched=True)
    model = case.model()
    blocks = (0, model.num_layers - 1)
    for place in forward_order(model):
        if place.block is not None and place.block not in blocks:
            continue
        found = []
        with model.trace() as tracer:
            for row in case.prompts:
                with tracer.invoke(row):
                    found.append(nnsight.save(place.read(model)))
        for alone, values in zip(found, reading(case), strict=True):
            assert torch.equal(alone, values[place]), place


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_reading_everything_changes_no_token_of_a_generation(shape, load, batched):
    case = Case(shape, wrapper=load, batched=batched)
    model, order = case.model(), forward_order(case.model())
    inputs = {name: tensor for name, tensor in case.inputs.items() if name != "position_ids"}
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1}
    wanted = case.bare().generate(**inputs, **options)
    tokens = []
    with model.generate(**options) as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                for _ in tracer.iter[:4]:
                    for place in order:
                        place.read(model)
        with tracer.invoke():
            tokens.append(tracer.result.save())
    assert torch.equal(tokens[0], wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_text_and_wrapper_serve_the_same_values(shape):
    plain, inside = (reading(Case(shape, wrapper=load, batched=True)) for load in (False, True))
    for left, right in zip(plain, inside, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[place], right[place]) for place in left)


def test_a_prompt_is_text_ids_or_an_encoding():
    model = Case("e2b").model()
    text = "jade and onyx"
    tokens = model.tokenizer(text, return_tensors="pt")
    found = []
    for prompt in (text, tokens["input_ids"], tokens["input_ids"][0].tolist(), tokens):
        with model.trace(prompt):
            given = model.input_ids.save()
            found.append((given, model.logits.save()))
    for given, logits in found:
        assert torch.equal(given, tokens["input_ids"])
        assert torch.equal(logits, found[0][1])


def test_one_invoke_may_hold_several_rows():
    case = Case("26b-a4b", batched=True)
    model = case.model()
    pair, single = torch.cat([ids(9), ids(9, salt=1)]), ids(4)
    with model.trace() as tracer:
        with tracer.invoke(pair):
            two = model.layers[1].mlp.expert_outputs.save()
        with tracer.invoke(single):
            one = model.layers[1].mlp.expert_outputs.save()
        with tracer.invoke():
            all_of_them = model.layers[1].mlp.expert_outputs.save()
    assert (two.shape[0], one.shape[0]) == (2, 1)
    assert torch.equal(torch.cat([two, one]), all_of_them)
