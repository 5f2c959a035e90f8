"""Which sequences run together: those of about one length, as many as a budget of tokens allows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from ..errors import BadArgument
from .sequences import Sequences

__all__ = ["Batch", "Feed", "feed", "grouped", "plan"]


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward."""

    number: int
    """Its place in the order of all batches, which is the same in every process."""
    sequences: tuple[int, ...]
    tokens: int
    """Real tokens, padding left out."""
    rows: int
    """Chosen tokens."""


@dataclass(frozen=True)
class Feed:
    """What a batch's forward is given, padded on the left, and which tokens of it get a row."""

    input_ids: torch.Tensor
    """`[batch seq]`, int64."""
    attention_mask: torch.Tensor
    """`[batch seq]`, int64."""
    chosen: torch.Tensor
    """`[batch seq]`, bool."""
    lengths: tuple[int, ...]
    sequences: torch.Tensor
    """`[rows]`, int64: which sequence each row is of."""
    positions: torch.Tensor
    """`[rows]`, int32: where in its sequence, 0 the first token."""
    token_ids: torch.Tensor
    """`[rows]`, int32."""


def plan(lengths: torch.Tensor, counts: torch.Tensor, budget: int) -> list[Batch]:
    """Batches of at most `budget` tokens, padding included; a longer sequence runs alone.

    `lengths` and `counts` are the tokens and the chosen tokens of each sequence; one without a chosen token
    is not run. The largest batch comes first, so that what does not fit into memory fails at once; the
    others come in a fixed random order, so that rows lie in no order of length.

    Raises: BadArgument, for a budget below one.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise BadArgument(f"harvest: tokens_per_batch is a number of tokens, not {budget!r}.")
    order = torch.argsort(lengths, stable=True).tolist()
    sizes, rows = lengths.tolist(), counts.tolist()
    groups: list[list[int]] = []
    for sequence in order:
        if not rows[sequence]:
            continue
        # In ascending order the newcomer is the longest.
        if groups and (len(groups[-1]) + 1) * sizes[sequence] <= budget:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    random.Random("batches").shuffle(groups)
    largest = max(range(len(groups)), key=lambda at: len(groups[at]) * sizes[groups[at][-1]], default=None)
    if largest is not None:
        groups.insert(0, groups.pop(largest))
    return [
        Batch(number, tuple(group), sum(sizes[at] for at in group), sum(rows[at] for at in group))
        for number, group in enumerate(groups)
    ]


def grouped(batches: list[Batch], row_bytes: int, limit: int, shares: int) -> list[tuple[Batch, ...]]:
    """Which batches share a shard, by their first: of each of `shares` shares (every `shares`-th batch) those
    that follow each other, at most `limit` bytes or one batch.

    It depends on nothing but what is asked and how many processes began, so that any number of processes can
    make the shards that are missing.
    """
    groups = [group for at in range(shares) for group in _grouped(batches[at::shares], row_bytes, limit)]
    return sorted(groups, key=lambda group: group[0].number)


def _grouped(batches: list[Batch], row_bytes: int, limit: int) -> list[tuple[Batch, ...]]:
    groups: list[tuple[Batch, ...]] = []
    size = 0
    for batch in batches:
        size += batch.rows * row_bytes
        if groups and size <= limit:
            groups[-1] += (batch,)
        else:
            groups.append((batch,))
            size = batch.rows * row_bytes
    return groups


def feed(sequences: Sequences, chosen: torch.Tensor, batch: Batch, pad: int) -> Feed:
    """A batch's tensors, on the CPU."""
    lengths = tuple(len(sequences[at]) for at in batch.sequences)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad, dtype=torch.int64)
    real, mask = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for row, (at, length) in enumerate(zip(batch.sequences, lengths, strict=True)):
        start = int(sequences.starts[at])
        ids[row, width - length :] = sequences[at]
        real[row, width - length :] = 1
        mask[row, width - length :] = chosen[start : start + length]
    row, column = mask.nonzero(as_tuple=True)
    before = width - torch.tensor(lengths)
    return Feed(
        input_ids=ids,
        attention_mask=real,
        chosen=mask,
        lengths=lengths,
        sequences=torch.tensor(batch.sequences)[row],
        positions=(column - before[row]).to(torch.int32),
        token_ids=ids[row, column].to(torch.int32),
    )
