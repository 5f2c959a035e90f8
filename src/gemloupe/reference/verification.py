"""`verify`: whether every value that a wrapped model serves is what its definition says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..errors import BadArgument, UnsupportedModel
from ..layouts import Layout
from ..paths import find
from ..plan import WRAPPERS
from ..standardized import StandardizedTransformer
from .compare import Difference, choices, compared, rounding_of
from .looks import Look, Looks
from .media import runs_of_media
from .names import names, pieces
from .prompts import Prompt, default_prompts, media_prompt, prompt_of
from .report import Absent, Report, Row
from .sight import sight
from .towers import towers
from .weights import Weights

__all__ = ["verify"]

_COVERED: Final = tuple(WRAPPERS.values())

# {where a path begins: the medium's host that it is of}
_HOST_OF: Final = {
    "vision": "vision",
    "projector": "vision",
    "audio": "audio",
    "audio_projector": "audio",
}

Found = dict[tuple[str, Look], Difference]


def verify(model: StandardizedTransformer, inputs: Any = None, *, progress: bool = True) -> Report:
    """Compare every value of a model with the float64 reference, on the model's own weights.

        report = gemloupe.verify(model)
        assert report.held, report.first

    Each value that the model serves is read in one forward and computed again by the reference, by three
    looks: by `step` from the model's own values just before it, by `block` from the model's own stream that
    enters the block, and as a `whole` from the token ids. A mixture's experts are the model's own choice in
    each, and the choice is compared by the probability that it gives up.

    The weights are the loaded module's, so what is found is in what the module does with them: a scale, a
    dropped norm, an edit left in. What a PyTorch hook changes is changed behind the value of the module it
    is on, and found at the next one, which reads it.

    A value holds where its largest difference over the real tokens, in units of its largest magnitude, is
    within `max(floor, 4 * (moved + rounding))`:

    - `floor` is what float32 costs, in which transformers computes norms, router and rotary tables whatever
      the weights are: 2e-5 by step and by block, 2e-4 as a whole.
    - `rounding` is half the precision's epsilon, 2**-24 for float32 and 2**-8 for bfloat16.
    - `moved` is how far the reference's value moves when every value that leads to it is off by one such
      rounding, and every angle of the rotary tables by 2**-23, up or down at random. It is measured, so that
      what a norm makes of a branch of next to nothing is not called wrong.
    - 4 is for the up to six roundings between two values that have names, and for chance.

    By step and by block each token is held to its own scale too, within four times the latter and ten times
    the floor, so that one token of massive values hides nothing of the others.

    A float32 model is so held to the floors, but where float32 itself is not enough: at position 1,000 a
    query's angle is off by 1e-4.

    model: a wrapped model; its weights are loaded if they are not yet.
    inputs: one forward's text or texts, token ids `[batch seq]`, or a mapping of `input_ids` and
        `attention_mask`, padded on the left, and on a wrapper of what a processor makes of images, or frames
        of video, and sounds. Fixed tokens if not given: a sequence longer than the window, a padded batch,
        and on a wrapper with towers a text with two images, and a sound where it takes any.
    progress: show a bar on a terminal or in a notebook.

    The model is run by `trace`, edits of `model.edit()` included, and is left as it was. Beside it there are
    one block's values, and one weight in float64 at a time (of the head 16,384 rows, of a mixture one
    expert). The reference runs eleven times: once by each look, and again for what rounding does.

    Raises: UnsupportedModel, for a model type that the reference does not cover, and for a quantized,
    sharded or absent weight; BadArgument, for something else than a wrapped model, for a weight that is not
    finite or that the definitions do not know, and for inputs that are no text. Nothing is said of the model
    then.
    """
    begun = time.perf_counter()
    _check(model)
    if not model.dispatched:
        model.dispatch()
    module: Any = model._module
    state = module.state_dict()
    if model.plan.tied:
        state.pop("lm_head.weight", None)  # by its definition the embedding's, whatever stands there
    config = module.config
    weights = Weights(model.plan, state, towers=towers(config))
    weights.check()
    prompts = _prompts(model, weights) if inputs is None else [_prompt(model, weights, inputs)]
    _refuse_modalities(config, prompts)
    rounding = rounding_of(weights.dtypes)
    places = [_places(model, weights, _media_of(prompt)) for prompt in prompts]
    layouts = {name: _layout(model, name) for of in places for part in of for name in part}
    found: Found = {}
    with _bar(progress, sum(map(len, places))) as advance:
        for prompt, of in zip(prompts, places, strict=True):
            _worse(found, _run(model, weights, prompt, of, layouts, rounding, advance))
    every = names(model.plan, weights.towers, frozenset().union(*map(_media_of, prompts)))
    order = {name: i for i, name in enumerate(every)}
    rows = [Row(name, look, difference) for (name, look), difference in found.items()]
    return Report(
        model=getattr(config, "_name_or_path", "") or type(module).__name__,
        num_layers=model.num_layers,
        precision=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights.dtypes)),
        rounding=rounding,
        tokens=tuple((prompt.ids.shape[0], prompt.ids.shape[1]) for prompt in prompts),
        rows=tuple(sorted(rows, key=lambda row: order[row.name])),
        absent=(*_absent(model), *_not_run(weights, prompts)),
        seconds=time.perf_counter() - begun,
    )


def _check(model: Any) -> None:
    if not isinstance(model, StandardizedTransformer):
        raise BadArgument(
            f"verify takes a wrapped model, not {type(model).__name__}.\n"
            f"Write verify(StandardizedTransformer(module_or_repo_id))."
        )
    if model.interleaver.interleaving:
        raise BadArgument("verify runs forwards of its own; call it outside the trace.")
    if model.plan.model_type not in _COVERED:
        raise UnsupportedModel(
            f"the reference defines {' and '.join(_COVERED)}, not {model.plan.model_type}: "
            f"nothing can be said of this model's values."
        )


# ---- what is run ------------------------------------------------------------------------------------------


def _refuse_modalities(config: Any, prompts: Sequence[Prompt]) -> None:
    """Refuse tokens in whose places a multimodal model puts something that the reference does not know."""
    for kind in ("image", "audio", "video"):
        token = getattr(config, f"{kind}_token_id", None)
        if token is None:
            continue
        if any(bool((p.ids == token).any()) and kind not in _media_of(p) for p in prompts):
            raise BadArgument(
                f"the text holds the token of {kind} ({token}), in whose place this model puts what is no "
                f"text, and there is no {kind}. Leave it out, or pass what a processor makes of both."
            )


def _media_of(prompt: Prompt) -> frozenset[str]:
    return frozenset() if prompt.media is None else prompt.media.kinds


def _prompt(model: Any, weights: Weights, inputs: Any) -> Prompt:
    prompt = prompt_of(inputs, model.tokenizer, weights.towers)
    lacking = [kind for kind in ("image", "video", "audio") if kind in _media_of(prompt)]
    towers_of = weights.towers
    if towers_of is not None:
        hosts = {"image": towers_of.vision, "video": towers_of.vision, "audio": towers_of.audio}
        lacking = [kind for kind in lacking if hosts[kind] is None]
    if lacking:
        raise BadArgument(f"this model takes no {' and no '.join(lacking)}. Leave it out.")
    return prompt


def _places(model: Any, weights: Weights, media: frozenset[str]) -> list[list[str]]:
    """The values that the model serves of a forward with these media, in the reference's pieces."""
    return [
        [name for name in piece if model.has(name)] for piece in pieces(model.plan, weights.towers, media)
    ]


def _prompts(model: Any, weights: Weights) -> list[Prompt]:
    config: Any = model._module.config
    fields = {**config.to_dict(), **config.get_text_config().to_dict()}
    ids = {name: value for name, value in fields.items() if name.endswith(("_token_id", "_token_index"))}
    special = frozenset(value for value in ids.values() if isinstance(value, int))
    bos = getattr(model.tokenizer, "bos_token_id", None)
    bos = ids.get("bos_token_id", 0) if bos is None else bos
    prompts = default_prompts(model.plan, special, bos)
    if (own := weights.towers) is not None and (own.vision or own.audio):
        prompts.append(media_prompt(model.plan, own, special, bos))
    return prompts


def _run(
    model: Any,
    weights: Weights,
    prompt: Prompt,
    places: Sequence[Sequence[str]],
    layouts: Mapping[str, Layout],
    rounding: float,
    advance: Callable[[], None],
) -> Found:
    """One forward of the model, the reference beside it."""
    prompt = prompt.to(weights.device)
    images = None if prompt.kinds is None else runs_of_media(prompt.kinds)
    looks = Looks(weights, prompt.ids, prompt.mask, rounding=rounding, images=images, media=prompt.media)
    encoding = prompt.encoding | {"position_ids": sight(weights.plan, prompt.mask).positions}
    real, found = prompt.mask.bool(), {}

    answers: dict[str, Tensor] = {}

    def follow() -> None:
        for part in places:
            served = {name: _read(model, name) for name in part}
            for seen in choices(looks.at(served)):
                own = seen.look == "step" and seen.name.endswith("expert_indices")
                difference = compared(seen, layouts[seen.name], real, 0.0 if own else rounding)
                key = seen.name, seen.look
                found[key] = found[key] | difference if key in found else difference
            if "logits" in served:
                answers["logits"] = served["logits"]
            advance()

    with torch.no_grad():
        with model.trace(encoding) as tracer:
            follow()
            result = tracer.result.save()
    returned = getattr(result, "logits", None)
    if not isinstance(returned, Tensor) or not torch.equal(returned, answers["logits"]):
        # Changed behind the last value that has a name, as by a hook on the model itself.
        found["logits", "step"] = replace(found["logits", "step"], absolute=math.inf)
    return found


def _read(model: Any, name: str) -> Tensor:
    host, _ = find(model, name)
    return getattr(host, name.rpartition(".")[2]).detach()


def _worse(found: Found, other: Found) -> None:
    """Of the differences of two forwards, the one that is farther off."""
    for key, difference in other.items():
        if key not in found or difference.excess > found[key].excess:
            found[key] = difference


def _layout(model: Any, name: str) -> Layout:
    _, served = find(model, name)
    assert served is not None  # a standard name is a value's
    return served.layout


def _absent(model: Any) -> Iterator[Absent]:
    """What the model lacks, in whole or on some blocks."""
    hosts = {"vision": model.plan.vision, "audio": model.plan.audio}
    told: set[str] = set()
    for row in model.support():
        host = _HOST_OF.get(row.path.partition(".")[0])
        if host is not None and hosts[host] is None:
            if host not in told:  # all of it, in a word
                yield Absent(host, None, (row.reason or "").split("\n")[0])
            told.add(host)
            continue
        path = row.path
        if host is not None and "[i]" in path and not row.num_blocks:
            path = f"{host}.layers"
            if path in told:
                continue
            told.add(path)
        for blocks, reason in row.lacking:
            yield Absent(path, blocks or None, reason.split("\n")[0])


def _not_run(weights: Weights, prompts: Sequence[Prompt]) -> Iterator[Absent]:
    """What the model has and no forward came by."""
    if (own := weights.towers) is None:
        return
    ran = frozenset().union(*map(_media_of, prompts))
    if own.vision is not None and not ran & {"image", "video"}:
        yield Absent("vision", None, "no forward was given an image or a frame of video.")
    elif own.vision is not None:
        for kind, what in (("image", "an image"), ("video", "a frame of video")):
            if kind not in ran:
                yield Absent(f"vision.{kind}_features", None, f"no forward was given {what}.")
    if own.audio is not None and "audio" not in ran:
        yield Absent("audio", None, "no forward was given a sound.")


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    if not (wanted and (console.is_interactive or console.is_jupyter)):
        yield lambda: None  # a bar of rich 14.0 that is not shown prints a line at its end
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verifying", total=total)
        yield lambda: bar.advance(task)
