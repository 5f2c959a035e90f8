"""Measuring two things against each other on a machine that does other work as well.

Both sides run in turn, A B, B A, A B, ..., and each pair gives one ratio: what slows the machine down for
longer than a pair slows both sides down. The median of the ratios is the result; its interval says
whether the pairs were enough to tell on which side of a bound it lies.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

import gemloupe

__all__ = [
    "Measurement",
    "Memory",
    "NotMeasured",
    "Sample",
    "Side",
    "Spread",
    "alternate",
    "command",
    "insist",
    "one_thread",
    "python",
    "spread",
    "timed_in_process",
]


class NotMeasured(Exception):
    """A row that cannot be measured here; the text is the reason, which is reported in its place."""


class Sample(NamedTuple):
    """What one run took, in seconds: on the wall clock, and of all this process's threads together."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Side:
    """One of the two things measured."""

    run: Callable[..., Any]
    """What is timed. Its result is compared with the other side's, and freed after the clock has stopped."""
    setup: Callable[[], Any] | None = None
    """Makes the argument of `run` before the clock starts, afresh for every run."""
    clock: Callable[[Any], Sample] | None = None
    """Reads the time off the result, where the work was done in another process."""

    def sample(self) -> tuple[Sample, Any]:
        """One timed run, and what it returned."""
        arguments = () if self.setup is None else (self.setup(),)
        gc.collect()  # or one side pays for the other's garbage
        wall, cpu = perf_counter(), process_time()
        result = self.run(*arguments)
        sample = Sample(perf_counter() - wall, process_time() - cpu)
        return (sample if self.clock is None else self.clock(result)), result


@dataclass(frozen=True)
class Measurement:
    """Pairs of samples, taken in turn."""

    ours: tuple[Sample, ...]
    theirs: tuple[Sample, ...]

    @property
    def ratios(self) -> list[float]:
        """Wall time of each pair, ours over theirs."""
        return [ours.wall / theirs.wall for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        """The median of the pairs' ratios of computing time: steadier than wall time on a busy machine."""
        return median(ours.cpu / theirs.cpu for ours, theirs in zip(self.ours, self.theirs, strict=True))

    @property
    def seconds(self) -> list[float]:
        """Wall time of our side alone."""
        return [sample.wall for sample in self.ours]

    @property
    def added(self) -> list[float]:
        """Computing time that our side of each pair took more."""
        return [ours.cpu - theirs.cpu for ours, theirs in zip(self.ours, self.theirs, strict=True)]


@dataclass(frozen=True)
class Memory:
    """Peaks of memory in bytes, counted in pieces of `unit` bytes; see `benchmarks.memory`."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    unit: int

    @property
    def ratios(self) -> list[float]:
        """How far our peak lies above theirs, in units."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [(ours - theirs) / self.unit for ours, theirs in pairs]


def alternate(
    ours: Side,
    theirs: Side,
    pairs: int,
    *,
    warmup: int = 1,
    same: Callable[[Any], Any] | None = None,
    tolerance: float = 0.0,
) -> Measurement:
    """Run both sides in turn, `pairs` times each, after `warmup` pairs that do not count.

    same: takes from a result the tensors that both sides must agree on: two sides that compute different
        things are not compared. It is asked on every pair.
    tolerance: how far they may be apart; by default they agree bit for bit.
    Raises: AssertionError, where they differ.
    """
    taken: list[tuple[Sample, Sample]] = []
    with frozen():
        for pair in range(warmup + pairs):
            order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
            sampled = {id(side): side.sample() for side in order}
            (our_sample, our_result), (their_sample, their_result) = sampled[id(ours)], sampled[id(theirs)]
            if same is not None:
                insist(same(our_result), same(their_result), tolerance)
            if pair >= warmup:
                taken.append((our_sample, their_sample))
    return Measurement(tuple(our for our, _ in taken), tuple(their for _, their in taken))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, where computing time is what the work takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def frozen() -> Iterator[None]:
    """Keep what is alive now out of garbage collections: the imports alone are a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def insist(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """Insist that two tensors, or lists of them, are equal, or apart by `tolerance` at most.

    Raises: AssertionError, naming the first that is not.
    """
    ours, theirs = ([value] if isinstance(value, torch.Tensor) else list(value) for value in (ours, theirs))
    assert len(ours) == len(theirs), f"one side gave {len(ours)} tensors, the other {len(theirs)}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        alike = one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=tolerance)
        assert alike, f"tensor {index} differs: what is compared is not the same work"


# ---- whole processes ---------------------------------------------------------------------------------------


def command(arguments: Sequence[str], **environment: str) -> Sample:
    """What a command took from its start to its end, and the computing time of it and its children."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run(arguments, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    wall, after = perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Sample(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs `code` in a Python of its own, with the gemloupe that this one imports."""
    place = str(Path(gemloupe.__file__).parents[1])
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {place!r})\n{code}", *arguments]


def timed_in_process(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Sample:
    """The `[wall, cpu]` that a command of `python` printed as its last line."""
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=env)
    return Sample(*json.loads(done.stdout.strip().split("\n")[-1]))


# ---- what the samples say ----------------------------------------------------------------------------------


class Spread(NamedTuple):
    """The middle of a list of numbers, the middle half, and where the true median is with 95 % confidence."""

    median: float
    quarter: float
    three_quarters: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread, by order statistics: nothing is assumed of the distribution."""
    ordered = sorted(values)
    quarter, middle, three_quarters = (
        quantiles(ordered, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    outside = _ranks_outside(len(ordered))
    return Spread(middle, quarter, three_quarters, ordered[outside], ordered[-1 - outside])


def _ranks_outside(count: int) -> int:
    """How many values at each end lie outside the median's 95 % interval.

    The median is below the k-th of `count` values with the chance that fewer than k of as many tosses of
    a coin come up heads. With five values or fewer, the interval is all of them and still too narrow.
    """
    chance, rank = 0.0, 0
    while (chance := chance + comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return max(rank - 1, 0)
