"""The small functions the verbs stand on, against their own definitions, on drawn input."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gemloupe.errors import BadArgument, UnknownName
from gemloupe.paths import find, parse
from gemloupe.positions import check, select
from gemloupe.support import spans
from tests.core.models import Case

# -- positions.select --------------------------------------------------------------------------------

masks = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=4)


def real_of(rows: list[tuple[int, int]]) -> Tensor:
    """Left-padded rows, `(padding, tokens)` each at least; all as wide as the widest."""
    width = max(pad + tokens for pad, tokens in rows)
    return torch.tensor([[column >= width - tokens for column in range(width)] for _, tokens in rows])


def wanted_places(position: object, length: int) -> set[int]:
    if position is None:
        return set(range(length))
    if isinstance(position, slice):
        return set(range(length)[position])
    numbers = [position] if isinstance(position, int) else list(position)  # pyright: ignore[reportArgumentType]
    return {range(length)[number] for number in numbers if -length <= number < length}


slices = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-3, 3).filter(bool),
)
numbers = st.integers(-9, 9)
choices = st.none() | numbers | slices | st.lists(numbers, max_size=4)


@given(masks, choices)
def test_a_position_is_a_place_in_the_row_s_own_text(rows, position):
    real = real_of(rows)
    chosen = select(position, real)
    assert chosen.dtype == torch.bool
    for mask, row in zip(real.tolist(), chosen.tolist(), strict=True):
        columns = [column for column, token in enumerate(mask) if token]
        wanted = {columns[place] for place in wanted_places(position, len(columns))}
        assert {column for column, one in enumerate(row) if one} == wanted


@given(masks, st.lists(numbers, min_size=1, max_size=4))
def test_a_tensor_a_tuple_and_a_list_are_the_same(rows, positions):
    real = real_of(rows)
    wanted = select(positions, real)
    assert torch.equal(select(torch.tensor(positions), real), wanted)
    assert torch.equal(select(tuple(positions), real), wanted)
    assert torch.equal(select(torch.tensor(positions)[None], real), wanted)


@given(masks, st.data())
def test_a_mask_chooses_columns_and_never_padding(rows, data):
    real = real_of(rows)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=real.shape[1], max_size=real.shape[1])))
    assert torch.equal(select(mask, real), mask & real)
    assert torch.equal(select(mask[None], real), mask & real)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 12))
def test_a_continued_text_counts_on(before, here, position):
    """A forward over a text's last tokens chooses what one over all of it chooses there."""
    whole = select(position, torch.ones(1, before + here, dtype=torch.bool))
    part = select(position, torch.ones(1, here, dtype=torch.bool), start=before)
    assert torch.equal(part, whole[:, before:])


@given(masks, choices)
def test_what_the_check_lets_pass_chooses_something_in_every_row(rows, position):
    """Numbers, that is: an empty slice or list means nothing and says so by choosing it."""
    real = real_of(rows)
    shortest = int(real.sum(-1).min())
    asked = [position] if isinstance(position, int) else position if isinstance(position, list) else []
    past = any(not -shortest <= number < shortest for number in asked)
    if past:
        with pytest.raises(BadArgument, match=f"the shortest text has {shortest} tokens"):
            check(position, real, verb="steer", growing=False)
    else:
        check(position, real, verb="steer", growing=False)
        if asked:
            assert select(position, real).any(-1).all()


@given(masks, st.integers(0, 99))
def test_a_growing_text_may_reach_any_position_but_none_before_it(rows, position):
    real = real_of(rows)
    check(position, real, verb="steer", growing=True)
    with pytest.raises(BadArgument):
        check(-position - 1 - int(real.sum(-1).min()), real, verb="steer", growing=True)


@given(st.sampled_from([1.0, "1", True, None, b"1"]))
def test_what_is_no_whole_number_is_refused(odd):
    with pytest.raises(BadArgument, match="positions are whole numbers, a slice, or a boolean mask"):
        check([0, odd], torch.ones(1, 3, dtype=torch.bool), verb="steer", growing=False)


# -- paths.parse -------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
tokens = st.tuples(names, st.lists(names | st.integers(-99, 99), max_size=5)).map(lambda t: [t[0], *t[1]])


def spelt(parts: list[str | int], brackets: bool) -> str:
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += f".{part}" if text else part
        else:
            text += f"[{part}]" if brackets or part < 0 else f".{part}"
    return text


@given(tokens)
def test_a_path_is_read_as_it_was_written(parts):
    assert parse(spelt(parts, brackets=True)) == parts
    assert parse(spelt(parts, brackets=False)) == parts


@given(st.text(max_size=12))
def test_any_text_is_a_path_or_an_unknown_name(text):
    try:
        parts = parse(text)
    except UnknownName as error:
        assert "is no path" in str(error)  # noqa: PT017
    else:
        assert parse(spelt(parts, brackets=True)) == parts or not text


@given(st.integers(0, 9), st.sampled_from(["", "model."]), st.booleans())
def test_a_path_leads_to_its_host(block, prefix, brackets):
    model = Case("e2b").model()
    place = f"[{block}]" if brackets else f".{block}"
    host, value = find(model, f"{prefix}layers{place}.mlp.mlp_output")
    assert host is model.layers[block].mlp
    assert value is type(host).mlp_output


# -- support.spans -----------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 60)))
def test_spans_say_the_very_numbers_in_the_fewest_words(numbers):
    text = spans(tuple(sorted(numbers)))
    found: list[int] = []
    ends = []
    for span in text.split(", ") if text else []:
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
        ends.append((int(first), int(last or first)))
        assert first != last
    assert found == sorted(numbers)
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(ends))
