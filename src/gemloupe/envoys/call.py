"""The attention call: queries, keys, values, scores and pattern, at the one moment they are known.

transformers calls its attention function with `(module, queries, keys, values, mask)`, after norms,
rotary embedding and cache, under every implementation alike. The values are served while the forward
stands before that call, in any order. What was edited goes back when the block moves on: queries, keys
and values as the call's inputs, scores and pattern as the call's output.

Scores and pattern are computed here, for the block that is asked. If neither is edited, the function's
own output stands, bit for bit; where a gradient is wanted it flows through the values served.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import torch
from greenlet import getcurrent
from nnsight.intervention.eproperty import WriteBack
from nnsight.intervention.interleaver import Event, Mediator, Pending

from ..errors import OutOfOrder
from ..ledger import NOTHING, owner, running, version
from ..served import Served, late_text, marked
from .mixing import Mask, heads_of, pattern_from, pattern_of, read_mask, scores_of, visible_in

__all__ = ["CALL", "AtCall", "AttentionCall", "HeadOutputs"]

CALL: Final = "source.attention_call"

_ARGUMENT: Final = {"queries": 1, "keys": 2, "values": 3}
_MIXED: Final = count(1)


class StraightThrough(torch.autograd.Function):
    """The first argument's bits with the second one's gradient."""

    @staticmethod
    def forward(_ctx: Any, bits: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        return bits.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0]


class Gone(Exception):
    """A tensor of a call that is over: the forward has let go of it."""


class Loan:
    """A tensor that is held only as long as somebody else holds it, or what it is a view of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.owner = weakref.ref(owner(tensor))
        self.itself = weakref.ref(tensor)
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def __call__(self) -> torch.Tensor | None:
        """The tensor, or `None` where it is gone."""
        tensor, whole = self.itself(), self.owner()
        if tensor is not None or whole is None:
            return tensor
        return whole.as_strided(*self.layout)


class AttentionCall:
    """One call of one block, as one worker sees it.

    While the worker stands before the call its tensors are held here. After that they are on loan: a
    query that nobody else needs is not to be kept for the rest of the forward.
    """

    def __init__(self, host: Any, visit: int, raw: tuple, rows: slice) -> None:
        self.host = host
        self.visit = visit
        self.rows = rows
        self.over = False
        """The worker has gone on to something else than this call."""
        self.left = False
        """The worker has waited for others since, who may have edited what it was given."""
        self.changed_heads = False
        """The worker edited the head outputs."""
        self.mixed_as = 0
        """The place of `mixed` among those of all workers."""
        args, self.kwargs = raw
        self.module, self.rest = args[0], args[4:]
        self.given: dict[str, Any] = {role: args[index] for role, index in _ARGUMENT.items()}
        """The call's queries, keys and values, or loans of them."""
        self.lent: dict[str, Loan] = {}
        """What was served and not edited, of a call that has been made."""
        self.edited: set[str] = set()
        """The roles whose edits have gone back."""
        self.held: dict[str, torch.Tensor] = {}
        """What was served, by role; keys and values are copies of this worker's own."""
        self.computed_from: dict[str, tuple] = {}
        """The state of queries and keys that scores and pattern were computed from."""
        self.born: dict[str, int | None] = {role: version(value) for role, value in self.given.items()}
        self.writes: dict[str, int] = {}
        """How often each role was assigned."""
        self.followed: tuple | None = None
        """The state of the scores that the held pattern was computed from."""
        self.mixed: dict[str, torch.Tensor] = {}
        """Scores and pattern as this worker left them, where it edited either."""
        self.inherited: list[AttentionCall] = []
        """Earlier workers' calls whose edited scores or pattern are in the output already."""

    # -- what is served --------------------------------------------------------------------------

    def get(self, role: str) -> torch.Tensor:
        """The value of a role as it stands, edits of this moment included."""
        self._recall()
        if role == "visible":
            return self._visible()
        if role in _ARGUMENT:
            if role not in self.held:
                value = self._given(role)
                self.held[role] = value if role == "queries" else value.clone()
                self.born[role] = version(self.held[role])
            return self.held[role]
        if self._stale():
            self.held.pop("scores", None)
            self.held.pop("pattern", None)
        if role == "scores":
            if "scores" not in self.held:
                self.held["scores"] = self._inherit("scores", self._scores(), self.inherited)
                self.born["scores"] = version(self.held["scores"])
            return self.held["scores"]
        if "pattern" not in self.held or self._outdated():
            wanted = self._given("queries").requires_grad or self._given("keys").requires_grad
            if torch.is_grad_enabled() and wanted:
                self.get("scores")  # the gradient reaches the pattern through the scores, read or not
            known = self.held.get("scores")
            pattern = pattern_from(*self._inputs()) if known is None else self._pattern_of(known)
            if known is None:
                pattern = self._inherit("pattern", pattern, self.inherited)
            # torch keeps the softmax's output for its backward pass, where an edit in place would spoil it.
            self.held["pattern"] = pattern.clone() if pattern.requires_grad else pattern
            self._take_pattern()
        return self.held["pattern"]

    def _pattern_of(self, scores: torch.Tensor) -> torch.Tensor:
        """The pattern that follows from these scores, which have earlier workers' edits of scores in them."""
        fixed = [other for other in self.inherited if "scores" not in other.mixed]
        return self._inherit("pattern", pattern_of(scores), fixed)

    def _take_pattern(self) -> None:
        self.born["pattern"] = version(self.held["pattern"])
        self.followed = self._state("scores") if "scores" in self.held else None

    def _outdated(self) -> bool:
        """Whether the scores were edited after the pattern was computed from them."""
        if "scores" not in self.held or "pattern" not in self.held:
            return False
        known = self.followed if self.followed is not None else (0, False)
        moved = self._state("scores") != known
        if moved and self._edited("pattern"):
            raise OutOfOrder(
                f"{self._name('attention_scores')} was edited after attention_probabilities was read, and "
                f"both were edited: the pattern follows from the scores.\n"
                f"Edit the scores first, then read the pattern."
            )
        return moved

    def put(self, role: str, new: torch.Tensor) -> None:
        """Take `new` for a role."""
        if role == "scores" and "pattern" in self.held and self._edited("pattern"):
            raise OutOfOrder(
                f"{self._name('attention_scores')} was written after attention_probabilities, which was "
                f"edited: the pattern follows from the scores.\nEdit the scores first, then read the pattern."
            )
        self.held[role] = new
        self.writes[role] = self.writes.get(role, 0) + 1
        self.born[role] = version(new)
        if role == "scores":
            self.held.pop("pattern", None)
        if role == "pattern":
            self._take_pattern()
        if role in ("scores", "pattern"):
            self._remember()

    def _scores(self) -> torch.Tensor:
        return scores_of(*self._inputs())

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, float, Mask]:
        """Queries, keys, scaling and mask, as they stand."""
        # Where a gradient is wanted, from the copy that keys are served as, now or later.
        keys = self.get("keys") if self._given("keys").requires_grad else self._current("keys")
        queries = self._current("queries")
        self._remember()
        return queries, keys, self.kwargs.get("scaling", 1.0), self._mask(queries, keys)

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor) -> Mask:
        """The mask as the attention function was given it."""
        mask = self.rest[0] if self.rest else self.kwargs.get("attention_mask")
        eager = self.module.config._attn_implementation == "eager"
        causal = not eager and getattr(self.module, "is_causal", True)
        return read_mask(mask, queries, keys, causal=causal, rows=self.rows)

    def _visible(self) -> torch.Tensor:
        """Which keys each query may see, `[batch heads query key]`."""
        queries, keys = self._current("queries"), self._current("keys")
        visible = visible_in(self._mask(queries, keys), queries, keys)
        return visible.expand(*queries.shape[:3], keys.shape[-2])

    def _inherit(self, role: str, own: torch.Tensor, earlier: list[AttentionCall]) -> torch.Tensor:
        """`own`, with the rows that an earlier worker edited as it left them."""
        for other in earlier:
            theirs = other.mixed.get(role)
            if theirs is None:
                continue
            start = (other.rows.start or 0) - (self.rows.start or 0)
            if start < 0:  # theirs covers the whole batch, ours some rows of it
                theirs = theirs[-start : -start + own.shape[0]]
                start = 0
            own = torch.cat([own[:start], theirs[: own.shape[0] - start], own[start + theirs.shape[0] :]])
        return own

    def _current(self, role: str) -> torch.Tensor:
        return self.held[role] if role in self.held else self._given(role)

    def _given(self, role: str) -> torch.Tensor:
        value = self.given[role]
        tensor = value() if isinstance(value, Loan) else value
        if tensor is None:
            raise Gone
        return tensor

    def _remember(self) -> None:
        self.computed_from = {role: self._state(role) for role in ("queries", "keys")}

    def _state(self, role: str) -> tuple:
        """What tells one state of a role from another: how often it was assigned, and its version."""
        try:
            current = self._current(role)
        except Gone:
            return self.computed_from[role]
        return self.writes.get(role, 0), version(current) != self.born[role] and version(current)

    def _stale(self) -> bool:
        """Whether queries or keys changed after scores or pattern were computed from them."""
        moved = any(self._state(role) != known for role, known in self.computed_from.items())
        if moved and any(self._edited(role) for role in ("scores", "pattern") if role in self.held):
            raise OutOfOrder(
                f"{self._name('attention_queries')} or attention_keys was edited after the scores or the "
                f"pattern that follow from them were edited.\nEdit queries and keys first."
            )
        return moved

    def _edited(self, role: str) -> bool:
        if role in self.writes or role in self.edited:
            return True
        return self.host.interleaver.ledger.changed(self.held[role])

    def _name(self, value: str) -> str:
        return f"{self.host.standard_path}.{value}"

    # -- what goes back --------------------------------------------------------------------------

    @property
    def mixes(self) -> bool:
        """Whether scores or pattern were served, so that the call's output may have to follow them."""
        return (
            "scores" in self.held
            or "pattern" in self.held
            or ("values" in self.held and bool(self.inherited))
        )

    def back(self, descriptor: Served) -> WriteBack:
        """The write-back nnsight performs when the worker moves on."""
        end = "output" if self.mixes else "input"
        location = self.host.location(f"{CALL}.{end}")
        return WriteBack(self.finish, tuple(self.held.values()), descriptor, location, self.visit)

    def finish(self) -> Any:
        """What goes back at the location of `back`: the call's inputs, or its output."""
        result = self._settled()
        self.lend()
        return result

    def _settled(self) -> Any:
        stale = self.mixes and self._stale()
        self._outdated()
        edited = {role for role in self.held if self._edited(role)}
        self.host.interleaver.ledger.settle(*self.held.values())
        self._refuse_fixed(edited)
        self.edited |= edited
        follows = edited & {"scores", "pattern"}
        if self.inherited and "values" in edited and not follows:
            follows = {"values"}  # what an earlier worker made of the pattern, over these values
            self.get("pattern")
            edited = edited | {"pattern"}
        wanted = any(self.held[role].requires_grad for role in ("scores", "pattern") if role in self.held)
        arguments = self._arguments(edited)
        if arguments:
            # Only what was edited: others may have edited the rest since.
            args, kwargs = self._at("input", Event.VALUE)
            new = tuple(arguments.get(index, argument) for index, argument in enumerate(args))
            self._at("input", Event.SWAP, (new, kwargs))
        dropout = self.kwargs.get("dropout", 0.0)
        # Where nothing was edited, scores and pattern are put on the way of the gradient: unless dropout
        # draws in the kernel what cannot be drawn again here.
        if not follows and (stale or not wanted or dropout):
            return NOTHING
        if follows:
            self.mixed = {"pattern": self._pattern(edited)}
            self.mixed_as = next(_MIXED)
            if "scores" in self.held and "pattern" not in edited:
                self.mixed["scores"] = self.held["scores"]
        output, *rest = raw = self._at("output", Event.VALUE)
        others = self._others_changed_heads()
        if not follows and others:
            return raw
        if others:
            raise OutOfOrder(
                f"{self._name('attention_head_outputs')} was edited by an earlier block of code (an edit of "
                f"the model, or another invoke), and its pattern, scores or values by this one: the heads "
                f"follow from them.\nEdit them in one block, in that order."
            )
        pattern = self._pattern(edited)
        drawn = torch.nn.functional.dropout(pattern, dropout) if dropout else pattern
        mixed = heads_of(drawn, self._current("values"))
        if not follows:
            return (StraightThrough.apply(output.detach(), mixed), *rest)
        weights = pattern if rest and rest[0] is not None else None
        return (mixed, weights, *rest[1:])

    def _refuse_fixed(self, edited: set[str]) -> None:
        """Refuse edits of what the scores or the pattern follow from, where an earlier worker fixed those."""
        if self.inherited and edited & {"queries", "keys"}:
            raise OutOfOrder(
                f"{self._name('attention_queries')} or attention_keys was edited after an earlier block "
                f"of code (an edit of the model, or another invoke) fixed the scores or the pattern."
            )
        if "scores" in edited and any("scores" not in other.mixed for other in self.inherited):
            raise OutOfOrder(
                f"{self._name('attention_scores')} was edited after an earlier block of code (an edit of the "
                f"model, or another invoke) fixed the pattern.\nEdit attention_probabilities here, or the "
                f"scores there."
            )

    def _others_changed_heads(self) -> bool:
        """Whether an earlier worker that shares rows with this one edited what the heads made."""
        return any(other.changed_heads for other in others_at(self))

    def may_wait(self, mediator: Mediator) -> bool:
        """Whether `mediator` holds values of this call and has edited none: nothing need go back yet."""
        waiting = mediator.transform
        return waiting is not None and waiting.fn == self.finish and not any(map(self._edited, self.held))

    def _others_edited(self) -> bool:
        """Whether another worker that shares rows with this one has edited what the call is given."""
        return any(other.edited & _ARGUMENT.keys() for other in others_at(self))

    def lend(self) -> None:
        """Hold no more than what was edited, which nobody else may hold; the rest while others do."""
        for role, value in self.given.items():
            if not isinstance(value, Loan) and not value.requires_grad:
                self.given[role] = Loan(value)
        for role, value in list(self.held.items()):
            if role not in self.edited and not value.requires_grad:
                self.lent[role] = Loan(self.held.pop(role))

    def _recall(self) -> None:
        """Hold again what is still there of what was lent."""
        for role, loan in self.lent.items():
            value = loan()
            if value is not None:
                self.held[role] = value
            elif role in _ARGUMENT:  # the copy is gone, and the call's own is what it was a copy of
                self.born[role] = version(self._given(role))
        self.lent.clear()

    def release(self) -> None:
        """The worker has gone on to something else: hold nothing."""
        self.over = True
        for kept in (self.given, self.lent, self.held, self.computed_from):
            kept.clear()
        self.inherited = []

    def _pattern(self, edited: set[str]) -> torch.Tensor:
        if "pattern" not in self.held or ("pattern" not in edited and self._outdated()):
            self.held["pattern"] = self._pattern_of(self.held["scores"])
        return self.held["pattern"]

    def _arguments(self, edited: set[str]) -> dict[int, torch.Tensor]:
        """What of the call's inputs goes back, by its place among them."""
        # A copy that carries a gradient goes back unedited too, to be on the path to the logits.
        return {
            _ARGUMENT[role]: value
            for role, value in self.held.items()
            if role in _ARGUMENT and (role in edited or value.requires_grad) and value is not self.given[role]
        }

    def _at(self, end: str, event: Event, *value: Any) -> Any:
        """Ask for a location at this call's own visit, whichever step the worker has moved on to."""
        location = self.host.location(f"{CALL}.{end}")
        worker: Any = getcurrent()
        return worker.parent.switch(Pending(event, location, self.visit, *value))


class HeadOutputs(Served):
    """`attention_head_outputs`: the call's output, which is read without losing its inputs."""

    def _read(self, obj: Any, mediator: Mediator, state: Any, name: str) -> Any:
        self._keep_call(obj, mediator, state)
        return super()._read(obj, mediator, state, name)

    def _write(self, obj: Any, mediator: Mediator, state: Any, name: str, value: torch.Tensor) -> None:
        self._keep_call(obj, mediator, state)
        super()._write(obj, mediator, state, name, value)
        self._note_change(state)

    def settle(self, host: Any, view: Any, raw: Any) -> Any:
        mediator, ledger = running(host.interleaver), host.interleaver.ledger
        if mediator is not None and ledger.changed(view):
            self._note_change(ledger.of(mediator))
        return super().settle(host, view, raw)

    def _note_change(self, state: Any) -> None:
        if state.call is not None:
            state.call.changed_heads = True

    def _keep_call(self, obj: Any, mediator: Mediator, state: Any) -> None:
        visit = self._visit(obj, mediator, state)
        entrance = obj.location(f"{CALL}.input")
        known = _is_call(state.call, obj, visit)
        if mediator.occurrence(entrance) <= visit and not known:
            pinned = mediator.iteration  # nnsight lets go of it once it is served
            state.call = open_call(obj, mediator, visit, Mediator.value(entrance))
            state.call.lend()
            mediator.iteration = pinned

    def _leave(self, obj: Any, mediator: Mediator, state: Any) -> None:
        if not _is_call(state.call, obj, self._visit(obj, mediator, state)):
            super()._leave(obj, mediator, state)


def open_call(host: Any, mediator: Mediator, visit: int, raw: tuple) -> AttentionCall:
    """The call as `mediator` sees it, with what earlier workers made of its scores and pattern."""
    call = AttentionCall(host, visit, raw, host.rows(mediator))
    call.inherited = sorted(
        (other for other in others_at(call) if other.mixed), key=lambda other: other.mixed_as
    )
    return call


def others_at(call: AttentionCall) -> Iterator[AttentionCall]:
    """The same call as other workers see it, whose rows overlap with this one's."""
    for state in call.host.interleaver.ledger.states():
        other = state.call
        if other is not call and _is_call(other, call.host, call.visit) and overlap(other.rows, call.rows):
            yield other


def overlap(one: slice, other: slice) -> bool:
    """Whether two workers share rows; a slice without bounds is the whole batch."""
    if one.stop is None or other.stop is None:
        return True
    return one.start < other.stop and other.start < one.stop


def _is_call(call: AttentionCall | None, host: Any, visit: int) -> bool:
    return call is not None and call.host is host and call.visit == visit


class AtCall(Served):
    """A value of the attention call, by its role there."""

    def __init__(self, role: str, **options: Any) -> None:
        super().__init__(f"{CALL}.input", **options)
        self.role = role

    def _read(self, obj: Any, mediator: Mediator, state: Any, name: str) -> Any:
        call, late = self._call(obj, mediator, state, name, "read")
        ledger = obj.interleaver.ledger
        if late:
            # The call is over: what it was given may still be known, and editing it comes too late.
            try:
                value = call.get(self.role)
            except Gone:
                raise OutOfOrder(late_text(name, state.last, "read")) from None
            call.lend()
            ledger.watch(value, name, after=state.last)
            return value
        value = call.get(self.role)
        state.last = name
        ledger.watch(value, name)
        mediator.transform = call.back(self)
        return marked(value, own=False)

    def _write(self, obj: Any, mediator: Mediator, state: Any, name: str, value: torch.Tensor) -> None:
        call, late = self._call(obj, mediator, state, name, "write")
        if late:
            raise OutOfOrder(late_text(name, state.last, "write"))
        current = call.get(self.role)
        if value is not current:
            obj.interleaver.ledger.settle(current)  # what was edited in place is overwritten
            self.accept(obj, name, value, current)
            value = value.clone()
            call.put(self.role, value)
            obj.interleaver.ledger.watch(value, name)
        mediator.transform = call.back(self)

    def _call(
        self, obj: Any, mediator: Mediator, state: Any, name: str, what: str
    ) -> tuple[AttentionCall, bool]:
        """The call of the present visit, and whether the forward has passed it."""
        visit = self._visit(obj, mediator, state)
        location = self._location(obj)
        call = state.call
        known = _is_call(call, obj, visit)
        if self._is_late(obj, mediator, state, location):
            if not known or call.over:
                raise OutOfOrder(late_text(name, state.last, what))
            return call, True
        if known and call.left:
            call.left = False
            if call._others_edited():
                mediator.transform = None if call.may_wait(mediator) else mediator.transform
                known = False  # to be asked for anew
        if known:
            waiting = mediator.transform
            if waiting is not None and waiting.fn != call.finish:
                mediator.flush()
            return call, False
        raw = Mediator.value(location)
        state.call = open_call(obj, mediator, visit, raw)
        return state.call, False
