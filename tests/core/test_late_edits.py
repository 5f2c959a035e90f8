"""An edit in place that the forward can no longer see is an error, and an edit in time is none."""

from __future__ import annotations

import itertools
import re

import nnsight
import pytest
import torch

from gemloupe.errors import BadArgument, LateEdit
from tests.core.models import Case, ids
from tests.core.places import Place, forward_order, reading

CASE = Case("e2b")
GREEDY = {"do_sample": False, "eos_token_id": -1}


# Ways to write into the memory of a tensor that was handed out.
WAYS = {
    "index": lambda value: value.__setitem__(slice(None), 0),
    "one element": lambda value: value[0, 0].zero_(),
    "add_": lambda value: value.add_(1),
    "copy_": lambda value: value.copy_(torch.zeros_like(value)),
    "view": lambda value: value.view(-1).zero_(),
    "transpose": lambda value: value.transpose(1, 2).mul_(2),
    "detached": lambda value: value.detach().zero_(),
    "masked": lambda value: value.masked_fill_(value > 0, 0),
    "out=": lambda value: torch.add(value.detach(), 1, out=value.detach()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ["read", "write", "nothing"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_an_edit_after_something_later_was_read(way, ending, batched):
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output was edited in place after the forward"):
        with model.trace() as tracer:
            if batched:
                with tracer.invoke(ids(5)):
                    model.logits.save()
            with tracer.invoke(ids(3)):
                value = model.layers[1].layer_output
                later = model.layers[3].layer_output
                WAYS[way](value)
                if ending == "read":
                    model.layers[5].layer_output.save()
                elif ending == "write":
                    model.layers[5].layer_output = torch.zeros_like(later)


def test_an_edit_of_a_tensor_that_nothing_holds_any_longer():
    model = CASE.model()

    def helper() -> None:
        value = model.layers[1].layer_output
        model.layers[3].layer_output.save()
        value.zero_()

    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output"):
        with model.trace() as tracer:
            with tracer.invoke(ids(5)):
                model.logits.save()
            with tracer.invoke(ids(3)):
                helper()


def test_every_value_is_watched():
    for case in (CASE, Case("26b-a4b", experts="eager"), Case("26b-a4b", experts="batched_mm")):
        model = case.model()
        for place in forward_order(model):
            if place.block not in (None, 1) or place.name in ("logits", "next_token_probs"):
                continue
            with pytest.raises(LateEdit, match=place.name):
                with model.trace(ids(5)):
                    value = place.read(model)
                    model.logits.save()
                    with torch.no_grad():
                        value.zero_()


def test_an_edit_in_a_loop_over_what_was_collected():
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[0\]\.mlp\.mlp_output"):
        with model.trace(ids(5)):
            outputs = [block.mlp.mlp_output for block in model.layers]
            for output in outputs:
                output.mul_(2)


def test_an_edit_of_what_was_assigned_and_read_back():
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output"):
        with model.trace(ids(5)):
            model.layers[1].layer_output = model.layers[1].layer_output * 2
            value = model.layers[1].layer_output
            model.layers[2].layer_output.save()
            value.zero_()


def test_an_edit_of_a_value_that_was_assigned_as_it_was():
    """What is assigned is the very tensor that was read: it still is what the model holds."""
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output"):
        with model.trace(ids(5)):
            value = model.layers[1].layer_output
            model.layers[1].layer_output = value
            model.layers[2].layer_output.save()
            value.zero_()


def test_an_edit_in_the_next_step():
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output"):
        with model.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
            kept = []
            for _ in tracer.iter[:3]:
                kept.append(model.layers[1].layer_output)
                model.layers[2].layer_output.save()
                if len(kept) == 2:
                    kept[0].zero_()


def test_an_edit_after_an_early_stop():
    model = CASE.model()
    with pytest.raises(LateEdit, match=r"layers\[1\]\.layer_output"):
        with model.trace(ids(5)) as tracer:
            value = model.layers[1].layer_output
            model.layers[2].layer_output.save()
            value.zero_()
            tracer.stop()


def test_an_edit_of_a_routing_value_after_the_routing():
    model = Case("26b-a4b").model()
    for name in ("router_logits", "router_probabilities", "expert_weights", "expert_outputs"):
        with pytest.raises(LateEdit, match=name):
            with model.trace(ids(5)):
                value = getattr(model.layers[1].mlp, name)
                model.layers[1].mlp.routed_output.save()
                value.mul_(2)
                model.layers[2].layer_output.save()


@pytest.mark.parametrize("first", ["router_logits", "router_probabilities"])
@pytest.mark.parametrize("then", ["expert_weights", "expert_indices", "expert_outputs"])
def test_an_edit_of_the_scores_after_what_follows_from_them_was_read(first, then):
    model = Case("26b-a4b").model()
    with pytest.raises(LateEdit, match=first):
        with model.trace(ids(5)):
            scores = getattr(model.layers[1].mlp, first)
            getattr(model.layers[1].mlp, then).save()
            scores.mul_(2)
            model.layers[1].mlp.routed_output.save()


def test_the_next_trace_is_clean_after_a_late_edit():
    model = CASE.model()
    for _ in range(2):
        with pytest.raises(LateEdit):
            with model.trace(CASE.prompts[0]):
                value = model.layers[1].layer_output
                model.layers[2].layer_output.save()
                value.zero_()
        with model.trace(CASE.prompts[0]):
            logits = model.logits.save()
        assert torch.equal(logits, CASE.logits())


# -- no false alarm ----------------------------------------------------------------------------------


def steps_in_time(model) -> None:
    """Edits as people write them, each of them in time."""
    block = model.layers[1]
    stream = block.layer_input
    stream[:, 0] = 0
    stream[:, 1] += 1
    stream *= 1.5
    block.self_attn.attention_output[:] *= 2
    block.mid_stream += 1
    block.mlp.mlp_input[0, -1] = block.mlp.mlp_input[0, -1] * 2
    neurons = block.mlp.mlp_neurons
    neurons.view(-1)[::3] = 0
    block.mlp.mlp_output = block.mlp.mlp_output * 2
    block.mlp.mlp_output += 1
    out = block.layer_output
    kept = out.clone()
    out.mul_(0.5)
    later = model.layers[2].layer_output
    kept.zero_()
    (later * 2).zero_()
    model.logits.clone().zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["e2b", "26b-a4b", "12b"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_edits_in_time_are_none(shape, dtype, batched):
    case = Case(shape, dtype=dtype, batched=batched)
    model = case.model()
    with model.trace() as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                steps_in_time(model)
                logits = model.logits.save()
    assert not torch.equal(logits, case.logits()[-1:])


def test_edits_in_time_in_every_step():
    model = CASE.model()
    with model.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            model.layers[1].layer_output[:, -1] *= 2
            model.layers[3].mlp.mlp_output += 1
            model.logits[:] = model.logits.roll(1, -1)


@pytest.mark.parametrize("place", [Place("layer_output", 1), Place("mlp_output", 3, "mlp")], ids=str)
def test_invokes_that_edit_the_same_place(place):
    """Each has a view of the same memory, so each edit moves the other's version counter."""
    model = CASE.model()
    rows = [ids(5), ids(3), ids(4)]
    found = []
    with model.trace() as tracer:
        for i, row in enumerate(rows):
            with tracer.invoke(row):
                place.read(model)[:] *= i + 1
                found.append(place.read(model).save())
                model.layers[5].layer_output.save()
    clean = []
    with model.trace() as tracer:
        for row in rows:
            with tracer.invoke(row):
                clean.append(place.read(model).save())
    for i, (edited, was) in enumerate(zip(found, clean, strict=True)):
        assert torch.equal(edited, was * (i + 1))


def test_one_invoke_reads_what_another_edits_later():
    model = CASE.model()
    with model.trace() as tracer:
        with tracer.invoke(ids(5)):
            kept = model.layers[1].layer_output.save()
            model.layers[4].layer_output.save()
        with tracer.invoke(ids(3)):
            model.layers[1].layer_output.save()
            model.layers[3].layer_output[:] = 0
            model.layers[4].layer_output.save()
    assert kept.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_tensors_are_the_user_s_after_the_trace(dtype):
    case = Case("e2b", dtype=dtype)
    model = case.model()
    order = forward_order(model)
    with model.trace(case.prompts[0]):
        values = nnsight.save([place.read(model) for place in order])
    for value in values:
        value.detach().zero_()
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


def test_a_stream_edited_where_the_next_block_receives_it():
    """`layers[i].layer_output` is the tensor that `layers[i + 1].layer_input` is."""
    model = CASE.model()
    for first, then in itertools.pairwise(
        [Place("layer_output", 1), Place("layer_input", 2), Place("attention_input", 2, "self_attn")]
    ):
        with model.trace(CASE.prompts[0]):
            first.read(model).save()
            then.read(model)[:] *= 2
            logits = model.logits.save()
        assert not torch.equal(logits, CASE.logits()), then


def test_reading_everything_raises_no_alarm_in_a_generation():
    """The model edits tensors in place too: what it does to what was handed out is no edit of the user's."""
    for case in (CASE, Case("26b-a4b"), Case("31b", attention="eager")):
        model = case.model()
        order = forward_order(model)
        with model.generate(case.prompts[0], max_new_tokens=3, **GREEDY) as tracer:
            for _ in tracer.iter[:3]:
                for place in order:
                    place.read(model)


def test_under_inference_mode_a_trace_is_refused():
    """Inference tensors have no version counter: an edit that came too late could not be told."""
    model = CASE.model()
    with torch.inference_mode():
        with pytest.raises(BadArgument, match=re.escape("Use torch.no_grad()")):
            with model.trace(CASE.prompts[0]):
                model.logits.save()


def test_a_write_of_what_an_earlier_place_held():
    """Its memory is the earlier place's, which is not edited by it."""
    model = CASE.model()
    with model.trace(CASE.prompts[0]):
        early = model.layers[0].layer_output.save()
        model.layers[3].layer_output = early
        model.layers[3].layer_output[:] *= 2
        late = model.layers[4].layer_input.save()
    assert torch.equal(early, reading(CASE)[0][Place("layer_output", 0)])
    assert torch.equal(late, early * 2)
