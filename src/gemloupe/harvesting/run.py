"""The verb: `harvest` runs a model over a data set and leaves a store."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import signature
from math import prod
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile
from typing import Any, Final

import torch

from ..errors import BadArgument, HarvestStopped, PromptWarning
from ..loading import text_config
from ..notices import warn
from ..references import Reference
from ..standardized import StandardizedTransformer
from . import positions as place
from .batches import Batch, feed, plan, share
from .index import FILE, Index, checksum, model_facts, value_facts, versions
from .positions import Chooser
from .progress import bar
from .ranks import Ranks, joined
from .rows import Form, forms
from .sequences import Sequences, read
from .shards import ShardFolder, aside, stopping, write_tensors
from .statistics import Sums, merged
from .store import STATISTICS, Store

__all__ = ["harvest"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def harvest(
    model: StandardizedTransformer,
    texts_or_ids: Any,
    values: str | Reference | Sequence[str | Reference],
    out: str | Path,
    *,
    positions: Chooser = "all",
    sample: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    tokens_per_batch: int = 4096,
    shard_bytes: int = 256 * 2**20,
    truncate: int | None = None,
    column: str | None = None,
    robust: bool = False,
    progress: bool = True,
    **unknown: Any,
) -> Store:
    """Run the model over many texts and write values of chosen tokens to a directory.

    `texts_or_ids` is an iterable of texts, of token ids or of a data set's rows (`column` names the field),
    a batch of ids `[batch seq]`, an encoding, or a `Path` to a text file or JSONL, one sequence a line. It
    is read to its end before anything runs. `values` are paths, references or patterns, of the text model.

    `positions` chooses tokens: `"all"`, `"last"`, `"content"` (no BOS, no padding, no special token), or a
    function from a sequence's ids `[seq]` to a mask `[seq]`; `sample` keeps so many of them per sequence,
    drawn by `seed`. Each chosen token has one row in every value, `[hidden]` of a stream; `harvesting.rows`
    has the row of every layout. `dtype` is what floating-point values are stored as, by default what the
    model computes. Batches are of sequences of about one length, at most `tokens_per_batch` tokens with
    padding; each forward stops after the last value asked for. A shard has at most `shard_bytes`, or one
    batch. `truncate` keeps the first tokens of longer sequences. `robust` adds what a mean hides to the
    statistics: massive activations and outlier dimensions.

    A run that ended before its end, however it did, is taken up by the same call: complete shards stay, and
    the store becomes what an uninterrupted run writes. Under `torchrun` every process makes the same call,
    takes its share and gets the same store. A model that the processes hold between them (`tp_plan`), or
    that lies on several devices (`device_map="auto"`), gives whole values.

    Returns the `Store`.

    Raises, before the first forward: UnknownName, Unavailable; BadArgument, for an empty data set, a
    sequence longer than the model's limit, a value without rows, a directory that holds something else or
    cannot be written, an unknown option; DamagedStore, for a shard of an earlier run that was cut or
    changed. Later: HarvestStopped, for a full disk and for the first value that is not finite.
    """
    if unknown:
        raise BadArgument(_unknown(next(iter(unknown))))
    if not isinstance(model, StandardizedTransformer):
        raise BadArgument(
            f"harvest: the model is a StandardizedTransformer, not a {type(model).__name__}; wrap it first."
        )
    asked = Asked(positions, sample, seed, dtype, tokens_per_batch, shard_bytes, robust)
    with joined(model) as ranks:
        with ranks.together():
            asked.check()
            given = read(model, texts_or_ids, column=column, truncate=truncate)
            work = _work(model, given, forms(model, values, positions), Path(out), asked)
        ranks.check_same("harvest (model, values, options or data)", work.index)
        with ranks.together():
            if ranks.first:
                work.begin(ranks.share[1])
        done, before = ranks.gather(work.state() if ranks.first else None)[0]
        if done is not None:
            with ranks.together():
                batches = share(work.batches, done, *ranks.share, before=before)
                with bar(work.tokens(batches, done), shown=progress and ranks.first) as advance:
                    _run(model, work, batches, done, advance, ranks)
            with ranks.together():
                if ranks.first:
                    work.finish()
    return Store(work.out)


@dataclass(frozen=True)
class Asked:
    """The options of a harvest that decide what its store holds."""

    positions: Chooser
    sample: int | None
    seed: int
    dtype: torch.dtype | None
    tokens_per_batch: int
    shard_bytes: int
    robust: bool

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises: BadArgument.
        """
        place.check(self.positions, self.sample, self.seed)
        if self.dtype is not None and self.dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise BadArgument(f"harvest: dtype is one of {known}, not {self.dtype!r}.")
        if (
            isinstance(self.shard_bytes, bool)
            or not isinstance(self.shard_bytes, int)
            or self.shard_bytes < 1
        ):
            raise BadArgument(f"harvest: shard_bytes is a number of bytes, not {self.shard_bytes!r}.")

    def facts(self) -> dict[str, Any]:
        """The options as the index has them."""
        return {
            **vars(self),
            "positions": place.described(self.positions),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }


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

    @staticmethod
    def tokens(batches: list[Batch], done: set[int]) -> int:
        """Tokens that are left to run."""
        return sum(batch.tokens for batch in batches if batch.number not in done)

    def begin(self, processes: int) -> None:
        """Make the directory, or find in it what an earlier run of this harvest left.

        Raises: BadArgument, DamagedStore, HarvestStopped.
        """
        there = Index.read(self.out) if (self.out / FILE).exists() else None
        if there is not None:
            self.index.check_same(there, self.out)
        self._make(empty=there is None)
        with stopping(self.out, FILE, lambda: len(self.shards.records())):
            if there is None:
                replace(self.index, processes=processes).write(self.out)
            elif there.complete and self._whole(there):
                self._tidy()
                return
            elif there.complete:  # a shard was removed, to be made again
                replace(self.index, processes=there.processes).write(self.out)
        for record in self.shards.records():
            self.shards.check(record)
        self.shards.clear()

    def _whole(self, index: Index) -> bool:
        """Whether all shards that a complete index names are there."""
        return {record.file for record in index.shards} == {record.file for record in self.shards.records()}

    def _make(self, *, empty: bool) -> None:
        """Make the folders, and see that they can be written.

        Raises: BadArgument.
        """
        ours = (self.shards.place, aside(self.out))
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            strange = next((each for each in self.out.iterdir() if each not in ours), None) if empty else None
            if strange is None:
                for place in ours:
                    place.mkdir(exist_ok=True)
                with NamedTemporaryFile(dir=aside(self.out)):
                    pass
        except OSError as error:
            raise BadArgument(
                f"harvest: {self.out} cannot be written: {error}. Give another directory."
            ) from None
        if strange is not None:
            raise BadArgument(
                f"harvest: {self.out} is no store and is not empty: it has {strange.name}. Give an empty "
                f"directory or a new one."
            )

    def state(self) -> tuple[set[int] | None, int]:
        """The batches that are done, `None` where the store is complete, and how many processes began it."""
        index = Index.read(self.out)
        if index.complete:
            return None, index.processes
        return {batch for record in self.shards.records() for batch in record.batches}, index.processes

    def finish(self) -> None:
        """Write the statistics of the whole and the index.

        Raises: HarvestStopped.
        """
        records = self.shards.records()
        with stopping(self.out, FILE, lambda: len(records)):
            sums = merged([self.shards.statistics(record) for record in records])
            tensors = {name: t for path, one in sums.items() for name, t in one.tensors(path).items()}
            write_tensors(self.out / STATISTICS, tensors)
            Index.read(self.out).finished(records).write(self.out)
        self._tidy()

    def _tidy(self) -> None:
        """Remove the folders that files are written aside in."""
        for folder in (aside(self.out), aside(self.shards.place)):
            if folder.is_dir():
                rmtree(folder)


def _work(model: Any, sequences: Sequences, chosen_forms: list[Form], out: Path, asked: Asked) -> Work:
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
        model.dispatch()
    _warn_of_bos(model, sequences)
    data = {
        "sequences": len(sequences),
        "tokens": len(sequences.ids),
        "rows": int(chosen.sum()),
        "longest": int(sequences.lengths.max()),
        "checksum": checksum(t.numpy().tobytes() for t in (sequences.ids, sequences.starts, chosen)),
    }
    index = Index(model_facts(model), value_facts(chosen_forms), data, asked.facts(), dict(versions()))
    return Work(out, asked, chosen_forms, sequences, chosen, batches, index)


def _run(
    model: Any,
    work: Work,
    batches: list[Batch],
    done: set[int],
    advance: Callable[[int], None],
    ranks: Ranks,
) -> None:
    """Run the batches that are not done, a shard at a time.

    Raises: HarvestStopped.
    """
    first = next((batch for batch in batches if batch.number not in done), None)
    if first is None:
        return
    # How large a row is, and so where shards end, is known when there are some.
    ahead: Taken | None = _read(model, work, first, ranks)
    like = ahead.like()
    for group in shard_plan(batches, like.row_bytes, work.asked.shard_bytes):
        if group[0].number in done:
            continue
        shard = Shard(work.forms, like, sum(batch.rows for batch in group), robust=work.asked.robust)
        for batch in group:
            shard.put(_read(model, work, batch, ranks) if ahead is None else ahead)
            ahead = None
            advance(batch.tokens)
        if ranks.writes:
            numbers = tuple(batch.number for batch in group)
            work.shards.write(shard.tensors, shard.statistics(), numbers)
        del shard  # before the next one is allocated


def shard_plan(batches: list[Batch], row_bytes: int, limit: int) -> list[list[Batch]]:
    """Which batches share a shard: those that follow each other, at most `limit` bytes or one batch."""
    groups: list[list[Batch]] = []
    size = 0
    for batch in batches:
        size += batch.rows * row_bytes
        if groups and size <= limit:
            groups[-1].append(batch)
        else:
            groups.append([batch])
            size = batch.rows * row_bytes
    return groups


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


def _read(model: Any, work: Work, batch: Batch, ranks: Ranks) -> Taken:
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


def _warn_of_bos(model: Any, sequences: Sequences) -> None:
    """As every call warns of it, once for all sequences."""
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None:
        return
    missing = (sequences.ids[sequences.starts[:-1]] != bos).nonzero().flatten()
    if len(missing):
        warn(
            f"{len(missing)} of {len(sequences)} sequences, the first of them {int(missing[0])}, do not "
            f"begin with BOS ({model.tokenizer.bos_token}), which Gemma was trained with; give text, or put "
            f"token id {bos} first.",
            PromptWarning,
        )


def _unknown(name: str) -> str:
    known = [each for each, p in signature(harvest).parameters.items() if p.kind is not p.VAR_KEYWORD]
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    meant = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(known[4:])}."
    return f"harvest has no option `{name}`. {meant}"
