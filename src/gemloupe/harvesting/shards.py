"""Shards on disk: whole or not there at all, and each with a record that says what it must hold.

A file is written aside, flushed to the disk and renamed. The record is renamed last: a shard without one
does not count, and a run that goes on writes it anew.

    0000000012.safetensors    the rows of batches 12, 14, ...; named after the first of them
    0000000012.sums           sums over these rows, as safetensors
    0000000012.json           the record
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import DamagedStore, HarvestStopped

__all__ = [
    "COLUMNS",
    "INDEX",
    "STATISTICS",
    "Record",
    "ShardFolder",
    "aside",
    "file_checksum",
    "read_tensors",
    "remedy",
    "stopping",
    "write_json",
    "write_tensors",
]

COLUMNS: Final = {"token_ids": torch.int32, "positions": torch.int32, "sequences": torch.int64}
"""What every shard holds beside the values, `[rows]` each."""
_OURS: Final = re.compile(r"(\d{10})\.(safetensors|sums|json)")
INDEX: Final = "index.json"
"""Of the whole store, see `index`."""
STATISTICS: Final = "statistics.safetensors"
"""Of the whole store, see `statistics`."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Record:
    """One shard: its file, what is in it, and how to tell that it is whole."""

    file: str
    rows: int
    batches: tuple[int, ...]
    bytes: int
    sha256: str
    statistics: str
    statistics_sha256: str
    values: dict[str, dict[str, Any]]
    """Of each value the dtype and the shape of a row."""
    harvest: str
    """`Index.identity` of the harvest that it is of."""
    processes: int
    """That began the harvest, on which it depends which batches share a shard."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Record:
        """The record that `asdict` gave, out of JSON."""
        return cls(**{**fields, "batches": tuple(fields["batches"])})


class ShardFolder:
    """The shards of a store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.place = store / "shards"

    def records(self) -> list[Record]:
        """The shards that are complete, in the order of their first batches.

        Raises: DamagedStore, for a record that cannot be read.
        """
        found = []
        for path in sorted(self.place.glob("*.json")):
            try:
                found.append(Record.of(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise DamagedStore(f"the record {path} cannot be read ({error}). {remedy(path)}") from None
        return found

    def strange(self) -> Path | None:
        """A file in the folder that no harvest writes, if there is one."""
        if not self.place.is_dir():
            return None
        ours = (each for each in self.place.iterdir() if each != aside(self.place))
        return next((each for each in ours if not _OURS.fullmatch(each.name)), None)

    def check_size(self, record: Record) -> None:
        """Refuse a shard that is gone, or was cut.

        Raises: DamagedStore.
        """
        path = self.place / record.file
        if not path.is_file():
            raise DamagedStore(f"the shard {path} is gone. {remedy(path)}")
        if (size := path.stat().st_size) != record.bytes:
            raise DamagedStore(
                f"the shard {path} was cut or changed: it has {size} bytes, and was written with "
                f"{record.bytes}. {remedy(path)}"
            )

    def check(self, record: Record) -> None:
        """Refuse a shard whose files are not, bit for bit, what was written.

        Raises: DamagedStore.
        """
        self.check_size(record)
        wanted = {record.file: record.sha256, record.statistics: record.statistics_sha256}
        for file, checksum in wanted.items():
            path = self.place / file
            if not path.is_file() or file_checksum(path) != checksum:
                raise DamagedStore(f"the shard {path} was changed: its checksum differs. {remedy(path)}")

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
        batches: tuple[int, ...],
        *,
        harvest: str,
        processes: int,
    ) -> Record:
        """Put a shard on the disk; it counts when this returns.

        Raises: HarvestStopped, where the disk is full or cannot be written.
        """
        name = f"{batches[0]:010d}"
        shard, sums = self.place / f"{name}.safetensors", self.place / f"{name}.sums"
        with stopping(self.store, f"shard {shard.name}", lambda: len(self.records())):
            write_tensors(shard, tensors)
            write_tensors(sums, statistics)
            record = Record(
                file=shard.name,
                rows=len(tensors["sequences"]),
                batches=batches,
                bytes=shard.stat().st_size,
                sha256=file_checksum(shard),
                statistics=sums.name,
                statistics_sha256=file_checksum(sums),
                values={
                    path: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
                    for path, tensor in tensors.items()
                    if path not in COLUMNS
                },
                harvest=harvest,
                processes=processes,
            )
            write_json(self.place / f"{name}.json", asdict(record))
        return record

    def statistics(self, record: Record) -> dict[str, torch.Tensor]:
        """The sums over a shard's rows, as tensors."""
        return read_tensors(self.place / record.statistics)

    def clear(self) -> None:
        """Remove what an ended run left unfinished: files aside, and shards without a record."""
        if aside(self.place).is_dir():
            shutil.rmtree(aside(self.place))
        complete = {Path(record.file).stem for record in self.records()}
        for path in self.place.iterdir():
            named = _OURS.fullmatch(path.name)
            if named and named[1] not in complete:
                path.unlink()


@contextmanager
def stopping(store: Path, what: str, complete: Callable[[], int]) -> Iterator[None]:
    """Say in a user's words that something could not be written.

    Raises: HarvestStopped.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = (
            getattr(error, "errno", None) in _FULL or "os error 28" in str(error) or "No space" in str(error)
        )
        reason = "the disk is full" if full else f"it cannot be written ({error})"
        left = (
            f"The store holds {complete()} complete shards and opens as it is. "
            if (store / INDEX).exists()
            else "Nothing was harvested yet. "
        )
        raise HarvestStopped(
            f"harvest stopped: {reason}, at {what} of {store}.\n{left}"
            f"{'Make room' if full else 'See to that'} and make the same call again: it goes on from there."
        ) from error


def aside(place: Path) -> Path:
    """Where files are written before they are renamed into `place`."""
    return place / ".unfinished"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file that appears whole or not at all.

    Raises: OSError, SafetensorError; nothing is left behind then.
    """
    _whole(path, lambda place: save_file(dict(tensors), place))


def write_json(path: Path, content: Any) -> None:
    """A JSON file that appears whole or not at all.

    Raises: OSError; nothing is left behind then.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False)
    _whole(path, lambda place: place.write_text(f"{text}\n", encoding="utf-8"))


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file aside, flush it, and rename it into its place."""
    folder = aside(path.parent)
    folder.mkdir(exist_ok=True)
    place = folder / path.name
    try:
        write(place)
        place.chmod(0o666 & ~_umask())  # safetensors makes files that nobody else may read
        _flush(place)
        place.replace(path)
        _flush(path.parent)  # the name is on the disk too
    except BaseException:
        place.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory: what is not looked at is not read."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remedy(path: Path) -> str:
    """What to do about a file of a shard."""
    name = path.name.partition(".")[0]
    return f"Remove {path.parent}/{name}.* and make the same harvest again: it computes these rows alone."
