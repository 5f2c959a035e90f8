"""Capturing values without minding their order: `collect` runs a forward, `record` joins an open trace.

A capture runs beside everything else and is served last at each location, so it sees what the next
module really received, edits included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

import torch
from nnsight.intervention.interleaver import EarlyStopException, Mediator

from . import positions as place
from .errors import BadArgument, NeverRan, UnknownName
from .generation import one_step_each
from .layouts import Layout
from .ledger import running
from .paths import expand, find, is_pattern
from .positions import Positions
from .references import Reference
from .served import TokenMask
from .steering import Frame
from .workers import SideWorker, caller, every_step, kept, start_beside, steps

__all__ = ["FORWARD_ORDER", "Collected", "collect", "in_forward_order", "record"]

Values = str | Reference | Sequence[str | Reference]

_TOKENS: Final = (
    "input_ids",
    "attention_mask",
    "vision.image_token_mask",
    "vision.video_token_mask",
    "audio.audio_token_mask",
    "token_embeddings",
    "per_layer_token_inputs",
)
_MEDIA: Final = (
    "vision.patch_mask",
    "vision.patch_embeddings",
    "vision.layers",
    "vision.tower_output",
    "projector.soft_tokens",
    "vision.image_features",
    "vision.video_features",
    "audio.frame_embeddings",
    "audio.layers",
    "audio.tower_output",
    "audio_projector.soft_tokens",
    "audio.frame_mask",
    "audio.audio_features",
)
_AT_SCATTER: Final = ("vision.image_features", "vision.video_features")
_STREAM: Final = (
    "per_layer_context_inputs",
    "per_layer_inputs",
    "layers",
    "raw_logits",
    "logits",
    "next_token_probs",
)
_BLOCK: Final = (
    "layer_input",
    "per_layer_input",
    "feed_forward1.mlp_output",
    "attention_input",
    "own_keys",
    "own_values",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "visible_keys",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_projection",
    "attention_output",
    "convolution_output",
    "mid_stream",
    "mlp_input",
    "mlp_neurons",
    "shared_expert_output",
    "router_logits",
    "router_probabilities",
    "expert_weights",
    "expert_indices",
    "expert_outputs",
    "routed_output",
    "mlp_projection",
    "mlp_output",
    "per_layer_output",
    "layer_output",
)

FORWARD_ORDER: Final = (*_TOKENS, *_MEDIA, *_STREAM)
"""The order in which a forward passes the standard values; `layers` are passed block by block."""


class Collected(Mapping[str, Any]):
    """Captured values, by the path or pattern they were asked by.

    A pattern gives one tensor with a leading axis of blocks where their shapes agree, else a dictionary
    from path to tensor. `blocks` says which blocks a pattern found. `input_ids` and `attention_mask` are
    the tokens and mask that were really fed. Complete when the trace is over.
    """

    def __init__(self, asked: Mapping[str, list[str]], layouts: Mapping[str, Layout], finish: Finish) -> None:
        self._asked = dict(asked)
        self._layouts = dict(layouts)
        self._finish = finish
        self._steps: dict[str, list[torch.Tensor]] = {}
        self._absent: dict[str, str] = {}
        """Why the call computed nothing of a value, by path."""
        self.input_ids: torch.Tensor | None = None
        self.attention_mask: torch.Tensor | None = None

    def __getitem__(self, value: str | Reference) -> Any:
        key = str(value)
        if key in self._asked:
            places = self._asked[key]
            found = {path: self._one(path) for path in places}
            if places == [key] or (len(places) == 1 and not is_pattern(key)):
                return found[places[0]]
            tensors = list(found.values())
            alike = all(t.shape == tensors[0].shape and t.dtype == tensors[0].dtype for t in tensors)
            return torch.stack([t.to(tensors[0].device) for t in tensors]) if alike else found
        if key in self._layouts:
            return self._one(key)
        raise KeyError(f"{key} was not captured; {', '.join(self._asked)} were.")

    def __contains__(self, value: object) -> bool:
        """Whether a value was asked for; whether the call computed it is another matter."""
        return str(value) in {**self._asked, **self._layouts}

    def __iter__(self) -> Iterator[str]:
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)

    def __repr__(self) -> str:
        return f"Collected({', '.join(self._described(key) for key in self._asked)})"

    def _described(self, key: str) -> str:
        if any(path not in self._steps and path not in self._absent for path in self._asked[key]):
            return f"{key}: not there yet"
        try:
            value = self[key]
        except NeverRan:
            return f"{key}: not computed"
        except BadArgument as error:
            return f"{key}: {error}"
        return f"{key}: {list(value.shape) if isinstance(value, torch.Tensor) else f'{len(value)} tensors'}"

    def paths(self, value: str | Reference) -> list[str]:
        """The places a pattern found."""
        return list(self._asked[str(value)])

    def blocks(self, value: str | Reference) -> list[int]:
        """The blocks a pattern found, in the order of the leading axis."""
        return [int(path.partition("[")[2].partition("]")[0]) for path in self.paths(value) if "[" in path]

    def _keep(self, path: str, value: torch.Tensor) -> None:
        self._steps.setdefault(path, []).append(value)

    def _one(self, path: str) -> torch.Tensor:
        if path in self._absent:
            raise NeverRan(self._absent[path])
        if path not in self._steps:
            raise UnknownName(f"{path} was not reached: this call did not run the module it belongs to.")
        return self._finish.whole(self._layouts[path], self._steps[path])


class Finish:
    """What becomes of a captured value: positions, dtype, device, and the steps of a generation joined."""

    def __init__(
        self,
        positions: Positions,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        generating: bool,
    ) -> None:
        self.positions = positions
        self.dtype = dtype
        self.device = device
        self.generating = generating
        self.frame: Frame | None = None
        self.step = 0
        """The step whose values are taken, where each is kept alone."""

    def one(self, layout: Layout, value: torch.Tensor) -> torch.Tensor:
        """A value as it is kept."""
        value = value.detach()
        if not self.generating:
            value = self._chosen(layout, value, self.step)
        if self.dtype is not None and value.is_floating_point():
            value = value.to(self.dtype)
        if self.device is not None:
            value = value.to(self.device)
        whole = value._base
        # A narrow view would keep the whole batch alive.
        return value.clone() if whole is not None and whole.numel() > 2 * value.numel() else value

    def whole(self, layout: Layout, parts: list[torch.Tensor]) -> torch.Tensor:
        """A value over all steps."""
        if not self.generating:
            return parts[0]
        width = None if self.frame is None else self.frame.width
        return self._chosen(layout, joined(layout, parts, width), len(parts) - 1)

    def _chosen(self, layout: Layout, value: torch.Tensor, new: int) -> torch.Tensor:
        """The chosen tokens of a value that ends where the text does, `new` tokens after the prompt."""
        axis = _token_axis(layout)
        if self.positions is None or axis is None:
            return value
        assert self.frame is not None
        moved = value.movedim(axis, 1)
        real, before = self.frame.real(moved, new)
        chosen = self.positions
        if isinstance(chosen, slice) or place.is_mask(chosen):
            mask = place.select(place.fitted(chosen, self.frame.text(moved, new)), real, before)
            if not isinstance(chosen, slice):
                return moved[mask]
            unequal(chosen, mask)
            return moved[mask].unflatten(0, (value.shape[0], int(mask[0].sum()))).movedim(1, axis)
        listed = chosen.flatten().tolist() if isinstance(chosen, torch.Tensor) else chosen
        columns = place.columns(listed, real, before)
        taken = moved[torch.arange(len(columns), device=moved.device)[:, None], columns]
        return taken[:, 0] if isinstance(listed, int) else taken.movedim(1, axis)


def unequal(positions: Positions, mask: torch.Tensor) -> None:
    """Refuse positions of which rows have unequally many.

    Raises: BadArgument.
    """
    counts = mask.sum(-1).tolist()
    if len(set(counts)) > 1:
        raise BadArgument(
            f"positions {positions!r} choose {counts} tokens of the rows; choose as many of each, or give a "
            f"boolean mask."
        )


def joined(layout: Layout, parts: list[torch.Tensor], prompt: int | None = None) -> torch.Tensor:
    """The steps of a generation as one value over all positions, as one forward over them would give it.

    `prompt`: columns of the prompt, those of a cache that the call was given included. Each step brings one
    token more, and what it holds ends there: without a cache the whole text so far, with one the new token.
    """
    axis = _token_axis(layout)
    if layout.axes[0] != "batch":
        return parts[0]  # computed with the prompt alone
    if axis is None and "key" in layout.axes:
        axis = layout.axis("key")
        if _grows(parts, axis):
            return parts[-1]
        # The first step knows the prompt's keys; every later one adds its own, the last.
        return torch.cat(
            [parts[0], *(part.narrow(axis, part.shape[axis] - 1, 1) for part in parts[1:])], axis
        )
    if axis is None:
        return torch.stack(parts)
    if "key" in layout.axes:
        parts = _placed(parts, layout.axis("key"), prompt or max(parts[0].shape[-2:]))
    # Of a token that several steps held, the last of them has the say.
    rows, covered = [], len(parts)
    for step, part in reversed(list(enumerate(parts))):
        size = part.shape[axis]
        begin, end = step - size, min(step, covered)
        if end > begin:
            rows.append(part.narrow(axis, 0, end - begin))
            covered = begin
    return rows[0] if len(rows) == 1 else torch.cat(rows[::-1], axis)


def _token_axis(layout: Layout) -> int | None:
    """The axis of the tokens that were fed, if the layout has one; an image's patches are none."""
    if layout.axes[0] != "batch":
        return None
    return next((layout.axis(name) for name in ("seq", "query") if name in layout.axes), None)


def _grows(parts: list[torch.Tensor], axis: int) -> bool:
    """Whether each step holds one more than the one before it."""
    sizes = [part.shape[axis] for part in parts]
    return len(sizes) > 1 and all(later == size + 1 for size, later in itertools.pairwise(sizes))


def _placed(parts: list[torch.Tensor], axis: int, prompt: int) -> list[torch.Tensor]:
    """Patterns or scores of each step, their keys at the absolute places of the whole text.

    A sliding block's cache keeps the last keys only; what it dropped, and what comes later, is invisible.
    """
    total = prompt + len(parts) - 1
    unseen = -torch.inf if bool((parts[0] < 0).any()) else 0.0
    placed = []
    for step, part in enumerate(parts):
        left = prompt + step - part.shape[axis]
        around = (0, 0) * (part.dim() - 1 - axis) + (left, total - prompt - step)
        placed.append(torch.nn.functional.pad(part, around, value=unseen))
    return placed


def collect(
    model: Any,
    inputs: Any,
    values: Values,
    *,
    positions: Positions = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generate: int | Mapping[str, Any] | None = None,
    edits: Callable[[Any], None] | None = None,
    **kwargs: Any,
) -> Collected:
    """Run one forward (or one generation) and capture values, in any order.

    `inputs` is what `trace` takes; a list of prompts is one left-padded batch. `values` are paths,
    references or patterns (`"layers.*.layer_output"`, `"layers[3:9].self_attn.attention_probabilities"`).
    `positions` chooses tokens: a number (that axis is dropped; -1 is the last real token), a slice, a list,
    or a boolean mask `[batch seq]` (flat result). They are places in the whole text, what a given cache
    holds included; of a slice or a mask a value gives what it has. `dtype` and `device` say how values are
    kept. `generate` is a number of new tokens or the arguments of `generate`; its steps are joined over
    absolute positions. `edits(model)` runs inside the trace before anything is captured, in `generate` at
    every step. The forward stops after the last value asked for. No gradients are kept.

    Raises: UnknownName, Unavailable, BadArgument, all before anything runs; BadArgument from the
    result, for a position that a value of a generation does not have.
    """
    _refuse_typos(kwargs)
    asked, layouts = _asked(model, values)
    options = _generation(generate)
    generating = generate is not None
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise BadArgument(f"collect: dtype is a torch dtype such as torch.float32, not {dtype!r}.")
    if generating and any(layout.name == "Logits" for layout in layouts.values()):
        options.setdefault("logits_to_keep", 0)
    finish = Finish(positions, dtype, device, generating)
    result = Collected(asked, layouts, finish)
    places = in_forward_order(layouts, generating=generating)
    fed: dict[str, Any] = {}

    def task() -> None:
        one_step_each(model, "collect", joins=True)
        finish.frame = Frame(model, caller(model, "collect"))
        fed.update(model.interleaver.encoding)
        _check(finish, "collect", growing=generating)
        for step in steps(model, None):
            _read(model, places, layouts, result, later=step > 0)
            if not generating:
                raise EarlyStopException
            if not any(layout.axes[0] == "batch" for layout in layouts.values()):
                return  # all of it comes of the prompt; nothing would be waited for in a later step

    interleaver = model.interleaver
    if interleaver.interleaving:
        raise BadArgument(
            "collect runs a forward of its own; inside an open trace use `model.record(values)`."
        )
    given = (inputs,) if inputs is not None else ()
    batcher = model._batcher_class(model, kwargs)
    with torch.no_grad():
        try:
            batcher.add(*given, **kwargs)
            if edits is not None:
                edit = partial(edits, model)
                interleaver.mediators.append(SideWorker(every_step(model, edit) if generating else edit))
            interleaver.mediators.append(SideWorker(_trusting(model, task)))
            interleaver.full_prefill = True
            output = model.interleave(
                model.generate if generating else model._call, batcher=batcher, **options
            )
        finally:
            interleaver.cancel()
    _feed(result, fed, output if generating else None)
    return result


def record(
    model: Any,
    values: Values,
    *,
    positions: Positions = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Collected:
    """Capture values of the open trace, in any order, beside the block.

    In an invoke it sees that invoke's rows. In `generate` it captures every step, joined over absolute
    positions; inside `for step in tracer.iter[...]`, that step alone. Either way `positions` are places in
    the whole text, and one that a value does not have is refused. Values are detached. The result is
    complete when the trace is over.

    Raises: UnknownName, Unavailable, BadArgument; OutsideTrace; OutOfOrder, for a value that has passed.
    """
    parent = caller(model, "record")
    asked, layouts = _asked(model, values)
    one_step_each(model, "record", joins=True)
    first = model.interleaver.ledger.of(parent).step
    generating = model.interleaver.generating and first is None
    finish = Finish(positions, dtype, device, generating)
    finish.frame = Frame(model, parent)
    _check(finish, "record", growing=model.interleaver.generating)
    result = kept(Collected(asked, layouts, finish))
    group = parent.batch_group
    rows = slice(None) if group is None else slice(group[0], group[0] + group[1])
    _feed(
        result,
        {k: v[rows] for k, v in model.interleaver.encoding.items() if isinstance(v, torch.Tensor)},
        None,
    )
    places = in_forward_order(layouts, generating=model.interleaver.generating)

    def task() -> None:
        for step in steps(model, first):
            finish.step = step
            if step > 0:
                _feed_step(model, result, step, joins=generating)
            _read(model, places, layouts, result, later=generating and step > 0)
            if not generating and step == (first or 0):
                return

    start_beside(model, _trusting(model, task), before=False)
    return result


def _generation(generate: int | Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `generate` that `collect` was given."""
    if generate is None:
        return {}
    if isinstance(generate, int) and not isinstance(generate, bool) and generate > 0:
        return {"max_new_tokens": generate}
    if isinstance(generate, Mapping):
        return dict(generate)
    raise BadArgument(
        f"collect: generate is a number of new tokens, or the arguments of `generate`, not {generate!r}."
    )


def _check(finish: Finish, verb: str, *, growing: bool) -> None:
    assert finish.frame is not None
    positions, prompt = finish.positions, finish.frame.prompt
    place.check(positions, prompt, verb=verb, growing=growing, whole=finish.generating)
    if isinstance(positions, slice) and prompt is not None and not growing:
        unequal(positions, place.select(positions, prompt))


def _refuse_typos(kwargs: Mapping[str, Any]) -> None:
    """Other keywords go to the model's call, which takes any name; a near miss of ours must not."""
    own = ("positions", "dtype", "device", "generate", "edits")
    for name in kwargs:
        near = get_close_matches(name, own, n=1, cutoff=0.75)
        if near and name != "position_ids":
            raise BadArgument(f"collect has no option `{name}`. Did you mean `{near[0]}`?")


def _trusting(model: Any, task: Callable[[], None]) -> Callable[[], None]:
    def trusted() -> None:
        model.interleaver.ledger.of(running(model.interleaver)).trusted = True
        task()

    return trusted


def _read(
    model: Any, places: list[str], layouts: Mapping[str, Layout], result: Collected, *, later: bool = False
) -> None:
    """Keep the values of one step; what comes of images and sound is there in the first one alone.

    Of what the call computes nothing the reason is kept.
    """
    mediator = running(model.interleaver)
    assert mediator is not None
    for path in places:
        if later and layouts[path].axes[0] != "batch":
            continue
        host, served = find(model, path)
        try:
            host.check_runs(served, mediator, model.interleaver.ledger.of(mediator))
        except NeverRan as error:
            result._absent[path] = str(error)
            continue
        value = getattr(host, path.rpartition(".")[2])
        result._keep(path, result._finish.one(layouts[path], value))


def _asked(model: Any, values: Values) -> tuple[dict[str, list[str]], dict[str, Layout]]:
    given = (
        [values] if isinstance(values, (str, Reference)) or not isinstance(values, Iterable) else list(values)
    )
    if any(not isinstance(value, (str, Reference)) for value in given):
        raise BadArgument(f"values are paths such as 'layers.*.layer_output' or references, not {given!r}.")
    if not given:
        raise BadArgument("no value was asked for; give paths such as 'layers.*.layer_output'.")
    asked = {str(value): expand(model, value) for value in given}
    layouts = {}
    for path in dict.fromkeys(path for paths in asked.values() for path in paths):
        _, served = find(model, path)
        assert served is not None  # `expand` names values alone
        layouts[path] = served.layout
    return asked, layouts


def in_forward_order(paths: Iterable[str], *, generating: bool = False) -> list[str]:
    """Paths in the order in which a forward passes them; `layers[i]` stands for every block.

    `generate` runs the vision tower before the first forward, and hands on what it makes.
    """
    return sorted(paths, key=lambda path: (not (generating and _in_vision_tower(path)), _rank(path)))


def _in_vision_tower(path: str) -> bool:
    return path.startswith(("vision.", "projector.")) and path not in (*_TOKENS, *_AT_SCATTER)


def _rank(path: str) -> tuple[int, int, int]:
    """Where in a forward a value is: its place, its block, and its place in the block."""
    stack, inside, rest = path.partition("layers[")
    if not inside:
        return FORWARD_ORDER.index(path), 0, 0
    block, _, name = rest.partition("].")
    short = name.rpartition(".")[2]
    rank = _BLOCK.index(name if name in _BLOCK else short)
    return FORWARD_ORDER.index(f"{stack}layers"), 0 if block == "i" else int(block), rank


def _feed(result: Collected, encoding: Mapping[str, Any], output: torch.Tensor | None) -> None:
    """Note the tokens and mask that were fed; a generation's last token was never fed."""
    ids, mask = encoding.get("input_ids"), encoding.get("attention_mask")
    if output is not None and isinstance(ids, torch.Tensor):
        new = output.shape[1] - ids.shape[1] - 1
        ids = output[:, :-1]
        if isinstance(mask, torch.Tensor):
            repeated = mask.repeat_interleave(ids.shape[0] // mask.shape[0], 0)
            mask = torch.cat([repeated, mask.new_ones(ids.shape[0], new)], -1)
    result.input_ids, result.attention_mask = ids, mask


def _feed_step(model: Any, result: Collected, step: int, *, joins: bool) -> None:
    """Note what a later step of a generation was fed, after what the earlier ones were."""
    mediator = running(model.interleaver)
    assert mediator is not None
    location = model.location("input")
    if mediator.occurrence(location) > step:  # `record` was called amid the step, which has passed its input
        result.input_ids = result.attention_mask = None
        return
    raw = Mediator.value(location)
    before, ids = result.input_ids, raw[1].get("input_ids")
    result.input_ids = result.attention_mask = None
    if ids is None or (joins and before is None):  # the prompt was embeddings
        return
    if joins and before is not None and ids.shape[1] <= before.shape[1]:
        ids = torch.cat([_repeated(before, ids), ids], -1)  # without a cache every step is fed the whole text
    result.input_ids, result.attention_mask = ids, TokenMask().take(raw)


def _repeated(before: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The prompt's rows as often as a generation that returns several sequences runs them."""
    return before.repeat_interleave(ids.shape[0] // before.shape[0], 0)
