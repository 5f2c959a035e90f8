"""Batches: every sequence once, of about one length, in a budget; and a share for every process."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemloupe.harvesting.batches import Batch, feed, grouped, plan
from gemloupe.harvesting.sequences import Sequences

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def planned(lengths: list[int], counts: list[int], budget: int) -> list[Batch]:
    return plan(torch.tensor(lengths), torch.tensor(counts), budget)


@given(LENGTHS, st.integers(1, 200), st.data())
def test_every_sequence_with_a_row_is_in_one_batch(lengths: list[int], budget: int, data: st.DataObject):
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    batches = planned(lengths, counts, budget)
    run = sorted(at for batch in batches for at in batch.sequences)
    assert run == [at for at, count in enumerate(counts) if count]
    assert [batch.number for batch in batches] == list(range(len(batches)))
    for batch in batches:
        assert batch.tokens == sum(lengths[at] for at in batch.sequences)
        assert batch.rows == sum(counts[at] for at in batch.sequences)
    assert planned(lengths, counts, budget) == batches


@given(LENGTHS, st.integers(1, 200))
def test_no_batch_is_over_the_budget_and_few_could_be_joined(lengths: list[int], budget: int):
    batches = planned(lengths, lengths, budget)

    def padded(batch: Batch) -> int:
        return len(batch.sequences) * max(lengths[at] for at in batch.sequences)

    for batch in batches:
        assert padded(batch) <= budget or len(batch.sequences) == 1
    if batches:
        assert padded(batches[0]) == max(padded(batch) for batch in batches)
    # Sequences of one length: all batches but one are as full as they can be.
    for length in set(lengths):
        alone = planned([length] * len(lengths), [1] * len(lengths), budget)
        full = max(1, budget // length)
        assert sorted(len(batch.sequences) for batch in alone)[1:] == [full] * (len(alone) - 1)


@given(LENGTHS, st.integers(1, 200))
def test_padding_is_little(lengths: list[int], budget: int):
    """In order of length, a batch's sequences are neighbours."""
    spans = [
        (min(lengths[at] for at in batch.sequences), max(lengths[at] for at in batch.sequences))
        for batch in planned(lengths, lengths, budget)
    ]
    for (low, high), (other_low, other_high) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert high <= other_low or (low, high) == (other_low, other_high)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 20), st.integers(1, 2000), st.integers(1, 5))
def test_shards_hold_batches_of_one_share_in_order_within_the_limit(
    lengths: list[int], budget: int, row_bytes: int, limit: int, shares: int
):
    batches = planned(lengths, lengths, budget)
    groups = grouped(batches, row_bytes, limit, shares)
    assert sorted(batch.number for group in groups for batch in group) == list(range(len(batches)))
    firsts = [group[0].number for group in groups]
    assert firsts == sorted(firsts)
    for at in range(shares):
        own = [group for group in groups if group[0].number % shares == at]
        assert [batch for group in own for batch in group] == batches[at::shares]
        sizes = [sum(batch.rows for batch in group) * row_bytes for group in own]
        assert all(size <= limit or len(group) == 1 for size, group in zip(sizes, own, strict=True))
        for size, after in zip(sizes, own[1:], strict=False):
            assert size + after[0].rows * row_bytes > limit


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=6), st.data())
def test_a_batch_is_padded_on_the_left_and_knows_its_rows(texts: list[list[int]], data: st.DataObject):
    lengths = [len(text) for text in texts]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    flat = [token for text in texts for token in text]
    sequences = Sequences(torch.tensor(flat, dtype=torch.int32), starts)
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat))))
    order = data.draw(st.permutations(range(len(texts))))
    fed = feed(sequences, chosen, Batch(0, tuple(order), len(flat), int(chosen.sum())), pad=0)
    width = max(lengths)
    assert fed.input_ids.tolist() == [[0] * (width - lengths[at]) + texts[at] for at in order]
    assert fed.attention_mask.tolist() == [[0] * (width - lengths[at]) + [1] * lengths[at] for at in order]
    rows = [
        (at, place, token)
        for at in order
        for place, token in enumerate(texts[at])
        if chosen[starts[at] + place]
    ]
    found = zip(fed.sequences.tolist(), fed.positions.tolist(), fed.token_ids.tolist(), strict=True)
    assert list(found) == rows
    assert fed.input_ids[fed.chosen].tolist() == [token for _, _, token in rows]
