"""One forward, read and edited: the wrapped model against the bare module with plain torch hooks.

Under `torch.no_grad()`. Hooks are set and removed, and traces opened and closed, inside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nnsight
import torch

from benchmarks.measure import Measurement, Side, alternate
from benchmarks.models import Size, Twins, twins
from benchmarks.row import Row

__all__ = ["ROWS"]

Run = Callable[[Twins], Any]


def rows_of(shape: str, kind: str) -> list[Row]:
    """The rows that every text shape has."""
    bare, kept = "the bare module", "plain hooks that keep the same tensors"
    return [
        row(shape, "control", f"{kind}: a second bare module (what the measurement is worth)", bare, second, plain),
        row(shape, "outside", f"{kind}: the wrapped model outside a trace", bare, outside, plain, 1.02),
        row(shape, "trace", f"{kind}: a trace that reads the logits alone", bare, read_logits, plain),
        row(shape, "layer_output", f"{kind}: every `layer_output`", kept, read_outputs, hook_outputs, 1.05),
        row(shape, "mid_stream", f"{kind}: every `mid_stream`", kept, read_middles, hook_middles),
        row(shape, "mlp", f"{kind}: the four values of every MLP", kept, read_mlps, hook_mlps),
        row(shape, "edit", f"{kind}: an assigned `layer_output`", "a plain hook that returns it", edit, hook_edit),
        row(shape, "steer", f"{kind}: `steer` on one block", "a plain hook that returns it", steer, hook_edit),
    ]


def row(
    shape: str, name: str, what: str, against: str, ours: Run, theirs: Run, bound: float | None = None
) -> Row:
    """A row whose two sides run on the twins of a shape."""

    def measure(size: Size, pairs: int) -> Measurement:
        pair = twins(shape, size)
        with torch.no_grad():
            return alternate(
                Side(lambda: ours(pair)), Side(lambda: theirs(pair)), pairs, same=lambda result: result
            )

    return Row(f"{shape}/{name}", what, against, measure, bound)


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
        for module in (block.mlp, block.mlp.down_proj, block.post_feedforward_layernorm):
            handles.append(module.register_forward_pre_hook(keep_input(kept)))
        handles.append(block.post_feedforward_layernorm.register_forward_hook(keep_output(kept)))
    with hooked(handles):
        pair.bare(**pair.inputs)
    return kept


# ---- edits -------------------------------------------------------------------------------------------------


def edit(pair: Twins) -> torch.Tensor:
    middle = len(pair.model.layers) // 2
    vector = direction(pair)
    with pair.model.trace(pair.inputs):
        layer = pair.model.layers[middle]
        layer.layer_output = layer.layer_output + vector
        logits = pair.model.logits.save()
    return logits


def steer(pair: Twins) -> torch.Tensor:
    middle = len(pair.model.layers) // 2
    vector = direction(pair)
    with pair.model.trace(pair.inputs):
        pair.model.steer(middle, vector)
        logits = pair.model.logits.save()
    return logits


def hook_edit(pair: Twins) -> torch.Tensor:
    block = blocks(pair)[len(blocks(pair)) // 2]
    vector = direction(pair)
    with hooked([block.register_forward_hook(lambda _module, _arguments, output: output + vector)]):
        return pair.bare(**pair.inputs).logits


def direction(pair: Twins) -> torch.Tensor:
    return torch.linspace(-1, 1, pair.bare.config.hidden_size)


# ---- the mixture -------------------------------------------------------------------------------------------


def read_mixture(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([])
        for layer in pair.model.layers:
            mlp = layer.mlp
            kept += [mlp.shared_expert_output, mlp.router_logits, mlp.router_probabilities]
            kept += [mlp.expert_weights, mlp.expert_indices, mlp.expert_outputs, mlp.routed_output]
        logits = pair.model.logits.save()
    return logits


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


ROWS: list[Row] = [
    *rows_of("31b", "dense"),
    *rows_of("e2b", "E2B-like"),
    row("26b-a4b", "outside", "mixture: the wrapped model outside a trace", "the bare module", outside, plain, 1.02),
    row("26b-a4b", "layer_output", "mixture: every `layer_output`", "plain hooks that keep the same tensors", read_outputs, hook_outputs, 1.05),
    row("26b-a4b", "mixture", "mixture: the seven values of every block", "the bare module", read_mixture, plain),
]
