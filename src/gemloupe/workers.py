"""Work that runs beside a trace's block without using up its order.

A block reads values in forward order, so a verb that waited for block 9 inside it would leave block 3
behind. Such a verb runs in a worker of its own: it sees the rows of the invoke it was called in, and
the block goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import nnsight
from nnsight.intervention.interleaver import Mediator, OutOfOrderError

from .errors import NeverRan, OutsideTrace
from .ledger import flushing, running

__all__ = ["SideWorker", "caller", "every_step", "keep_prompt", "kept", "start_beside", "steps"]


class SideWorker(Mediator):
    """A worker that runs a function instead of a block of source."""

    def __init__(
        self,
        task: Callable[[], None],
        parent: Mediator | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(None, {}, {})
        self.flush = flushing(self)
        self.task = task
        self.done = done
        self.batch_group = None if parent is None else parent.batch_group
        self._counts = {} if parent is None else parent.counts_at_start

    def _run(self) -> None:
        # The steps of this worker are those of the block it was started from.
        self.counts_at_start = self._counts or self.counts_at_start
        # The run ended while the task waited for a step or a block that was not run: it is done.
        with suppress(OutOfOrderError, NeverRan):
            self.task()
            self.flush()
        if self.done is not None:
            self.done()


def caller(model: Any, verb: str) -> Mediator:
    """The worker that calls a verb.

    Raises: OutsideTrace, where none does.
    """
    mediator = running(model.interleaver)
    if mediator is None:
        raise OutsideTrace(
            f"{verb} edits a running forward; call it inside one:\n"
            f"    with model.trace(prompt):\n        model.{verb}(...)\n"
            f"or for every later trace: `with model.edit() as (tracer, edited): edited.{verb}(...)`."
        )
    return mediator


def kept(result: Any) -> Any:
    """`result`, so that it outlives the trace it was made in."""
    with suppress(ValueError):  # outside a `with` block (in `collect`) nothing has to be kept
        nnsight.save(result)
    return result


def start_beside(
    model: Any,
    task: Callable[[], None],
    *,
    before: bool,
    first: bool = False,
    done: Callable[[], None] | None = None,
) -> None:
    """Start `task` beside the calling worker; `done` is called when it, or the run, is over.

    At a location both wait for, it is served `before` the caller (edits, which the caller then sees),
    or after everybody (captures, which see every edit).
    """
    interleaver = model.interleaver
    parent = running(interleaver)
    assert parent is not None
    side = SideWorker(task, parent, done)
    interleaver.ledger.of(side).last = interleaver.ledger.of(parent).last
    mediators = interleaver.mediators
    mediators.insert(0 if first else mediators.index(parent) if before else len(mediators), side)
    # The caller's waiting write-back is of this moment; it goes in before anybody else is served.
    side.start(interleaver)
    worker: Any = side.worker
    if worker:
        # A run that fails ends the worker, and its parent goes on with that: it must not be the caller.
        worker.parent = worker.parent.parent


def steps(model: Any, first: int | None) -> Iterator[int]:
    """Inside a side worker: every forward of the run, or the step `first` alone."""
    interleaver = model.interleaver
    mediator = running(interleaver)
    assert mediator is not None
    state = interleaver.ledger.of(mediator)
    for step in count() if first is None else (first,):
        state.step = mediator.iteration = step
        yield step


def every_step(model: Any, task: Callable[[], None]) -> Callable[[], None]:
    """`task`, run anew in each forward of a generation."""

    def tasks() -> None:
        for step in steps(model, None):
            if step:
                Mediator.value(model.interleaver.entrance)  # waits until there is such a step
            task()

    return tasks


def keep_prompt(model: Any) -> SideWorker:
    """A worker that lets every block see the whole prompt in `generate`.

    transformers drops all but the last prompt position before the blocks that borrow keys and values
    (`_maybe_slice_kv_shared_inputs`); the call is answered here with what it was given.
    """
    place = model.stack.location("source.drop_prompt.input").removesuffix(".input")

    def task() -> None:
        for _ in steps(model, None):
            # All it is given but the last, `logits_to_keep`; under no name, which would keep it for the
            # rest of the forward.
            Mediator.skip(f"{place}.skip", Mediator.value(f"{place}.input")[0][:-1])

    return SideWorker(task)
