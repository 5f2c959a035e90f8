"""A random order of rows that a disk can read: short runs of them from a few shards at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import torch

__all__ = ["buffers", "order"]

_RUN: Final = 32
"""Rows that are read together. Those of a sequence follow each other, so that longer runs would mix less."""
_SHARDS: Final = 16
_ROWS: Final = 2**18
"""At least so many shards and rows are mixed with each other. Each shard is read from end to end when it is
first touched, for its checksum, so that all at once would be long."""


def order(starts: list[int], seed: int) -> Iterator[tuple[int, int]]:
    """Runs of rows, first and end, in a random order: every row of the shards that start there, once."""
    drawn = random.Random(seed)
    shards = list(pairwise(starts))
    drawn.shuffle(shards)
    runs: list[tuple[int, int]] = []
    enough = 0  # runs that are mixed with each other
    for number, (start, stop) in enumerate(shards):
        runs += [(first, min(first + _RUN, stop)) for first in range(start, stop, _RUN)]
        if number < _SHARDS or enough * _RUN < _ROWS:
            enough = len(runs)
        while len(runs) > enough:
            yield _drawn(runs, drawn)
    while runs:
        yield _drawn(runs, drawn)


def _drawn(runs: list[tuple[int, int]], drawn: random.Random) -> tuple[int, int]:
    """One of the runs, taken out."""
    at = drawn.randrange(len(runs))
    runs[at], runs[-1] = runs[-1], runs[at]
    return runs.pop()


def buffers(starts: list[int], batch_size: int, buffer: int, seed: int) -> Iterator[torch.Tensor]:
    """Row numbers, at least `buffer` of them together and whole batches but for the last; every row once."""
    drawn = torch.Generator().manual_seed(seed)
    held: list[torch.Tensor] = []
    count = 0
    for first, stop in order(starts, seed):
        held.append(torch.arange(first, stop))
        count += stop - first
        if count >= max(buffer, batch_size):
            mixed = _mixed(held, drawn)
            whole = count // batch_size * batch_size
            yield mixed[:whole]
            held, count = [mixed[whole:]], count - whole
    if count:
        yield _mixed(held, drawn)


def _mixed(held: list[torch.Tensor], drawn: torch.Generator) -> torch.Tensor:
    rows = torch.cat(held)
    return rows[torch.randperm(len(rows), generator=drawn)]
