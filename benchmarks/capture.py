"""`collect`: every block's output, against plain hooks; and the early stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.forward import HOOKS, Run, blocks, hook_outputs, hooked, plain, row
from benchmarks.measure import insist
from benchmarks.models import Twins
from benchmarks.row import Row

__all__ = ["OUTPUTS", "ROWS", "block", "collect_outputs"]

OUTPUTS: Final = "layers.*.layer_output"
LAYERS: Final = 12
"""Blocks of the full size, in which the blocks to stop after are counted."""


# ---- every block's output ----------------------------------------------------------------------------------


def collect_outputs(pair: Twins) -> list[torch.Tensor]:
    kept = pair.model.collect(pair.inputs, OUTPUTS)
    return [kept[path] for path in kept.paths(OUTPUTS)]


# ---- the early stop ----------------------------------------------------------------------------------------


def block(pair: Twins, k: int) -> int:
    """Block `k` of the full size, or the one as deep in a smaller model."""
    return k * len(blocks(pair)) // LAYERS


def stop_after(k: int) -> Run:
    def run(pair: Twins) -> torch.Tensor:
        path = f"layers[{block(pair, k)}].layer_output"
        return pair.model.collect(pair.inputs, path)[path]

    return run


def is_output_of(k: int) -> Callable[[Twins, Any], None]:
    """Checks what was collected, and that the forward ran no block after that one."""

    def check(pair: Twins, collected: torch.Tensor) -> None:
        insist(collected, hook_outputs(pair)[block(pair, k)])
        ran: list[int] = []
        layers = pair.wrapped.model.layers
        handles = [
            layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
            for index, layer in enumerate(layers)
        ]
        with hooked(handles):
            stop_after(k)(pair)
        assert ran == list(range(block(pair, k) + 1)), f"blocks {ran} ran"

    return check


# ---- the rows ----------------------------------------------------------------------------------------------


def collect_row(shape: str, kind: str) -> Row:
    what = f"{kind}: `collect` of every `layer_output`"
    return row(shape, "collect", what, HOOKS, collect_outputs, hook_outputs, bound=1.05)


def stop_row(k: int) -> Row:
    """A row of a forward that stops after block k: its share of the blocks, and a tenth for all the rest."""
    return row(
        "31b",
        f"stop-{k}",
        f"dense: `collect` of `layers[{k}].layer_output` of {LAYERS} blocks",
        "the whole forward",
        stop_after(k),
        plain,
        check=is_output_of(k),
        bound=round((k + 1) / LAYERS + 0.1, 3),
    )


ROWS: list[Row] = [
    collect_row("31b", "dense"),
    *(stop_row(k) for k in (2, 8)),
    collect_row("e2b", "E2B-like"),
]
