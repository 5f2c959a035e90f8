"""The directory that a harvest writes to: made, found free of anything else, and kept for one run alone."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

from filelock import FileLock, Timeout

from ..errors import BadArgument
from .shards import INDEX, STATISTICS, ShardFolder, aside

__all__ = ["alone", "directory", "mark_run", "sees", "tidy"]

_LOCK: Final = ".lock"
_RUN: Final = "run"
_OURS: Final = (_RUN, INDEX, STATISTICS)
"""What may lie aside in a directory that has no index."""
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system without locks answers."""
_PATIENCE: Final = 10.0
"""Seconds after which a file that another machine wrote is seen over a network."""


def directory(out: Any) -> Path:
    """What was given as `out`.

    Raises: BadArgument.
    """
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "\0" in str(out):
        raise BadArgument(f"harvest: out is the directory to write to, not {out!r}.")
    return Path(os.fspath(out))


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make the directory and keep other runs out of it, until the end.

    Raises: BadArgument, for a directory that holds something else, cannot be written or is written to.
    """
    with suppress(FileNotFoundError):  # another run may be removing its own; it is asked again below
        _refuse_what_is_there(out)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    # It stays when the run is over: a lock that is removed may be held by one run and made anew by another.
    lock = FileLock(out / _LOCK, timeout=0)
    with _writing(out):
        try:
            lock.acquire()
        except Timeout:
            raise BadArgument(
                f"harvest: another run is writing to {out}. Wait until it ends, or give another directory."
            ) from None
        except NotImplementedError:
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    try:
        _refuse_what_is_there(out)  # it may have come before the lock was held
        with _writing(out):
            for place in (ShardFolder(out).place, aside(out)):
                place.mkdir(exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            aside(out).rmdir()  # where nothing was begun
        lock.release()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadArgument(f"harvest: {out} cannot be written: {error}. Give another directory.") from None


def _refuse_what_is_there(out: Path) -> None:
    """Raises: BadArgument, for a directory that holds something else than a store."""
    if out.is_symlink() and not out.exists():
        raise BadArgument(f"harvest: {out} is a link to nothing. Give another directory.")
    if out.exists() and not out.is_dir():
        raise BadArgument(f"harvest: {out} is a file, not a directory. Give another one.")
    if not (out / INDEX).exists() and (strange := _strange(out, ShardFolder(out))) is not None:
        raise BadArgument(
            f"harvest: {out} is no store and is not empty: it has {strange.relative_to(out)}. Give an empty "
            f"directory or a new one."
        )


def _strange(out: Path, shards: ShardFolder) -> Path | None:
    """What lies in a directory without an index that no harvest put there; hidden files and a disk's own
    folder do not count."""
    if not out.is_dir():
        return None
    for each in out.iterdir():
        ours = each in (shards.place, aside(out)) or each.name in (INDEX, STATISTICS, "lost+found")
        if not ours and not each.name.startswith("."):
            return each
    if aside(out).is_dir():
        for each in aside(out).iterdir():
            if each.name not in _OURS:
                return each
    return shards.strange()


def mark_run(out: Path) -> str:
    """Leave a mark of this run that its other processes look for."""
    mark = uuid.uuid4().hex
    (aside(out) / _RUN).write_text(mark)
    return mark


def sees(out: Path, mark: str | None) -> bool:
    """Whether the mark is seen from here, or a store where there is none."""
    ends = time.monotonic() + _PATIENCE
    while True:
        try:
            if (out / INDEX).is_file() if mark is None else (aside(out) / _RUN).read_text() == mark:
                return True
        except OSError:
            pass
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)


def tidy(out: Path) -> None:
    """Remove the folders that files are written aside in."""
    for folder in (aside(out), aside(ShardFolder(out).place)):
        rmtree(folder, ignore_errors=True)
