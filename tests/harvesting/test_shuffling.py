"""The order of shuffled rows: every row once, from many sequences, a few shards at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemloupe.harvesting import shuffling
from gemloupe.harvesting.shuffling import in_batches, order

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def starts(sizes: list[int]) -> list[int]:
    return torch.tensor([0, *sizes]).cumsum(0).tolist()


def batches(sizes: list[int], size: int, buffer: int, seed: int) -> list[list[int]]:
    runs = ({"row": torch.arange(first, stop)} for first, stop in order(starts(sizes), seed))
    return [batch["row"].tolist() for batch in in_batches(runs, size, buffer, seed)]


@given(SIZES, st.integers(1, 500), st.integers(1, 2000), st.integers(0, 99))
def test_every_row_comes_once_in_batches_of_the_size(sizes: list[int], size: int, buffer: int, seed: int):
    found = batches(sizes, size, buffer, seed)
    assert sorted(row for batch in found for row in batch) == list(range(sum(sizes)))
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert 0 < len(found[-1]) <= size
    assert found == batches(sizes, size, buffer, seed)


@given(SIZES, st.integers(0, 99))
def test_shards_are_done_with_a_few_at_a_time(sizes: list[int], seed: int):
    begins = torch.tensor(starts(sizes))
    shards = [int(torch.searchsorted(begins, first, right=True)) for first, _ in order(starts(sizes), seed)]
    seen: list[int] = []
    for shard in shards:
        if shard not in seen:
            seen.append(shard)
    for at in range(0, len(seen), shuffling._SHARDS):
        window = set(seen[at : at + shuffling._SHARDS])
        places = [place for place, shard in enumerate(shards) if shard in window]
        assert places == list(range(places[0], places[-1] + 1))


def test_a_batch_has_rows_of_about_as_many_sequences_as_independent_draws_have():
    # A hundred shards of 4,096 rows, of sequences of 500 tokens.
    rows, size = 100 * 4096, 2048
    drawn = torch.Generator().manual_seed(0)
    independent = len((torch.randint(rows, (size,), generator=drawn) // 500).unique())
    found = batches([4096] * 100, size, 32_768, seed=1)
    counts = [len({row // 500 for row in batch}) for batch in found[:-1]]
    # Of 16 shards there are 131 sequences.
    assert independent > 700
    assert min(counts) > 110
    neighbours = [sum(a + 1 == b for a, b in zip(batch, batch[1:], strict=False)) for batch in found]
    assert max(neighbours) <= 3
