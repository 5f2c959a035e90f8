"""Checks that compare tensors, as the command line shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

__all__ = ["Check", "Pair", "agree", "check_table", "hooked"]

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Check:
    """Something that must hold: what it compares, and the largest difference that was found."""

    name: str
    compares: str
    difference: float
    allowed: float
    felt: bool = True
    """Whether what was done shows at all: two runs that an edit does not reach agree as well."""

    @property
    def held(self) -> bool:
        """Whether it holds; a difference that is no number does not."""
        return self.felt and self.difference <= self.allowed


def agree(
    name: str, compares: str, pairs: Iterable[Pair], allowed: float = 0.0, *, felt: bool = True
) -> Check:
    """The check that both tensors of every pair agree: bit for bit or to `allowed`. No pair, no hold."""
    differences = [_difference(one, other) for one, other in pairs]
    # `max` passes over a difference that is no number, unless it comes first.
    worst = next((d for d in differences if d != d), max(differences, default=float("nan")))
    return Check(name, compares, worst, allowed, felt)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, infinite where their shapes differ."""
    return float((one.double() - other.double()).abs().max()) if one.shape == other.shape else float("inf")


@contextmanager
def hooked(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A plain PyTorch hook that changes what a module answers, for the length of a block."""

    def hook(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        return change(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def check_table(checks: Iterable[Check]) -> Table:
    """The checks as a rich table, one a row."""
    table = Table(
        "check", "compares", "largest difference", "held", box=None, header_style="dim", pad_edge=False
    )
    for check in checks:
        allowed = f" (allowed {check.allowed:g})" if check.allowed else ""
        felt = "" if check.felt else ", without effect"
        held = Text("yes", style="green") if check.held else Text("NO", style="bold red")
        table.add_row(check.name, check.compares, f"{check.difference:.2g}{allowed}{felt}", held)
    return table
