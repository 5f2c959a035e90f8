"""Rule 3: a write reaches the logits, exactly as the same edit made by hand, and nothing else."""

from __future__ import annotations

from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.core.hand import COMPOSED, edited_logits
from tests.core.models import SEED, Case, every_case, ids, padded, stack
from tests.core.oracle import Oracle
from tests.core.places import ATTENTION_CALL, Place, first_of_each, reading, writable

STYLES = ("assigned", "in place")
# A block that lends its keys and values, or the first; and the last, which borrows where blocks do.
BLOCKS = {"e2b": (3, 9), "e4b": (4, 11), "26b-a4b": (0, 5), "31b": (0, 5), "12b": (0, 5)}
READ_BACK: dict[str, Any] = {
    "shapes": ("26b-a4b",),
    "wrapper": (False,),
    "attention": ("sdpa",),
    "dtypes": (torch.float32,),
}
every_style = pytest.mark.parametrize("style", STYLES)


def outside_the_call(model) -> list[Place]:
    """What this file tests; the values inside the attention call have tests of their own."""
    return [place for place in writable(model) if place.name not in ATTENTION_CALL]


def delta(place: Place, like: Tensor) -> Tensor:
    """A fresh change of a value, about as large as it is."""
    random = torch.Generator().manual_seed(SEED + sum(map(ord, str(place))))
    noise = torch.randn(like.shape, generator=random).to(like.dtype)
    return noise * like.detach().abs().float().mean().to(like.dtype)


def put(place: Place, model, value: Tensor, style: str) -> None:
    if style == "assigned":
        place.write(model, value)
    else:
        place.read(model)[:] = value


def traced(case: Case, edit, invoke: int = 0) -> Tensor:
    """All rows' logits of a trace in which `edit(model)` runs in one invoke."""
    model, rows = case.model(), case.prompts
    if len(rows) == 1:
        with model.trace(rows[0]):
            edit(model)
            logits = model.logits.save()
        return logits
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    with model.trace() as tracer:
        for i, row in enumerate(rows):
            with tracer.invoke(row):
                if i == invoke:
                    edit(model)
                found[i] = model.logits.save()
    return torch.cat(found)


# -- writes that change nothing ----------------------------------------------------------------------

UNCHANGED = [
    *every_case(wrapper=(False,), batched=(False,)),
    *every_case(wrapper=(True,), attention=("sdpa",), dtypes=(torch.float32,), batched=(True,)),
    *every_case(wrapper=(False,), attention=("eager",), dtypes=(torch.bfloat16,), batched=(True,)),
]


@pytest.mark.parametrize("case", UNCHANGED, ids=str)
@every_style
def test_writing_back_every_value_moves_no_bit(case, style):
    places = outside_the_call(case.model())

    def edit(model):
        for place in places:
            put(place, model, place.read(model).clone(), style)

    assert torch.equal(traced(case, edit), case.logits())


@pytest.mark.parametrize("shape", SHAPES)
@every_style
def test_writing_back_in_every_invoke_moves_no_bit(shape, style):
    case = Case(shape, batched=True)
    model = case.model()
    places = outside_the_call(model)
    found = []
    with model.trace() as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                for place in places:
                    put(place, model, place.read(model).clone(), style)
                found.append(model.logits.save())
    assert torch.equal(torch.cat(found), case.logits())


# -- writes that change something --------------------------------------------------------------------

CHANGED = [
    *every_case(wrapper=(False,), attention=("sdpa",), dtypes=(torch.float32,), batched=(False,)),
    *every_case(wrapper=(True,), attention=("sdpa",), dtypes=(torch.float32,), batched=(True,)),
    Case("e2b", attention="eager", dtype=torch.bfloat16, batched=True),
    Case("26b-a4b", attention="eager", dtype=torch.bfloat16, experts="batched_mm", batched=True),
]


@pytest.mark.parametrize("case", CHANGED, ids=str)
@every_style
def test_a_changed_write_is_the_edit_made_by_hand(case, style):
    model, clean = case.model(), case.logits()
    invoke = 1 if case.batched else 0
    before = reading(case)[invoke]
    for place in first_of_each(outside_the_call(model), BLOCKS[case.shape]):
        change = delta(place, before[place])
        if place.name == "router_probabilities":  # stays a distribution, in which others come first
            change = before[place].detach().roll(1, -1) - before[place].detach()

        def edit(model, place=place, change=change):
            put(place, model, place.read(model) + change, style)

        def by_hand(tensor: Tensor, change=change) -> Tensor:
            result = tensor.clone()
            result[invoke : invoke + 1] += change.to(tensor.dtype)
            return result

        logits, wanted = traced(case, edit, invoke), edited_logits(case, place, by_hand)
        assert not torch.equal(logits[invoke], clean[invoke]), place
        if place.name in COMPOSED:
            allowed = 200 * torch.finfo(case.dtype).eps * wanted.abs().max()
            assert (logits - wanted).abs().max() <= allowed, place
        else:
            assert torch.equal(logits, wanted), place
        others = [i for i in range(len(clean)) if i != invoke]
        assert_alone(logits[others], clean[others], case, place)


def assert_alone(logits: Tensor, clean: Tensor, case: Case, place: Place) -> None:
    """Other invokes' rows: untouched, or to rounding where a kernel takes an expert's tokens all at once."""
    if case.experts in (None, "batched_mm"):
        assert torch.equal(logits, clean), place
    elif len(clean):
        assert (logits - clean).abs().max() <= 1e-5 * clean.abs().max(), place


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("place", ["router_logits", "expert_outputs", "mlp_output"])
def test_edits_of_every_invoke_stay_with_their_own_rows(experts, place):
    """All invokes edit one place, each by its own amount: each row is that of its invoke edited alone."""
    case = Case("26b-a4b", experts=experts, batched=True)
    model = case.model()
    where = Place(place, 2, "mlp")
    found: list[Tensor] = []
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                where.write(model, where.read(model) * (2.0 + i))
                found.append(model.logits.save())
    for i, logits in enumerate(found):

        def edit(model, i=i):
            where.write(model, where.read(model) * (2.0 + i))

        assert_alone(logits, traced(case, edit, i)[i : i + 1], case, where)


def test_zeroing_an_mlp_takes_out_its_contribution():
    case = Case("e2b")
    model = case.model()
    with model.trace(case.prompts[0]):
        block = model.layers[3]
        before = block.mid_stream.save()
        block.mlp.mlp_output = torch.zeros_like(block.mlp.mlp_output)
        extra = block.per_layer_output.save()
        after = block.layer_output.save()
    assert torch.equal((before + extra) * stack(case.bare()).layers[3].layer_scalar, after)


@pytest.mark.parametrize("case", [Case("e2b"), *every_case(**READ_BACK)], ids=str)
@every_style
def test_what_was_written_is_read_back(case, style):
    """And reading it back changes nothing: the answer is that of the write alone."""
    model, invoke = case.model(), int(case.batched)
    for place in first_of_each(outside_the_call(model), BLOCKS[case.shape][:1]):
        value = reading(case)[invoke][place].detach() * 1.5
        seen: list[Tensor] = []

        def alone(model, place=place, value=value):
            put(place, model, value, style)

        def read_back(model, place=place, value=value, seen=seen):
            put(place, model, value, style)
            seen.append(place.read(model).detach().clone())
            seen.append(place.read(model).detach().clone())

        assert torch.equal(traced(case, read_back, invoke), traced(case, alone, invoke)), place
        assert all(torch.equal(one, value) for one in seen), place


def changed(place: Place, value: Tensor) -> Tensor:
    # Probabilities are renormalised: twice the same would be no change.
    return value.roll(1, -1) if place.name == "router_probabilities" else value * 2


@pytest.mark.parametrize("case", [Case("e2b"), *every_case(**READ_BACK)], ids=str)
def test_a_stored_edit_is_seen_by_a_read_and_outlives_it(case):
    """The edit sees all rows, the trace's blocks their own: each read is of what the edit left."""
    model = case.model()
    for place in first_of_each(outside_the_call(model), BLOCKS[case.shape][:1]):
        with model.edit() as (_tracer, edited):
            place.write(edited, changed(place, place.read(edited)))
        answers = []
        for looking in (False, True):
            found = []
            with edited.trace() as tracer:
                for i, row in enumerate(case.prompts):
                    with tracer.invoke(row):
                        if looking:
                            seen = place.read(edited)
                            assert torch.equal(seen, changed(place, reading(case)[i][place])), place
                        found.append(edited.logits.save())
            answers.append(torch.cat(found))
        assert torch.equal(*answers), place
        assert not torch.equal(answers[0], case.logits()), place


# -- what a write reaches ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@every_style
def test_mid_stream_reaches_the_mlp_the_router_and_the_residual(shape, style):
    case = Case(shape, batched=True)
    model, oracle, block = case.model(), Oracle(case.bare()), 2
    old = reading(case)[1][Place("mid_stream", block)].detach()
    new = old + delta(Place("mid_stream", block), old)
    seen: dict[str, Tensor] = {}
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                if i == 1:
                    layer = model.layers[block]
                    put(Place("mid_stream", block), model, new, style)
                    seen["mlp_input"] = nnsight.save(layer.mlp.mlp_input)
                    if layer.has_experts:
                        seen["router_logits"] = nnsight.save(layer.mlp.router_logits)
                        seen["experts_input"] = nnsight.save(layer.experts.input)
                    seen["mlp_output"] = nnsight.save(layer.mlp.mlp_output)
                    if layer.has_per_layer_input:
                        seen["per_layer_output"] = nnsight.save(layer.per_layer_output)
                    seen["layer_output"] = nnsight.save(layer.layer_output)
    wide = new.double()
    wanted = {"mlp_input": oracle.normed(wide, block, "pre_feedforward_layernorm")}
    if "router_logits" in seen:
        wanted["router_logits"] = oracle.router_logits(block, wide)
        width = len(new[0])
        seen["experts_input"] = seen["experts_input"].view(len(case.prompts), width, -1)[1:2]
        wanted["experts_input"] = oracle.normed(wide, block, "pre_feedforward_layernorm_2")
    for name, value in wanted.items():
        assert torch.allclose(seen[name].double(), value, rtol=0, atol=1e-5 * value.abs().max().item()), name
    stream = new + seen["mlp_output"]
    if "per_layer_output" in seen:
        stream = stream + seen["per_layer_output"]
    assert torch.equal(
        stream * case.bare().get_submodule(f"model.layers.{block}").layer_scalar, seen["layer_output"]
    )


@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", SHAPES)
@every_style
def test_other_ids_are_the_other_prompt(shape, load, style):
    case, other = Case(shape, wrapper=load), ids(13, salt=1)
    model = case.model()
    with model.trace(case.prompts[0]):
        put(Place("input_ids"), model, other, style)
        logits = model.logits.save()
    with torch.no_grad():
        assert torch.equal(logits, case.bare()(other).logits)


@every_style
def test_other_ids_in_one_invoke_are_the_other_prompt_there(style):
    case, other = Case("e4b", batched=True), ids(7, salt=1)
    width = 13

    def edit(model):
        value = model.input_ids
        if style == "assigned":
            model.input_ids = torch.cat([value[:, : width - 7], other], -1)
        else:
            value[:, width - 7 :] = other

    rows = case.prompts
    with torch.no_grad():
        wanted = case.bare()(**padded([rows[0], other, rows[2]])).logits
    assert torch.equal(traced(case, edit, 1), wanted)


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
@every_style
def test_a_masked_token_is_seen_by_none(shape, style):
    case = Case(shape)
    model = case.model()
    mask = torch.ones(1, 13, dtype=torch.int64)
    mask[0, 4] = 0
    with model.trace(case.prompts[0], attention_mask=torch.ones_like(mask)):
        put(Place("attention_mask"), model, mask, style)
        logits = model.logits.save()
    with torch.no_grad():
        wanted = case.bare()(case.prompts[0], attention_mask=mask).logits
    assert not torch.equal(wanted[:, -1], case.logits()[:, -1])
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", ["e2b", "e4b"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
@every_style
def test_a_token_replaced_everywhere_is_the_other_token_s_run(shape, load, batched, style):
    case = Case(shape, wrapper=load, batched=batched)
    model, invoke, at = case.model(), int(batched), -3
    rows = case.prompts
    other = rows[invoke].clone()
    other[0, at] = 300 - other[0, at]  # another plain byte
    with model.trace(other):
        embedding = model.token_embeddings[:, at].save()
        of_token = model.per_layer_token_inputs[:, at].save()

    def edit(model):
        if style == "assigned":
            embeddings = model.token_embeddings.clone()
            embeddings[:, at] = embedding
            model.token_embeddings = embeddings
            halves = model.per_layer_token_inputs.clone()
            halves[:, at] = of_token
            model.per_layer_token_inputs = halves
        else:
            model.token_embeddings[:, at] = embedding
            model.per_layer_token_inputs[:, at] = of_token

    with torch.no_grad():
        wanted = case.bare()(**padded([*rows[:invoke], other, *rows[invoke + 1 :]])).logits
    assert not torch.equal(wanted, case.logits())
    assert torch.equal(traced(case, edit, invoke), wanted)


def test_a_token_s_own_half_alone_is_not_the_whole_token():
    """Without the per-layer half the run is another one: the test above would fail."""
    case = Case("e2b")
    model = case.model()
    other = case.prompts[0].clone()
    other[0, -3] = 300 - other[0, -3]
    with model.trace(other):
        embedding = model.token_embeddings[:, -3].save()
    with model.trace(case.prompts[0]):
        model.token_embeddings[:, -3] = embedding
        logits = model.logits.save()
    with torch.no_grad():
        assert not torch.equal(logits, case.bare()(other).logits)


@every_style
def test_one_block_s_per_layer_input_is_its_own(style):
    case = Case("e2b")
    model = case.model()
    before = reading(case)[0]
    found = []
    with model.trace(case.prompts[0]):
        whole = model.per_layer_inputs.save()
        for i in range(model.num_layers):
            if i == 4:
                put(Place("per_layer_input", 4), model, model.layers[4].per_layer_input * 3, style)
            found.append(model.layers[i].per_layer_input.save())
    for i, value in enumerate(found):
        wanted = before[Place("per_layer_input", i)] * (3 if i == 4 else 1)
        assert torch.equal(value, wanted), i
    assert torch.equal(whole, before[Place("per_layer_inputs")])  # what was read before stays as it was read


# -- what a write does not reach ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@every_style
def test_no_write_outlives_its_trace(shape, style):
    case = Case(shape)
    model = case.model()
    weights = {name: tensor.clone() for name, tensor in model._module.state_dict().items()}
    for place in first_of_each(outside_the_call(model), BLOCKS[shape]):
        with model.trace(case.prompts[0]):
            put(place, model, place.read(model) * 2, style)
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())
    with torch.no_grad():
        assert torch.equal(model._module(**case.inputs).logits, case.logits())
    for name, tensor in model._module.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_the_caller_s_tensor_is_a_copy_apart(shape, batched):
    """What is assigned is neither edited by the model nor read again after the assignment."""
    case = Case(shape, batched=batched)
    model, invoke = case.model(), int(batched)
    for place in first_of_each(outside_the_call(model), BLOCKS[shape][:1]):
        given = reading(case)[invoke][place].detach() * 1.5
        before = given.clone()

        def kept(model, place=place, given=given):
            place.write(model, given)

        def spoilt(model, place=place, given=given):
            place.write(model, given)
            given.zero_()

        def overwritten(model, place=place, given=given):
            place.write(model, given)
            place.read(model)[:] = 0

        wanted = traced(case, kept, invoke)
        assert torch.equal(given, before), place
        traced(case, overwritten, invoke)
        assert torch.equal(given, before), place
        assert torch.equal(traced(case, spoilt, invoke), wanted), place


@every_style
@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_the_prompt_that_was_given_stays_as_it_was(style, name):
    model, row = Case("e2b").model(), ids(7)
    given = {"input_ids": row.clone(), "attention_mask": torch.ones_like(row)}
    with model.trace(**given):
        value = Place(name).read(model).clone()
        value[:, 3] = 0
        put(Place(name), model, value, style)
    assert torch.equal(given["input_ids"], row)
    assert given["attention_mask"].all()


def test_one_tensor_may_be_assigned_in_many_places():
    case = Case("31b")
    model = case.model()
    nothing = torch.zeros(1, 13, 40)
    with model.trace(case.prompts[0]):
        for block in model.layers:
            block.self_attn.attention_output = nothing
            block.mlp.mlp_output = nothing
        stream = model.layers[-1].layer_output.save()
    scale = torch.stack([block.layer_scalar for block in stack(case.bare()).layers]).prod()
    wanted = reading(case)[0][Place("token_embeddings")] * scale
    assert torch.allclose(stream, wanted, rtol=1e-5, atol=0)
    assert not nothing.any()


def test_a_value_of_another_block_or_trace_can_be_assigned():
    """Activation patching, and a value put back where it was read."""
    case = Case("12b")
    model = case.model()
    with model.trace(ids(13, salt=1)):
        other = model.layers[2].layer_output.save()
    with model.trace(case.prompts[0]):
        early = model.layers[1].layer_output
        model.layers[2].layer_output = other
        patched = model.layers[2].layer_output.save()
        model.layers[4].mlp.mlp_output = early
        moved = model.layers[4].mlp.mlp_output.save()
        kept = early.save()
    assert torch.equal(patched, other)
    assert torch.equal(moved, kept)
    assert torch.equal(kept, reading(case)[0][Place("layer_output", 1)])
