"""`collect`: any set of values from one forward, in no order."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, Unavailable, UnknownName
from gemloupe.testing import SHAPES
from tests.core.models import SEED, Case, every_case, ids, padded
from tests.core.places import forward_order, reading

EXPERTS = ("batched_mm",)
CASES = [
    *every_case(wrapper=(False,), experts=EXPERTS, batched=(True,)),
    *every_case(
        wrapper=(True,), attention=("sdpa",), dtypes=(torch.float32,), experts=EXPERTS, batched=(True,)
    ),
    Case("e2b"),
    Case("12b", attention="eager"),
]


def batch(case: Case) -> Any:
    """The case's prompts as one input, padded on the left."""
    return (
        {name: case.inputs[name] for name in ("input_ids", "attention_mask")}
        if case.batched
        else case.prompts[0]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_value_at_once_in_no_order_is_what_a_trace_reads(case):
    model = case.model()
    places = forward_order(model)
    paths = [str(place) for place in places]
    random.Random(SEED).shuffle(paths)
    found = model.collect(batch(case), paths)
    assert list(found) == paths
    assert torch.equal(found["logits"], case.logits())
    for place in places:
        wanted = torch.cat([values[place].detach() for values in reading(case)])
        assert torch.equal(found[str(place)], wanted), place
        assert not found[str(place)].requires_grad


@pytest.mark.parametrize("case", [Case("e4b", batched=True), Case("26b-a4b", experts="batched_mm")], ids=str)
def test_each_value_alone_is_the_one_collected_among_all(case):
    model = case.model()
    for place in forward_order(model):
        if place.block in (None, 0, model.num_layers - 1):
            wanted = torch.cat([values[place].detach() for values in reading(case)])
            assert torch.equal(model.collect(batch(case), str(place))[str(place)], wanted), place


def test_the_tokens_and_the_mask_are_the_ones_that_were_fed():
    case = Case("e2b", batched=True)
    model = case.model()
    found = model.collect(batch(case), "layers[0].layer_output")
    assert torch.equal(found.input_ids, case.inputs["input_ids"])
    assert torch.equal(found.attention_mask, case.inputs["attention_mask"])
    texts = ["opal", "a much longer jade"]
    found = model.collect(texts, "layers[0].layer_output")
    wanted = model.tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(found.input_ids, wanted["input_ids"])
    assert torch.equal(found.attention_mask, wanted["attention_mask"])
    assert model.collect("opal", "logits").attention_mask.all()


@pytest.mark.parametrize(
    "inputs",
    [
        "jade",
        ["jade", "a longer one"],
        [2, 30, 40, 50],
        [[2, 30], [2, 40, 50, 60]],
        {"input_ids": torch.tensor([[2, 9]])},
    ],
    ids=["text", "texts", "ids", "rows of ids", "encoding"],
)
def test_inputs_are_what_a_trace_takes(inputs):
    model = Case("e2b").model()
    found = model.collect(inputs, "logits")
    with model.trace(inputs):
        given, logits = model.input_ids.save(), model.logits.save()
    assert torch.equal(found.input_ids, given)
    assert torch.equal(found["logits"], logits)


# -- which values --------------------------------------------------------------------------------------


def test_patterns_name_blocks_as_python_slices_do():
    case = Case("e2b")
    model, row = case.model(), case.prompts[0]
    every = [f"layers[{i}].layer_output" for i in range(10)]
    patterns = {
        "layers.*.layer_output": range(10),
        "layers[*].layer_output": range(10),
        "layers[:].layer_output": range(10),
        "layers[3:9].layer_output": range(3, 9),
        "layers[-3:].layer_output": range(7, 10),
        "layers[:-7].layer_output": range(3),
        "layers[1::4].layer_output": [1, 5, 9],
        "layers[::-1].layer_output": range(9, -1, -1),
        "layers[4:5].layer_output": [4],
    }
    found = model.collect(row, [*patterns, *every])
    for pattern, blocks in patterns.items():
        assert found.blocks(pattern) == list(blocks)
        assert found.paths(pattern) == [every[i] for i in blocks]
        assert torch.equal(found[pattern], torch.stack([found[every[i]] for i in blocks])), pattern
        assert found[pattern].shape == (len(list(blocks)), 1, 13, 40)


def test_values_of_unequal_shape_come_by_path():
    model, row = Case("e2b").model(), ids(13)
    found = model.collect(row, ["layers.*.self_attn.own_keys", "layers[*].self_attn.attention_probabilities"])
    keys = found["layers.*.self_attn.own_keys"]
    assert list(keys) == [f"layers[{i}].self_attn.own_keys" for i in range(5)]
    assert [key.shape[-1] for key in keys.values()] == [16, 16, 16, 16, 32]
    assert found.blocks("layers.*.self_attn.own_keys") == [0, 1, 2, 3, 4]
    assert found["layers[*].self_attn.attention_probabilities"].shape == (10, 1, 4, 13, 13)


def test_a_value_is_named_by_path_reference_or_index_from_the_end():
    case = Case("12b")
    model, row = case.model(), case.prompts[0]
    reference = model.layers[-1].self_attn.attention_probabilities
    spelt = [
        "layers[5].self_attn.attention_probabilities",
        "layers[-1].self_attn.attention_probabilities",
        "layers.5.self_attn.attention_probabilities",
        "model.layers[5].self_attn.attention_probabilities",
    ]
    found = model.collect(row, [reference, *spelt])
    for name in (reference, *spelt):
        assert found[name].shape == (1, 4, 13, 13)
        assert torch.equal(found[name], found[reference])
    (alone,) = model.collect(row, reference).values()
    assert torch.equal(alone, found[reference])
    assert torch.equal(model.collect(row, [model.logits])["logits"], case.logits())


def test_what_was_not_asked_for_is_not_there():
    found = Case("e2b").model().collect(ids(5), ["layers[3:5].layer_output", "logits"])
    assert list(found) == ["layers[3:5].layer_output", "logits"]
    assert len(found) == 2
    with pytest.raises(
        KeyError, match=r"layers\[5\].layer_output was not captured; layers\[3:5\].layer_output, logits were"
    ):
        found["layers[5].layer_output"]
    assert found["layers[4].layer_output"].shape == (1, 5, 40)
    assert repr(found) == "Collected(layers[3:5].layer_output: [2, 1, 5, 40], logits: [1, 5, 288])"


# -- which positions, and how kept ---------------------------------------------------------------------

ROWS = (10, 4, 7)


def three_rows() -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A model, a padded batch, and values of it over `[batch seq ...]` in several layouts."""
    model = Case("e2b").model()
    inputs = padded([ids(length) for length in ROWS])
    inputs.pop("position_ids")
    names = [
        "layers[3].layer_output",
        "layers[4].self_attn.attention_probabilities",
        "layers[2].self_attn.own_values",
    ]
    whole = model.collect(inputs, [*names, "layers[9].self_attn.attention_head_outputs", "input_ids"])
    return model, inputs, dict(whole.items())


AXIS = {"attention_probabilities": 2, "own_values": 2}  # where the layout's tokens are, if not 1


@pytest.mark.parametrize("position", [0, 3, -1, -4])
def test_a_position_is_a_real_token_of_each_row_and_drops_the_axis(position):
    model, inputs, whole = three_rows()
    found = model.collect(inputs, list(whole), positions=position)
    for name, value in whole.items():
        rows = value.movedim(AXIS.get(name.rpartition(".")[2], 1), 1)
        places = [10 - length + position if position >= 0 else position for length in ROWS]
        wanted = torch.stack([row[place] for row, place in zip(rows, places, strict=True)])
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    "positions", [[0, 2], [0, -1], [3], slice(0, 4), slice(-3, None), slice(1, 4, 2), (1, 2), range(3)]
)
def test_several_positions_keep_the_axis(positions):
    model, inputs, whole = three_rows()
    found = model.collect(inputs, list(whole), positions=positions)
    for name, value in whole.items():
        axis = AXIS.get(name.rpartition(".")[2], 1)
        rows = [row[10 - length :] for row, length in zip(value.movedim(axis, 1), ROWS, strict=True)]
        chosen = positions if isinstance(positions, slice) else list(positions)
        wanted = torch.stack([row[chosen] for row in rows]).movedim(1, axis)
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("positions", [[2, 0], [-1, 0], [1, 1], torch.tensor([3, 1])])
def test_a_list_of_positions_gives_them_in_its_order(positions):
    model, row = Case("e2b").model(), ids(10)
    whole = model.collect(row, "layers[3].layer_output")["layers[3].layer_output"]
    found = model.collect(row, "layers[3].layer_output", positions=positions)["layers[3].layer_output"]
    assert torch.equal(found, whole[:, positions])


def test_a_mask_of_positions_gives_the_chosen_tokens_flat():
    model, inputs, whole = three_rows()
    mask = torch.rand(3, 10, generator=torch.Generator().manual_seed(SEED)) < 0.6
    mask[:, -1] = True
    real = mask & inputs["attention_mask"].bool()
    found = model.collect(inputs, list(whole), positions=mask)
    for name, value in whole.items():
        rows = value.movedim(AXIS.get(name.rpartition(".")[2], 1), 1)
        assert torch.equal(found[name], rows[real]), name


def test_positions_leave_values_without_tokens_as_they_are():
    model, row = Case("e2b").model(), ids(10)
    names = ["next_token_probs", "layers[3].self_attn.attention_keys"]
    found, whole = model.collect(row, names, positions=-1), model.collect(row, names)
    assert all(torch.equal(found[name], whole[name]) for name in names)


def test_dtype_and_device_say_how_numbers_are_kept():
    model, row = Case("e2b").model(), ids(10)
    names = ["layers[3].layer_output", "input_ids"]
    plain, half = model.collect(row, names), model.collect(row, names, dtype=torch.bfloat16)
    assert torch.equal(half[names[0]], plain[names[0]].bfloat16())
    assert half["input_ids"].dtype == torch.int64
    elsewhere = model.collect(row, names, device="meta")
    assert all(value.is_meta for value in elsewhere.values())


def test_a_few_positions_do_not_keep_the_whole_batch_alive():
    model = Case("e2b").model()
    inputs = {"input_ids": torch.cat([ids(40, salt) for salt in range(8)])}
    for positions in (-1, [0, 3], slice(0, 2)):
        found = model.collect(inputs, "layers.*.layer_output", positions=positions)
        stored = found["layers[3].layer_output"].untyped_storage().nbytes()
        assert stored <= 2 * 8 * 2 * 40 * 4


# -- edits, gradients, early stop ----------------------------------------------------------------------


def test_edits_run_before_what_is_collected():
    case = Case("e2b", batched=True)
    model = case.model()
    names = [
        "layers[4].self_attn.attention_probabilities",
        "layers[9].self_attn.attention_head_outputs",
        "logits",
    ]
    names += ["layers[4].layer_output", "layers[3].self_attn.own_keys"]

    def edits(model: Any) -> None:
        model.layers[3].self_attn.own_keys[:] *= 2
        model.layers[4].self_attn.attention_probabilities[:, 0] = 0
        model.layers[4].layer_output = model.layers[4].layer_output * 2

    found = model.collect(batch(case), names, edits=edits)
    with torch.no_grad():
        with model.trace(batch(case)):
            host = model.layers[3].self_attn
            host.own_keys[:] *= 2
            keys = host.own_keys.clone().save()
            model.layers[4].self_attn.attention_probabilities[:, 0] = 0
            pattern = model.layers[4].self_attn.attention_probabilities.clone().save()
            model.layers[4].layer_output = model.layers[4].layer_output * 2
            stream = model.layers[4].layer_output.save()
            heads = model.layers[9].self_attn.attention_head_outputs.save()
            logits = model.logits.save()
    for name, wanted in zip(names, (pattern, heads, logits, stream, keys), strict=True):
        assert torch.equal(found[name], wanted), name
    assert torch.equal(model.collect(batch(case), "logits")["logits"], case.logits())


def test_edits_may_steer_and_skip():
    case = Case("e2b")
    model, row = case.model(), case.prompts[0]
    reports: list[Any] = []

    def edits(model: Any) -> None:
        reports.append(model.steer(2, torch.ones(40), positions=[0, -1]))
        reports.append(model.skip_layers(5, 6))

    found = model.collect(
        row, ["layers[6].layer_output", "layers[4].layer_output", "layers[2].layer_output"], edits=edits
    )
    assert torch.equal(found["layers[6].layer_output"], found["layers[4].layer_output"])
    plain = model.collect(row, "layers[2].layer_output")["layers[2].layer_output"]
    moved = (found["layers[2].layer_output"] != plain).any(-1)[0]
    assert moved.tolist() == [True, *[False] * 11, True]
    assert reports[0].counts == {2: 2}


class Ran:
    """Which of the model's blocks ran, and how far."""

    def __init__(self, model: Any) -> None:
        self.blocks: list[int] = []
        self.parts: list[str] = []
        self.handles = []
        for i, block in enumerate(model.layers):
            self.handles.append(
                block._module.register_forward_pre_hook(lambda _m, _a, i=i: self.blocks.append(i))
            )
            for name in ("self_attn", "mlp", "post_feedforward_layernorm"):
                self.handles.append(
                    block._module.get_submodule(name).register_forward_pre_hook(
                        lambda _m, _a, i=i, name=name: self.parts.append(f"{name} {i}")
                    )
                )
        self.handles.append(
            model._module.lm_head.register_forward_pre_hook(lambda _m, _a: self.parts.append("head"))
        )

    def __enter__(self) -> Ran:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_stops_after_the_last_value(shape):
    model, row = Case(shape, experts="batched_mm" if shape == "26b-a4b" else None).model(), ids(13)
    for last in (0, 2, model.num_layers - 1):
        with Ran(model) as ran:
            found = model.collect(row, [f"layers[{last}].layer_output", "layers[0].layer_input"])
        assert ran.blocks == list(range(last + 1))
        assert "head" not in ran.parts
        assert found[f"layers[{last}].layer_output"].shape == (1, 13, 40)
        with Ran(model) as ran:
            model.collect(row, f"layers[{last}].self_attn.attention_probabilities")
        assert ran.blocks == list(range(last + 1))
        assert f"mlp {last}" not in ran.parts
    with Ran(model) as ran:
        model.collect(row, "token_embeddings")
    assert ran.blocks == []
    with Ran(model) as ran:
        model.collect(row, ["layers[0].layer_output", "logits"])
    assert ran.blocks == list(range(model.num_layers))
    assert "head" in ran.parts


def test_edits_past_the_last_value_do_not_prolong_the_forward():
    model, row = Case("e2b").model(), ids(13)

    def edits(model: Any) -> None:
        model.layers[1].layer_output[:] = 1
        model.layers[8].layer_output[:] = 1

    with Ran(model) as ran:
        found = model.collect(row, "layers[1].layer_output", edits=edits)
    assert ran.blocks == [0, 1]
    assert (found["layers[1].layer_output"] == 1).all()


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "error", "pieces"),
    [
        ([], {}, BadArgument, ["no value was asked for"]),
        ("layers[3]", {}, UnknownName, ["layers[3] is a module or a fact, not a value"]),
        ("layers[*].kind", {}, UnknownName, ["a module or a fact"]),
        ("layers[3].layer_outptu", {}, UnknownName, ["layers[3] has no `layer_outptu`", "`layer_output`"]),
        ("layers[99].layer_output", {}, UnknownName, ["layers[99]", "10 blocks, 0 to 9"]),
        ("layers[20:].layer_output", {}, UnknownName, ["names no block", "10, 0 to 9"]),
        ("layers[3", {}, UnknownName, ["is no path"]),
        pytest.param(
            "norm[*].output",
            {},
            UnknownName,
            ["norm is not a list of blocks"],
        ),
        ("layers[7].self_attn.own_keys", {}, Unavailable, ["borrows block 3's"]),
        ("layers[5:].self_attn.own_keys", {}, Unavailable, ["layers[5]", "borrows block 3's"]),
        ("layers[3].mlp.router_logits", {}, Unavailable, ["no mixture of experts"]),
        (["logits", "layers[*].mlp.router_logits"], {}, Unavailable, ["no mixture of experts"]),
        ("logits", {"positions": 13}, BadArgument, ["position 13 is past the sequence", "0 to 12"]),
        ("logits", {"positions": [0, -14]}, BadArgument, ["position -14 is past the sequence"]),
        ("logits", {"positions": True}, BadArgument, ["positions are whole numbers"]),
        ("logits", {"positions": ["x"]}, BadArgument, ["positions are whole numbers"]),
        (
            "logits",
            {"positions": torch.ones(1, 4, dtype=torch.bool)},
            BadArgument,
            ["covers 4 columns, the batch has 13"],
        ),
        pytest.param(
            "logits",
            {"positions": torch.ones(3, 13, dtype=torch.bool)},
            BadArgument,
            ["3"],
        ),
        pytest.param("logits", {"positions": 1.5}, BadArgument, []),
        pytest.param(3, {}, BadArgument, []),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(values, options, error, pieces):
    model = Case("e2b").model()
    with Ran(model) as ran:
        with pytest.raises(error) as caught:
            model.collect(ids(13), values, **options)
    assert all(piece in str(caught.value) for piece in pieces)
    assert ran.blocks == []
    assert torch.equal(model.collect(ids(13), "logits")["logits"], Case("e2b").logits())


def test_so_are_positions_of_which_rows_have_unequally_many():
    model, inputs, _ = three_rows()
    with Ran(model) as ran:
        with pytest.raises(BadArgument, match=r"choose \[8, 4, 7\] tokens of the rows.*boolean mask"):
            model.collect(inputs, "layers[3].layer_output", positions=slice(0, 8))
    assert ran.blocks == []


def test_collect_is_refused_inside_a_trace():
    case = Case("e2b")
    model, row = case.model(), case.prompts[0]
    with pytest.raises(BadArgument, match=r"inside an open trace use `model.record"):
        with model.trace(row):
            model.layers[2].layer_output
            model.collect(row, "logits")
    with pytest.raises(BadArgument, match=r"inside an open trace use `model.record"):
        model.collect(row, "logits", edits=lambda model: model.collect(row, "logits"))
    with model.trace(row):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


# -- nothing left --------------------------------------------------------------------------------------


def activations() -> int:
    """Live tensors that have the shape of something computed."""
    gc.collect()
    tensors = [
        found for found in gc.get_objects() if type(found) is Tensor
    ]  # `isinstance` wakes torch's lazy modules
    return sum(tensor.dim() > 2 and 29 in tensor.shape[1:] for tensor in tensors)


def test_nothing_of_a_capture_stays_alive():
    model, row = Case("e2b").model(), ids(29)
    names = ["layers.*.layer_output", "layers.*.self_attn.attention_probabilities"]
    found = model.collect(row, names)
    assert activations() == 20
    del found
    assert activations() == 0
    with pytest.raises(BadArgument):
        model.collect(row, names, positions=29)
    with pytest.raises(ZeroDivisionError):
        model.collect(row, names, edits=lambda model: model.layers[5].layer_output * (1 // 0))
    assert activations() == 0


def test_no_gradient_is_kept_and_the_mode_stays_the_caller_s():
    model, row = Case("e2b").model(), ids(5)
    assert torch.is_grad_enabled()
    assert not model.collect(row, "logits")["logits"].requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError):
        model.collect(row, "logits", edits=lambda model: 1 // 0)
    assert torch.is_grad_enabled()
    with model.trace(row):
        logits = model.logits.save()
    assert logits.requires_grad
