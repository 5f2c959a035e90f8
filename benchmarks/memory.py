"""Peaks of memory: what torch's allocator handed out and took back during a run, call by call.

The profiler sees every request to the CPU allocator, also those inside an operator (softmax, a fused kernel's
buffers), which a tensor's own life cycle does not show. What libraries allocate for themselves without it
is not counted, on either side.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import Memory

__all__ = ["compare", "peak"]


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that were held at once during `run`, above what was held before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler saw no allocation: nothing was measured"
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int, *, unit: int) -> Memory:
    """The peaks of both sides, in turn, after a run of each that does not count."""
    ours(), theirs()
    peaks = [(peak(ours), peak(theirs)) for _ in range(pairs)]
    return Memory(tuple(our for our, _ in peaks), tuple(their for _, their in peaks), unit)
