"""The descriptor that a standard value is.

One `served` descriptor owns a value: its name, docstring, location in the forward, layout,
availability, the view a reader gets, and how a write goes back. Outside a trace it gives a
`Reference`. Inside one it is nnsight's `eproperty`: a read waits for the forward to reach the
location, a write replaces what flows on.

    @served("post_attention_layernorm.output", of="block")
    def attention_output(self, value) -> Residual:
        '''What the attention adds to the stream, after its post-norm, unscaled.'''
        return value
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Mediator, OutOfOrderError

from . import layouts
from .errors import BadWrite, NeverRan, OutOfOrder, OutsideTrace, ReadOnly, Unavailable
from .layouts import LAYOUTS, Layout
from .ledger import running, same_memory, same_view
from .prompts import cached_tokens
from .references import Reference

__all__ = [
    "Argument",
    "Field",
    "Item",
    "Keyword",
    "Moment",
    "Served",
    "TokenMask",
    "Whole",
    "served",
    "served_values",
]


@dataclass(frozen=True)
class Whole:
    """The value at the location is the value served."""

    def take(self, raw: Any) -> Any:
        return raw

    def put(self, raw: Any, new: Any) -> Any:
        return new


@dataclass(frozen=True)
class Argument:
    """One argument of a call; the location serves `(args, kwargs)`."""

    index: int
    name: str = ""

    def take(self, raw: Any) -> Any:
        args, kwargs = raw
        return args[self.index] if len(args) > self.index else kwargs[self.name]

    def put(self, raw: Any, new: Any) -> Any:
        args, kwargs = raw
        if len(args) > self.index:
            return (*args[: self.index], new, *args[self.index + 1 :]), kwargs
        return args, {**kwargs, self.name: new}


@dataclass(frozen=True)
class Keyword:
    """An argument that a call is given by keyword; the location serves `(args, kwargs)`."""

    name: str

    def take(self, raw: Any) -> Any:
        value = raw[1].get(self.name)
        if not isinstance(value, torch.Tensor):
            raise NeverRan(f"this call was given no `{self.name}` tensor, so there is none to serve.")
        return value

    def put(self, raw: Any, new: Any) -> Any:
        args, kwargs = raw
        return args, {**kwargs, self.name: new}


@dataclass(frozen=True)
class TokenMask(Keyword):
    """The mask of real tokens; transformers leaves it out of a call in which every token is real."""

    name: str = "attention_mask"

    def take(self, raw: Any) -> Any:
        _, kwargs = raw
        if kwargs.get(self.name) is not None:
            return super().take(raw)
        ids, places = kwargs.get("input_ids", kwargs.get("inputs_embeds")), kwargs.get("position_ids")
        if ids is None:
            return super().take(raw)
        # The tokens of the cache are covered too.
        total = cached_tokens(kwargs) + ids.shape[1] if places is None else int(places.max()) + 1
        return ids.new_ones(ids.shape[0], total, dtype=torch.int64)


@dataclass(frozen=True)
class Item:
    """One element of a tuple the location serves."""

    index: int

    def take(self, raw: Any) -> Any:
        return raw[self.index]

    def put(self, raw: Any, new: Any) -> Any:
        return (*raw[: self.index], new, *raw[self.index + 1 :])


@dataclass(frozen=True)
class Field:
    """One field of a transformers `ModelOutput` the location serves."""

    name: str

    def take(self, raw: Any) -> Any:
        if isinstance(raw, tuple):
            raise BadWrite(
                f"the call was asked for a tuple, which has no `{self.name}`; leave out return_dict=False."
            )
        return raw[self.name]

    def put(self, raw: Any, new: Any) -> Any:
        result = raw.copy()
        result[self.name] = new
        return result


@dataclass(frozen=True)
class Moment:
    """Locations that the forward passes in one breath, so that their values may be read in any order.

    Reading a later one keeps what the earlier ones held. `anchor` is passed just before them; what
    it holds has the shape of the residual stream, for values that the model holds flat over tokens.
    """

    name: str
    of: str
    anchor: str
    members: tuple[str, ...]


class Served(eproperty):
    """A standard value; see `served`."""

    def __init__(
        self,
        at: str,
        *,
        of: str = "self",
        piece: Any = None,
        needs: Callable[[Any], str | None] | None = None,
        read_only: str | None = None,
        moment: Moment | None = None,
        private: bool = False,
        renamed: bool = False,
        kept_by_autograd: bool = False,
    ) -> None:
        super().__init__(key=at)
        self.at = at
        self.of = of
        self.piece = Whole() if piece is None else piece
        self.needs = needs
        self.read_only = read_only
        self.moment = moment
        self.private = private
        self.renamed = renamed
        """The model holds its memory under an earlier name too: a block's output is the next one's input."""
        self.kept_by_autograd = kept_by_autograd
        """torch keeps this very memory for its backward pass, so that an edit in place would spoil it."""
        self.axes: Mapping[str, str] = {}
        """Axes that go by another name on this kind of host; see `on`."""
        self._back: Callable[[Any, Any, Any], Any] | None = None
        self._check: Callable[[Any, Any], None] | None = None
        self._stub: Callable[[Any, Any], Any]

    def __call__(self, stub: Callable[[Any, Any], Any]) -> Served:
        super().__call__(stub)
        self._stub = stub
        self._preprocess = self._serve
        self._transform = self.settle
        self.description = self.meaning
        return self

    def back(self, function: Callable[[Any, Any, Any], Any]) -> Served:
        """Register the inverse of the view: `(host, new, piece)` to what the model holds there."""
        self._back = function
        return self

    def check(self, function: Callable[[Any, Any], None]) -> Served:
        """Register a check of a written value beyond shape, dtype and device: `(host, new)`."""
        self._check = function
        return self

    def on(
        self, axes: Mapping[str, str], *, needs: Callable[[Any], str | None] | None = None, doc: str = ""
    ) -> Served:
        """The same value of another kind of host, some axes by another name there.

        What is bound to the descriptor is bound anew; `doc` replaces its docstring, if it is given.
        """
        other = type(self).__new__(type(self))
        property.__init__(other)
        vars(other).update(vars(self))
        other.axes, other.needs = axes, needs
        other._preprocess, other._transform = other._serve, other.settle
        other.__doc__ = doc or _renamed(self.__doc__ or "", axes)
        other.description = other.meaning
        return other

    # -- what it is ------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout its stub names as return annotation."""
        hint = self._stub.__annotations__["return"]
        if not isinstance(hint, str):  # a module without postponed annotations
            hint = next(name for name, alias in vars(layouts).items() if alias is hint)
        layout = LAYOUTS[hint.removesuffix("Layout")]
        if not self.axes:
            return layout
        return replace(layout, axes=tuple(self.axes.get(axis, axis) for axis in layout.axes))

    @property
    def meaning(self) -> str:
        """The first line of its docstring."""
        return (self.__doc__ or "").strip().split("\n")[0]

    def __str__(self) -> str:
        return f"({self.name}) {self.layout}: {self.meaning}"

    def path_on(self, host: Any) -> str:
        """The standard path of this value on `host`, as a user writes it after `model.`."""
        prefix = host.standard_path
        return f"{prefix}.{self.name}" if prefix else str(self.name)

    def why_not(self, host: Any) -> str | None:
        """Why `host` lacks this value and what to use instead, or `None` where it has it."""
        return None if self.needs is None else self.needs(host)

    def reference(self, host: Any) -> Reference:
        """The value, by name."""
        return Reference(self.path_on(host), self.layout, self.meaning, self.read_only is None)

    # -- where it is -----------------------------------------------------------------------------

    def _location(self, obj: Any) -> str:
        return obj.relative(self.of).location(self.at)

    # -- reading ---------------------------------------------------------------------------------

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        reason = self.why_not(obj)
        if reason is not None:
            raise Unavailable(f"{self.path_on(obj)}: {reason}")
        mediator = running(obj.interleaver)
        if mediator is None:
            self._refuse_foreign(obj)
            return self.reference(obj)
        state = obj.interleaver.ledger.of(mediator)
        state.asked = name = self.path_on(obj)
        obj.check_runs(self, mediator, state)
        with _translated(mediator, name), _on_pass(mediator, obj.first_pass(self, mediator)):
            return self._read(obj, mediator, state, name)

    def _read(self, obj: Any, mediator: Mediator, state: Any, name: str) -> Any:
        """The value, for the worker that is running."""
        location = self._location(obj)
        visit = self._visit(obj, mediator, state)
        if self._is_late(obj, mediator, state, location):
            if (location, visit) not in state.captured:
                raise OutOfOrder(late_text(name, state.last, "read"))
            raw = state.captured[(location, visit)]
            value = self.view(obj, raw)
            obj.interleaver.ledger.watch(value, name, after=state.last)
            return value
        self._leave(obj, mediator, state)
        if self.moment is not None:
            self._capture(obj, mediator, state, location)
        value = super().__get__(obj)
        if self.moment is not None:
            state.captured[(location, visit)] = state.raw
        state.raw = None  # not to be kept for the rest of the forward
        state.last = name
        obj.interleaver.ledger.watch(value, name)
        return value

    def _serve(self, host: Any, raw: Any) -> Any:
        mediator = running(host.interleaver)
        if mediator is not None:
            host.interleaver.ledger.of(mediator).raw = raw
        return self.view(host, raw)

    def view(self, host: Any, raw: Any) -> Any:
        """What the reader gets of what the location holds."""
        value = self.current(host, raw)
        if isinstance(value, torch.Tensor):
            spoiled = self.kept_by_autograd and value.requires_grad and torch.is_grad_enabled()
            if self.private or spoiled or self._is_held(host, value):
                return value.clone()
        return marked(value, own=value is not self.piece.take(raw))

    def _is_held(self, host: Any, value: torch.Tensor) -> bool:
        """Whether a block of code still holds this memory under the name it had before.

        An edit of it in place would change what was read, and perhaps saved, under that name; it is served
        as a copy then.
        """
        return self.renamed and host.interleaver.ledger.holds(value, self.path_on(host))

    def current(self, host: Any, raw: Any) -> Any:
        """The value as the model holds it, in its standard layout."""
        try:
            return self._stub(host, self.piece.take(raw))
        except AttributeError as error:
            # Python takes an `AttributeError` in a descriptor for "no such attribute".
            raise RuntimeError(f"serving {self.path_on(host)} failed: {error!r}") from error

    def settle(self, host: Any, view: Any, raw: Any) -> Any:
        """The moment of a read is over: what goes back into the forward."""
        edited = host.interleaver.ledger.settle(view)
        if edited and self.read_only is not None:
            raise ReadOnly(f"{self.path_on(host)} cannot be edited: {self.read_only}")
        if edited and self._check is not None:
            self._check(host, view)
        may_be_copy = self.kept_by_autograd or isinstance(self.piece, Argument)
        copied = self.private or (may_be_copy and not same_memory(view, self.piece.take(raw)))
        if not copied or not (edited or getattr(view, "requires_grad", False)):
            return raw
        # A copy that carries a gradient goes back unedited too, to be on the path to the logits.
        return self._replace(host, raw, view)

    def _replace(self, host: Any, raw: Any, new: Any) -> Any:
        piece = self.piece.take(raw)
        return self.piece.put(raw, new if self._back is None else self._back(host, new, piece))

    # -- writing ---------------------------------------------------------------------------------

    def __set__(self, obj: Any, value: Any) -> None:
        name = self.path_on(obj)
        reason = self.why_not(obj)
        if reason is not None:
            raise Unavailable(f"{name}: {reason}")
        if self.read_only is not None:
            raise ReadOnly(f"{name} cannot be written: {self.read_only}")
        mediator = running(obj.interleaver)
        if mediator is None:
            self._refuse_foreign(obj)
            raise OutsideTrace(
                f"`{name}` was written where no forward is running.\nWrite it inside one:\n"
                f"    with model.trace(prompt):\n        model.{name} = value\n"
                f"or for every later trace: `with model.edit() as (tracer, edited): ...`."
            )
        if not isinstance(value, torch.Tensor):
            raise BadWrite(
                f"{name} takes a tensor of layout {self.layout}, not {type(value).__name__}. "
                f"To fill it: `model.{name}[:] = ...`."
            )
        state = obj.interleaver.ledger.of(mediator)
        state.asked = name
        obj.check_runs(self, mediator, state)
        with _translated(mediator, name), _on_pass(mediator, obj.first_pass(self, mediator)):
            self._write(obj, mediator, state, name, value)
        obj.interleaver.ledger.check()
        obj.interleaver.ledger.wrote(name)
        state.last = name

    def _write(self, obj: Any, mediator: Mediator, state: Any, name: str, value: torch.Tensor) -> None:
        """Take `value`, for the worker that is running."""
        location = self._location(obj)
        visit = self._visit(obj, mediator, state)
        if self._is_late(obj, mediator, state, location):
            raise OutOfOrder(late_text(name, state.last, "write"))
        self._leave(obj, mediator, state)
        if self.moment is not None:
            self._capture(obj, mediator, state, location)
        raw = Mediator.value(location)
        view = self.current(obj, raw)
        if not same_view(value, view):
            self.accept(obj, name, value, view)
            # A copy: the model may edit what it is given in place, and the caller may edit what it gave.
            value = value.clone()
        obj.interleaver.ledger.watch(value, name)
        replaced = self._replace(obj, raw, value)
        Mediator.swap(location, replaced)
        if self.moment is not None:
            state.captured[(location, visit)] = replaced

    def accept(self, host: Any, name: str, new: torch.Tensor, view: Any) -> None:
        """Refuse a write that does not fit what is there.

        Raises: BadWrite.
        """
        if new.shape != view.shape:
            raise BadWrite(
                f"{name} has shape {tuple(view.shape)} {self.layout}; the write has {tuple(new.shape)}. "
                f"To broadcast, write in place: `model.{name}[:] = ...`."
            )
        if new.dtype != view.dtype:
            raise BadWrite(
                f"{name} is {view.dtype}; the write is {new.dtype}. Write `value.to({view.dtype})`."
            )
        if new.device != view.device:
            raise BadWrite(
                f"{name} is on {view.device}; the write is on {new.device}. "
                f"Write `value.to({str(view.device)!r})`."
            )
        if self._check is not None:
            self._check(host, new)

    # -- order -----------------------------------------------------------------------------------

    def _visit(self, obj: Any, mediator: Mediator, state: Any) -> int:
        """Which visit of the location a request made now is meant for."""
        if mediator.iteration is not None:
            return mediator.iteration
        if state.step is not None:
            return state.step
        # Relaxed with no step of our own: the forward that is running.
        return mediator.occurrence(obj.root.location("output"))

    def _is_late(self, obj: Any, mediator: Mediator, state: Any, location: str) -> bool:
        return mediator.occurrence(location) > self._visit(obj, mediator, state)

    def _leave(self, obj: Any, mediator: Mediator, state: Any) -> None:
        """The worker goes on from the attention call it may stand at, which need keep nothing more for it."""
        if state.call is not None and not state.call.over:
            mediator.flush()  # what it edited there goes back first
            state.call.release()

    def _capture(self, obj: Any, mediator: Mediator, state: Any, location: str) -> None:
        """Keep what the earlier locations of this value's moment hold, as the forward passes them."""
        moment = self.moment
        assert moment is not None
        host = obj.relative(moment.of)
        visit = self._visit(obj, mediator, state)
        key = (host.path, moment.name, visit)
        if state.moment != key:
            mediator.flush()  # a write-back of the moment before may need what it captured
            state.captured.clear()
            state.moment = key
        for at in (moment.anchor, *moment.members):
            earlier = host.location(at)
            if earlier == location:
                return
            if (earlier, visit) in state.captured or mediator.occurrence(earlier) > visit:
                continue
            state.captured[(earlier, visit)] = Mediator.value(earlier)

    def _refuse_foreign(self, obj: Any) -> None:
        """A block that runs beside something else than this model's forward cannot be served."""
        if running_any():
            raise OutsideTrace(
                f"{self.path_on(obj)} was asked for inside a block that does not run beside this model's "
                f"forward (a backward block, or another model's trace).\nRead it before that block opens."
            )


served = Served


def _renamed(text: str, axes: Mapping[str, str]) -> str:
    """A docstring whose layouts, in brackets, name the axes anew."""

    def layout(match: re.Match[str]) -> str:
        return f"[{' '.join(axes.get(axis, axis) for axis in match[1].split())}]"

    return re.sub(r"\[([a-z_ ]+)\]", layout, text)


def marked(value: Any, *, own: bool) -> Any:
    """Let `.grad` of a view be taken from the tensor it is a view of.

    A view made here (`own`) is not itself on the way to the logits, nor is one that nnsight cut to an
    invoke's rows. nnsight reads the gradient of a marked view off its base, by the view's strides
    (`nnsight.intervention.backward`), so the base's gradient has to be laid out as the base is.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value._base is None:
        return value
    if own:
        setattr(value, "_nnsight_batch", True)  # noqa: B010  # nnsight's own mark
    if getattr(value, "_nnsight_batch", False):
        size, stride = value._base.size(), value._base.stride()

        def laid_out(gradient: torch.Tensor) -> torch.Tensor:
            if gradient.stride() == stride and gradient.storage_offset() == 0:
                return gradient
            return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(
                gradient
            )

        value._base.register_hook(laid_out)
    return value


def running_any() -> bool:
    """Whether some worker, of any run, is executing now."""
    from greenlet import getcurrent

    reference = getattr(getcurrent(), "mediator", None)
    return reference is not None and reference() is not None


class _translated:
    """Says in the user's words what nnsight says of a request that was never served."""

    def __init__(self, mediator: Mediator, name: str) -> None:
        self.mediator = mediator
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        # A loop over steps that outran the run ends by nnsight's own error, which it catches again.
        if isinstance(error, OutOfOrderError) and self.mediator.iteration == 0:
            raise NeverRan(
                f"{self.name} was asked for, but this call did not run the module it belongs to "
                f"(or was stopped before it)."
            ) from None


class _on_pass:
    """Asks for a later pass of a module that runs several times a forward, as a tower does for video."""

    def __init__(self, mediator: Mediator, passes: int) -> None:
        self.mediator = mediator
        self.passes = passes

    def __enter__(self) -> None:
        self.before = self.mediator.iteration
        if self.passes:
            self.mediator.iteration = (self.before or 0) + self.passes

    def __exit__(self, *_: Any) -> None:
        if self.passes:
            self.mediator.iteration = self.before


def late_text(name: str, last: str | None, what: str) -> str:
    """The message of a request that came after its value had passed."""
    after = f", after {last}" if last else ""
    fix = (
        f"{what.capitalize()} {name} before {last}"
        if last
        else f"Move the {what} of {name} up, or, where this invoke waits at a barrier, let the other one "
        f"reach it sooner"
    )
    return (
        f"the {what} of {name} comes too late{after}: the forward has already passed it.\n"
        f"{fix}; inside a trace values come in forward order."
    )


def served_values(kind: type) -> dict[str, Served]:
    """Every standard value that hosts of class `kind` serve, by name, in the order they are written."""
    found: dict[str, Served] = {}
    for base in reversed(kind.__mro__):
        for name, attribute in vars(base).items():
            if isinstance(attribute, Served):
                found[name] = attribute
            elif name in found:
                del found[name]
    return found
