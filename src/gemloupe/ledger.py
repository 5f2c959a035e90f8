"""What the workers of one run have been served, so that order and late edits can be checked.

nnsight runs each block of intervention code as a worker beside the forward. It serves a value when
the forward reaches it and forgets it; a read of what has passed waits for ever, and an edit in place
of a tensor that the forward has already used changes nothing. The ledger remembers enough to say so:
the last value each worker was served, the step its loop stands at, and the version counter of every
tensor handed out.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Event, Interleaver, Mediator, Pending

from .errors import LateEdit, StepsWarning
from .generation import uses_cache
from .notices import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NOTHING", "Ledger", "StandardInterleaver", "flushing", "owner", "running"]


def running(interleaver: Any) -> Mediator | None:
    """The worker of `interleaver`'s run that is executing now, or `None` outside one."""
    reference = getattr(getcurrent(), "mediator", None)
    mediator = None if reference is None else reference()
    return mediator if mediator is not None and mediator.interleaver is interleaver else None


# Hosts of what a generation computes in its first step alone.
_WITH_THE_PROMPT: Final = ("vision", "projector", "audio", "audio_projector")

# How many of the last tensors handed out are compared at each step; all are at the end of a run.
RECENT: Final = 256


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no numbers, as in `scan`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def version(tensor: torch.Tensor) -> int | None:
    """How often the tensor's memory was edited in place; `None` where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version counter
        return None


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two tensors are views of one storage, which is what shares a version counter."""
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # fake and meta tensors hold no storage
        return False


def same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two tensors are one view of one memory."""
    if one is other:
        return True
    if one.requires_grad != other.requires_grad:  # one of them was detached
        return False
    alike = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return alike and same_memory(one, other) and one.storage_offset() == other.storage_offset()


def owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose life a view shares: a slice of the view keeps it alive, and not the view."""
    return tensor if tensor._base is None else tensor._base


@dataclass
class Watched:
    """A tensor that was handed out, and the version it had when its moment ended."""

    tensor: weakref.ref
    version: int
    name: str
    after: str | None = None
    """The value whose read had moved the forward past this one, which was read all the same."""
    held: torch.Tensor | None = None
    """The tensor itself, where nobody else may hold it when it is next looked at."""


@dataclass
class WorkerState:
    """What one worker has been served so far."""

    last: str | None = None
    asked: str | None = None
    """The value asked for last, served or not."""
    step: int | None = None
    endless: bool = False
    """The loop the worker is in has no end of its own (`tracer.iter[:]`)."""
    captured: dict[tuple[str, int], Any] = field(default_factory=dict)
    moment: tuple[str, str, int] | None = None
    raw: Any = None
    call: Any = None
    looped: bool = False
    """The worker has been in a loop over steps."""
    wrote: str | None = None
    """A value that was edited outside any loop over steps."""
    trusted: bool = False
    """The worker is the library's own and edits nothing it is served in place."""

    def anchor(self, location: str) -> Any:
        """What the anchor of the present moment held, or `None` where it had passed."""
        return None if self.moment is None else self.captured.get((location, self.moment[2]))


def late_edit_text(watched: Watched) -> str:
    """What is said of an edit that comes after its moment."""
    name, after = watched.name, watched.after
    if after is not None and after != name:
        return (
            f"{name} was edited in place after {after} was read: the forward had passed it by then, so the "
            f"edit cannot reach the model.\nEdit {name} before {after} is read; to compute with it instead, "
            f"work on a copy: `x = ....clone()`."
        )
    return (
        f"{name} was edited in place after the forward had moved on, so the edit cannot reach the model.\n"
        f"Edit it right after reading it, before anything else is read; to compute with it instead, work on "
        f"a copy: `x = ....clone()`."
    )


class Ledger:
    """The bookkeeping of one run, shared by all its workers."""

    def __init__(self, interleaver: StandardInterleaver) -> None:
        self._interleaver = weakref.ref(interleaver)
        self._states: dict[Mediator, WorkerState] = {}
        self._watched: list[Watched] = []
        self.contributions: tuple[Any, torch.Tensor] | None = None
        """The experts' outputs of the call that runs, under an implementation that holds them nowhere."""

    def waiting(self) -> list[torch.Tensor]:
        """The views whose moment has not ended: some worker's write-back still waits for them."""
        interleaver = self._interleaver()
        views: list[Any] = []
        for mediator in interleaver.mediators if interleaver is not None else ():
            if mediator.transform is not None:
                view = mediator.transform.view
                views.extend(view if isinstance(view, tuple) else (view,))
        return [view for view in views if isinstance(view, torch.Tensor)]

    def of(self, mediator: Mediator) -> WorkerState:
        """The state of one worker, made on first use."""
        state = self._states.get(mediator)
        if state is None:
            state = self._states[mediator] = WorkerState()
        return state

    def states(self) -> list[WorkerState]:
        """The states of all workers of the run so far."""
        return list(self._states.values())

    def watch(self, tensor: Any, name: str, *, after: str | None = None) -> None:
        """Remember a tensor that was handed out under `name`.

        `after`: the forward had passed it, by the read of that value. No write-back waits for it, so an
        edit of it is one too late, also where the tensor was given no name
        (`model....attention_keys[:] = 0`) and would be gone by the time that edits are looked for.
        """
        if not isinstance(tensor, torch.Tensor) or self._trusted():
            return
        now = version(tensor)
        if now is not None:
            held = None if after is None else tensor
            self._watched.append(Watched(weakref.ref(owner(tensor)), now, name, after, held))

    def holds(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether this memory was handed out under a name other than `name`, and is still held."""
        if self._trusted():
            return False
        recent = self._watched[-RECENT:]
        return any(
            entry.name != name and (other := entry.tensor()) is not None and same_memory(other, tensor)
            for entry in recent
        )

    def changed(self, tensor: Any) -> bool:
        """Whether a tensor was edited in place since it was handed out."""
        whole = owner(tensor)
        return any(known is whole and entry.version != version(known) for known, entry in self._alive(RECENT))

    def settle(self, *tensors: Any) -> bool:
        """End the moment of `tensors`: accept what was done to them, and say whether anything was.

        Every other tensor that changed since its own moment ended was edited too late.
        """
        if self._trusted():
            return False
        edited = [tensor for tensor in tensors if self.changed(tensor)]
        for tensor in edited:
            for other, watched in self._alive():
                if same_memory(other, tensor):
                    watched.version = version(other) or 0
        self.check()
        if edited:
            self.wrote(next(entry.name for known, entry in self._alive() if same_memory(known, edited[0])))
        return bool(edited)

    def wrote(self, name: str) -> None:
        """Note that the running worker edited the value `name`."""
        mediator = running(self._interleaver())
        # What a loop's last round edited goes back when the loop is over.
        if mediator is not None and not self.of(mediator).looped:
            self.of(mediator).wrote = name

    def check(self, *, all: bool = False) -> None:
        """Raise `LateEdit` for the first tensor that was edited after its moment.

        Looks at the latest `RECENT` of them, or at `all`.
        """
        for tensor, watched in self._alive(0 if all else RECENT):
            watched.held = None
            if version(tensor) != watched.version and not any(same_memory(tensor, v) for v in self.waiting()):
                self._watched = [entry for entry in self._watched if entry is not watched]
                raise LateEdit(late_edit_text(watched))

    def _trusted(self) -> bool:
        mediator = running(self._interleaver())
        return mediator is not None and self.of(mediator).trusted

    def _alive(self, latest: int = 0) -> Iterator[tuple[torch.Tensor, Watched]]:
        alive = [(entry.tensor(), entry) for entry in self._watched[-latest:]]
        if any(tensor is None for tensor, _ in alive):
            kept = [entry for tensor, entry in alive if tensor is not None]
            self._watched[-latest:] = kept
        return ((tensor, entry) for tensor, entry in alive if tensor is not None)


def _has_both(media: Any, group: Any) -> bool:
    return all(media.items(kind, group)[1] for kind in ("images", "frames"))


def outrun_text(state: WorkerState) -> str:
    """What is said of a loop that asked for a step the run did not make."""
    wanted = (
        f"{state.asked or 'a value'} in step {state.step}" if state.step is not None else "a further step"
    )
    ends = "An open loop ends in no other way. " if state.endless else ""
    return (
        f"the loop over steps asked for {wanted}, which this call did not make. What the loop saved is kept; "
        f"what follows it in the same block did not run.\n{ends}Put what follows into another invoke, "
        f"`with tracer.invoke(): ...`, or after the trace; to make every step happen, give "
        f"`min_new_tokens=`."
    )


NOTHING: Final = object()
"""What a write-back gives where nothing goes back, and the forward is to stay where it is."""


def flushing(mediator: Mediator) -> Callable[[], None]:
    """The `flush` of one worker.

    nnsight's looks up whom to hand control to before it asks what goes back, and a write-back of ours may
    wait for the forward meanwhile, in which time a barrier hands the worker to somebody else.
    """
    reference = weakref.ref(mediator)  # the worker holds this function

    def flush() -> None:
        worker = reference()
        if worker is None:
            return
        waiting, worker.transform = worker.transform, None
        if waiting is None:
            return
        new = waiting.fn()
        if new is not NOTHING:
            current: Any = getcurrent()
            current.parent.switch(Pending(Event.SWAP, waiting.location, waiting.occurrence, new))

    return flush


class StandardInterleaver(Interleaver):
    """nnsight's interleaver, with a fresh ledger for every run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger = Ledger(self)
        self.encoding: dict[str, Any] = {}
        """What the run's call is given: the tokens and mask that are really fed."""
        self.generating = False
        """Whether the run is a `generate`, whose text grows."""
        self.entrance = ""
        """The location of the model's own input, which every forward passes first."""
        self.options: dict[str, Any] = {}
        """The keywords the run's call was given."""
        self._before: dict[str, int] = {}
        """What `counts` stood at when the run began."""
        self.full_prefill = False
        """Whether blocks that borrow keys and values are to see the whole prompt."""

    def __enter__(self) -> StandardInterleaver:
        self.ledger = Ledger(self)
        self._before = dict(self.counts)
        for mediator in self.mediators:
            mediator.flush = flushing(mediator)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> bool:
        stopped = super().__exit__(exc_type, exc_value, traceback)
        if stopped:
            # An early stop ends the moment of what was read last; nothing waits for it any more.
            self.ledger.settle(*self.ledger.waiting())
        return stopped

    def handle(self, provider: str, value: Any) -> Any:
        batcher = self.batcher
        if batcher is None or batcher.media is None:
            return super().handle(provider, value)
        # Serving a worker may run another module, whose locations come between; what a cache keeps is cut
        # when the visit has been counted.
        before = batcher.at, batcher.turn
        batcher.at, batcher.turn = provider, self.counts.get(provider, 0) - self._before.get(provider, 0)
        try:
            return super().handle(provider, value)
        finally:
            batcher.at, batcher.turn = before

    def check_dangling_mediators(self) -> None:
        self._tell_of_one_step_edits()
        # The loop of a stored edit is open, and ends with every call.
        looping = [m for m in self.mediators if m.alive and m.iteration != 0]
        # Ending a block ends its loop, so what is said of that is put together before.
        outrun = {f"'{m.pending}' ": "" if m.copy else outrun_text(self.ledger.of(m)) for m in looping}
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                super().check_dangling_mediators()
        finally:
            for warning in caught:
                text = str(warning.message)
                ours = next((said for place, said in outrun.items() if text.startswith(place)), text)
                if ours:
                    warn(ours, warning.category if ours is text else StepsWarning)
        self.ledger.check(all=True)

    def _tell_of_one_step_edits(self) -> None:
        """Warn of an edit that a run made once where it would have had to be made again."""
        for mediator in self.mediators:
            name = self.ledger.of(mediator).wrote
            if name is None:
                continue
            if name.partition(".")[0] in _WITH_THE_PROMPT:
                self._tell_of_the_other_pass(mediator, name)
            elif self.generating and mediator.copy and mediator.occurrence(self.entrance) > 1:
                warn(
                    f"the edit of {name} that `model.edit()` keeps was made in the first step of this "
                    f"generation, on the prompt, and not on the new tokens.\nTo make it in every step put it "
                    f"into a loop, `for step in tracer.iter[:]: ...`, or use `intervene` or `steer`.",
                    StepsWarning,
                )

    def _tell_of_the_other_pass(self, mediator: Mediator, name: str) -> None:
        """Warn of an edit of what comes of media, where more of it comes: of video, or in a later step."""
        batcher, group = self.batcher, mediator.batch_group
        at_scatter = name.endswith("_features")
        if at_scatter:
            again = self.generating and mediator.occurrence(self.entrance) > 1
            if again and not uses_cache(batcher.envoy):
                warn(
                    f"the edit of {name} was made in the first step of this generation alone: without a "
                    f"cache the features enter the stream anew in every step.\nPut it into a loop, "
                    f"`for step in tracer.iter[:n]: ...`, or leave use_cache on.",
                    StepsWarning,
                )
            return
        both = all(self.encoding.get(given) is not None for given in ("pixel_values", "pixel_values_videos"))
        if not both or not name.startswith(("vision.", "projector.")):
            return
        if group is None or batcher.media is None or _has_both(batcher.media, group):
            warn(
                f"the edit of {name} was made on the images of this call and not on its video, on which the "
                f"tower runs next.\nTo edit both: `for turn in tracer.iter[:2]: ...`.",
                StepsWarning,
            )

    def cancel(self) -> None:
        super().cancel()
        # The states hold workers, whose scopes hold the model and the tensors of the run.
        self.ledger = Ledger(self)
        self.encoding = {}
        self.options = {}
        self.generating = self.full_prefill = False
