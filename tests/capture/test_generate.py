"""`collect(generate=...)`: the steps of a generation joined, as one uncached forward would give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from gemloupe.errors import BadArgument
from gemloupe.testing import SHAPES
from tests.core.models import Case, ids, padded, shortcut
from tests.core.places import forward_order

LONG = 10  # longer than the window of six
GREEDY = {"do_sample": False, "eos_token_id": None}


def case_of(shape: str, **options: Any) -> Case:
    return Case(shape, experts="batched_mm" if shape == "26b-a4b" else None, **options)


def pair() -> dict[str, Tensor]:
    inputs = padded([ids(LONG), ids(5)])
    inputs.pop("position_ids")
    return inputs


def alike(value: Tensor, wanted: Tensor, real: Tensor, layout: str, where: object) -> None:
    """Over real tokens; `real` is `[batch seq]`."""
    assert value.shape == wanted.shape, where
    for row, tokens in enumerate(real):
        mine, other = value[row], wanted[row]
        for axis, name in enumerate(layout.split()[1:]):
            if name in ("seq", "query", "key"):
                mine, other = (x.movedim(axis, 0)[tokens].movedim(0, axis) for x in (mine, other))
        if not value.is_floating_point():
            assert torch.equal(mine, other), where
            continue
        seen = other > -1e30
        assert torch.equal(seen, mine > -1e30), where
        assert (mine - other)[seen].abs().max() <= 5e-5 * other[seen].abs().max(), where


@pytest.mark.parametrize(
    "case",
    [
        *(case_of(shape, attention=kernel) for shape in SHAPES for kernel in ("sdpa", "eager")),
        *(case_of(shape, wrapper=True) for shape in ("e2b", "12b")),
    ],
    ids=str,
)
@pytest.mark.parametrize("several", [False, True], ids=["one", "two rows"])
def test_everything_in_generate_is_everything_of_one_uncached_forward(case, several):
    model = case.model()
    layouts = {row.path: " ".join(row.layout.axes) for row in model.support() if row.available}
    places = [place for place in forward_order(model) if place.name != "next_token_probs"]
    paths = [str(place) for place in places]
    found = model.collect(pair() if several else ids(LONG), paths, generate={"max_new_tokens": 3, **GREEDY})
    assert found.input_ids.shape == (1 + several, LONG + 2)
    whole = model.collect({"input_ids": found.input_ids, "attention_mask": found.attention_mask}, paths)
    real = found.attention_mask.bool()
    for place, path in zip(places, paths, strict=True):
        layout = layouts[path.replace(f"[{place.block}]", "[i]")]
        if "seq" in layout or "query" in layout:
            length = found[path].shape[layout.split().index("seq" if "seq" in layout else "query")]
            assert length == LONG + 2, path
        alike(found[path], whole[path], real, layout, path)


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_a_prompt_of_ten_and_two_new_tokens_are_eleven_positions_on_every_block(shape):
    model = case_of(shape).model()
    names = ["layers.*.layer_output", "layers.*.self_attn.attention_probabilities"]
    found = model.collect(ids(10), names, generate=2)
    assert found[names[0]].shape == (model.num_layers, 1, 11, 40)
    assert found[names[1]].shape == (model.num_layers, 1, 4, 11, 11)
    assert found.input_ids.shape == found.attention_mask.shape == (1, 11)


def test_the_tokens_are_those_that_were_fed():
    case = Case("e2b")
    model, inputs = case.model(), pair()
    found = model.collect(inputs, "layers[0].layer_output", generate={"max_new_tokens": 4, **GREEDY})
    bare = case.bare().generate(**inputs, max_new_tokens=4, **GREEDY)
    assert torch.equal(found.input_ids, bare[:, :-1])
    assert torch.equal(found.attention_mask[:, :LONG], inputs["attention_mask"])
    assert found.attention_mask[:, LONG:].all()


def test_patterns_of_a_sliding_block_have_every_key_in_its_place():
    """A query sees the last six keys, wherever the cache keeps them."""
    model = Case("e2b").model()
    found = model.collect(
        ids(LONG), ["layers[7].self_attn.attention_probabilities"], generate={"max_new_tokens": 6, **GREEDY}
    )
    pattern = found["layers[7].self_attn.attention_probabilities"]
    assert pattern.shape == (1, 4, 15, 15)
    place = torch.arange(15)
    back = place[:, None] - place[None, :]
    assert torch.equal((pattern > 0).all(1)[0], (back >= 0) & (back < 6))
    assert (pattern.sum(-1) - 1).abs().max() <= 1e-6


def test_scores_say_minus_infinity_of_what_was_dropped():
    model = Case("e2b").model()
    name = "layers[7].self_attn.attention_scores"
    scores = model.collect(ids(LONG), name, generate={"max_new_tokens": 3, **GREEDY})[name]
    place = torch.arange(12)
    back = place[:, None] - place[None, :]
    assert torch.equal(scores[0, 0] == -torch.inf, (back < 0) | (back >= 6))


def halve(model: Any) -> None:
    model.layers[2].layer_output[:] *= 0.5


def silence_lent_values(model: Any) -> None:
    model.layers[3].self_attn.own_values[..., ::2] = 0


def silence_a_head(model: Any) -> None:
    model.layers[7].self_attn.attention_probabilities[:, 1] = 0


@pytest.mark.parametrize("edits", [halve, silence_lent_values, silence_a_head], ids=lambda f: f.__name__)
def test_edits_are_made_in_every_step(edits):
    model = Case("e2b").model()
    paths = [str(place) for place in forward_order(model) if place.name != "next_token_probs"]
    options = {"max_new_tokens": 4, "logits_to_keep": 0, **GREEDY}
    found = model.collect(ids(LONG), paths, generate=options, edits=edits)
    with torch.no_grad():
        with model.generate(ids(LONG), **options) as tracer:
            record = model.record(paths)
            for _ in tracer.iter[:4]:
                edits(model)
    for path in paths:
        assert torch.equal(found[path], record[path]), path
    plain = model.collect(found.input_ids, "logits")["logits"]
    assert (found["logits"] - plain).abs().max() > 1e-2
    edited = model.collect(found.input_ids, "logits", edits=edits)["logits"]
    assert (found["logits"] - edited).abs().max() <= 5e-5 * edited.abs().max()


def test_a_verb_among_the_edits_is_made_in_every_step():
    model = Case("e2b").model()
    name, added = "layers[2].layer_output", torch.ones(40)
    found = model.collect(
        ids(LONG), name, generate={"max_new_tokens": 3, **GREEDY}, edits=lambda m: m.steer(2, added)
    )
    plain = model.collect(found.input_ids, name)[name]
    assert (found[name] - plain - 1).abs().max() <= 5e-5 * plain.abs().max()


# -12: the prompt alone has not so many.
@pytest.mark.parametrize("position", [0, 9, 10, 11, -1, -12, [0, 11], slice(8, 11), slice(-2, None)])
def test_positions_count_through_the_new_tokens(position):
    model = Case("e2b").model()
    names = ["layers[3].layer_output", "layers[9].self_attn.attention_probabilities"]
    options = {"generate": {"max_new_tokens": 3, **GREEDY}}
    whole = model.collect(ids(LONG), names, **options)
    found = model.collect(ids(LONG), names, positions=position, **options)
    assert torch.equal(found[names[0]], whole[names[0]][:, position])
    assert torch.equal(found[names[1]], whole[names[1]][:, :, position])


def test_positions_of_a_padded_row_count_its_own_tokens():
    model = Case("e2b").model()
    options = {"generate": {"max_new_tokens": 3, **GREEDY}}
    whole = model.collect(pair(), "layers[3].layer_output", **options)["layers[3].layer_output"]
    for position, places in ((0, (0, 5)), (6, (6, 11)), (-1, (11, 11))):
        found = model.collect(pair(), "layers[3].layer_output", positions=position, **options)
        wanted = torch.stack([whole[row, place] for row, place in enumerate(places)])
        assert torch.equal(found["layers[3].layer_output"], wanted), position


@pytest.mark.parametrize("positions", [12, [0, 12], -13], ids=str)
def test_a_position_past_the_last_step_is_refused(positions):
    model = Case("e2b").model()
    with pytest.raises(BadArgument):
        found = model.collect(
            ids(LONG), "logits", positions=positions, generate={"max_new_tokens": 3, **GREEDY}
        )
        found["logits"]


def test_a_number_is_the_number_of_new_tokens_and_options_are_generate_s():
    model = Case("e2b").model()
    name = "layers[3].layer_output"
    assert model.collect(ids(5), name, generate=3)[name].shape == (1, 7, 40)
    sampled = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "eos_token_id": None}
    found = model.collect(ids(5), name, generate=sampled)
    assert found[name].shape == (2, 7, 40)
    assert found.input_ids.shape == found.attention_mask.shape == (2, 7)


def test_logits_are_those_of_every_position():
    case = Case("12b")
    model = case.model()
    found = model.collect(ids(LONG), ["logits", "raw_logits"], generate={"max_new_tokens": 3, **GREEDY})
    assert found["logits"].shape == (1, 12, 288)
    with torch.no_grad():
        wanted = case.bare()(found.input_ids).logits
    assert (found["logits"] - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert torch.equal(found["logits"].argmax(-1)[:, LONG - 1 : -1], found.input_ids[:, LONG:])


def test_without_a_cache_every_step_is_the_whole_text():
    model = Case("e2b").model()
    name = "layers[3].layer_output"
    found = model.collect(ids(LONG), name, generate={"max_new_tokens": 3, "use_cache": False, **GREEDY})[name]
    cached = model.collect(ids(LONG), name, generate={"max_new_tokens": 3, **GREEDY})[name]
    assert found.shape == cached.shape
    assert (found - cached).abs().max() <= 2e-5 * cached.abs().max()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"cache_implementation": "static"}, "cache_implementation"), ({"num_beams": 2}, "num_beams")],
)
def test_settings_under_which_tokens_have_no_place_are_refused(options, named):
    model = Case("e2b").model()
    with pytest.raises(BadArgument, match=named):
        model.collect(ids(LONG), "logits", generate={"max_new_tokens": 3, **GREEDY, **options})


def test_a_given_cache_that_is_longer_than_its_text_is_refused():
    model = Case("e2b").model()
    cache = StaticCache(config=model._module.config, max_cache_len=20)
    with pytest.raises(BadArgument, match=r"in a StaticCache, .* give a DynamicCache"):
        model.collect(ids(LONG), STREAM, generate={"max_new_tokens": 3, "past_key_values": cache, **GREEDY})


def test_a_mask_of_positions_covers_the_prompt():
    model = Case("e2b").model()
    mask = torch.zeros(1, LONG, dtype=torch.bool)
    mask[0, [2, 9]] = True
    options = {"generate": {"max_new_tokens": 3, **GREEDY}}
    whole = model.collect(ids(LONG), "layers[3].layer_output", **options)["layers[3].layer_output"]
    found = model.collect(ids(LONG), "layers[3].layer_output", positions=mask, **options)
    assert torch.equal(found["layers[3].layer_output"], whole[0, [2, 9]])
    longer = torch.cat([mask, torch.tensor([[False, True]])], -1)
    found = model.collect(ids(LONG), "layers[3].layer_output", positions=longer, **options)
    assert torch.equal(found["layers[3].layer_output"], whole[0, [2, 9, 11]])


@pytest.mark.parametrize("columns", [9, 13])
def test_a_mask_that_is_not_the_text_s_is_refused(columns):
    model = Case("e2b").model()
    mask = torch.ones(1, columns, dtype=torch.bool)
    with pytest.raises(BadArgument, match=f"covers {columns} columns"):
        found = model.collect(ids(LONG), "logits", positions=mask, generate={"max_new_tokens": 3, **GREEDY})
        found["logits"]


STREAM = "layers[7].layer_output"  # of a block that borrows, before which transformers drops the prompt
NEW = 4


def text(inputs: Any, names: list[str], model: Any) -> Any:
    """Every value of the text that a generation makes, from one forward over it."""
    found = model.collect(inputs, "layers[0].layer_output", generate={"max_new_tokens": NEW, **GREEDY})
    return model.collect({"input_ids": found.input_ids, "attention_mask": found.attention_mask}, names)


def cache_of(case: Case, inputs: dict[str, Tensor], length: int) -> dict[str, Any]:
    """A cache of the first `length` columns."""
    mask = inputs["attention_mask"][:, :length]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = case.bare()(
            input_ids=inputs["input_ids"][:, :length],
            attention_mask=mask,
            position_ids=places,
            use_cache=True,
        )
    return {name: output[name] for name in output.keys() & {"cache", "past_key_values"}}


def ends(case: Case, path: str, how: str, positions: Any, *, several: bool) -> Any:
    """What `positions` chooses of a value that holds the end of its text alone.

    `record`: logits of the last prompt position on, or a borrower's stream without `full_prefill`; `cached`:
    a generation that continues six cached tokens, by `collect` or by `record`.
    """
    model, inputs = case.model(), pair() if several else {"input_ids": ids(LONG)}
    options = {"max_new_tokens": NEW, **GREEDY}
    if "cached" in how:
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        options |= cache_of(case, inputs, 6)
    if how == "cached collect":
        return model.collect(inputs, path, positions=positions, generate=options)[path]
    with torch.no_grad():
        with model.generate(inputs, full_prefill=how == "cached record", **options):
            record = model.record(path, positions=positions)
    return record[path]


ENDS: list[Any] = [("logits", "record", LONG - 1)]
ENDS += [pytest.param(STREAM, "record", LONG - 1, marks=shortcut)]
ENDS += [(STREAM, f"cached {verb}", 6) for verb in ("collect", "record")]
LAST = LONG + NEW - 2


def close(value: Tensor, wanted: Tensor) -> bool:
    return value.shape == wanted.shape and bool((value - wanted).abs().max() <= 5e-5 * wanted.abs().max())


@pytest.mark.parametrize(("path", "how", "first"), ENDS)
@pytest.mark.parametrize("position", [LONG - 1, LONG, LAST, -1, -4, [LONG - 1, LAST], slice(LONG, LAST)])
def test_positions_of_a_value_that_begins_amid_the_text_are_those_of_the_text(path, how, first, position):
    case = Case("e2b")
    whole = text(ids(LONG), [path], case.model())[path]
    assert close(ends(case, path, how, position, several=False), whole[:, position])


@pytest.mark.parametrize(("path", "how", "first"), ENDS)
def test_in_a_padded_row_they_are_those_of_its_own_text(path, how, first):
    """The second row has five tokens of padding; its token 4 is the last of its prompt."""
    case = Case("e2b")
    whole = text(pair(), [path], case.model())[path]
    for position, columns in ((-1, (LAST, LAST)), (-3, (LAST - 2, LAST - 2)), (slice(-2, None), None)):
        found = ends(case, path, how, position, several=True)
        wanted = whole[:, position] if columns is None else whole[[0, 1], list(columns)]
        assert close(found, wanted), position
    with pytest.raises(BadArgument, match=rf"position 4 of row 0 is not there: .* from {first} to {LAST}\."):
        ends(case, path, how, 4, several=True)
    with pytest.raises(BadArgument, match=rf"position 9 of row 1 is not there: .* to {LAST - 5}\."):
        ends(case, path, how, 9, several=True)


@pytest.mark.parametrize(("path", "how", "first"), ENDS)
@pytest.mark.parametrize("missing", ["the first", "one before", "one after", "negative", "in a list"])
def test_a_position_that_the_value_does_not_have_is_refused(path, how, first, missing):
    position = {
        "the first": 0,
        "one before": first - 1,
        "one after": LAST + 1,
        "negative": first - LAST - 2,
        "in a list": [first - 1, LAST],
    }[missing]
    with pytest.raises(BadArgument, match=rf"this value has those from {first} to {LAST}\."):
        ends(Case("e2b"), path, how, position, several=False)


def test_a_refused_position_shows_in_the_repr():
    model = Case("e2b").model()
    found = model.collect(ids(LONG), STREAM, positions=12, generate={"max_new_tokens": 3, **GREEDY})
    assert repr(found) == (
        f"Collected({STREAM}: position 12 of row 0 is not there: this value has those from 0 to 11.)"
    )


@pytest.mark.parametrize(("path", "how", "first"), ENDS)
@pytest.mark.parametrize("longer", [0, NEW - 1])
def test_a_mask_of_positions_covers_what_the_value_does_not_have(path, how, first, longer):
    case = Case("e2b")
    mask = torch.zeros(1, LONG + longer, dtype=torch.bool)
    mask[0, [first - 1, LONG - 1, -1]] = True  # the first of them is not there
    wanted = text(ids(LONG), [path], case.model())[path][0]
    chosen = [LONG - 1, LAST] if longer else [LONG - 1]
    assert close(ends(case, path, how, mask, several=False), wanted[chosen])


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_steps_that_keep_several_positions_are_joined_without_repeating_one(use_cache):
    model = Case("e2b").model()
    whole = text(ids(LONG), ["logits"], model)["logits"]
    with torch.no_grad():
        with model.generate(ids(LONG), max_new_tokens=NEW, logits_to_keep=3, use_cache=use_cache, **GREEDY):
            record, one = model.record("logits"), model.record("logits", positions=LONG)
    assert close(record["logits"], whole[:, LONG - 3 :])
    assert close(one["logits"], whole[:, LONG])


@pytest.mark.parametrize("several", [False, True], ids=["one", "two rows"])
def test_patterns_of_a_continued_text_have_every_key_the_cached_ones_too(several):
    case = Case("e2b")
    model = case.model()
    names = [
        f"layers[{i}].self_attn.{value}"
        for i in (3, 4, 9)
        for value in ("attention_probabilities", "attention_scores")
    ]
    inputs = pair() if several else {"input_ids": ids(LONG), "attention_mask": torch.ones(1, LONG)}
    options = {"max_new_tokens": NEW, **GREEDY}
    found = model.collect(inputs, names, generate={**options, **cache_of(case, inputs, 6)})
    whole = text(inputs, names, model)
    real = found.attention_mask.bool()
    for name in names:
        assert found[name].shape == (1 + several, 4, LAST - 5, LAST + 1)
        if name.endswith("probabilities"):
            assert (found[name].sum(-1) - 1).abs().max() <= 1e-5
        for row, tokens in enumerate(real):
            mine, other = found[name][row][..., tokens], whole[name][row][:, 6:][..., tokens]
            seen = other > -1e30
            assert torch.equal(seen, mine > -1e30), name
            assert (mine - other)[seen].abs().max() <= 5e-5 * other[seen].abs().max(), name


@shortcut
def test_patterns_of_a_borrower_that_ran_on_the_last_position_alone():
    model = Case("e2b").model()
    names = ["layers[9].self_attn.attention_probabilities", "layers[7].self_attn.attention_probabilities"]
    with torch.no_grad():
        with model.generate(ids(LONG), full_prefill=False, max_new_tokens=NEW, **GREEDY):
            record = model.record(names)
    whole = text(ids(LONG), names, model)
    for name in names:
        assert close(record[name], whole[name][:, :, LONG - 1 :])
