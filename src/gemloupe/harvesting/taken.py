"""The rows of a batch, as a forward gives them, and of a shard, filled in as they come."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import HarvestStopped, PromptWarning
from ..loading import text_config
from .batches import Batch, feed
from .ranks import Ranks
from .rows import Form
from .shards import COLUMNS, Record
from .statistics import Sums
from .work import Work

__all__ = ["Shard", "Taken", "take"]


@dataclass(frozen=True)
class Taken:
    """The rows of one batch."""

    rows: dict[str, torch.Tensor]
    """Of every value, and of `COLUMNS`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows together."""
        return sum(rows.element_size() * prod(rows.shape[1:]) for rows in self.rows.values())

    def like(self) -> Taken:
        """The same with no row."""
        return Taken({name: rows.new_empty(0, *rows.shape[1:]) for name, rows in self.rows.items()})

    @classmethod
    def as_in(cls, record: Record) -> Taken:
        """No row, of what a shard holds."""
        columns = {name: torch.empty(0, dtype=dtype) for name, dtype in COLUMNS.items()}
        return cls(
            columns
            | {
                path: torch.empty(0, *facts["shape"], dtype=getattr(torch, facts["dtype"]))
                for path, facts in record.values.items()
            }
        )


def take(model: Any, work: Work, batch: Batch, ranks: Ranks) -> Taken:
    """Run one batch."""
    config = text_config(model._module.config)
    fed = feed(work.sequences, work.chosen, batch, pad=config.pad_token_id or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PromptWarning)  # said once for all sequences
        found = model.collect(
            {"input_ids": fed.input_ids, "attention_mask": fed.attention_mask},
            [form.path for form in work.forms],
            positions=fed.chosen,
            dtype=work.asked.dtype,
            device="cpu",
            use_cache=False,
        )
    noted = {"token_ids": fed.token_ids, "positions": fed.positions, "sequences": fed.sequences}
    rows = {form.path: form.rows(found[form.path], fed, work.longest) for form in work.forms}
    return Taken(noted | {form.path: ranks.whole(rows[form.path], form) for form in work.forms})


class Shard:
    """The rows of some batches, filled in as they come."""

    def __init__(self, forms: list[Form], like: Taken, rows: int, *, robust: bool) -> None:
        self.forms = forms
        self.filled = 0
        self.tensors = {name: tensor.new_empty(rows, *tensor.shape[1:]) for name, tensor in like.rows.items()}
        # Whole numbers have no mean worth a name, and hidden keys' scores are minus infinity.
        counted = [form for form in forms if like.rows[form.path].is_floating_point() and not form.masked]
        self.sums = {
            form.path: Sums(tuple(like.rows[form.path].shape[1:]), robust=robust) for form in counted
        }

    def put(self, taken: Taken) -> None:
        """The rows of the next batch.

        Raises: HarvestStopped, where a number is not finite.
        """
        rows = taken.rows
        for form in self.forms:
            if not self._add(form, rows):
                raise HarvestStopped(_not_finite(form, rows))
        stop = self.filled + len(rows["sequences"])
        for name, tensor in rows.items():
            self.tensors[name][self.filled : stop] = tensor
        self.filled = stop

    def _add(self, form: Form, rows: dict[str, torch.Tensor]) -> bool:
        """Add a value's rows up. Returns whether all are finite."""
        if form.path in self.sums:
            return self.sums[form.path].add(rows[form.path], rows["sequences"], rows["positions"])
        return not bool(_spoilt(form, rows[form.path]).any())

    def statistics(self) -> dict[str, torch.Tensor]:
        """The sums over all rows, as tensors."""
        return {name: t for path, sums in self.sums.items() for name, t in sums.tensors(path).items()}


def _spoilt(form: Form, rows: torch.Tensor) -> torch.Tensor:
    """Which numbers are not finite; minus infinity is a hidden key's score."""
    return rows.isnan() | (rows.isposinf() if form.masked else rows.isinf())


def _not_finite(form: Form, rows: dict[str, torch.Tensor]) -> str:
    value = rows[form.path].reshape(len(rows[form.path]), -1)
    bad = _spoilt(form, value)
    row = int(bad.any(1).nonzero()[0])
    number = float(value[row][bad[row]][0])
    hint = " float16 ends at 65504: store bfloat16 or float32." if value.dtype == torch.float16 else ""
    return (
        f"harvest stopped: {form.path} is {number} at position {int(rows['positions'][row])} of sequence "
        f"{int(rows['sequences'][row])} (token {int(rows['token_ids'][row])}), the first of the values asked "
        f"for in the forward's order.{hint}\nComplete shards stay."
    )
