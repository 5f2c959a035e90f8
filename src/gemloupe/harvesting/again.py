"""Whether a model still computes what a store holds.

A hook, the numbers in an edit, an adapter that is switched off cannot be seen on a model. So a batch of what
is there is run again. On the same machine with as many threads it comes out bit for bit. Where it does not,
rows further apart than rounding explains are refused, and the rest is told: a small steering vector may be as
far from it as another machine is.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..errors import BadArgument, StoreWarning
from ..notices import warn
from .ranks import Ranks
from .shards import read_tensors
from .taken import take
from .work import Left, Work

__all__ = ["check_computed"]

_FINE: Final = 1e-3
"""How far the median row may be from the one stored, in norms: another machine adds up in another order."""
_ROUGH: Final = 0.1
"""The same where numbers of 16 bits are computed or stored. Single rows may be further: rounding sends a
token to another expert."""


def check_computed(model: Any, work: Work, left: Left, ranks: Ranks) -> None:
    """Compare the first batch that is there with what the model computes now.

    Raises: BadArgument, where it is another; DamagedStore.
    """
    if not left.records:
        return
    record = left.records[0]
    batch = next((batch for batch in work.batches if batch.number == record.batches[0]), None)
    if batch is None:
        return  # `missing` says so
    work.shards.check(record)
    stored = read_tensors(work.shards.place / record.file)
    computed = take(model, work, batch, ranks).rows
    moved: tuple[str, float] | None = None
    for form in work.forms:
        some, other = stored[form.path][: batch.rows], computed[form.path]
        if _equal(some, other):
            continue
        apart = _apart(some, other)
        rough = some.is_floating_point() and min(some.dtype.itemsize, model._module.dtype.itemsize) < 4
        if float(apart.median()) > (_ROUGH if rough else _FINE):
            row = int(apart.argmax())
            raise BadArgument(
                f"harvest: {work.out} holds another {form.path} than this model computes now: at position "
                f"{int(computed['positions'][row])} of sequence {int(computed['sequences'][row])} they are "
                f"{float(apart[row]):.2g} of its norm apart.\nSomething changes what it computes: a hook, an "
                f"edit, a setting. Undo it, or give another directory as `out`."
            )
        if moved is None or float(apart.max()) > moved[1]:
            moved = form.path, float(apart.max())
    if moved is not None and ranks.first:
        warn(
            f"the model does not compute bit for bit what {work.out} holds: a row of {moved[0]} is "
            f"{moved[1]:.2g} of its norm apart. Another machine, device or number of threads explains that; "
            f"if a hook or an edit does, give another directory.",
            StoreWarning,
        )


def _equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((some == other) | (some.isnan() & other.isnan())).all())


def _apart(stored: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """How far rows are from each other, `[rows]`, in norms of the stored one; whole numbers and masks are one
    apart where they differ, in whatever order they are: experts of about one weight change places."""
    some, other = (rows.reshape(len(rows), -1) for rows in (stored, computed))
    if not some.is_floating_point():
        return (some.sort(1).values != other.sort(1).values).any(1).double()
    # Hidden keys' scores are minus infinity, or the lowest number of their type.
    hidden = torch.finfo(some.dtype).min / 2
    some, other = (rows.double().masked_fill(rows <= hidden, -torch.inf) for rows in (some, other))
    apart = torch.where(some == other, 0, some - other)
    size = torch.where(some.isfinite(), some, 0).norm(dim=1)
    return torch.nan_to_num(apart.norm(dim=1) / size.clamp(min=1e-30), nan=torch.inf)
