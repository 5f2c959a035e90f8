"""Whether a model still computes what a store holds."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..errors import BadArgument
from .ranks import Ranks
from .shards import read_tensors
from .taken import take
from .work import Left, Work

__all__ = ["check_computed"]

_FINE: Final = 1e-3
"""How far a row may be from the one stored, in norms: another machine adds up in another order."""
_ROUGH: Final = 0.1
"""The same where numbers of 16 bits are computed or stored."""
_STRAYS: Final = 0.1
"""The share of such rows that may be further: rounding sends a token to another expert."""


def check_computed(model: Any, work: Work, left: Left, ranks: Ranks) -> None:
    """Refuse to go on where the model does not compute what the store holds: a hook, an edit's own numbers
    and a setting cannot be seen on it. A batch of a shard that is there is run again.

    Raises: BadArgument, DamagedStore.
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
    rough = model._module.dtype.itemsize < 4 or any(rows.dtype.itemsize < 4 for rows in computed.values())
    for form in work.forms:
        apart = _apart(stored[form.path][: batch.rows], computed[form.path])
        far = apart > (_ROUGH if rough else _FINE)
        if float(far.double().mean()) > (_STRAYS if rough else 0):
            row = int(far.nonzero()[0])
            raise BadArgument(
                f"harvest: {work.out} holds another {form.path} than this model computes now: at position "
                f"{int(computed['positions'][row])} of sequence {int(computed['sequences'][row])} they are "
                f"{float(apart[row]):.2g} of its norm apart.\nSomething changes what it computes: a hook, an "
                f"edit, a setting. Undo it, or give another directory as `out`."
            )


def _apart(stored: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """How far rows are from each other, `[rows]`, in norms of the stored one."""
    some, other = (rows.reshape(len(rows), -1).to(torch.float64) for rows in (stored, computed))
    apart = torch.where(some == other, 0, some - other)  # scores of hidden keys are minus infinity
    size = torch.where(some.isfinite(), some, 0).norm(dim=1)
    return torch.nan_to_num(apart.norm(dim=1) / size.clamp(min=1e-30), nan=torch.inf)
