"""Reading a store: slices, shuffled iteration, a torch data set, and the statistics.

Shards are mapped into memory, so what is not looked at is not read, but for the checksum of each shard,
which is compared when the shard is first touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeAlias

import torch
from torch.utils.data import Dataset

from ..errors import BadArgument, DamagedStore, UnknownName
from ..references import Reference
from .index import Index
from .shards import COLUMNS, STATISTICS, ShardFolder, file_checksum, read_tensors
from .shuffling import buffers
from .sources import short, whole_number
from .statistics import Statistics, ValueStatistics, merged

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Column", "Rows", "Store"]

_AGAIN: Final = "Make the same harvest again: it puts this together anew from the shards."
_NUMBERS: Final = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
Wanted: TypeAlias = "SupportsIndex | slice | Sequence[int] | torch.Tensor | NDArray[Any]"
"""Rows: one (its axis is dropped), a slice, numbers, or a mask `[rows]`."""
Names = str | Reference | Iterable[str | Reference]


class Store:
    """A directory that `harvest` wrote.

    `store[path]` is a `Column`, whose slices are tensors: `store["layers[3].layer_output"][:100]` is
    `[rows hidden]`. Row i of every value is of one token: `token_ids[i]`, at `positions[i]` of the sequence
    numbered `sequences[i]`, in the order of the data set. Rows lie by batches: those of a sequence follow
    each other, and sequences come in no order. A store whose run ended early holds what was complete, and
    `complete` says so.

    `verify=False` leaves the checksums out.

    Raises: BadArgument, where there is no store; DamagedStore, for a shard that is gone or was cut, and,
    when it is first touched, for one that was changed.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        self.index = Index.read(self.path)
        self._checks = verify
        self._folder = ShardFolder(self.path)
        self.shards = self.index.shards if self.index.complete else tuple(self._folder.records())
        for record in self.shards:
            self._folder.check_size(record)
        rows = sum(record.rows for record in self.shards)
        batches = [batch for record in self.shards for batch in record.batches]
        if len(batches) != len(set(batches)):
            raise DamagedStore(f"the index of {self.path} was changed: it has a batch twice. {_AGAIN}")
        if self.index.complete and rows != self.index.data["rows"]:
            raise DamagedStore(
                f"the index of {self.path} was changed: its shards have {rows} rows, and "
                f"{self.index.data['rows']} were harvested. {_AGAIN}"
            )
        self._starts = torch.tensor([0, *(record.rows for record in self.shards)]).cumsum(0)
        self._opened: dict[int, dict[str, torch.Tensor]] = {}

    # -- what there is ---------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the harvest came to its end."""
        return self.index.complete

    @property
    def paths(self) -> tuple[str, ...]:
        """The values, in forward order."""
        return tuple(self.index.values)

    def __len__(self) -> int:
        """Tokens that have a row."""
        return int(self._starts[-1])

    def __contains__(self, value: object) -> bool:
        return str(value) in self.index.values

    def __repr__(self) -> str:
        state = "" if self.complete else ", not complete"
        name = self.index.model["name"] or self.index.model["class"]
        return f"Store({str(self.path)!r}: {len(self)} rows of {len(self.paths)} values of {name}{state})"

    @cached_property
    def statistics(self) -> Statistics:
        """Mean, variance and norms by value, over all rows; whole numbers and raw scores have none.

        Raises: DamagedStore.
        """
        parts: list[Mapping[str, torch.Tensor]]
        if self.complete:
            self._check_statistics()
            parts = [read_tensors(self.path / STATISTICS)]
        else:
            parts = [self._folder.statistics(record) for record in self.shards]
        sums = merged(parts)
        return Statistics(
            {path: ValueStatistics.of(sums[path]) for path in self.paths if path in sums}, self.paths
        )

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises: DamagedStore, which names the first that differs.
        """
        for record in self.shards:
            self._folder.check(record)
        if self.complete:
            self._check_statistics()

    def _check_statistics(self) -> None:
        """Refuse statistics that are not what was written.

        Raises: DamagedStore.
        """
        path = self.path / STATISTICS
        if not path.is_file() or (self._checks and file_checksum(path) != self.index.statistics_sha256):
            raise DamagedStore(f"{path} is gone or was changed. {_AGAIN}")

    # -- rows ------------------------------------------------------------------------------------

    def __getitem__(self, value: str | Reference) -> Column:
        """The rows of a value.

        Raises: UnknownName, with the nearest.
        """
        name = str(value) if isinstance(value, (str, Reference)) else short(value)
        if name not in (*self.index.values, *COLUMNS):
            near = get_close_matches(name, self.index.values, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise UnknownName(f"{name} was not harvested; {', '.join(self.paths)} were.{meant}")
        return Column(self, name)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """`[rows]`, int32."""
        return self["token_ids"][:]

    @cached_property
    def positions(self) -> torch.Tensor:
        """`[rows]`, int32: each row's place in its sequence, 0 the first token."""
        return self["positions"][:]

    @cached_property
    def sequences(self) -> torch.Tensor:
        """`[rows]`, int64: the number of each row's sequence in the data set."""
        return self["sequences"][:]

    def of_sequence(self, sequence: int) -> slice:
        """The rows of one sequence; none where none of its tokens was chosen, or its shard is not there yet.

        Raises: BadArgument, for a number that no sequence has.
        """
        if not 0 <= sequence < self.index.data["sequences"]:
            raise BadArgument(
                f"there is no sequence {sequence}: the data set has {self.index.data['sequences']}, numbered "
                f"from 0."
            )
        numbers, starts, stops = self._runs
        at = int(torch.searchsorted(numbers, sequence))
        if at == len(numbers) or int(numbers[at]) != sequence:
            return slice(0, 0)
        return slice(int(starts[at]), int(stops[at]))

    @cached_property
    def _runs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequences that have rows, ascending, and where the rows of each start and stop."""
        numbers, counts = self.sequences.unique_consecutive(return_counts=True)
        stops = counts.cumsum(0)
        order = numbers.argsort()
        return numbers[order], (stops - counts)[order], stops[order]

    def shuffled(
        self,
        batch_size: SupportsIndex,
        values: Names | None = None,
        *,
        seed: SupportsIndex = 0,
        buffer: SupportsIndex = 32_768,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """All rows once, in batches of `batch_size` (the last may be smaller), in an order that `seed`
        decides.

        Short runs of rows from several random shards are put into a buffer of `buffer` rows, which batches
        are drawn from: a batch has rows of many sequences, and the disk reads one shard after another. Give
        another seed for another epoch. Each batch has the values (by default all), `token_ids`, `positions`
        and `sequences`.

        Raises: BadArgument, UnknownName.
        """
        rows = []
        for name, given in (("batch_size", batch_size), ("buffer", buffer)):
            number = whole_number(given)
            if number is None or number < 1:
                raise BadArgument(f"shuffled: {name} is a number of rows, not {short(given)}.")
            rows.append(number)
        start = whole_number(seed)
        if start is None or not -(2**63) <= start < 2**64:  # what torch's generator takes
            raise BadArgument(f"shuffled: seed is a whole number of 64 bits, not {short(seed)}.")
        return self._shuffled(rows[0], self._names(values), start, rows[1])

    def _shuffled(
        self, batch_size: int, names: list[str], seed: int, buffer: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        columns = [Column(self, name) for name in names]
        for rows in buffers(self._starts.tolist(), batch_size, buffer, seed):
            ascending, places = rows.sort()  # a file is read from its start to its end
            back = places.argsort()
            read = {column.name: column._numbered(ascending)[back] for column in columns}
            for at in range(0, len(rows), batch_size):
                yield {name: tensor[at : at + batch_size] for name, tensor in read.items()}

    def dataset(self, values: Names | None = None) -> Rows:
        """A torch `Dataset` of the rows, for a `DataLoader`: each is a dictionary of the values (by default
        all), `token_ids`, `positions` and `sequences`.

        Raises: UnknownName.
        """
        return Rows(self, self._names(values))

    def _names(self, values: Names | None) -> list[str]:
        if values is None:
            values = self.paths
        elif isinstance(values, (str, Reference)) or not isinstance(values, Iterable):
            values = [values]
        return [*(self[value].name for value in values), *COLUMNS]

    # -- shards ----------------------------------------------------------------------------------

    def _shard(self, number: int) -> dict[str, torch.Tensor]:
        """A shard's tensors, mapped into memory."""
        if number not in self._opened:
            record = self.shards[number]
            if self._checks:
                self._folder.check(record)
            tensors = read_tensors(self._folder.place / record.file)
            if len(tensors["sequences"]) != record.rows:
                raise DamagedStore(
                    f"the index of {self.path} was changed: {record.file} has other rows. {_AGAIN}"
                )
            self._opened[number] = tensors
        return self._opened[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}  # another process maps the files itself


class Column:
    """The rows of one value: `column[3]`, `column[10:20]`, `column[[4, 1]]`, `column[mask]` are tensors.

    A slice inside one shard is a view of the file as this store has it mapped: what is changed in it in
    place stays changed for whoever reads these rows of this store again, and never reaches the disk.
    `clone()` it first. Everything else is a copy.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the whole column, `rows` first."""
        return ("rows", *self.store.index.values.get(self.name, {"axes": ()})["axes"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole column."""
        return (len(self), *self._facts()["shape"])

    @property
    def dtype(self) -> torch.dtype:
        """What it is stored as."""
        return getattr(torch, self._facts()["dtype"])

    def _facts(self) -> dict[str, Any]:
        if self.name in COLUMNS:
            return {"shape": [], "dtype": str(COLUMNS[self.name]).removeprefix("torch.")}
        if not self.store.shards:
            raise BadArgument(f"{self.store.path} has no complete shard yet, so {self.name} has no shape.")
        return self.store.shards[0].values[self.name]

    def __len__(self) -> int:
        return len(self.store)

    def __repr__(self) -> str:
        return f"<{self.name} [{' '.join(self.axes)}]: {len(self)} rows>"

    def __getitem__(self, rows: Wanted) -> torch.Tensor:
        """Rows, as a tensor's are taken; further axes are indexed on the result.

        Raises: BadArgument, for what names no rows; IndexError, for a row past the end.
        """
        if isinstance(rows, slice):
            return self._sliced(rows)
        number = whole_number(rows)
        if number is not None:
            if not -len(self) <= number < len(self):
                raise self._past(number)
            return self._numbered(torch.tensor([number % len(self)]))[0]
        wanted = self._listed(rows)
        if wanted.dtype == torch.bool:
            if wanted.shape != (len(self),):
                raise BadArgument(f"a mask of rows is [{len(self)}], not {list(wanted.shape)}.")
            return self._numbered(wanted.nonzero().flatten())
        return self._numbered(self._inside(wanted))

    def _sliced(self, rows: slice) -> torch.Tensor:
        try:
            start, stop, step = rows.indices(len(self))
        except (TypeError, ValueError) as error:
            raise BadArgument(f"{rows!r} is no slice of rows: {error}.") from None
        if step == 1:
            return self._run(start, max(start, stop))
        return self._numbered(torch.tensor(range(start, stop, step), dtype=torch.int64))

    def _listed(self, rows: Any) -> torch.Tensor:
        """A mask, or row numbers, `[n]`, int64."""
        try:
            found = None if isinstance(rows, tuple) else torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            found = None
        if found is not None and found.dtype == torch.bool and found.dim():
            return found.cpu()
        # An empty list is of no dtype. As an index, uint8 was a mask once.
        integral = found is not None and (found.dtype in _NUMBERS or not found.numel())
        if found is None or found.dim() != 1 or not integral:
            what = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, torch.Tensor) else short(rows)
            raise BadArgument(
                f"{self.name}: {what} names no rows. Rows are a whole number, a slice, a list or "
                f"tensor of row numbers, or a mask, torch.bool [{len(self)}]. Index further axes on what "
                f"comes of it: column[rows][:, 5]."
            )
        return found.to("cpu", torch.int64)

    def _inside(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows counted from the start."""
        past = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(past):
            raise self._past(int(past[0]))
        return rows % max(len(self), 1)

    def _past(self, row: int) -> IndexError:
        return IndexError(f"row {row} is past the store's {len(self)}, 0 to {len(self) - 1}.")

    def _run(self, start: int, stop: int) -> torch.Tensor:
        """Rows that follow each other."""
        starts = self.store._starts
        parts = []
        for shard, record in enumerate(self.store.shards):
            first = int(starts[shard])
            if start < first + record.rows and stop > first:
                parts.append(self.store._shard(shard)[self.name][max(start - first, 0) : stop - first])
        if not parts:
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _numbered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by number, in the order given."""
        result = torch.empty(len(rows), *self.shape[1:], dtype=self.dtype)
        shards = torch.searchsorted(self.store._starts, rows, right=True) - 1
        for shard in shards.unique().tolist():
            of_it = shards == shard
            result[of_it] = self.store._shard(shard)[self.name][rows[of_it] - self.store._starts[shard]]
        return result


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a store as a torch data set."""

    def __init__(self, store: Store, names: list[str]) -> None:
        self.store = store
        self.names = names

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: Column(self.store, name)[row] for name in self.names}

    def __getitems__(self, rows: list[int]) -> list[dict[str, torch.Tensor]]:
        """Many at a time, which is how a `DataLoader` asks."""
        found = {name: Column(self.store, name)[rows] for name in self.names}
        return [{name: tensor[i] for name, tensor in found.items()} for i in range(len(rows))]
