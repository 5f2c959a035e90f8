"""The tracer behind `with model.trace(...)`: nnsight's, with loops that know which step they stand at.

nnsight pins the first request of a loop's body to the loop's step and lets the others follow the
forward, so a request that comes too late would bind the next step's value. Here the ledger is told
the step, and such a request is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import CodeType
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.barrier import Barrier
from nnsight.intervention.editing import EditingTracer
from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.iterator import Iterations
from nnsight.intervention.tracer import InterleavingTracer

from .errors import BadArgument

__all__ = ["StandardEditor", "StandardTracer", "Steps"]


_RESULT: Any = vars(InterleavingTracer)["result"]


class Steps(Iterations):
    """`tracer.iter[...]` and `tracer.all()`: the steps of a generation, one after the other."""

    def __getitem__(self, key: slice | int | list[int]) -> Steps:
        if isinstance(key, slice) and key.step not in (None, 1):
            if key.stop is None:
                raise BadArgument(f"tracer.iter[{key.start or 0}::{key.step}] has no end; give one.")
            return Steps(steps=list(range(key.start or 0, key.stop, key.step)))
        chosen = super().__getitem__(key)
        return Steps(chosen.start, chosen.stop, chosen.steps)

    def __iter__(self) -> Iterator[int]:
        worker: Any = getcurrent()  # nnsight's worker, which knows its mediator
        mediator = worker.mediator()
        state = mediator.interleaver.ledger.of(mediator)
        before, state.endless = (state.step, state.endless), self.stop is None and self.steps is None
        state.looped = True
        try:
            generator: Any = super().__iter__()
            with closing(generator) as steps:
                for step in steps:
                    state.step = step
                    entrance = mediator.interleaver.entrance
                    if step and state.endless and mediator.occurrence(entrance) <= step:
                        # So that the body runs for the steps there are, whether or not it waits for anything.
                        Mediator.value(entrance)
                    yield step
        finally:
            state.step, state.endless = before


class Meeting(Barrier):
    """A barrier at which what a worker edited goes back before it waits.

    nnsight keeps a write-back until the worker's next request; a worker that waits at a barrier makes its
    next one when the forward has moved on.
    """

    def __call__(self) -> None:
        mediator = Mediator.current("tracer.barrier()")
        interleaver: Any = mediator.interleaver
        call = interleaver.ledger.of(mediator).call
        if call is None or not call.may_wait(mediator):
            mediator.flush()
        if call is not None:
            call.left = True  # others may edit what it was given
        super().__call__()


class _Told(InterleavingTracer):
    """nnsight's tracer, which tells the ledger where its block of code stands."""

    def barrier(self, n: int) -> Meeting:
        """A meeting point for `n` of this trace's invokes, each of which calls it."""
        return Meeting(n)

    @property
    def result(self) -> Any:
        """What the call returns, when it is over: token ids in `generate`."""
        value = _RESULT.__get__(self, type(self))
        worker: Any = getcurrent()
        mediator = worker.mediator()
        mediator.interleaver.ledger.of(mediator).last = "tracer.result, which waits for the end of the call"
        return value

    @result.setter
    def result(self, value: Any) -> None:
        _RESULT.__set__(self, value)

    @property
    def iter(self) -> Steps:
        """The steps of a repeated run: `for step in tracer.iter[:3]: ...`."""
        return Steps()


class StandardEditor(_Told, EditingTracer):
    """The tracer of `model.edit()`: `for step in tracer.iter[:]` edits every step of a run."""


class StandardTracer(_Told):
    """The tracer of `model.trace(...)`.

    `full_prefill`: whether blocks that borrow keys and values see the whole prompt in `generate`.
    """

    def __init__(self, *args: Any, full_prefill: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full_prefill = full_prefill

    def execute(self, code: CodeType) -> None:
        envoy: Any = self.envoy
        if torch.is_inference_mode_enabled():
            raise BadArgument(
                "a trace under torch.inference_mode() cannot tell which tensors were edited.\n"
                "Use torch.no_grad()."
            )
        envoy.interleaver.full_prefill = self.full_prefill
        super().execute(code)
