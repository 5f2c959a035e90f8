"""What is harvested: the token ids of every sequence, checked.

All of it is read and tokenized before the first forward, four bytes a token, so that what cannot be
harvested is refused while nothing is lost, and so that batches are of one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import Any

import torch

from ..errors import BadArgument
from ..ledger import is_fake
from ..loading import text_config
from ..media_checks import placeholders
from .sources import Item, items, named, short

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
    one, else `text`. `truncate` keeps the first tokens of a longer sequence. Where ids come with an
    `attention_mask`, its padding is left out.

    Raises: BadArgument, for nothing, for an empty or too long sequence, for ids the model does not know and
    for placeholders of images, video or sound; LoadError, for texts where there is no tokenizer.
    """
    if truncate is not None and (isinstance(truncate, bool) or not isinstance(truncate, int) or truncate < 1):
        raise BadArgument(f"harvest: truncate is a number of tokens to keep, not {truncate!r}.")
    parts: list[torch.Tensor] = []
    sizes: list[int] = []
    for rows in batched(_rows(model, given, column), _AT_ONCE):
        kept = [row[:truncate] for row in rows]
        parts.append(torch.cat(kept))  # a tensor for each of millions of sequences would be most of them
        sizes += [len(row) for row in kept]
    if not parts:
        raise BadArgument(f"harvest: {named(given)} holds no sequence; give texts or token ids.")
    lengths = torch.tensor(sizes)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sequences = Sequences(torch.cat(parts), starts)
    _check_lengths(model, lengths)
    _check_placeholders(model, sequences)
    return sequences


def _check_lengths(model: Any, lengths: torch.Tensor) -> None:
    limit = getattr(text_config(model._module.config), "max_position_embeddings", None)
    longest = int(lengths.argmax())
    if limit is not None and int(lengths[longest]) > limit:
        raise BadArgument(
            f"harvest: sequence {longest} has {int(lengths[longest])} tokens, and the model's limit is "
            f"{limit} (max_position_embeddings). Cut it up, or give truncate={limit} to keep the first "
            f"{limit} of each."
        )


def _check_placeholders(model: Any, sequences: Sequences) -> None:
    """Refuse the tokens that a multimodal forward replaces, for which a harvest has nothing to give."""
    nouns = placeholders(model._module.config)
    found = torch.isin(sequences.ids, torch.tensor(list(nouns), dtype=torch.int32)).nonzero().flatten()
    if not len(found):
        return
    token = int(sequences.ids[found[0]])
    spelled = getattr(model.tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    name = f"token id {token}" + (f", {spelled}" if spelled else "")
    sequence = int(torch.searchsorted(sequences.starts, found[0], right=True)) - 1
    raise BadArgument(
        f"harvest: sequence {sequence} has the {nouns[token]} placeholder ({name}) at position "
        f"{int(found[0] - sequences.starts[sequence])}, and a harvest is of text alone. Leave the sequence "
        f"out; `model.collect` reads values of a prompt with its media."
    )


def _rows(model: Any, given: Any, column: str | None) -> Iterator[torch.Tensor]:
    """The ids of each sequence, texts tokenized many at a time."""
    for some in batched(_settled(model, given, column), _AT_ONCE):
        texts = [each for each, _ in some if isinstance(each, str)]
        encoded = iter(model.tokenizer(texts)["input_ids"] if texts else ())
        for each, name in some:
            yield _ids(model, Item(next(encoded)), name) if isinstance(each, str) else each


def _settled(model: Any, given: Any, column: str | None) -> Iterator[tuple[str | torch.Tensor, str]]:
    """Each sequence as text or checked ids, and what it is called.

    An iterable may give one buffer again and again, so ids are copied before the next one is asked for.
    """
    for at, item in enumerate(items(given, column)):
        name = f"sequence {at} ({item.line})" if item.line else f"sequence {at}"
        if isinstance(item.what, str):
            _check_text(item.what, name)
            yield item.what, name
        else:
            yield _ids(model, item, name), name


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadArgument(
            f"harvest: {name} is no text: its character {error.start} is {text[error.start]!r}, half of a "
            f"surrogate pair. Replace it, or leave the sequence out."
        ) from None


def _ids(model: Any, item: Item, name: str) -> torch.Tensor:
    """One sequence's ids, checked: a copy, int32, without its padding."""
    row = _tensor(_one(item.what))
    if row is not None and is_fake(row):
        raise BadArgument(
            f"harvest: {name} is a tensor without data ({row.device}); give ids that are there."
        )
    if row is None or row.dim() != 1 or (len(row) and not _is_whole(row)):
        one = " One sequence is given as [ids]." if isinstance(item.what, Integral) and not item.line else ""
        raise BadArgument(f"harvest: {name} is no text and no list of token ids: {short(item.what)}.{one}")
    row = row.to("cpu", torch.int64)  # torch has no minimum of unsigned numbers
    if item.mask is not None:
        row = _unpadded(row, _one(item.mask), name)
    if not len(row):
        raise BadArgument(f"harvest: {name} is empty: it has no token. Leave it out.")
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >= model.vocab_size:
        raise BadArgument(
            f"harvest: {name} has token id {low if low < 0 else high}; the model knows 0 to "
            f"{model.vocab_size - 1}."
        )
    return row.to(torch.int32)


def _unpadded(row: torch.Tensor, mask: Any, name: str) -> torch.Tensor:
    """The ids that a mask calls real; padding is at either end or at both."""
    given = _tensor(mask)
    real = None if given is None or is_fake(given) else given.to("cpu", torch.float64)
    if real is None or real.shape != row.shape or not bool(((real == 0) | (real == 1)).all()):
        raise BadArgument(
            f"harvest: {name} has {len(row)} token ids, so its attention_mask is {len(row)} numbers, 1 for a "
            f"token and 0 for padding, not {short(mask)}."
        )
    kept = real.nonzero().flatten()
    if not len(kept):
        return row[:0]
    first, last = int(kept[0]), int(kept[-1])
    if last - first + 1 != len(kept):
        hidden = first + int((real[first:] == 0).nonzero()[0])
        raise BadArgument(
            f"harvest: {name} hides token {hidden} between others by its attention_mask, and a harvest takes "
            f"padding at the ends alone. Leave hidden tokens out of the ids."
        )
    return row[first : last + 1]


def _one(given: Any) -> Any:
    """The one row of a tensor or an array `[1 seq]`, which is how a tokenizer answers to one text."""
    return given[0] if getattr(given, "ndim", 1) == 2 and len(given) == 1 else given


def _tensor(given: Any) -> torch.Tensor | None:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_whole(row: torch.Tensor) -> bool:
    return not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)


def batched(items: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """`itertools.batched`, which Python 3.11 lacks."""
    items = iter(items)
    while some := tuple(islice(items, count)):
        yield some
