"""A random order of rows that a disk can read: short runs of them from a few shards at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import torch

__all__ = ["in_batches", "order"]

_RUN: Final = 64
"""Rows that are read together. Those of a sequence follow each other, so that longer runs would mix less."""
_SHARDS: Final = 16
"""Shards that are mixed with each other: each is read from end to end when it is first touched, for its
checksum."""

Rows = dict[str, torch.Tensor]


def order(starts: list[int], seed: int) -> Iterator[tuple[int, int]]:
    """Runs of rows, first and end, in a random order: every row of the shards that start there, once."""
    drawn = random.Random(seed)
    shards = list(pairwise(starts))
    drawn.shuffle(shards)
    for at in range(0, len(shards), _SHARDS):
        runs = [
            (first, min(first + _RUN, stop))
            for start, stop in shards[at : at + _SHARDS]
            for first in range(start, stop, _RUN)
        ]
        drawn.shuffle(runs)
        yield from runs


def in_batches(runs: Iterable[Rows], batch_size: int, buffer: int, seed: int) -> Iterator[Rows]:
    """The rows of all runs, drawn from a buffer of at least `buffer` of them."""
    drawn = torch.Generator().manual_seed(seed)
    held: list[Rows] = []
    count = 0
    for run in runs:
        held.append(run)
        count += _length(run)
        if count < max(buffer, batch_size):
            continue
        mixed = _mixed(held, drawn)
        whole = count // batch_size * batch_size
        yield from _cut(mixed, whole, batch_size)
        held = [{name: rows[whole:] for name, rows in mixed.items()}]
        count -= whole
    if count:
        yield from _cut(_mixed(held, drawn), count, batch_size)


def _mixed(held: list[Rows], drawn: torch.Generator) -> Rows:
    """Rows of several runs in a random order."""
    together = {name: torch.cat([rows[name] for rows in held]) for name in held[0]}
    shuffled = torch.randperm(_length(together), generator=drawn)
    return {name: rows[shuffled] for name, rows in together.items()}


def _cut(rows: Rows, stop: int, batch_size: int) -> Iterator[Rows]:
    for at in range(0, stop, batch_size):
        yield {name: tensor[at : min(at + batch_size, stop)] for name, tensor in rows.items()}


def _length(rows: Rows) -> int:
    return len(next(iter(rows.values())))
