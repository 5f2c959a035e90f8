"""The values of one attention call come in any order; what comes too late says so."""

from __future__ import annotations

import weakref
from itertools import permutations

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import LateEdit, OutOfOrder
from gemloupe.ledger import owner
from tests.attention.values import CALL, OWN, attention, of_block, with_heads
from tests.core.models import Case, ids
from tests.core.places import reading

ORDERS = list(permutations(CALL))
CASES = [
    Case("e2b", batched=True),
    Case("26b-a4b", experts="batched_mm"),
    Case("31b", attention="eager", batched=True),
    Case("12b", dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sixth", range(6))
def test_every_order_reads_the_same_bits(case, sixth):
    model, rows = case.model(), case.prompts
    block = model.num_layers - 1
    orders = ORDERS[120 * sixth : 120 * (sixth + 1)]
    for order in orders if case.shape == "12b" else orders[::9]:
        found: list[tuple[dict[str, Tensor], Tensor]] = []
        with torch.no_grad():
            if case.batched:
                with model.trace() as tracer:
                    nnsight.save(found)
                    for row in rows:
                        with tracer.invoke(row):
                            found.append(
                                (
                                    {name: getattr(attention(model, block), name) for name in order},
                                    model.logits,
                                )
                            )
            else:
                with model.trace(rows[0]):
                    nnsight.save(found)
                    found.append(
                        ({name: getattr(attention(model, block), name) for name in order}, model.logits)
                    )
        assert torch.equal(torch.cat([logits for _, logits in found]), case.logits()), order
        for (values, _), wanted in zip(found, reading(case), strict=True):
            for name in CALL:
                assert torch.equal(values[name], of_block(wanted, block)[name]), (order, name)


def model_and_row():
    case = Case("e2b")
    return case.model(), case.prompts[0]


def test_own_keys_and_values_are_read_in_either_order():
    model, row = model_and_row()
    found: dict[tuple[str, ...], list[Tensor]] = {}
    for order in (OWN, OWN[::-1]):
        values: dict[str, Tensor] = {}
        with torch.no_grad():
            with model.trace(row):
                for name in order:
                    values[name] = getattr(attention(model, 3), name).save()
                logits = model.logits.save()
        found[order] = [values["own_keys"], values["own_values"], logits]
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))
    assert torch.equal(logits, Case("e2b").logits())


@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("edited", OWN)
def test_an_edit_of_own_keys_comes_before_the_own_values(edited, style):
    model, row = model_and_row()

    def edit() -> Tensor:
        with torch.no_grad():
            with model.trace(row):
                host = attention(model, 3)
                for name in OWN if edited == "own_values" else OWN[::-1]:
                    value = getattr(host, name)
                    if name == edited and style == "assigned":
                        setattr(host, name, value * 0.5)
                    elif name == edited:
                        value *= 0.5
                logits = model.logits.save()
        return logits

    if edited == "own_values":
        assert not torch.equal(edit(), Case("e2b").logits())
    else:
        with pytest.raises((OutOfOrder, LateEdit), match=r"layers\[3\]\.self_attn\.own_keys"):
            edit()


@pytest.mark.parametrize("name", CALL)
@pytest.mark.parametrize("own", OWN)
def test_own_keys_and_values_come_before_the_call(own, name):
    model, row = model_and_row()
    with pytest.raises(OutOfOrder) as error:
        with model.trace(row):
            getattr(attention(model, 3), name)
            getattr(attention(model, 3), own)
    read, fix, _ = str(error.value).replace(";", "\n").split("\n")
    assert read.startswith(
        f"the read of layers[3].self_attn.{own} comes too late, after layers[3].self_attn.{name}"
    )
    assert fix == f"Read layers[3].self_attn.{own} before layers[3].self_attn.{name}"


@pytest.mark.parametrize("name", [*OWN, *CALL])
@pytest.mark.parametrize(
    "after", ["layers[3].self_attn.attention_projection", "layers[5].layer_input", "logits"]
)
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_request_after_the_attention_is_late(name, after, what):
    model, row = model_and_row()
    later = {
        "layers[3].self_attn.attention_projection": lambda: attention(model, 3).attention_projection,
        "layers[5].layer_input": lambda: model.layers[5].layer_input,
        "logits": lambda: model.logits,
    }[after]
    with pytest.raises(OutOfOrder) as error:
        with model.trace(row):
            later()
            if what == "read":
                getattr(attention(model, 3), name)
            else:
                setattr(attention(model, 3), name, torch.zeros(1))
    assert str(error.value).startswith(
        f"the {what} of layers[3].self_attn.{name} comes too late, after {after}"
    )


@pytest.mark.parametrize("name", CALL[:-1])
def test_a_write_after_the_head_outputs_is_late(name):
    model, row = model_and_row()
    with pytest.raises(OutOfOrder, match=f"write of .*{name} comes too late, after .*attention_head_outputs"):
        with model.trace(row):
            value = getattr(attention(model, 3), name).clone()
            attention(model, 3).attention_head_outputs
            setattr(attention(model, 3), name, value * 2)


AFTER = {
    "the heads": lambda model: attention(model, 3).attention_head_outputs,
    "the projection": lambda model: attention(model, 3).attention_projection,
    "the next block": lambda model: attention(model, 4).attention_queries,
    "the logits": lambda model: model.logits,
}


@pytest.mark.parametrize("name", [*OWN, *CALL])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_an_edit_in_place_after_the_block_moved_on_is_refused(name, after, batched):
    model, row = model_and_row()
    if name == "attention_head_outputs" and after == "the heads":
        after = "the projection"
    with pytest.raises(LateEdit) as error:
        if batched:
            with model.trace() as tracer:
                with tracer.invoke(ids(7)):
                    attention(model, 3).attention_keys
                with tracer.invoke(row):
                    value = getattr(attention(model, 3), name)
                    AFTER[after](model)
                    value[:] = 0
                    model.logits
        else:
            with model.trace(row):
                value = getattr(attention(model, 3), name)
                AFTER[after](model)
                value[:] = 0
                model.logits
    assert f"layers[3].self_attn.{name} was edited in place after the forward had moved on" in str(
        error.value
    )


@pytest.mark.parametrize("name", CALL)
def test_so_is_one_that_nothing_follows(name):
    model, row = model_and_row()
    with pytest.raises(LateEdit, match=name):
        with model.trace(row):
            value = getattr(attention(model, 3), name)
            model.logits
            value[:] = 0


@pytest.mark.parametrize("name", CALL[:-1])
def test_a_value_first_read_after_the_heads_is_no_longer_editable(name):
    model, row = model_and_row()
    with pytest.raises(LateEdit, match=name):
        with model.trace(row):
            attention(model, 3).attention_head_outputs
            getattr(attention(model, 3), name)[:] = 0
            model.logits


@pytest.mark.parametrize("name", [*OWN, *CALL])
def test_computing_with_a_value_later_is_no_edit(name):
    model, row = model_and_row()
    with model.trace(row):
        value = getattr(attention(model, 3), name)
        copy = value.clone()
        late = model.layers[6].layer_output
        copy[:] = 0
        value = value * 2 + late.mean()
        logits = model.logits.save()
    assert torch.equal(logits, Case("e2b").logits())


@pytest.mark.parametrize("edited", ["attention_scores", "attention_probabilities"])
@pytest.mark.parametrize("name", ["attention_queries", "attention_keys"])
@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_queries_and_keys_come_before_an_edit_of_what_follows_from_them(edited, name, style, kernel):
    case = Case("e4b", attention=kernel)
    model = case.model()
    with pytest.raises(OutOfOrder, match=r"self_attn\.attention_queries or attention_keys .*edited after"):
        with model.trace(case.prompts[0]):
            host = attention(model, 3)
            value = getattr(host, name)
            getattr(host, edited)[:, 0] *= 0.5
            if style == "assigned":
                setattr(host, name, value * 2)
            else:
                value[:] = 0
            model.logits


@pytest.mark.parametrize(
    "style",
    [
        "assigned",
        pytest.param(
            "in place",
        ),
    ],
)
def test_scores_come_before_an_edit_of_the_pattern(style):
    model, row = model_and_row()
    with pytest.raises(OutOfOrder):
        with model.trace(row):
            host = attention(model, 3)
            scores = host.attention_scores
            host.attention_probabilities[:, 0] = 0
            if style == "assigned":
                host.attention_scores = scores * 2
            else:
                scores[:, 1, :, 1:] = -torch.inf
            host.attention_head_outputs


def test_a_pattern_read_before_an_edit_of_the_scores_is_no_longer_the_pattern():
    model, row = model_and_row()
    with pytest.raises((OutOfOrder, LateEdit)):
        with model.trace(row):
            host = attention(model, 3)
            scores, pattern = host.attention_scores, host.attention_probabilities
            scores[:, 1, :, 1:] = -torch.inf
            pattern[:, 0] = 0
            host.attention_head_outputs


def test_scores_follow_the_last_of_several_writes():
    """However often the keys are written between two reads, and whichever memory the writes reuse."""
    model, row = model_and_row()
    wrong: list[int] = []
    for writes in range(2, 9):
        with torch.no_grad():
            with model.trace(row):
                host = attention(model, 3)
                queries, keys = host.attention_queries.clone().save(), host.attention_keys.clone().save()
                given = [keys * factor for factor in range(1, 10)]
                host.attention_keys = given[0]
                host.attention_scores
                for later in given[1:writes]:
                    host.attention_keys = later
                scores = host.attention_scores.clone().save()
        wanted = writes * queries @ with_heads(keys, 4).transpose(-1, -2)
        if not torch.allclose(scores, wanted.where(scores > -1e30, scores), rtol=1e-4, atol=1e-4):
            wrong.append(writes)
    assert wrong == []


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALL)
def test_a_value_of_the_call_that_comes_after_something_else_is_too_late(name, grad):
    """Whether or not somebody still holds the tensor."""
    model = Case("e2b").model()
    late = rf"read of layers\[3\]\.self_attn\.{name} comes too late, after layers\[4\]\.layer_input"
    with torch.set_grad_enabled(grad), pytest.raises(OutOfOrder, match=late):
        with model.trace(ids(8)):
            attention(model, 3).attention_queries
            model.layers[4].layer_input
            getattr(attention(model, 3), name)


def test_what_was_edited_before_a_barrier_stands_when_more_is_read_after_it():
    model = Case("e2b").model()

    def logits(*, pause: bool) -> Tensor:
        found: list[Tensor] = []
        with torch.no_grad():
            with model.trace() as tracer:
                barrier = tracer.barrier(2)
                with tracer.invoke(ids(8)):
                    attention(model, 3).attention_keys[:] *= 2
                    if pause:
                        barrier()
                        attention(model, 3).attention_queries
                    found.append(model.logits.save())
                with tracer.invoke(ids(8)):
                    if pause:
                        barrier()
                    found.append(model.logits.save())
        return torch.cat(found)

    wanted = logits(pause=False)
    assert not torch.equal(*wanted)
    assert torch.equal(logits(pause=True), wanted)


@pytest.mark.parametrize("name", ["attention_probabilities", "attention_scores", "attention_head_outputs"])
@pytest.mark.parametrize("batched", [False, True])
def test_the_call_s_tensors_are_not_kept_for_the_rest_of_the_forward(name, batched):
    model = Case("12b").model()
    alive: list[bool] = []
    with torch.no_grad():
        with model.trace() as tracer:
            for row in (ids(8), ids(5))[: 1 + batched]:
                with tracer.invoke(row):
                    getattr(attention(model, 3), name).save()
            with tracer.invoke():
                queries = weakref.ref(owner(attention(model, 3).attention_queries))
                model.layers[5].layer_output
                alive.append(nnsight.save(queries() is not None))
    assert alive == [False]


@pytest.mark.parametrize("name", CALL[:-1])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("last", [True, False], ids=["at the end", "before more"])
def test_an_edit_after_the_head_outputs_is_refused_though_the_tensor_has_no_name(name, kernel, last):
    model = Case("e2b", attention=kernel).model()
    with torch.no_grad(), pytest.raises(LateEdit, match=rf"self_attn\.{name} was edited in place after"):
        with model.trace(ids(8)):
            attention(model, 3).attention_head_outputs
            getattr(attention(model, 3), name)[..., -1] = 0
            if not last:
                model.logits.save()
