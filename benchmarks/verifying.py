"""`verify`: how long it takes beside the forward that it checks."""

from __future__ import annotations

from typing import Any

import torch

import gemloupe
from benchmarks.measure import Measurement, Side, alternate
from benchmarks.models import Size, twins
from benchmarks.row import Row
from gemloupe.testing import tiny

__all__ = ["ROWS"]


def beside_forward(model: Any, module: Any, ids: torch.Tensor, pairs: int) -> Measurement:
    """Both on the same tokens, once each before it counts."""

    def verified() -> None:
        report = gemloupe.verify(model, ids, progress=False)
        assert report.held, report.first

    def forward() -> None:
        with torch.no_grad():
            module(ids)

    return alternate(Side(verified), Side(forward), pairs)


def text(length: int) -> torch.Tensor:
    ids = torch.randint(20, 260, (1, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 2
    return ids


def dense(size: Size, pairs: int) -> Measurement:
    pair = twins("31b", size)
    return beside_forward(pair.model, pair.bare, text(2 * size.seq), pairs)


def smallest(_size: Size, pairs: int) -> Measurement:
    model = tiny("e2b")
    return beside_forward(model, model._module, text(24), pairs)


ROWS: list[Row] = [
    Row("verify/tiny", "`verify` of a tiny E2B", "its forward", smallest, bound=3.0, unit="seconds", pairs=7),
    Row("31b/verify", "dense: `verify`", "its forward", dense, bound=60.0, unit="seconds", pairs=3),
]
