"""`record`: capture beside the block of an open trace, using nothing of its order up."""

from __future__ import annotations

from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, OutOfOrder, OutsideTrace, Unavailable, UnknownName
from gemloupe.testing import SHAPES
from tests.core.models import LENGTHS, Case, ids, padded
from tests.core.places import forward_order, reading

# An open loop over steps ends by outrunning the run.
outruns = pytest.mark.filterwarnings("ignore::gemloupe.errors.StepsWarning")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("grad", ["enable_grad", "no_grad"])
def test_everything_is_recorded_and_the_block_reads_on_in_its_order(shape, kernel, grad):
    case = Case(shape, attention=kernel, experts="batched_mm" if shape == "26b-a4b" else None)
    model = case.model()
    places = forward_order(model)
    with getattr(torch, grad)():
        with model.trace(case.prompts[0]):
            record = model.record([str(place) for place in reversed(places)])
            early = model.layers[0].layer_output.save()
            pattern = model.layers[3].self_attn.attention_probabilities.save()
            logits = model.logits.save()
    assert torch.equal(logits, case.logits())
    assert torch.equal(early, record["layers[0].layer_output"])
    assert torch.equal(pattern, record["layers[3].self_attn.attention_probabilities"])
    for place in places:
        assert torch.equal(record[str(place)], reading(case)[0][place]), place
        assert not record[str(place)].requires_grad


@pytest.mark.parametrize(
    "case", [Case("e2b", batched=True), Case("26b-a4b", experts="batched_mm", batched=True)], ids=str
)
def test_in_an_invoke_it_is_that_invoke_s_rows(case):
    model = case.model()
    places = forward_order(model)
    records: list[Any] = []
    with model.trace() as tracer:
        nnsight.save(records)
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                if i != 1:
                    records.append(model.record([str(place) for place in places]))
                logits = model.logits
                logits[:] *= 1 + i
    for i, record in zip((0, 2), records, strict=True):
        for place in places:
            if place.name in ("logits", "next_token_probs"):
                continue
            assert torch.equal(record[str(place)], reading(case)[i][place]), (i, place)
        assert torch.equal(record["logits"], case.logits()[i : i + 1] * (1 + i))
        assert torch.equal(record.input_ids, case.inputs["input_ids"][i : i + 1])
        assert torch.equal(record.attention_mask, case.inputs["attention_mask"][i : i + 1])


def test_positions_are_those_of_the_invoke_s_own_text():
    case = Case("e2b", batched=True)
    model = case.model()
    records: list[Any] = []
    with model.trace() as tracer:
        nnsight.save(records)
        for row in case.prompts:
            with tracer.invoke(row):
                records.append(
                    [model.record("layers[3].layer_output", positions=p) for p in (0, 2, -1, [0, 2])]
                )
    whole = model.collect(
        {k: case.inputs[k] for k in ("input_ids", "attention_mask")}, "layers[3].layer_output"
    )
    for row, length, found in zip(whole["layers[3].layer_output"], LENGTHS, records, strict=True):
        tokens = row[-length:]
        for record, wanted in zip(found, (tokens[0], tokens[2], tokens[-1], tokens[[0, 2]]), strict=True):
            assert torch.equal(record["layers[3].layer_output"][0], wanted)


EDITS = {
    "layers[4].layer_output": lambda model: model.layers[4].layer_output,
    "layers[4].layer_input": lambda model: model.layers[4].layer_input,
    "layers[4].self_attn.own_keys": lambda model: model.layers[4].self_attn.own_keys,
    "layers[4].self_attn.attention_keys": lambda model: model.layers[4].self_attn.attention_keys,
    "layers[4].self_attn.attention_queries": lambda model: model.layers[4].self_attn.attention_queries,
    "layers[4].self_attn.attention_values": lambda model: model.layers[4].self_attn.attention_values,
    "layers[4].self_attn.attention_probabilities": lambda model: (
        model.layers[4].self_attn.attention_probabilities
    ),
    "layers[4].self_attn.attention_scores": lambda model: model.layers[4].self_attn.attention_scores,
    "layers[4].self_attn.attention_head_outputs": lambda model: (
        model.layers[4].self_attn.attention_head_outputs
    ),
    "layers[4].mlp.mlp_neurons": lambda model: model.layers[4].mlp.mlp_neurons,
    "logits": lambda model: model.logits,
}


def assign(model: Any, path: str, value: Tensor) -> None:
    host, _, name = path.rpartition(".")
    for part in host.split("."):
        if part:
            model = getattr(model, part.partition("[")[0])
            model = model[int(part[part.index("[") + 1 : -1])] if "[" in part else model
    setattr(model, name, value)


@pytest.mark.parametrize("path", EDITS)
@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_it_sees_what_the_next_module_received(path, style, batched, kernel):
    """The recorded values are those of a trace that reads them after the same edit."""
    case = Case("e2b", attention=kernel, batched=batched)
    model = case.model()
    places = [place for place in forward_order(model) if place.block in (4, 9, None)]
    found: list[Any] = []

    def edit() -> None:
        if style == "assigned":
            assign(model, path, EDITS[path](model) * 0.5)
        else:
            value = EDITS[path](model)
            value *= 0.5

    def block() -> None:
        found.append(model.record([str(place) for place in places]))
        edit()

    with torch.no_grad():
        if batched:
            with model.trace() as tracer:
                nnsight.save(found)
                with tracer.invoke(case.prompts[0]):
                    model.layers[3].layer_output
                with tracer.invoke(case.prompts[1]):
                    block()
        else:
            with model.trace(case.prompts[0]):
                nnsight.save(found)
                block()
        wanted: dict[str, Tensor] = {}
        order = [str(place) for place in places]

        def read() -> None:
            for place in places:
                if str(place) == path:
                    edit()
                wanted[str(place)] = nnsight.save(place.read(model).clone())

        if batched:
            with model.trace() as tracer:
                with tracer.invoke(case.prompts[0]):
                    model.layers[3].layer_output
                with tracer.invoke(case.prompts[1]):
                    read()
        else:
            with model.trace(case.prompts[0]):
                read()
    before = order.index(path)
    changed = 0
    for i, name in enumerate(order):
        assert torch.equal(found[0][name], wanted[name]), name
        changed += i >= before and name != path
    assert changed or path == "logits"


def test_it_sees_what_steering_and_silencing_did():
    model, row = Case("e2b").model(), ids(13)
    with model.trace(row):
        record = model.record("layers.*.layer_output")
        model.steer(2, torch.ones(40), positions=[1])
        model.skip_layers(5, 6)
    plain = model.collect(row, "layers.*.layer_output")["layers.*.layer_output"]
    streams = record["layers.*.layer_output"]
    assert (streams[2] != plain[2]).any(-1)[0].tolist() == [False, True, *[False] * 11]
    assert torch.equal(streams[5], streams[4])
    assert torch.equal(streams[6], streams[4])


def test_several_records_are_apart():
    model, row = Case("e2b").model(), ids(13)
    with model.trace(row):
        one = model.record("layers[3].layer_output")
        other = model.record(["layers.*.layer_output", "layers[1].self_attn.attention_scores"], positions=-1)
        model.layers[2].layer_output
        late = model.record("layers[3:].layer_output", dtype=torch.float64)
    assert torch.equal(one["layers[3].layer_output"][:, -1], other["layers.*.layer_output"][3])
    assert torch.equal(late["layers[3:].layer_output"][:, :, -1], other["layers.*.layer_output"][3:].double())


def test_what_has_passed_is_too_late():
    model, row = Case("e2b").model(), ids(13)
    with pytest.raises(
        OutOfOrder, match=r"layers\[0\]\.layer_output .*too late, after layers\[5\]\.layer_output"
    ):
        with model.trace(row):
            model.layers[5].layer_output
            model.record("layers.*.layer_output")


@pytest.mark.parametrize(
    ("values", "options", "error"),
    [
        ([], {}, BadArgument),
        ("layers[3]", {}, UnknownName),
        ("layers[7].self_attn.own_keys", {}, Unavailable),
        ("logits", {"positions": 13}, BadArgument),
        ("logits", {"positions": torch.ones(1, 4, dtype=torch.bool)}, BadArgument),
    ],
)
def test_what_cannot_be_meant_is_refused(values, options, error):
    case = Case("e2b")
    model = case.model()
    with pytest.raises(error):
        with model.trace(case.prompts[0]):
            model.record(values, **options)
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


def test_outside_a_trace_it_says_where_it_works():
    with pytest.raises(OutsideTrace, match=r"with model\.trace\(prompt\):\n\s+model\.record\("):
        Case("e2b").model().record("logits")


# -- generate ------------------------------------------------------------------------------------------

GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
NAMES = [
    "layers.*.layer_output",
    "layers[9].self_attn.attention_probabilities",
    "layers[7].self_attn.attention_scores",
]


def test_in_generate_it_joins_all_steps():
    model = Case("e2b").model()
    with torch.no_grad():
        with model.generate(ids(10), **GREEDY):
            record = model.record(NAMES)
    found = model.collect(ids(10), NAMES, generate=GREEDY)
    for name in NAMES:
        assert torch.equal(record[name], found[name])


@pytest.mark.parametrize("use_cache", [True, False])
def test_in_generate_the_tokens_are_those_that_were_fed(use_cache):
    model = Case("e2b").model()
    with model.generate(ids(10), **GREEDY, use_cache=use_cache):
        record = model.record(NAMES)
    found = model.collect(ids(10), NAMES, generate=GREEDY)
    assert torch.equal(record.input_ids, found.input_ids)
    assert record.attention_mask.tolist() == [[1] * 12]


def test_in_a_padded_batch_the_mask_that_was_fed_grows():
    model = Case("e2b").model()
    with model.generate(**GREEDY) as tracer:
        with tracer.invoke(ids(10)):
            pass
        with tracer.invoke(ids(6)):
            record = model.record(NAMES)
    assert record.input_ids.shape == (1, 12)
    assert record.attention_mask.tolist() == [[0] * 4 + [1] * 8]


def test_in_a_loop_the_tokens_are_the_step_s():
    model = Case("e2b").model()
    records: list[Any] = []
    with torch.no_grad():
        with model.generate(ids(10), **GREEDY) as tracer:
            nnsight.save(records)
            for _ in tracer.iter[:2]:
                records.append(model.record(NAMES))
                model.layers[2].layer_output
                records.append(model.record("logits"))
    first, _, second, late = records
    assert torch.equal(first.input_ids, ids(10))
    assert second.input_ids.shape == (1, 1)
    assert second.attention_mask.shape == (1, 11)
    assert late.input_ids is None


@pytest.mark.parametrize("loop", ["bounded", "some"])
def test_in_a_loop_it_is_that_step_alone(loop):
    model = Case("e2b").model()
    records: list[Any] = []
    with torch.no_grad():
        with model.generate(ids(10), **GREEDY) as tracer:
            nnsight.save(records)
            for step in tracer.iter[:3] if loop == "bounded" else tracer.iter[[0, 2]]:
                records.append((step, model.record(NAMES)))
                model.layers[2].layer_output
    found = model.collect(ids(10), NAMES, generate=GREEDY)
    for step, record in records:
        rows = slice(0, 10) if step == 0 else slice(9 + step, 10 + step)
        assert torch.equal(record[NAMES[0]], found[NAMES[0]][:, :, rows])
        pattern = found[NAMES[1]][:, :, rows, : 10 + step]
        assert torch.equal(record[NAMES[1]], pattern)
    assert [step for step, _ in records] == ([0, 1, 2] if loop == "bounded" else [0, 2])


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("batched", [False, True], ids=["one", "two rows"])
def test_in_a_loop_positions_are_those_of_the_whole_text(batched, use_cache):
    """The second row, of five tokens, is padded by five."""
    model, name = Case("e2b").model(), "layers[3].layer_output"
    inputs = padded([ids(10), ids(5)]) if batched else {"input_ids": ids(10)}
    inputs.pop("position_ids", None)
    records: dict[Any, Any] = {}
    with torch.no_grad():
        with model.generate(inputs, **GREEDY, use_cache=use_cache) as tracer:
            nnsight.save(records)
            for step in tracer.iter[1:3]:
                for position in (-1, None if batched else 9 + step):
                    records[step, position] = model.record(name, positions=position)
    found = model.collect(inputs, name, generate=GREEDY)[name]
    for (step, position), record in records.items():
        wanted = found[:, 9 + step]
        value = record[name][:, -1] if position is None else record[name]
        assert (value - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (step, position)


@pytest.mark.parametrize("position", [9, [9], 8, -2, 12], ids=str)
def test_in_a_loop_a_position_of_another_step_is_refused(position):
    """Step 1 feeds position 10."""
    model = Case("e2b").model()
    with pytest.raises(BadArgument, match=r"is not there: this value has those from 10 to 10\."):
        with model.generate(ids(10), **GREEDY) as tracer:
            for _ in tracer.iter[1:2]:
                model.record("layers[3].layer_output", positions=position)


@pytest.mark.parametrize("kind", ["slice", "mask", "later slice"])
def test_in_a_loop_a_slice_and_a_mask_choose_what_the_step_has(kind):
    model, name = Case("e2b").model(), "layers[3].layer_output"
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, 9] = True
    positions = {"slice": slice(9, 10), "mask": mask, "later slice": slice(11, None)}[kind]
    records: list[Any] = []
    with torch.no_grad():
        with model.generate(ids(10), **GREEDY) as tracer:
            nnsight.save(records)
            for _ in tracer.iter[:3]:
                records.append(model.record(name, positions=positions))  # noqa: PERF401
    sizes = [record[name].numel() // 40 for record in records]
    assert sizes == ([0, 0, 1] if kind == "later slice" else [1, 0, 0])
    assert records[1][name].shape == ((0, 40) if kind == "mask" else (1, 0, 40))


@outruns
@pytest.mark.parametrize("several", [False, True], ids=["alone", "in an invoke"])
def test_an_open_loop_of_records_alone_has_one_for_each_step(several):
    model = Case("e2b").model()
    records: list[Any] = []
    with torch.no_grad():
        with model.generate(**GREEDY) as tracer:
            nnsight.save(records)
            with tracer.invoke(ids(10)):
                for _ in tracer.iter[:]:
                    records.append(model.record(NAMES))  # noqa: PERF401
            if several:
                with tracer.invoke(ids(10, salt=1)):
                    model.layers[2].layer_output
    found = model.collect(ids(10), NAMES, generate=GREEDY)
    assert len(records) == 3
    for step, record in enumerate(records):
        assert record.input_ids.shape == (1, 1 if step else 10)
        value = record[NAMES[0]][:, :, -1]
        assert (value - found[NAMES[0]][:, :, 9 + step]).abs().max() <= 1e-4 * value.abs().max()


@outruns
def test_edits_of_each_step_are_seen():
    model = Case("e2b").model()
    with torch.no_grad():
        with model.generate(ids(10), **GREEDY) as tracer:
            record = model.record("layers[3:5].layer_output")
            for step in tracer.iter[:]:
                model.layers[4].layer_output[:] = step
    streams = record["layers[3:5].layer_output"]
    assert streams[1, 0, :, 0].tolist() == [0] * 10 + [1, 2]
    assert streams[0].std() > 0


def test_an_invoke_of_a_generation_records_its_own_rows():
    model = Case("e2b").model()
    with torch.no_grad():
        with model.generate(**GREEDY) as tracer:
            with tracer.invoke(ids(10)):
                one = model.record(NAMES)
            with tracer.invoke(ids(5)):
                other = model.record(NAMES, positions=-1)
    assert one[NAMES[0]].shape == (10, 1, 12, 40)
    assert other[NAMES[0]].shape == (10, 1, 40)
    alone = model.collect(ids(5), NAMES[0], generate=GREEDY, positions=-1)[NAMES[0]]
    assert (other[NAMES[0]] - alone).abs().max() <= 1e-4 * alone.abs().max()
