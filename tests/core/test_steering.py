"""Steering and silencing by one call: exactly the edit made by hand, and no order used up."""

from __future__ import annotations

import re
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, OutOfOrder, OutsideTrace
from gemloupe.steering import Edited
from gemloupe.testing import SHAPES
from tests.core.hand import edited_logits
from tests.core.models import SEED, Case, continued, ids, stack
from tests.core.places import Place, reading
from tests.core.test_absence import Counted

GREEDY = {"do_sample": False, "eos_token_id": -1}
LENGTH = 13
every_shape = pytest.mark.parametrize("shape", SHAPES)
one_or_batched = pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])


def vector(*shape: int) -> Tensor:
    return torch.randn(*shape, 40, generator=torch.Generator().manual_seed(SEED))


def traced(case: Case, edit: Any, invoke: int = 0) -> Tensor:
    """All rows' logits of a trace in which `edit(model)` runs in one invoke."""
    model, found = case.model(), []
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                if i == invoke:
                    edit(model)
                found.append(model.logits.save())
    return torch.cat(found)


def by_hand(case: Case, place: Place, added: Tensor, columns: list[int], invoke: int) -> Tensor:
    """The bare model's logits with something added in some columns of a row."""

    def edit(value: Tensor) -> Tensor:
        result = value.clone()
        result[invoke, columns] += added.to(value.dtype)
        return result

    return edited_logits(case, place, edit)


def real_columns(case: Case, invoke: int) -> list[int]:
    """Where the row's real tokens stand."""
    return case.inputs["attention_mask"][invoke].nonzero().flatten().tolist()


# -- steer -------------------------------------------------------------------------------------------


@every_shape
@one_or_batched
@pytest.mark.parametrize("at", ["layer_output", "mlp_output", "attention_output", "attention_input"])
def test_steering_is_adding_the_vector(shape, batched, at):
    case = Case(shape, batched=batched)
    invoke, added = int(batched), vector()
    part = {"mlp_output": "mlp", "attention_output": "self_attn", "attention_input": "self_attn"}.get(at, "")
    logits = traced(case, lambda model: model.steer(3, added, 2.5, at=at), invoke)
    wanted = by_hand(case, Place(at, 3, part), 2.5 * added, real_columns(case, invoke), invoke)
    assert not torch.equal(wanted, case.logits())
    assert torch.equal(logits, wanted)


MASK = torch.arange(LENGTH) % 3 == 1
POSITIONS: dict[str, tuple[Any, Any]] = {
    "all": (None, lambda n: range(n)),
    "first": (0, lambda n: [0]),
    "a number": (2, lambda n: [2]),
    "the last": (-1, lambda n: [n - 1]),
    "from the end": (-3, lambda n: [n - 3]),
    "a list": ([0, -1, 1], lambda n: [0, 1, n - 1]),
    "a tuple": ((1, 2), lambda n: [1, 2]),
    "a range": (range(3), lambda n: [0, 1, 2]),
    "a slice": (slice(1, None), lambda n: range(1, n)),
    "a slice from the end": (slice(-2, None), lambda n: range(n - 2, n)),
    "a slice with steps": (slice(None, None, 2), lambda n: range(0, n, 2)),
    "a slice past the end": (slice(1, 99), lambda n: range(1, n)),
    "a tensor": (torch.tensor([0, 2]), lambda n: [0, 2]),
    "the same twice": ([1, 1], lambda n: [1]),
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("invoke", [0, 1, 2])
def test_positions_count_real_tokens(name, invoke):
    case = Case("e2b", batched=True)
    positions, places = POSITIONS[name]
    columns = real_columns(case, invoke)
    chosen = sorted({columns[i] for i in places(len(columns))})
    reports: list[Edited] = []

    def edit(model: Any) -> None:
        reports.append(model.steer([2, 8], vector(), positions=positions))

    logits = traced(case, edit, invoke)
    once = Case("e2b", batched=True)
    wanted = both_by_hand(once, chosen, invoke)
    assert torch.equal(logits, wanted)
    assert reports[0].counts == {2: len(chosen), 8: len(chosen)}
    assert reports[0].positions == len(chosen)
    assert str(reports[0]) == (
        f"steer layer_output: positions edited in layers[2]: {len(chosen)}, layers[8]: {len(chosen)}"
    )


def both_by_hand(case: Case, columns: list[int], invoke: int) -> Tensor:
    def add(_module: Any, _args: tuple, out: Tensor) -> Tensor:
        out = out.clone()
        out[invoke, columns] += vector()
        return out

    handles = [stack(case.bare()).layers[i].register_forward_hook(add) for i in (2, 8)]
    with torch.no_grad():
        logits = case.bare()(**case.inputs).logits
    for handle in handles:
        handle.remove()
    return logits


@one_or_batched
def test_a_mask_of_positions_chooses_columns(batched):
    case = Case("31b", batched=batched)
    invoke = int(batched)
    real = case.inputs["attention_mask"][invoke].bool()
    chosen = (MASK & real).nonzero().flatten().tolist()
    for mask in (MASK, MASK[None]):
        logits = traced(case, lambda model, mask=mask: model.steer(1, vector(), positions=mask), invoke)
        assert torch.equal(logits, by_hand(case, Place("layer_output", 1), vector(), chosen, invoke))


def test_padding_is_never_steered():
    case = Case("12b", batched=True)
    model, found = case.model(), []
    with model.trace() as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                model.steer(0, vector(), 100)
                found.append(model.layers[0].layer_output.save())
    for invoke, value in enumerate(found):
        real = case.inputs["attention_mask"][invoke].bool()
        clean = reading(case)[invoke][Place("layer_output", 0)]
        assert torch.equal(value[:, ~real], clean[:, ~real])
        assert (value[:, real] != clean[:, real]).all()


def test_a_vector_for_each_position_is_added_there():
    case = Case("e4b")
    for shape in ((LENGTH,), (1, LENGTH)):
        logits = traced(case, lambda model, shape=shape: model.steer(4, vector(*shape)))
        wanted = by_hand(case, Place("layer_output", 4), vector(LENGTH), list(range(LENGTH)), 0)
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_the_vector_follows_the_stream_s_dtype(dtype):
    case = Case("e2b", dtype=torch.bfloat16)
    added = vector().to(dtype)
    logits = traced(case, lambda model: model.steer(2, added, 0.5))
    wanted = by_hand(case, Place("layer_output", 2), 0.5 * added.to(torch.bfloat16), list(range(LENGTH)), 0)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("layers", [-1, 9, [9], (-1,), range(9, 10), [9, -1]], ids=str)
def test_layers_are_numbers_in_any_collection(layers):
    case = Case("e2b")
    logits = traced(case, lambda model: model.steer(layers, vector()))
    wanted = by_hand(case, Place("layer_output", 9), vector(), list(range(LENGTH)), 0)
    assert torch.equal(logits, wanted)


def test_the_value_may_be_a_reference():
    case = Case("e2b")
    model = case.model()
    for at in (model.layers[0].mlp.mlp_output, model.layers[7].mlp.mlp_output, "mlp.mlp_output"):
        logits = traced(case, lambda model, at=at: model.steer(7, vector(), at=at))
        assert torch.equal(
            logits, by_hand(case, Place("mlp_output", 7, "mlp"), vector(), [*range(LENGTH)], 0)
        )


def test_steering_uses_nothing_of_the_block_s_order_up():
    """Block 9 is steered before block 0 is read, and what is read is what was steered."""
    case = Case("e2b")
    model = case.model()
    with model.trace(case.prompts[0]):
        model.steer([9, 1], vector())
        first = model.layers[0].layer_output.save()
        second = model.layers[1].layer_output.save()
        model.steer(5, vector())
        last = model.layers[9].layer_output.save()
        logits = model.logits.save()
    clean = reading(case)[0]
    assert torch.equal(first, clean[Place("layer_output", 0)])
    assert torch.equal(second, clean[Place("layer_output", 1)] + vector())
    assert not torch.equal(last, clean[Place("layer_output", 9)])
    assert torch.equal(logits[0], model.project_on_vocab(last)[0])


def test_steering_twice_and_by_hand_adds_up():
    case = Case("31b")
    model = case.model()
    with model.trace(case.prompts[0]):
        model.steer(1, vector())
        model.steer(1, vector(), 2)
        model.layers[1].layer_output += 1
        value = model.layers[1].layer_output.save()
    wanted = reading(case)[0][Place("layer_output", 1)] + vector() + 2 * vector() + 1
    assert torch.equal(value, wanted)


def test_each_invoke_steers_its_own_way():
    case = Case("26b-a4b", experts="batched_mm", batched=True)
    model, found = case.model(), []
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                model.steer(i, vector(), i + 1)
                found.append(model.logits.save())
    for i, logits in enumerate(found):
        alone = traced(case, lambda model, i=i: model.steer(i, vector(), i + 1), i)
        assert torch.equal(logits[0], alone[i])


def test_a_stored_edit_steers_every_later_trace():
    case = Case("e2b")
    model = case.model()
    with model.edit() as (_tracer, edited):
        edited.steer(2, vector())
    wanted = by_hand(case, Place("layer_output", 2), vector(), [*range(LENGTH)], 0)
    for _ in range(2):
        with edited.trace(case.prompts[0]):
            logits = edited.logits.save()
        assert torch.equal(logits, wanted)
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


def test_steering_a_block_that_has_passed_is_refused():
    model = Case("e2b").model()
    with pytest.raises(OutOfOrder, match=re.escape("layers[1].layer_output comes too late")):
        with model.trace(ids(5)):
            model.layers[4].layer_output.save()
            model.steer([1, 7], vector())


# -- steer, in a generation --------------------------------------------------------------------------


def streams(case: Case, steps: int, edit: Any, **options: Any) -> list[list[Tensor]]:
    """Each invoke's `layers[1].layer_output`, step by step, of a generation in which `edit(model)` runs."""
    model = case.model()
    found: list[list[Tensor]] = [[] for _ in case.prompts]
    with model.generate(max_new_tokens=steps, **{**GREEDY, **options}) as tracer:
        for row, values in zip(case.prompts, found, strict=True):
            with tracer.invoke(row):
                edit(model)
                for _ in tracer.iter[:steps]:
                    values.append(
                        nnsight.save(model.layers[1].layer_output - model.layers[2].layer_input * 0)
                    )
    return found


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@one_or_batched
@pytest.mark.filterwarnings("ignore::gemloupe.errors.NothingEdited")
@pytest.mark.parametrize(
    ("positions", "when", "edited"),
    [
        (None, "both", lambda n, t: True),
        (None, "prompt", lambda n, t: t < n),
        (None, "new", lambda n, t: t >= n),
        (2, "both", lambda n, t: t == 2),
        (2, "new", lambda n, t: False),
        (slice(1, 3), "prompt", lambda n, t: 1 <= t < 3),
        ([14, 0], "both", lambda n, t: t in (0, 14)),
        ([14, 0], "new", lambda n, t: t == 14 and n <= 14),
    ],
)
def test_positions_go_on_counting_through_the_new_tokens(cache, batched, positions, when, edited):
    case = Case("31b", batched=batched)
    steps = 3
    reports: list[Edited] = []

    def edit(model: Any) -> None:
        reports.append(model.steer(1, vector(), 1000, positions=positions, when=when))

    found = streams(case, steps, edit, use_cache=cache)
    for report, values, row in zip(reports, found, case.prompts, strict=True):
        length, pad, total = row.shape[1], LENGTH - row.shape[1], 0
        for step, value in enumerate(values):
            first = 0 if step == 0 or not cache else LENGTH - 1 + step
            for column in range(value.shape[1]):
                place = first + column - pad
                wanted = place >= 0 and edited(length, place)
                assert (value[0, column].abs().mean() > 100) == wanted, (step, column)
                total += wanted
        assert report.counts == ({1: total} if total else {})


def test_steering_in_a_loop_steers_that_step():
    model = Case("e2b").model()
    found = []
    with model.generate(ids(5), max_new_tokens=4, **GREEDY) as tracer:
        for step in tracer.iter[:4]:
            if step in (0, 2):
                model.steer(1, vector(), 1000)
            found.append(nnsight.save(model.layers[1].layer_output))
    assert [value.abs().mean().item() > 100 for value in found] == [True, False, True, False]


@pytest.mark.parametrize(
    "options", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}], ids=str
)
def test_steering_reaches_every_returned_sequence(options):
    case = Case("e2b")
    reports: list[Edited] = []

    def edit(model: Any) -> None:
        reports.append(model.steer(1, vector(), 1000, positions=-1, when="prompt"))

    (values,) = streams(case, 2, edit, **options)
    assert values[0].shape[0] == 3
    assert (values[0][:, -1].abs().mean(-1) > 100).all()
    assert (values[0][:, :-1].abs().mean(-1) < 100).all()
    assert reports[0].counts == {1: 3}


# -- skip_layers -------------------------------------------------------------------------------------


def silent(case: Case, blocks: range, invoke: int | None = None) -> Tensor:
    """The bare model's logits with blocks that run, and lend what they lend, and hand on what they got."""

    def pass_by(_module: Any, args: tuple, out: Tensor) -> Tensor:
        out = out.clone()
        rows = slice(None) if invoke is None else slice(invoke, invoke + 1)
        out[rows] = args[0][rows]
        return out

    blocks_of = stack(case.bare()).layers
    handles = [blocks_of[i].register_forward_hook(pass_by) for i in blocks]
    with torch.no_grad():
        logits = case.bare()(**case.inputs).logits
    for handle in handles:
        handle.remove()
    return logits


SKIPS = {
    "e2b": [(0, 0), (3, 4), (2, 6), (5, 9), (9, 9), (0, 9)],  # 3 and 4 lend
    "e4b": [(4, 5), (0, 11), (6, 11)],  # 4 and 5 lend
    "26b-a4b": [(1, 3), (5, 5)],
    "31b": [(0, 2)],
    "12b": [(2, -1)],
}


@pytest.mark.parametrize(
    ("shape", "start", "end"), [(shape, *span) for shape, spans in SKIPS.items() for span in spans]
)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
def test_skipped_blocks_are_silent_and_still_lend(shape, start, end, load):
    case = Case(shape, wrapper=load)
    model = case.model()
    last = end % model.num_layers
    reports: list[Edited] = []

    def edit(model: Any) -> None:
        reports.append(model.skip_layers(start, end))

    logits = traced(case, edit)
    wanted = silent(case, range(start, last + 1))
    assert not torch.equal(wanted, case.logits())
    assert torch.equal(logits, wanted)
    assert reports[0].layers == tuple(range(start, last + 1))
    assert reports[0].counts == dict.fromkeys(range(start, last + 1), LENGTH)


@pytest.mark.parametrize("shape", ["e2b", "e4b", "31b"])
@pytest.mark.parametrize("invoke", [0, 1, 2])
def test_one_invoke_skips_and_the_others_do_not(shape, invoke):
    case = Case(shape, batched=True)
    logits = traced(case, lambda model: model.skip_layers(2, 4), invoke)
    wanted = silent(case, range(2, 5), invoke)
    assert torch.equal(logits, wanted)
    others = [i for i in range(3) if i != invoke]
    assert torch.equal(logits[others], case.logits()[others])


def test_skipping_all_blocks_leaves_the_embeddings():
    case = Case("12b")
    model = case.model()
    with model.trace(case.prompts[0]):
        model.skip_layers(0, -1)
        embedded = model.token_embeddings.save()
        logits = model.logits.save()
    assert torch.equal(logits, model.project_on_vocab(embedded))


def test_what_a_skipped_block_computes_can_still_be_read():
    case = Case("e2b")
    model = case.model()
    clean = reading(case)[0]
    with model.trace(case.prompts[0]):
        model.skip_layers(3, 4)
        entered = model.layers[3].layer_input.save()
        inside = model.layers[3].mlp.mlp_output.save()
        left = model.layers[3].layer_output.save()
        received = model.layers[5].layer_input.save()
    assert torch.equal(entered, clean[Place("layer_input", 3)])
    assert torch.equal(inside, clean[Place("mlp_output", 3, "mlp")])
    assert torch.equal(left, entered)
    assert torch.equal(received, entered)


def test_a_stream_edited_at_the_entrance_is_handed_on_edited():
    case = Case("e2b")
    model = case.model()
    with model.trace(case.prompts[0]):
        model.skip_layers(3, 4)
        model.layers[3].layer_input = model.layers[3].layer_input + vector()
        received = model.layers[5].layer_input.save()
    assert torch.equal(received, reading(case)[0][Place("layer_input", 3)] + vector())


def test_spans_can_be_skipped_apart():
    case = Case("e2b")
    model = case.model()
    with model.trace(case.prompts[0]):
        model.skip_layers(7, 8)
        model.skip_layers(1, 2)
        logits = model.logits.save()
    module = case.bare()
    handles = [
        stack(module).layers[i].register_forward_hook(lambda _m, args, _out: args[0]) for i in (1, 2, 7, 8)
    ]
    with torch.no_grad():
        wanted = module(**case.inputs).logits
    for handle in handles:
        handle.remove()
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("shape", ["e2b", "31b"])
@one_or_batched
def test_skipping_through_a_generation(shape, batched):
    case = Case(shape, batched=batched)
    model = case.model()
    module, inputs = case.bare(), {k: v for k, v in case.inputs.items() if k != "position_ids"}

    def pass_by(_module: Any, args: tuple, _out: Tensor) -> Tensor:
        return args[0]

    handles = [stack(module).layers[i].register_forward_hook(pass_by) for i in (1, 2, 3)]
    wanted = module.generate(**inputs, max_new_tokens=6, **GREEDY)
    for handle in handles:
        handle.remove()
    assert not torch.equal(wanted, module.generate(**inputs, max_new_tokens=6, **GREEDY))
    tokens: list[Tensor] = []
    with model.generate(max_new_tokens=6, **GREEDY) as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                model.skip_layers(1, 3)
        with tracer.invoke():
            tokens.append(tracer.result.save())
    assert torch.equal(tokens[0], wanted)


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize(
    ("positions", "columns"),
    [(9, [2]), (-1, [5]), ([8, 12], [1, 5]), (slice(7, 9), [0, 1]), (None, range(6))],
)
def test_positions_of_a_text_continued_from_a_cache_count_what_it_holds(masked, positions, columns):
    model, row = Case("e2b").model(), ids(LENGTH)
    added, found = vector(), []
    options = {"attention_mask": torch.ones_like(row)} if masked else {}

    def cache() -> dict[str, Any]:
        return continued(Case("e2b"), row[:, :7])

    with torch.no_grad():
        with model.trace(row[:, 7:], **cache(), **options):
            model.steer(3, added, 4.0, positions=positions)
            found.append(model.logits.save())
        with model.trace(row[:, 7:], **cache(), **options):
            model.layers[3].layer_output[:, list(columns)] += 4 * added
            found.append(model.logits.save())
    assert torch.equal(*found)
    chosen = model.collect(row[:, 7:], "layers[3].layer_output", positions=positions, **cache(), **options)[
        "layers[3].layer_output"
    ]
    whole = model.collect(row[:, 7:], "layers[3].layer_output", **cache(), **options)
    wanted = whole["layers[3].layer_output"][:, list(columns)]
    assert torch.equal(chosen.flatten(), wanted.flatten())


def test_skipping_in_a_loop_skips_in_that_step():
    model = Case("e2b").model()
    found = []
    with model.generate(ids(5), max_new_tokens=4, **GREEDY) as tracer:
        for step in tracer.iter[:4]:
            if step in (1, 3):
                model.skip_layers(2, 3)
            found.append(nnsight.save((model.layers[2].layer_input, model.layers[4].layer_input)))
    assert [torch.equal(before, after) for before, after in found] == [False, True, False, True]


# -- refusals ----------------------------------------------------------------------------------------


def steering(*args: Any, **kwargs: Any) -> Any:
    return lambda model: model.steer(*args, **kwargs)


def skipping(start: int, end: int) -> Any:
    return lambda model: model.skip_layers(start, end)


REFUSED: dict[str, tuple[Any, str]] = {
    "layer too high": (steering(10, vector()), "the model has 10 blocks, 0 to 9"),
    "layer too low": (steering(-11, vector()), "layer -11 does not exist"),
    "one layer of several": (steering([1, 12], vector()), "layer 12 does not exist"),
    "no layer": (steering([], vector()), "no layer was given"),
    "a truth for a layer": (steering(True, vector()), "a layer is a whole number, not True"),
    "a word for a layer": (steering(["1"], vector()), "a layer is a whole number, not '1'"),
    "narrow": (steering(1, torch.ones(39)), "must be 40 wide, as the stream is; it is (39,)"),
    "a scalar": (steering(1, torch.tensor(1.0)), "must be 40 wide, as the stream is; it is ()"),
    "a list for a vector": (steering(1, [1.0] * 40), "it is list"),
    "position past the end": (
        steering(1, vector(), positions=5),
        "position 5 is past the sequence: the shortest text has 5 tokens, 0 to 4, or -5 to -1",
    ),
    "position before the start": (steering(1, vector(), positions=[0, -6]), "position -6 is past"),
    "a position in a tensor": (steering(1, vector(), positions=torch.tensor([7])), "position 7 is past"),
    "a broken position": (steering(1, vector(), positions=[1.5]), "positions are whole numbers"),
    "a true position": (steering(1, vector(), positions=True), "positions are whole numbers"),
    "a wide mask": (
        steering(1, vector(), positions=torch.ones(6, dtype=torch.bool)),
        "covers 6 columns, the batch has 5",
    ),
    "unknown value": (steering(1, vector(), at="mlp_ouput"), "a block has no value 'mlp_ouput'"),
    "a method": (steering(1, vector(), at="skip"), "a block has no value 'skip'"),
    "a fact": (steering(1, vector(), at="kind"), "a block has no value 'kind'"),
    "value of another layout": (
        steering(1, vector(), at="mlp_neurons"),
        "laid out [batch seq hidden]; mlp_neurons is [batch seq intermediate]",
    ),
    "value that is not there": (
        steering(1, vector(), at="routed_output"),
        "layers[1].mlp.routed_output: block 1 has no mixture",
    ),
    "unknown when": (steering(1, vector(), when="always"), "choose one of prompt, new, both"),
    "skip too high": (skipping(3, 10), "layer 10 does not exist"),
    "skip too low": (skipping(-11, 3), "layer -11 does not exist"),
    "skip backwards": (skipping(4, 3), "there is none; give the lower first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_anything_runs(name):
    model = Case("e2b").model()
    call, message = REFUSED[name]
    verb = "skip_layers" if name.startswith("skip") else "steer"
    with Counted(model) as counted:
        with pytest.raises(BadArgument, match=re.escape(message)) as refused:
            with model.trace(ids(5)):
                call(model)
    assert str(refused.value).startswith(verb)
    assert counted.runs == 0


@pytest.mark.parametrize("invoke", [0, 1])
def test_a_position_is_checked_against_the_invoke_s_own_text(invoke):
    model = Case("e2b").model()

    def run() -> None:
        with model.trace() as tracer:
            with tracer.invoke(ids(7)):
                if invoke == 0:
                    model.steer(1, vector(), positions=5)
                model.logits.save()
            with tracer.invoke(ids(3)):
                if invoke == 1:
                    model.steer(1, vector(), positions=5)
                model.logits.save()

    if invoke == 0:
        run()
    else:
        with pytest.raises(BadArgument, match="the shortest text has 3 tokens"):
            run()


@pytest.mark.parametrize("verb", ["steer", "skip_layers"])
def test_outside_a_trace_a_verb_says_where_it_works(verb):
    model = Case("e2b").model()
    with pytest.raises(OutsideTrace, match=re.escape(f"model.{verb}(...)")):
        model.steer(1, vector()) if verb == "steer" else model.skip_layers(1, 2)
