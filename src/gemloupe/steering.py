"""Edits by one call: steering, a function of a value, and silencing blocks.

They run beside the block they are called in, so they use nothing of its order up, and say what they did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from nnsight.intervention.interleaver import Mediator

from . import positions as place
from .errors import BadArgument, BadWrite, NothingEdited
from .generation import one_step_each
from .notices import warn
from .paths import find
from .positions import Positions
from .references import Reference
from .workers import caller, kept, start_beside, steps

__all__ = ["Edited", "When", "intervene", "skip_layers", "steer"]

When = Literal["prompt", "new", "both"]


@dataclass
class Edited:
    """What an edit did: how many positions it changed in each block. Complete when the trace is over."""

    verb: str
    value: str
    layers: tuple[int, ...]
    counts: dict[int, int] = field(default_factory=dict)
    """Block to the number of positions edited there, summed over rows and steps."""

    @property
    def positions(self) -> int:
        """Positions edited in the block that was edited least."""
        return min((self.counts.get(layer, 0) for layer in self.layers), default=0)

    def __str__(self) -> str:
        done = ", ".join(f"layers[{layer}]: {self.counts.get(layer, 0)}" for layer in self.layers)
        return f"{self.verb} {self.value}: positions edited in {done}"


def steer(
    model: Any,
    layers: int | Iterable[int],
    vector: torch.Tensor,
    factor: float = 1.0,
    *,
    positions: Positions = None,
    at: str | Reference = "layer_output",
    when: When = "both",
) -> Edited:
    """Add `factor * vector` to a value of some blocks, inside a trace.

    `vector` is `[hidden]`, or anything that broadcasts to `[batch seq hidden]`; it follows the stream's
    device and dtype. `positions` counts real tokens from 0, or from the end if negative (a slice, a list
    and a boolean mask work too); all of them by default. `at` names the value: `layer_output`,
    `mlp_output`, `attention_output`, any that is laid out `[batch seq hidden]`. In `generate`, `when`
    chooses the prompt, the new tokens or both; positions count through both. Inside
    `for step in tracer.iter[...]` it edits that step alone.

    Returns a report of how many positions were edited, complete when the trace is over. Where none was, a
    `NothingEdited` warning says so.

    Raises: BadArgument, before anything runs, for a block out of range, a vector of the wrong width, a
    position past the sequence, or a value of another layout; OutsideTrace; OutOfOrder, for a block that
    has passed.
    """
    if not isinstance(vector, torch.Tensor) or vector.dim() == 0 or vector.shape[-1] != model.hidden_size:
        got = tuple(vector.shape) if isinstance(vector, torch.Tensor) else type(vector).__name__
        caller(model, "steer")
        raise BadArgument(
            f"steer: the vector must be {model.hidden_size} wide, as the stream is; it is {got}."
        )

    def add(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        try:
            added = (factor * vector.to(value.device, value.dtype)).expand(value.shape)
        except RuntimeError:
            raise BadArgument(
                f"steer: a vector of shape {tuple(vector.shape)} does not broadcast to a value of shape "
                f"{tuple(value.shape)} [batch seq hidden]; give `[hidden]`, `[batch 1 hidden]` or all of it."
            ) from None
        return torch.where(mask[..., None], value + added, value)

    return _edit(model, "steer", layers, add, positions, at, when, axes=(("batch", "seq", "hidden"),))


def intervene(
    model: Any,
    layers: int | Iterable[int],
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    positions: Positions = None,
    at: str | Reference = "layer_output",
    when: When = "both",
) -> Edited:
    """Replace a value of some blocks by a function of it, inside a trace.

    `function` is given the value at the chosen tokens of all rows, `[tokens, ...]` (`[tokens hidden]` of the
    stream, `[tokens heads head_dim]` of `attention_head_outputs`), padding left out, and returns as much.
    It is called once a block and forward. `positions`, `at` and `when` are those of `steer`; `at` takes any
    value of a block that has a `seq` or `query` axis after `batch`. To splice a sparse autoencoder in:
    `model.intervene(4, sae, at="mlp_output")`.

    Returns a report of how many positions were edited, complete when the trace is over. Where none was, a
    `NothingEdited` warning says so.

    Raises: BadArgument, before anything runs; BadWrite, for a result of another shape, dtype or device;
    OutsideTrace; OutOfOrder, for a block that has passed.
    """
    if not callable(function):
        caller(model, "intervene")
        raise BadArgument(
            f"intervene takes a function of the value, not a {type(function).__name__}; to add a vector, "
            f"`model.steer(layers, vector)`."
        )

    def replace(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = value[mask]
        new = function(given.clone())
        if not isinstance(new, torch.Tensor):
            raise BadWrite(f"intervene: the function returned a {type(new).__name__}, not a tensor.")
        if (new.shape, new.dtype, new.device) != (given.shape, given.dtype, given.device):
            raise BadWrite(
                f"intervene: the function was given {tuple(given.shape)} {given.dtype} on {given.device} and "
                f"returned {tuple(new.shape)} {new.dtype} on {new.device}; give back what fits."
            )
        result = value.clone()
        result[mask] = new
        return result

    return _edit(model, "intervene", layers, replace, positions, at, when, axes=None)


def _edit(
    model: Any,
    verb: str,
    layers: int | Iterable[int],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    positions: Positions,
    at: str | Reference,
    when: When,
    *,
    axes: tuple[tuple[str, ...], ...] | None,
) -> Edited:
    """Change a value of some blocks at chosen tokens, beside the block of code that calls.

    `change` is given the value and the mask of its chosen tokens, `[batch seq]`.
    """
    parent = caller(model, verb)
    chosen = _blocks(model, layers, verb)
    hosts = [_host(model, layer, at, verb, axes) for layer in chosen]
    if when not in get_args(When):
        raise BadArgument(f"{verb}: when={when!r}; choose one of {', '.join(get_args(When))}.")
    one_step_each(model, verb, joins=False)
    frame = Frame(model, parent)
    place.check(positions, frame.prompt, verb=verb, growing=model.interleaver.generating)
    report = kept(Edited(verb, hosts[0][1], chosen))
    first = model.interleaver.ledger.of(parent).step

    def task() -> None:
        for step in steps(model, first):
            for layer, (host, name) in zip(chosen, hosts, strict=True):
                value = getattr(host, name)
                mask = frame.select(step, value, positions, when)
                if not bool(mask.any()):
                    continue
                setattr(host, name, change(value, mask))
                report.counts[layer] = report.counts.get(layer, 0) + int(mask.sum())

    def done() -> None:
        if not any(report.counts.values()):
            warn(
                f"{verb} edited nothing: no token of this call was chosen by positions={positions!r} and "
                f"when={when!r}.",
                NothingEdited,
            )

    # A stored edit serves calls of every kind, and a step of a loop may well have nothing to edit.
    tells = first is None and not parent.copy
    start_beside(model, task, before=True, done=done if tells else None)
    return report


def skip_layers(model: Any, start: int | Iterable[int], end: int | None = None) -> Edited:
    """Silence blocks `start` to `end`, both included, or `start` alone: each hands on the stream it received.

    `start` may be a list of blocks, if there is no `end`.

    A silenced block still runs, so it still lends its keys and values and still fills the cache; only
    the stream passes it by. Inside `for step in tracer.iter[...]` it silences that step alone.

    Raises: BadArgument, before anything runs, for a block out of range or an empty range; OutsideTrace;
    OutOfOrder, for a block that has passed.
    """
    parent = caller(model, "skip_layers")
    chosen = _blocks(model, start, "skip_layers")
    if end is not None:
        if isinstance(start, Iterable):
            raise BadArgument(
                f"skip_layers: give a list of blocks, or two ends, not both: {start!r}, {end!r}."
            )
        (first,), (last,) = chosen, _blocks(model, end, "skip_layers")
        if first > last:
            raise BadArgument(
                f"skip_layers: from block {first} to block {last} there is none; give the lower first."
            )
        chosen = tuple(range(first, last + 1))
    report = kept(Edited("skip_layers", "layer_output", chosen))
    step_now = model.interleaver.ledger.of(parent).step

    def task() -> None:
        for _ in steps(model, step_now):
            for layer in chosen:
                block = model.layers[layer]
                # What the first norm receives is the stream as it really entered, any edit of it included.
                (stream, *_rest), _kwargs = Mediator.value(block.location("input_layernorm.input"))
                block.layer_output = stream
                report.counts[layer] = report.counts.get(layer, 0) + stream.shape[0] * stream.shape[1]

    start_beside(model, task, before=True, first=True)
    return report


def _blocks(model: Any, layers: int | Iterable[int], verb: str) -> tuple[int, ...]:
    """Block numbers, ascending, negative ones counted from the end."""
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    total = model.num_layers
    for layer in given:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise BadArgument(f"{verb}: a layer is a whole number, not {layer!r}.")
        if not -total <= layer < total:
            raise BadArgument(
                f"{verb}: layer {layer!r} does not exist; the model has {total} blocks, 0 to {total - 1}."
            )
    if not given:
        raise BadArgument(f"{verb}: no layer was given.")
    return tuple(sorted({layer % total for layer in given}))


def _host(
    model: Any, layer: int, at: str | Reference, verb: str, axes: tuple[tuple[str, ...], ...] | None
) -> tuple[Any, str]:
    """The envoy that serves `at` on a block, and the value's name there.

    `axes`: the layouts that will do; any with tokens after the batch where there are none.
    """
    if not isinstance(at, (str, Reference)):
        raise BadArgument(
            f"{verb}: at= takes a name such as 'layer_output', not a {type(at).__name__}. "
            f"Inside a trace a value's attribute is its tensor."
        )
    place, _, name = str(at).rpartition(".")
    if set(re.findall(r"[A-Za-z_]\w*", place)) - {"model", "layers", "self_attn", "mlp"}:
        where = str(at).removeprefix("model.")
        raise BadArgument(
            f"{verb} edits values of the text model's blocks, and {at} is none. Write it in the trace:\n"
            f"    model.{where} = model.{where} + ..."
        )
    block = model.layers[layer]
    for host in (block, block.self_attn, block.mlp):
        if name in dir(type(host)):
            _, served = find(model, f"{host.standard_path}.{name}")
            if served is None:
                break
            reason = served.why_not(host)
            if reason is not None:
                raise BadArgument(f"{verb}: {served.path_on(host)}: {reason}")
            if served.read_only is not None:
                raise BadArgument(f"{verb}: {served.path_on(host)} cannot be edited: {served.read_only}")
            found = served.layout.axes
            if axes is not None and found not in axes:
                raise BadArgument(
                    f"{verb} adds to values laid out [batch seq hidden]; {name} is {served.layout}."
                )
            if found[0] != "batch" or found[1] not in ("seq", "query"):
                raise BadArgument(f"{verb} edits values laid out [batch seq ...]; {name} is {served.layout}.")
            return host, name
    raise BadArgument(
        f"{verb}: a block has no value {name!r}; `layer_output`, `mlp_output`, `attention_output` are some."
    )


class Frame:
    """Where the tokens of each step stand in their texts, for the rows of one worker."""

    def __init__(self, model: Any, parent: Mediator) -> None:
        group = parent.batch_group
        rows = slice(None) if group is None else slice(group[0], group[0] + group[1])
        interleaver = model.interleaver
        self.prompt = place.real_tokens(interleaver.encoding, rows, generating=interleaver.generating)

    @property
    def width(self) -> int | None:
        """Columns of the prompt, padding included, or `None` where the call does not say."""
        return None if self.prompt is None else self.prompt.shape[1]

    def select(self, step: int, value: torch.Tensor, positions: Positions, when: When) -> torch.Tensor:
        """The tokens to edit of this step's `value`, `[batch seq]`."""
        batch, seq = value.shape[:2]
        text = self.text(value, step)
        if self.width is None:
            return place.select(positions, text) & self._wanted(when, step > 0)
        first, masks = text.shape[1] - seq, []
        if first < self.width:
            prompt = text[:, : self.width]
            chosen = place.select(place.fitted(positions, prompt), prompt) & self._wanted(when, False)
            masks.append(chosen[:, first:])
        # Without a cache the whole text so far runs again: each new token as in the step that brought it.
        for column in range(max(first, self.width), text.shape[1]):
            if place.is_mask(positions):  # it covers the prompt
                masks.append(text.new_zeros(batch, 1))
                continue
            start = text[:, :column].sum(-1, keepdim=True)
            masks.append(place.select(positions, text[:, column, None], start) & self._wanted(when, True))
        return torch.cat(masks, -1)

    def real(self, value: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens of a `value` are real, `[batch seq]`, and how many of each row's stand before it in
        the text, `[batch 1]`: those of a cache that the call was given, or what transformers dropped.

        `new`: the tokens that were fed after the prompt. A value ends where the text does.
        """
        text = self.text(value, new)
        first = text.shape[1] - value.shape[1]
        return text[:, first:], text[:, :first].sum(-1, keepdim=True)

    def text(self, value: torch.Tensor, new: int) -> torch.Tensor:
        """Which columns of the text hold real tokens, with `new` fed after the prompt, `[batch column]`."""
        batch, seq = value.shape[:2]
        prompt = self._prompt(value)
        if prompt is None:
            return torch.ones(batch, seq, dtype=torch.bool, device=value.device)
        return torch.cat([prompt, prompt.new_ones(batch, max(new, seq - prompt.shape[1]))], -1)

    def _prompt(self, value: torch.Tensor) -> torch.Tensor | None:
        if self.prompt is None:
            return None
        prompt = self.prompt.to(value.device)
        # Beams and several returned sequences repeat each row of the prompt.
        return prompt.repeat_interleave(value.shape[0] // prompt.shape[0], 0)

    @staticmethod
    def _wanted(when: When, new: bool) -> bool:
        return when == "both" or (when == "new") == new
