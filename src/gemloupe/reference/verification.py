"""`verify`: whether every value that a wrapped model serves is what its definition says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
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
from ..support import SupportRow
from .compare import Difference, choices, compared, rounding_of
from .looks import Look, Looks
from .names import names, place
from .prompts import Prompt, default_prompts, prompt_of
from .report import Absent, Report, Row
from .sight import sight
from .weights import Weights

__all__ = ["verify"]

_COVERED: Final = tuple(WRAPPERS.values())

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
        `attention_mask`, padded on the left. Fixed tokens if not given: a sequence longer than the window,
        and a padded batch.
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
    weights = Weights(model.plan, state)
    weights.check()
    prompts = _prompts(model) if inputs is None else [prompt_of(inputs, model.tokenizer)]
    _refuse_modalities(module.config, prompts)
    rounding = rounding_of(weights.dtypes)
    places = [[name for name in part if model.has(name)] for part in _parts(names(model.plan))]
    layouts = {name: _layout(model, name) for part in places for name in part}
    found: Found = {}
    with _bar(progress, len(prompts) * len(places)) as advance:
        for prompt in prompts:
            _worse(found, _run(model, weights, prompt, places, layouts, rounding, advance))
    order = {name: i for i, name in enumerate(layouts)}
    rows = [Row(name, look, difference) for (name, look), difference in found.items()]
    return Report(
        model=getattr(module.config, "_name_or_path", "") or type(module).__name__,
        num_layers=model.num_layers,
        precision=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights.dtypes)),
        rounding=rounding,
        tokens=tuple((ids.shape[0], ids.shape[1]) for ids, _ in prompts),
        rows=tuple(sorted(rows, key=lambda row: order[row.name])),
        absent=tuple(_absent(model)),
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
        if token is not None and any(bool((ids == token).any()) for ids, _ in prompts):
            raise BadArgument(
                f"the text holds the token of {kind} ({token}), in whose place this model puts what is no "
                f"text; the reference is of the text model. Leave it out."
            )


def _prompts(model: Any) -> list[Prompt]:
    config: Any = model._module.config
    fields = {**config.to_dict(), **config.get_text_config().to_dict()}
    ids = {name: value for name, value in fields.items() if name.endswith(("_token_id", "_token_index"))}
    special = frozenset(value for value in ids.values() if isinstance(value, int))
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return default_prompts(model.plan, special, ids.get("bos_token_id", 0) if bos is None else bos)


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
    ids, mask = (tensor.to(weights.device) for tensor in prompt)
    looks = Looks(weights, ids, mask, rounding=rounding)
    encoding = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": sight(weights.plan, mask).positions,
    }
    real, found = mask.bool(), {}

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


def _parts(paths: Sequence[str]) -> Iterator[list[str]]:
    """The names in the pieces in which `parts` yields the values: inputs, entrance, blocks, answers."""
    yield list(paths[:2])
    for _, part in groupby(paths[2:], key=lambda name: place(name)[0]):
        yield list(part)


def _layout(model: Any, name: str) -> Layout:
    _, served = find(model, name)
    assert served is not None  # a standard name is a value's
    return served.layout


def _absent(model: Any) -> Iterator[Absent]:
    """What the model lacks, in whole or on some blocks."""
    for row in model.support():
        blocks = _lacking(row, model.num_layers)
        if row.reason is not None:
            yield Absent(row.path, blocks, row.reason.split("\n")[0])


def _lacking(row: SupportRow, num_layers: int) -> tuple[int, ...] | None:
    return None if row.blocks is None else tuple(i for i in range(num_layers) if i not in row.blocks)


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    if not (wanted and (console.is_interactive or console.is_jupyter)):
        yield lambda: None  # a bar of rich 14.0 that is not shown prints a line at its end
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verifying", total=total)
        yield lambda: bar.advance(task)
