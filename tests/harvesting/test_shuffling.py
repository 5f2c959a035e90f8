"""The order of shuffled rows: every row once, from many sequences, a few shards at a time."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemloupe.harvesting.shuffling import buffers, order

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def starts(sizes: list[int]) -> list[int]:
    return torch.tensor([0, *sizes]).cumsum(0).tolist()


def batches(sizes: list[int], size: int, buffer: int, seed: int) -> list[list[int]]:
    found: list[list[int]] = []
    for rows in buffers(starts(sizes), size, buffer, seed):
        assert len(rows) >= min(buffer - size, sum(sizes)) or sum(map(len, found)) + len(rows) == sum(sizes)
        found += [some.tolist() for some in rows.split(size)]
    return found


@given(SIZES, st.integers(1, 500), st.integers(1, 2000), st.integers(0, 99))
def test_every_row_comes_once_in_batches_of_the_size(sizes: list[int], size: int, buffer: int, seed: int):
    found = batches(sizes, size, buffer, seed)
    assert sorted(row for batch in found for row in batch) == list(range(sum(sizes)))
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert 0 < len(found[-1]) <= size
    assert found == batches(sizes, size, buffer, seed)


def test_shards_are_touched_a_few_at_a_time():
    size = 20_000  # rows of a shard, of which fourteen have 2**18
    touched: list[int] = []
    for done, (first, _) in enumerate(order(starts([size] * 60), seed=1)):
        if first // size not in touched:
            touched.append(first // size)
            # Sixteen at first, then one more for each that was read.
            assert len(touched) <= 16 + 1 + done * 32 // size
    assert sorted(touched) == list(range(60))
    assert touched != sorted(touched)


def test_a_batch_has_rows_of_about_as_many_sequences_as_independent_draws_have():
    # A hundred shards of 4,096 rows, of sequences of 500 tokens.
    rows, size = 100 * 4096, 2048
    drawn = torch.Generator().manual_seed(0)
    independent = len((torch.randint(rows, (size,), generator=drawn) // 500).unique())
    found = batches([4096] * 100, size, 32_768, seed=1)
    counts = [len({row // 500 for row in batch}) for batch in found[:-1]]
    # 2**18 rows that are mixed with each other are of 524 sequences.
    assert 700 < independent < 819
    assert median(counts) > 450
    assert min(counts) > 250
    neighbours = [sum(a + 1 == b for a, b in pairwise(batch)) for batch in found]
    assert max(neighbours) <= 3
