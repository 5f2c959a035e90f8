"""What is harvested: texts or token ids, from a list, an iterable, a file or a data set.

All of it is read and tokenized before the first forward, four bytes a token, so that what cannot be
harvested is refused while nothing is lost, and so that batches are of one length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..errors import BadArgument
from ..loading import text_config

__all__ = ["Sequences", "read"]

_AT_ONCE = 1024
"""Texts that the tokenizer is given together."""


@dataclass(frozen=True)
class Sequences:
    """Token ids of every sequence, one after another."""

    ids: torch.Tensor
    """`[tokens]`, int32."""
    starts: torch.Tensor
    """`[sequences + 1]`, int64: where each begins, and where the last one ends."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, sequence: int) -> torch.Tensor:
        return self.ids[self.starts[sequence] : self.starts[sequence + 1]]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each, `[sequences]`."""
        return self.starts.diff()


def read(model: Any, given: Any, *, column: str | None = None, truncate: int | None = None) -> Sequences:
    """The tokens of what is given.

    `column` is the field of a row that holds the text or the ids; by default `input_ids` where there is
    one, else `text`. `truncate` keeps the first tokens of a longer sequence.

    Raises: BadArgument, for nothing, for an empty or too long sequence and for ids the model does not know;
    LoadError, for a file that is not there and for texts where there is no tokenizer.
    """
    if truncate is not None and (isinstance(truncate, bool) or not isinstance(truncate, int) or truncate < 1):
        raise BadArgument(f"harvest: truncate is a number of tokens to keep, not {truncate!r}.")
    parts: list[torch.Tensor] = []
    sizes: list[int] = []
    for some in batched(_rows(model, given, column), _AT_ONCE):
        rows = [_tokens(model, row, len(sizes) + at, truncate) for at, row in enumerate(some)]
        parts.append(torch.cat(rows))  # a tensor for each of millions of sequences would be most of them
        sizes += [len(row) for row in rows]
    if not parts:
        raise BadArgument(f"harvest: {_named(given)} holds no sequence; give texts or token ids.")
    lengths = torch.tensor(sizes)
    config = text_config(model._module.config)
    limit = getattr(config, "max_position_embeddings", None)
    longest = int(lengths.argmax())
    if limit is not None and int(lengths[longest]) > limit:
        raise BadArgument(
            f"harvest: sequence {longest} has {int(lengths[longest])} tokens, and the model's limit is "
            f"{limit} (max_position_embeddings). Cut it up, or give truncate={limit} to keep the first "
            f"{limit} of each."
        )
    return Sequences(torch.cat(parts), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


def _tokens(model: Any, ids: Any, at: int, truncate: int | None) -> torch.Tensor:
    """One sequence's ids, checked."""
    try:
        row = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        row = torch.zeros(0, 0)
    if row.numel() == 0 and row.dim() == 1:
        raise BadArgument(f"harvest: sequence {at} is empty: it has no token. Leave it out.")
    if row.dim() != 1 or row.is_floating_point() or row.dtype == torch.bool:
        raise BadArgument(f"harvest: sequence {at} is no text and no list of token ids: {_short(ids)}.")
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >= model.vocab_size:
        raise BadArgument(
            f"harvest: sequence {at} has token id {low if low < 0 else high}; the model knows 0 to "
            f"{model.vocab_size - 1}."
        )
    return row[:truncate].to("cpu", torch.int32)


def _rows(model: Any, given: Any, column: str | None) -> Iterator[Any]:
    """The ids of each sequence, texts tokenized many at a time."""
    for some in batched(_items(given, column), _AT_ONCE):
        texts = [item for item in some if isinstance(item, str)]
        encoded = iter(model.tokenizer(texts)["input_ids"] if texts else ())
        for item in some:
            yield next(encoded) if isinstance(item, str) else item


def batched(items: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """`itertools.batched`, which Python 3.11 lacks."""
    items = iter(items)
    while some := tuple(islice(items, count)):
        yield some


def _items(given: Any, column: str | None) -> Iterator[Any]:
    """Each sequence as text or ids."""
    if isinstance(given, str):
        raise BadArgument(
            f"harvest: {_short(given)} is one text, and a harvest is of many. Give [text], a list or an "
            f"iterable of them; or a file as Path({_short(given)})."
        )
    if isinstance(given, Path):
        given = _lines(given)
    elif isinstance(given, Mapping):
        given = _encoding(given)
    if not isinstance(given, Iterable) or (isinstance(given, torch.Tensor) and given.dim() != 2):
        raise BadArgument(
            f"harvest: texts or ids are a list, an iterable, a Path or a data set, not {_short(given)}."
        )
    for at, row in enumerate(given):
        yield _field(row, column, at) if isinstance(row, Mapping) else row


def _field(row: Mapping[str, Any], column: str | None, at: int) -> Any:
    """The text or the ids of a data set's row."""
    name = column or ("input_ids" if "input_ids" in row else "text")
    if row.get(name) is None:
        raise BadArgument(
            f"harvest: row {at} has no {name!r}; it has {', '.join(map(repr, row)) or 'nothing'}. "
            f"Name the field of the text or the ids: column=..."
        )
    return row[name]


def _encoding(given: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of what a tokenizer returns, without their padding."""
    if "input_ids" not in given:
        raise BadArgument(
            f"harvest: an encoding has `input_ids`; this one has {', '.join(given) or 'nothing'}."
        )
    masks = given.get("attention_mask")
    for at, ids in enumerate(given["input_ids"]):
        row = torch.as_tensor(ids)
        yield row if masks is None else row[torch.as_tensor(masks[at]).bool()]


def _lines(path: Path) -> Iterator[Any]:
    """The rows of a file: of `.jsonl` (`.ndjson`, `.json`) each line's JSON, of another each line's text."""
    if not path.is_file():
        raise BadArgument(
            f"harvest: there is no file {path}; give a text file or JSONL, one sequence a line."
        )
    of_json = path.suffix in (".jsonl", ".ndjson", ".json")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if not of_json:
                yield line.rstrip("\n")
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise BadArgument(f"harvest: line {number} of {path} is no JSON: {error}.") from None


def _named(given: Any) -> str:
    return f"the file {given}" if isinstance(given, Path) else f"what was given ({type(given).__name__})"


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 60 else f"{text[:57]}..."
