"""What a harvest has to do, and what earlier runs of it left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import BadArgument, DamagedStore
from . import positions as place
from .batches import Batch, grouped, plan
from .index import Index, checksum, model_facts, value_facts, versions
from .positions import Chooser
from .rows import Form
from .sequences import Sequences
from .shards import INDEX, STATISTICS, Record, ShardFolder, file_checksum, remedy, stopping, write_tensors
from .statistics import merged

__all__ = ["DTYPES", "Asked", "Left", "Work", "planned"]

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Asked:
    """The options of a harvest that decide what its store holds."""

    positions: Chooser
    sample: int | None
    seed: int
    dtype: Any
    """A `torch.dtype`, or `None`."""
    tokens_per_batch: int
    shard_bytes: int
    robust: bool

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises: BadArgument.
        """
        place.check(self.positions, self.sample, self.seed)
        if self.dtype is not None and self.dtype not in DTYPES.values():
            known = ", ".join(DTYPES)
            raise BadArgument(f"harvest: dtype is one of {known}, not {self.dtype!r}.")
        if (
            isinstance(self.shard_bytes, bool)
            or not isinstance(self.shard_bytes, int)
            or self.shard_bytes < 1
        ):
            raise BadArgument(f"harvest: shard_bytes is a number of bytes, not {self.shard_bytes!r}.")
        if not isinstance(self.robust, bool):
            raise BadArgument(f"harvest: robust is True or False, not {self.robust!r}.")

    def facts(self) -> dict[str, Any]:
        """The options as the index has them."""
        return {
            **vars(self),
            "positions": place.described(self.positions),
            "seed": None if self.sample is None else self.seed,  # it decides nothing then
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True)
class Left:
    """What earlier runs of a harvest left."""

    complete: bool
    processes: int
    """That began it."""
    records: list[Record]
    """The shards that are there."""
    identity: str
    """Of the index that they are of: the one that was written when the harvest began."""


@dataclass(frozen=True)
class Work:
    """What a harvest has to do, the same in every process."""

    out: Path
    asked: Asked
    forms: list[Form]
    sequences: Sequences
    chosen: torch.Tensor
    batches: list[Batch]
    index: Index

    @property
    def shards(self) -> ShardFolder:
        return ShardFolder(self.out)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which are the keys of every pattern's row."""
        return int(self.sequences.lengths.max())

    def is_done(self) -> bool:
        """Whether the directory holds the whole store.

        Raises: BadArgument, where it holds another harvest; DamagedStore.
        """
        if not (self.out / INDEX).is_file():
            return False
        there = Index.read(self.out)
        self.index.check_same(there, self.out)
        return there.complete and self._whole(there, self.shards.records())

    def begin(self, processes: int) -> None:
        """Put the index into the directory, or find in it what an earlier run of this harvest left.

        Raises: BadArgument, DamagedStore, HarvestStopped.
        """
        there = Index.read(self.out) if (self.out / INDEX).exists() else None
        if there is not None:
            self.index.check_same(there, self.out)
        records = self.shards.records()
        first = there or self.index
        for record in records:
            if record.harvest != first.identity:
                raise BadArgument(
                    f"harvest: {self.out} holds the shard {record.file} of another harvest, and no index "
                    f"that says which. Give another directory as `out`, or remove this one."
                )
        whole = there is not None and there.complete and self._whole(there, records)
        if not whole:
            before = records[0] if records else there
            begun = first.begun(processes if before is None else before.processes)
            if begun != there:
                with stopping(self.out, INDEX, lambda: len(records)):
                    begun.write(self.out)
            for record in records:
                self.shards.check(record)
            self.shards.clear()

    def _whole(self, index: Index, records: list[Record]) -> bool:
        """Whether all that a complete index names is there."""
        statistics = self.out / STATISTICS
        return (
            index.shards == tuple(records)
            and statistics.is_file()
            and file_checksum(statistics) == index.statistics_sha256
        )

    def left(self) -> Left:
        """What is there."""
        index = Index.read(self.out)
        return Left(index.complete, index.processes, self.shards.records(), index.identity)

    def missing(self, left: Left, row_bytes: int) -> list[tuple[Batch, ...]]:
        """The batches of the shards that are still to be made.

        Raises: DamagedStore, for a shard of other batches than belong together.
        """
        groups = grouped(self.batches, row_bytes, self.asked.shard_bytes, left.processes)
        numbers = {tuple(batch.number for batch in group): group for group in groups}
        for record in left.records:
            if numbers.pop(record.batches, None) is None:
                raise DamagedStore(
                    f"the shard {self.shards.place / record.file} holds other batches than belong together. "
                    f"{remedy(self.shards.place / record.file)}"
                )
        return list(numbers.values())

    def finish(self) -> None:
        """Write the statistics of the whole and the index.

        Raises: HarvestStopped; DamagedStore, where shards were removed meanwhile.
        """
        records = self.shards.records()
        there = sorted(batch for record in records for batch in record.batches)
        if there != [batch.number for batch in self.batches]:
            raise DamagedStore(
                f"{self.out} holds {len(there)} of {len(self.batches)} batches where all were written: "
                f"shards were removed meanwhile. Make the same call again."
            )
        with stopping(self.out, INDEX, lambda: len(records)):
            sums = merged([self.shards.statistics(record) for record in records])
            tensors = {name: t for path, one in sums.items() for name, t in one.tensors(path).items()}
            write_tensors(self.out / STATISTICS, tensors)
            checksum = file_checksum(self.out / STATISTICS)
            Index.read(self.out).finished(records, checksum).write(self.out)


def planned(model: Any, sequences: Sequences, chosen_forms: list[Form], out: Path, asked: Asked) -> Work:
    """What there is to do, and the index that says so.

    Raises: BadArgument.
    """
    chosen = place.choose(
        sequences, asked.positions, sample=asked.sample, seed=asked.seed, special=place.special_tokens(model)
    )
    before = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])
    counts = before[sequences.starts[1:]] - before[sequences.starts[:-1]]
    batches = plan(sequences.lengths, counts, asked.tokens_per_batch)
    if not model.dispatched:
        model.dispatch()  # its weights tell which model it is
    data = {
        "sequences": len(sequences),
        "tokens": len(sequences.ids),
        "rows": int(chosen.sum()),
        "longest": int(sequences.lengths.max()),
        "checksum": checksum(t.numpy().tobytes() for t in (sequences.ids, sequences.starts, chosen)),
    }
    index = Index(model_facts(model), value_facts(chosen_forms), data, asked.facts(), dict(versions()))
    return Work(out, asked, chosen_forms, sequences, chosen, batches, index)
