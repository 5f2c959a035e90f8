"""One forward, read and edited: the wrapped model against the bare module with plain torch hooks.

Under `torch.no_grad()`. Hooks are set and removed, and traces opened and closed, inside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import nnsight
import torch

from benchmarks.measure import Measurement, Side, alternate, one_thread
from benchmarks.models import Size, Twins, twins
from benchmarks.row import Row

__all__ = ["HOOKS", "ROWS", "Run", "blocks", "hook_outputs", "hooked", "keep_output", "plain", "row"]

Run = Callable[[Twins], Any]

BARE: Final = "the bare module"
HOOKS: Final = "plain hooks that keep the same tensors"
SMALL: Final = Size(hidden=64, layers=12, batch=2, seq=16)
"""Twelve blocks that compute next to nothing: what a trace adds stands out."""


def row(
    shape: str,
    name: str,
    what: str,
    against: str,
    ours: Run,
    theirs: Run,
    *,
    check: Callable[[Twins, Any], None] | None = None,
    tolerance: float = 0.0,
    **fields: Any,
) -> Row:
    """A row whose two sides run on the twins of a shape, and must give tensors equal up to `tolerance`.

    check: where the sides keep different things, what our side's result is checked by instead, once.
    """

    def measure(size: Size, pairs: int) -> Measurement:
        pair = twins(shape, size)
        sides = Side(lambda: ours(pair)), Side(lambda: theirs(pair))
        with torch.no_grad():
            if check is None:
                return alternate(*sides, pairs, same=_itself, tolerance=tolerance)
            check(pair, ours(pair))
            return alternate(*sides, pairs)

    return Row(f"{shape}/{name}", what, against, measure, **fields)


def small(original: Row) -> Row:
    """The row on small models and one thread."""

    def measure(size: Size, pairs: int) -> Measurement:
        with one_thread():
            return original.measure(min(size, SMALL, key=lambda each: each.hidden), pairs)

    return replace(original, measure=measure)


def _itself(result: Any) -> Any:
    return result


# ---- nothing read ------------------------------------------------------------------------------------------


def plain(pair: Twins) -> torch.Tensor:
    return pair.bare(**pair.inputs).logits


def second(pair: Twins) -> torch.Tensor:
    return pair.second(**pair.inputs).logits


def outside(pair: Twins) -> torch.Tensor:
    return pair.wrapped(**pair.inputs).logits


def read_logits(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        logits = pair.model.logits.save()
    return logits


# ---- values read -------------------------------------------------------------------------------------------


def read_outputs(pair: Twins) -> list[torch.Tensor]:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([layer.layer_output for layer in pair.model.layers])
    return kept


def hook_outputs(pair: Twins) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with hooked([block.register_forward_hook(keep_output(kept)) for block in blocks(pair)]):
        pair.bare(**pair.inputs)
    return kept


def read_middles(pair: Twins) -> list[torch.Tensor]:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([layer.mid_stream for layer in pair.model.layers])
    return kept


def hook_middles(pair: Twins) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    norms = [block.pre_feedforward_layernorm for block in blocks(pair)]
    with hooked([norm.register_forward_pre_hook(keep_input(kept)) for norm in norms]):
        pair.bare(**pair.inputs)
    return kept


def read_mlps(pair: Twins) -> list[torch.Tensor]:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([])
        for layer in pair.model.layers:
            mlp = layer.mlp
            kept += [mlp.mlp_input, mlp.mlp_neurons, mlp.mlp_projection, mlp.mlp_output]
    return kept


def hook_mlps(pair: Twins) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    handles = []
    for block in blocks(pair):
        norm = block.post_feedforward_layernorm
        entered = (block.mlp, block.mlp.down_proj, norm)
        handles += [module.register_forward_pre_hook(keep_input(kept)) for module in entered]
        handles.append(norm.register_forward_hook(keep_output(kept)))
    with hooked(handles):
        pair.bare(**pair.inputs)
    return kept


def read_mixture(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([])
        for layer in pair.model.layers:
            mlp = layer.mlp
            kept += [mlp.shared_expert_output, mlp.router_logits, mlp.router_probabilities]
            kept += [mlp.expert_weights, mlp.expert_indices, mlp.expert_outputs, mlp.routed_output]
        logits = pair.model.logits.save()
    return logits


# ---- edits -------------------------------------------------------------------------------------------------


def edit(pair: Twins) -> torch.Tensor:
    vector = direction(pair)
    with pair.model.trace(pair.inputs):
        layer = pair.model.layers[middle(pair)]
        layer.layer_output = layer.layer_output + vector
        logits = pair.model.logits.save()
    return logits


def steer(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        pair.model.steer(middle(pair), direction(pair))
        logits = pair.model.logits.save()
    return logits


def hook_edit(pair: Twins) -> torch.Tensor:
    vector = direction(pair)
    block = blocks(pair)[middle(pair)]
    with hooked([block.register_forward_hook(lambda _module, _arguments, output: output + vector)]):
        return pair.bare(**pair.inputs).logits


def middle(pair: Twins) -> int:
    return len(blocks(pair)) // 2


def direction(pair: Twins) -> torch.Tensor:
    return torch.linspace(-1, 1, pair.bare.config.hidden_size)


# ---- generate ----------------------------------------------------------------------------------------------


def length(steps: int) -> dict[str, Any]:
    return {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}


def read_steps(steps: int) -> Run:
    def run(pair: Twins) -> list[torch.Tensor]:
        with pair.model.generate(pair.inputs, **length(steps)) as tracer:
            kept = nnsight.save([])
            for _step in tracer.iter[:steps]:
                kept += [layer.layer_output for layer in pair.model.layers]
        return kept

    return run


def hook_steps(steps: int) -> Run:
    def run(pair: Twins) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with hooked([block.register_forward_hook(keep_output(kept)) for block in blocks(pair)]):
            pair.bare.generate(**pair.inputs, **length(steps))
        return kept

    return run


# ---- plain hooks -------------------------------------------------------------------------------------------


def blocks(pair: Twins) -> Any:
    return pair.bare.model.layers


def keep_output(kept: list[torch.Tensor]) -> Callable[..., None]:
    return lambda _module, _arguments, output: kept.append(output)


def keep_input(kept: list[torch.Tensor]) -> Callable[..., None]:
    return lambda _module, arguments: kept.append(arguments[0])


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """Plain hooks, removed at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- the rows ----------------------------------------------------------------------------------------------


def text_rows(shape: str, kind: str) -> list[Row]:
    """The rows that a dense shape and one with per-layer embeddings both have."""
    edited = "a plain hook that returns the edited tensor"
    return [
        row(shape, "control", f"{kind}: a second bare module", BARE, second, plain),
        row(shape, "outside", f"{kind}: the wrapped model outside a trace", BARE, outside, plain, bound=1.02),
        row(shape, "trace", f"{kind}: a trace that reads the logits alone", BARE, read_logits, plain),
        row(
            shape,
            "layer_output",
            f"{kind}: every `layer_output`",
            HOOKS,
            read_outputs,
            hook_outputs,
            bound=1.05,
        ),
        row(shape, "mid_stream", f"{kind}: every `mid_stream`", HOOKS, read_middles, hook_middles),
        row(shape, "mlp", f"{kind}: four values of every MLP", HOOKS, read_mlps, hook_mlps),
        row(shape, "edit", f"{kind}: a `layer_output` assigned", edited, edit, hook_edit),
        row(shape, "steer", f"{kind}: `steer` on one block", edited, steer, hook_edit),
    ]


def mixture_rows(shape: str, kind: str) -> list[Row]:
    """The rows of a mixture of experts."""
    return [
        row(shape, "outside", f"{kind}: the wrapped model outside a trace", BARE, outside, plain, bound=1.02),
        row(
            shape,
            "layer_output",
            f"{kind}: every `layer_output`",
            HOOKS,
            read_outputs,
            hook_outputs,
            bound=1.05,
        ),
        row(shape, "values", f"{kind}: the seven values of every mixture", BARE, read_mixture, plain),
    ]


def generate_row(shape: str, name: str, what: str, steps: int) -> Row:
    what = f"{what}: every `layer_output` of {steps} steps of `generate`"
    return row(shape, name, what, HOOKS, read_steps(steps), hook_steps(steps), pairs=7)


def added_rows(shape: str, kind: str) -> list[Row]:
    """The rows of what is added to one forward."""

    def added(name: str, what: str, against: str, ours: Run, theirs: Run) -> Row:
        what = f"{kind}, small: {what}"
        return small(row(shape, f"added-{name}", what, against, ours, theirs, unit="added", pairs=51))

    return [
        added("control", "a second bare module", BARE, second, plain),
        added("outside", "the wrapped model outside a trace", BARE, outside, plain),
        added("trace", "a trace that reads the logits alone", BARE, read_logits, plain),
        added("layer_output", "every `layer_output`", HOOKS, read_outputs, hook_outputs),
        added("mlp", "four values of every MLP", HOOKS, read_mlps, hook_mlps),
    ]


ROWS: list[Row] = [
    *text_rows("31b", "dense"),
    generate_row("31b", "generate", "dense", 8),
    *text_rows("e2b", "E2B-like"),
    *mixture_rows("26b-a4b", "mixture"),
    small(generate_row("31b", "many-steps", "dense, small", 64)),
    *added_rows("e2b", "E2B-like"),
]
