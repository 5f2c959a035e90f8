"""Rule 9: values come in forward order; one that comes too late says so at once and never binds another."""

from __future__ import annotations

import itertools
import re
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import GemloupeError, NeverRan, OutOfOrder, StepsWarning
from gemloupe.testing import SHAPES
from tests.core.models import Case, ids
from tests.core.places import ROUTING, Place, forward_order, reading

ALL_ORDERS = [*itertools.permutations(ROUTING)]
SOME_ORDERS = ALL_ORDERS[::17]


def late(model: Any, first: Place, then: Place, what: str) -> None:
    """Touches two places in the wrong order, inside a trace."""
    first.read(model).save()
    if what == "read":
        then.read(model).save()
    else:
        then.write(model, torch.zeros(1))


PAIRS = [
    (Place("layer_output", 4), Place("layer_output", 2)),
    (Place("layer_output", 2), Place("layer_input", 2)),
    (Place("mlp_output", 1, "mlp"), Place("attention_output", 1, "self_attn")),
    (Place("mid_stream", 3), Place("attention_input", 3, "self_attn")),
    (Place("layer_input", 0), Place("token_embeddings")),
    (Place("mlp_neurons", 0, "mlp"), Place("mlp_input", 0, "mlp")),
    (Place("logits"), Place("raw_logits")),
    (Place("logits"), Place("input_ids")),
    (Place("per_layer_output", 2), Place("mlp_output", 2, "mlp")),
    (Place("per_layer_inputs"), Place("per_layer_token_inputs")),
]


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[1]} after {pair[0]}")
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_what_comes_too_late_names_both_and_the_fix(pair, what, batched):
    model = Case("e2b").model()
    first, then = pair
    with pytest.raises(OutOfOrder) as refused:
        if batched:
            with model.trace() as tracer:
                with tracer.invoke(ids(5)):
                    model.logits.save()
                with tracer.invoke(ids(3)):
                    late(model, first, then, what)
        else:
            with model.trace(ids(5)):
                late(model, first, then, what)
    assert f"the {what} of {then} comes too late, after {first}" in str(refused.value)
    assert f"{what.capitalize()} {then} before {first}" in str(refused.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_of_a_block_is_late_after_its_output(shape):
    model = Case(shape).model()
    for place in forward_order(model):
        if place.block == 2 and place.name != "layer_output":
            with pytest.raises(OutOfOrder, match=re.escape(str(place))):
                with model.trace(ids(4)):
                    model.layers[2].layer_output.save()
                    place.read(model).save()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_can_be_read_after_the_one_before(shape):
    """Neighbours in forward order, pairwise: no order is asked for that the forward does not have."""
    model = Case(shape).model()
    order = [place for place in forward_order(model) if place.block in (None, 1, 2)]
    values = reading(Case(shape))[0]
    for first, second in itertools.pairwise(order):
        with model.trace(Case(shape).prompts[0]):
            one = first.read(model).save()
            two = second.read(model).save()
        assert torch.equal(one, values[first]), first
        assert torch.equal(two, values[second]), second


def test_the_same_value_can_be_read_twice():
    case = Case("26b-a4b")
    model = case.model()
    for place in forward_order(model):
        if place.block not in (None, 1):
            continue
        with model.trace(case.prompts[0]):
            first = place.read(model).save()
            second = place.read(model).save()
        assert torch.equal(first, second), place


def test_nothing_is_left_behind_by_a_refusal():
    case = Case("e2b")
    model = case.model()
    for _ in range(2):
        with pytest.raises(OutOfOrder):
            with model.trace(case.prompts[0]):
                late(model, *PAIRS[0], "read")
        with model.trace(case.prompts[0]):
            logits = model.logits.save()
        assert torch.equal(logits, case.logits())


def test_a_refusal_is_the_package_s_own_error_and_can_be_caught_inside():
    """The trace goes on after it, and what follows is served."""
    case = Case("e2b")
    model = case.model()
    caught = []
    with model.trace(case.prompts[0]):
        model.layers[3].layer_output.save()
        try:
            model.layers[1].layer_output.save()
        except GemloupeError as error:
            caught.append(error)
        after = model.layers[4].layer_output.save()
    assert isinstance(caught[0], OutOfOrder)
    assert torch.equal(after, reading(case)[0][Place("layer_output", 4)])


def test_a_value_of_a_module_that_did_not_run_says_so():
    model = Case("e2b").model()
    with pytest.raises(NeverRan, match=r"layers\[1\]\.mlp\.mlp_neurons was asked for, but this call did not"):
        with model.trace(ids(5)):
            model.layers[1].mlp.skip(model.layers[1].mlp.mlp_input)
            model.layers[1].mlp.mlp_neurons.save()


def test_a_value_that_another_invoke_stopped_before_says_so():
    model = Case("e2b").model()
    with pytest.raises(NeverRan, match=r"layers\[4\]\.mid_stream .*stopped before it"):
        with model.trace() as tracer:
            with tracer.invoke(ids(5)):
                model.layers[1].layer_output.save()
                tracer.stop()
            with tracer.invoke(ids(3)):
                model.layers[4].mid_stream.save()


# -- the routing's values belong to one moment -------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "batched", "orders"),
    [
        ("batched_mm", False, ALL_ORDERS),
        ("grouped_mm", True, SOME_ORDERS),
        ("eager", True, SOME_ORDERS),
        ("eager", False, SOME_ORDERS),
    ],
)
def test_routing_values_are_read_in_any_order(experts, batched, orders):
    case = Case("26b-a4b", experts=experts, batched=batched)
    model, rows = case.model(), case.prompts
    for order in orders:
        found: list[dict[str, Tensor]] = [{} for _ in rows]
        with model.trace() as tracer:
            for row, values in zip(rows, found, strict=True):
                with tracer.invoke(row):
                    for name in order:
                        values[name] = nnsight.save(getattr(model.layers[1].mlp, name))
                    values["routed_output"] = nnsight.save(model.layers[1].mlp.routed_output)
        for values, wanted in zip(found, reading(case), strict=True):
            for name, value in values.items():
                assert torch.equal(value, wanted[Place(name, 1, "mlp")]), (order, name)


def test_routing_values_of_two_blocks_keep_apart():
    case = Case("26b-a4b")
    model = case.model()
    found = {}
    with model.trace(case.prompts[0]):
        for block in (1, 3):
            for name in reversed(ROUTING):
                found[block, name] = nnsight.save(getattr(model.layers[block].mlp, name))
    for (block, name), value in found.items():
        assert torch.equal(value, reading(case)[0][Place(name, block, "mlp")]), (block, name)


@pytest.mark.parametrize("name", ROUTING)
def test_a_routing_value_is_late_after_the_routing(name):
    model = Case("26b-a4b").model()
    with pytest.raises(OutOfOrder, match=rf"layers\[1\]\.mlp\.{name}"):
        with model.trace(ids(5)):
            model.layers[1].mlp.routed_output.save()
            getattr(model.layers[1].mlp, name).save()


@pytest.mark.parametrize("first", ["expert_weights", "expert_indices", "expert_outputs"])
@pytest.mark.parametrize("name", ["router_logits", "router_probabilities"])
def test_a_write_to_the_routing_after_its_result_was_read_is_refused(first, name):
    """It could be read in any order, but no longer changes what has been computed."""
    model = Case("26b-a4b").model()
    with pytest.raises(OutOfOrder, match=rf"the write of layers\[1\]\.mlp\.{name} comes too late"):
        with model.trace(ids(5)):
            getattr(model.layers[1].mlp, first).save()
            value = getattr(model.layers[1].mlp, name)
            setattr(model.layers[1].mlp, name, value * 2)


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("router_logits", "expert_indices"),
        ("router_probabilities", "expert_weights"),
        ("expert_weights", "expert_outputs"),
    ],
)
@pytest.mark.parametrize(
    "read_first", [pytest.param(True, id="read first"), pytest.param(False, id="unread")]
)
def test_a_written_routing_value_is_read_again_as_written(name, then, read_first):
    case = Case("26b-a4b")
    model = case.model()
    value = reading(case)[0][Place(name, 1, "mlp")].detach().roll(1, -1)
    with model.trace(case.prompts[0]):
        mlp = model.layers[1].mlp
        if read_first:
            getattr(mlp, name).save()
        setattr(mlp, name, value)
        getattr(mlp, then).save()
        again = getattr(mlp, name).save()
    assert torch.equal(again, value)


@pytest.mark.parametrize("name", ["router_logits", "router_probabilities", "expert_weights"])
def test_a_routing_value_edited_in_place_is_read_again_as_edited(name):
    case = Case("26b-a4b")
    model = case.model()
    value = reading(case)[0][Place(name, 1, "mlp")].detach().roll(1, -1)
    with model.trace(case.prompts[0]):
        mlp = model.layers[1].mlp
        getattr(mlp, name)[:] = value
        mlp.expert_outputs.save()
        again = getattr(mlp, name).save()
    assert torch.equal(again, value)


# -- steps of a generation ---------------------------------------------------------------------------


def generated(case: Case, steps: int, **options) -> Tensor:
    """What the bare model generates, padding and prompt included."""
    inputs = {name: tensor for name, tensor in case.inputs.items() if name != "position_ids"}
    return case.bare().generate(**inputs, max_new_tokens=steps, do_sample=False, eos_token_id=-1, **options)


def forwards(case: Case, tokens: Tensor, steps: int) -> list[Tensor]:
    """The logits of each step's last position, from a run of the whole text without a cache."""
    bare, inputs = case.bare(), case.inputs
    width = inputs["input_ids"].shape[1]
    found = []
    for step in range(steps):
        grown = torch.ones(len(tokens), step, dtype=torch.int64)
        mask = torch.cat([inputs["attention_mask"], grown], -1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            out = bare(input_ids=tokens[:, : width + step], attention_mask=mask, position_ids=positions)
        found.append(out.logits[:, -1])
    return found


LOOPS: dict[str, Any] = {
    "iter[:4]": lambda tracer: tracer.iter[:4],
    "iter[0:4]": lambda tracer: tracer.iter[0:4],
    "iter[[0, 1, 2, 3]]": lambda tracer: tracer.iter[[0, 1, 2, 3]],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_each_step_of_a_loop_serves_its_own_step(shape, loop, batched):
    case = Case(shape, batched=batched)
    model, rows = case.model(), case.prompts
    wanted_tokens = generated(case, 4)
    wanted = forwards(case, wanted_tokens, 4)
    found: list[list[Tensor]] = [[] for _ in rows]
    fed: list[list[Tensor]] = [[] for _ in rows]
    with model.generate(max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
        for row, logits, given in zip(rows, found, fed, strict=True):
            with tracer.invoke(row):
                for _ in LOOPS[loop](tracer):
                    given.append(nnsight.save(model.input_ids))
                    early = model.layers[1].layer_output
                    late = model.layers[-1].layer_output
                    assert early.shape == late.shape
                    logits.append(nnsight.save(model.logits))
    for i, (logits, given) in enumerate(zip(found, fed, strict=True)):
        assert len(logits) == 4
        for step in range(4):
            row = wanted[step][i]
            assert (logits[step][0, -1] - row).abs().max() <= 1e-4 * row.abs().max(), step
            if step:
                assert given[step].tolist() == [[wanted_tokens[i, 12 + step].item()]]


@pytest.mark.parametrize("loop", ["all()", "iter[:]"])
def test_an_open_loop_ends_with_the_run(loop):
    case = Case("e2b")
    model = case.model()
    steps = []
    with pytest.warns(StepsWarning, match="which this call did not make"):  # noqa: PT031
        with model.generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=-1) as tracer:
            for _ in tracer.all() if loop == "all()" else tracer.iter[:]:
                steps.append(nnsight.save(model.layers[2].mlp.mlp_output))  # noqa: PERF401
    assert [value.shape[1] for value in steps] == [13, 1, 1]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("loop", ["iter[at]", "iter[:]", "all()", "iter[[at]]"])
def test_a_late_request_in_a_step_never_binds_the_next_step(at, what, loop):
    """Refused at once, naming both, in the first step and in later ones."""
    model = Case("e2b").model()
    seen: list[int] = []
    with pytest.raises(OutOfOrder) as refused:
        with model.generate(ids(5), max_new_tokens=5, do_sample=False, eos_token_id=-1) as tracer:
            steps = {
                "iter[at]": lambda: tracer.iter[at],
                "iter[[at]]": lambda: tracer.iter[[at]],
                "iter[:]": lambda: tracer.iter[:],
                "all()": lambda: tracer.all(),
            }[loop]()
            for step in steps:
                model.layers[1].layer_output.save()
                model.layers[6].layer_output.save()
                seen.append(step)
                if step == at:
                    if what == "read":
                        model.layers[3].layer_output.save()
                    else:
                        Place("layer_output", 3).write(model, torch.zeros(1))
    assert seen[-1] == at
    assert f"the {what} of layers[3].layer_output comes too late, after layers[6].layer_output" in str(
        refused.value
    )


@pytest.mark.parametrize("at", [1, 2])
def test_a_late_request_after_the_step_s_answer_is_refused(at):
    """The token that was chosen comes after the forward has ended: what follows is the next step's.

    Not in step 0, for which transformers' streamer is given the prompt, before the forward.
    """
    model = Case("e2b").model()
    with pytest.raises(OutOfOrder, match=r"layers\[1\]\.layer_output"):
        with model.generate(ids(5), max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
            for _ in tracer.iter[at]:
                model.logits.save()
                model.generator.streamer.output.save()
                model.layers[1].layer_output.save()


def test_a_late_first_request_of_a_step_is_refused_too():
    """The step before has been passed altogether."""
    model = Case("e2b").model()
    with pytest.raises(OutOfOrder, match=r"layers\[1\]\.layer_output"):
        with model.generate(ids(5), max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
            for _ in tracer.iter[2]:
                model.layers[4].layer_output.save()
            for _ in tracer.iter[1]:
                model.layers[1].layer_output.save()


def test_without_a_loop_a_block_sees_the_first_step_alone():
    case = Case("e2b")
    model = case.model()
    with model.generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=-1) as tracer:
        value = model.layers[2].layer_output.save()
        tokens = tracer.result.save()
    assert torch.equal(value, reading(case)[0][Place("layer_output", 2)])
    assert torch.equal(tokens, generated(case, 3))
    with pytest.raises(OutOfOrder):
        with model.generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=-1):
            model.layers[2].layer_output.save()
            model.layers[1].layer_output.save()


def test_nested_loops_and_a_loop_after_a_loop():
    model = Case("12b").model()
    found = []
    with model.generate(ids(5), max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
        for step in tracer.iter[:2]:
            found.append((step, nnsight.save(model.input_ids)))  # noqa: PERF401
        for step in tracer.iter[2:4]:
            found.append((step, nnsight.save(model.input_ids)))  # noqa: PERF401
        tokens = tracer.result.save()
    assert [step for step, _ in found] == [0, 1, 2, 3]
    for step, given in found[1:]:
        assert given.tolist() == [[tokens[0, 4 + step].item()]]


every_experts = pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])


@every_experts
@pytest.mark.parametrize("at", [0, 1])
def test_late_expert_outputs_never_bind_the_next_step(experts, at):
    """Their location inside the fused function is not counted where nobody has asked for it in time."""
    model = Case("26b-a4b", experts=experts).model()
    with pytest.raises(OutOfOrder, match=r"layers\[2\]\.mlp\.expert_outputs comes too late"):
        with model.generate(ids(5), max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
            for _ in tracer.iter[at]:
                model.layers[2].mlp.routed_output.save()
                model.layers[2].mlp.expert_outputs.save()


@every_experts
def test_routing_values_in_any_order_in_every_step(experts):
    model = Case("26b-a4b", experts=experts).model()
    found = []
    with model.generate(ids(5), max_new_tokens=3, do_sample=False, eos_token_id=-1) as tracer:
        for _ in tracer.iter[:3]:
            mlp = model.layers[2].mlp
            outputs, indices, logits = mlp.expert_outputs, mlp.expert_indices, mlp.router_logits
            found.append(nnsight.save((outputs, indices, logits, mlp.routed_output)))
    for step, (outputs, indices, logits, routed) in enumerate(found):
        assert outputs.shape[:3] == (1, 1 if step else 5, 3)
        assert torch.equal(indices, logits.topk(3, -1).indices)
        assert torch.allclose(outputs.sum(2), routed, rtol=0, atol=1e-6)
