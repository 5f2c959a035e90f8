"""What the harvest's tests run on, and what they compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemloupe import Store
from tests.core.models import Case, ids

LENGTHS = (9, 3, 14, 6, 9, 1, 12, 5, 9, 4, 7, 2)
OUTPUTS = "layers.*.layer_output"
OUTPUT = "layers[3].layer_output"


def rows_of_ids() -> list[list[int]]:
    """Sequences of many lengths, BOS first."""
    return [ids(length, salt)[0].tolist() for salt, length in enumerate(LENGTHS)]


def model() -> Any:
    return Case("e2b").model()


def files(store: Path) -> dict[str, bytes]:
    """Every file of a store, but for the lock, which some releases of filelock remove."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def in_order(store: Store, path: str) -> Tensor:
    """A value's rows by sequence and position."""
    order = sorted(range(len(store)), key=lambda i: (int(store.sequences[i]), int(store.positions[i])))
    return store[path][order]


def lose(out: Path, number: int) -> None:
    """Remove a shard."""
    first = sorted(out.glob("shards/*.json"))[number].stem
    for path in out.glob(f"shards/{first}.*"):
        path.unlink()


@contextmanager
def forwards(of: Any) -> Iterator[list[Tensor]]:
    """The ids of every forward that runs meanwhile."""
    ran: list[Tensor] = []
    handle = of._module.register_forward_pre_hook(
        lambda _module, _args, kwargs: ran.append(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        yield ran
    finally:
        handle.remove()


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """How often a module ran, as the length of a list."""
    ran: list[int] = []
    handle = module.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        yield ran
    finally:
        handle.remove()
