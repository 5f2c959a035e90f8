"""Where sequences come from: a list, an iterable, a data set, an encoding or a file, one item each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..errors import BadArgument

__all__ = ["Item", "items", "named", "short", "whole_number"]

_JSON: Final = (".jsonl", ".ndjson", ".json")
_ONE_ARRAY: Final = (
    "JSONL has one sequence a line; of a file that is one array give what it holds: "
    "json.loads(Path(...).read_text())."
)


class Item(NamedTuple):
    """One sequence as it is given."""

    what: Any
    """A text, or ids."""
    mask: Any = None
    """Which of the ids are real, where that was given."""
    line: str = ""
    """The line of the file that it comes from, in words."""


def items(given: Any, column: str | None) -> Iterator[Item]:
    """Each sequence of what is given; `column` names the field of a row.

    Raises: BadArgument, for what holds no sequences, for a file that cannot be read as what it is, and for a
    row without the field.
    """
    if isinstance(given, str):
        raise BadArgument(
            f"harvest: {short(given)} is one text, and a harvest is of many. Give [text], a list or an "
            f"iterable of them; or a file as Path({short(given)})."
        )
    if isinstance(given, Path):
        for row, line in _lines(given):
            yield _item(row, column, line, line)
        return
    if isinstance(given, Mapping):
        yield from _encoding(given)
        return
    if isinstance(given, io.TextIOBase):
        raise BadArgument("harvest: an open file is no data set; give its Path instead.")
    if not isinstance(given, Iterable) and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        given = _each(given)
    if not isinstance(given, Iterable) or (isinstance(given, torch.Tensor) and given.dim() != 2):
        raise BadArgument(
            f"harvest: texts or ids are a list, an iterable, a Path or a data set, not {short(given)}."
        )
    for at, row in enumerate(given):
        yield _item(row, column, f"row {at}")


def _each(given: Any) -> Iterator[Any]:
    """The items of torch's map-style `Dataset`, which is no iterable."""
    for at in range(len(given)):
        yield given[at]


def named(given: Any) -> str:
    """What is given, in words."""
    return f"the file {given}" if isinstance(given, Path) else f"what was given ({type(given).__name__})"


def short(thing: Any, most: int = 60) -> str:
    """The repr of anything, on one line of at most so many characters."""
    text = " ".join(repr(thing).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def whole_number(thing: Any) -> int | None:
    """A whole number of Python, of numpy or of torch (a tensor without axes) as Python's; `None` for what is
    none, as a bool is."""
    if isinstance(thing, bool) or "bool" in str(getattr(thing, "dtype", "")) or getattr(thing, "ndim", 0):
        return None
    try:
        return index(thing)
    except (TypeError, RuntimeError):
        return None


def _item(row: Any, column: str | None, place: str, line: str = "") -> Item:
    """A row as a sequence: itself, or where it has fields the text or the ids of one."""
    if not isinstance(row, Mapping):
        return Item(row, line=line)
    name = column or ("input_ids" if "input_ids" in row else "text")
    what = row.get(name)
    if what is None and name in row:
        raise BadArgument(f"harvest: {place}: its {name!r} is None. Leave the row out.")
    if what is None:
        raise BadArgument(
            f"harvest: {place} has no {name!r}; it has {', '.join(map(repr, row)) or 'nothing'}. "
            f"Name the field of the text or the ids: column=..."
        )
    # The mask is of `input_ids`, and of another field only where it stands in for them.
    masked = name == "input_ids" or "input_ids" not in row
    return Item(what, row.get("attention_mask") if masked and not isinstance(what, str) else None, line)


def _encoding(given: Mapping[str, Any]) -> Iterator[Item]:
    """The sequences of what a tokenizer returns, of one text or of many."""
    if "input_ids" not in given:
        raise BadArgument(
            f"harvest: an encoding has `input_ids`; this one has {', '.join(given) or 'nothing'}. Of a data "
            f"set in splits give one, as given['train']."
        )
    ids, masks = given["input_ids"], given.get("attention_mask")
    if isinstance(ids, (str, bytes)) or _count(ids) is None:
        raise BadArgument(f"harvest: the encoding's `input_ids` are no list of token ids: {short(ids)}.")
    if _is_one(ids):
        ids, masks = [ids], None if masks is None else [masks]
    if masks is not None and _count(masks) != len(ids):
        raise BadArgument(
            f"harvest: the encoding has {len(ids)} sequences, and its attention_mask has not as many rows: "
            f"{short(masks)}."
        )
    for at, row in enumerate(ids):
        yield Item(row, None if masks is None else masks[at])


def _count(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


def _is_one(ids: Any) -> bool:
    """Whether ids are one sequence rather than a list of them."""
    first = next(iter(ids), None)
    return isinstance(first, Integral) or getattr(first, "ndim", None) == 0


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a file and the line of each: of `.jsonl` (`.ndjson`, `.json`) its JSON, of another its
    text. Blank lines are left out."""
    if not path.is_file():
        raise BadArgument(
            f"harvest: there is no file {path}; give a text file or JSONL, one sequence a line."
        )
    of_json = path.suffix.lower() in _JSON
    for number, line in enumerate(_decoded(path), 1):
        if not line.strip():
            continue
        place = f"line {number} of {path}"
        yield _parsed(line, place) if of_json else line, place


def _decoded(path: Path) -> Iterator[str]:
    """The lines of a file without their ends.

    They are split as bytes: read as text, a lone carriage return would end one too.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadArgument(f"harvest: {path} cannot be read: {error}.") from None
    with file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                hint = "It is compressed: unpack it." if raw.startswith(b"\x1f\x8b") else "Convert the file."
                raise BadArgument(
                    f"harvest: line {number} of {path} is not UTF-8 text: {error.reason} at byte "
                    f"{error.start} of the line. {hint}"
                ) from None
            yield line.removesuffix("\n").removesuffix("\r")


def _parsed(line: str, place: str) -> Any:
    # A file that is one array begins so, as a line of ids does.
    hint = f" {_ONE_ARRAY}" if line.lstrip().startswith("[") else ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"harvest: {place} is no JSON: {error}.{hint}") from None
    if isinstance(row, list) and row and not _is_one(row):
        raise BadArgument(f"harvest: {place} is no text and no list of token ids: {short(row)}.{hint}")
    return row
