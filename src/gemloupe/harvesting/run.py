"""The verb: `harvest` runs a model over a data set and leaves a store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ..errors import BadArgument, PromptWarning
from ..notices import warn
from ..references import Reference
from ..standardized import StandardizedTransformer
from .again import check_computed
from .directory import alone, directory, mark_run, sees, tidy
from .positions import Chooser
from .progress import bar
from .ranks import Ranks, joined
from .rows import forms
from .sequences import Sequences, read
from .sources import whole_number
from .store import Store
from .taken import Shard, Taken, take
from .work import DTYPES, Asked, Left, Work, planned

__all__ = ["harvest"]


def harvest(
    model: StandardizedTransformer,
    texts_or_ids: Any,
    values: str | Reference | Sequence[str | Reference],
    out: str | Path,
    *,
    positions: Chooser = "all",
    sample: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
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
    a batch of ids `[batch seq]`, an encoding, or a `Path` to a text file or JSONL, one sequence a line. An
    `attention_mask` beside ids says which are padding. All of it is read before anything runs. `values` are
    paths, references or patterns, of the text model.

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
    cannot be written, or that another run is writing to, an unknown option; DamagedStore, for a shard of an
    unfinished run that was cut or changed. After one: BadArgument, where the model does not compute what the
    directory holds. Later: HarvestStopped, for a full disk and for the first value that is not finite.
    """
    if unknown:
        raise BadArgument(_unknown(next(iter(unknown))))
    if not isinstance(model, StandardizedTransformer):
        raise BadArgument(
            f"harvest: the model is a StandardizedTransformer, not a {type(model).__name__}; wrap it first."
        )
    if model.interleaver.interleaving:
        raise BadArgument("harvest runs forwards of its own: call it outside the trace.")
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype, dtype)  # as the command line has it
    numbers: list[Any] = [
        number if (whole := whole_number(number)) is None else whole  # numpy's and torch's, too
        for number in (sample, seed, tokens_per_batch, shard_bytes, truncate)
    ]
    sample, seed, tokens_per_batch, shard_bytes, truncate = numbers
    asked = Asked(positions, sample, seed, dtype, tokens_per_batch, shard_bytes, robust)
    with joined(model) as ranks, ExitStack() as held:
        with ranks.together():
            asked.check()
            given = read(model, texts_or_ids, column=column, truncate=truncate)
            work = planned(model, given, forms(model, values, positions), directory(out), asked)
            _refuse_dropout(model._module)
            _warn_of_bos(model, given)
        ranks.check_same("harvest (model, values, options or data)", work.index)
        begun: tuple[str | None, Left] | None = None
        with ranks.together():
            if ranks.first:
                begun = _begun(work, ranks, held)
        mark, left = ranks.gather(begun)[0]
        with ranks.together():
            if not sees(work.out, mark):
                raise BadArgument(
                    f"harvest: process {ranks.rank} does not see the directory {out} that process 0 writes "
                    f"to. All write into one: give a directory that every process sees."
                )
        with ranks.together():
            check_computed(model, work, left, ranks)
        with ranks.together():
            if not left.complete:
                _run(model, work, left, ranks, shown=progress)
        with ranks.together():
            if ranks.first:
                if not left.complete:
                    work.finish()
                if mark is not None:
                    tidy(work.out)
    return Store(work.out)


def _begun(work: Work, ranks: Ranks, held: ExitStack) -> tuple[str | None, Left]:
    """The mark of this run in the directory, which it has to itself from now on, and what is there.

    Nothing is written where nothing is left to do, and there is no mark then: a store may be somebody else's.
    """
    if work.is_done():
        tidy(work.out)  # where the run that ended it could not
        return None, work.left()
    held.enter_context(alone(work.out))
    work.begin(ranks.share[1])
    return mark_run(work.out), work.left()


def _run(model: Any, work: Work, left: Left, ranks: Ranks, *, shown: bool) -> None:
    """Make this process's share of the shards that are not there, one at a time.

    Raises: HarvestStopped, DamagedStore.
    """
    at, shares = ranks.share
    ahead: dict[int, Taken] = {}
    if left.records:
        like = Taken.as_in(left.records[0])
    else:  # how large a row is, and so where shards end, is known when there are some
        batch = work.batches[min(at, len(work.batches) - 1)]
        ahead[batch.number] = take(model, work, batch, ranks)
        like = ahead[batch.number].like()
    groups = work.missing(left, like.row_bytes)[at::shares]
    tokens = sum(batch.tokens for group in groups for batch in group)
    with bar(tokens, shown=shown and ranks.first) as advance:
        for group in groups:
            shard = Shard(work.forms, like, sum(batch.rows for batch in group), robust=work.asked.robust)
            for batch in group:
                taken = ahead.pop(batch.number, None)
                shard.put(take(model, work, batch, ranks) if taken is None else taken)
                del taken
                advance(batch.tokens)
            ahead.clear()
            if ranks.writes:
                work.shards.write(
                    shard.tensors,
                    shard.statistics(),
                    tuple(batch.number for batch in group),
                    harvest=left.identity,
                    processes=left.processes,
                )
            del shard  # before the next one is allocated


def _refuse_dropout(module: torch.nn.Module) -> None:
    """Refuse a model whose values are drawn anew in every forward.

    Raises: BadArgument.
    """
    for name, each in module.named_modules():
        rate = each.p if isinstance(each, torch.nn.Dropout) else getattr(each, "attention_dropout", 0)
        if each.training and isinstance(rate, float) and rate > 0:
            raise BadArgument(
                f"harvest: the model is in training mode, and {name} drops out {rate:g} of its numbers, "
                f"others in every forward.\nCall `model.eval()` first."
            )


def _warn_of_bos(model: Any, sequences: Sequences) -> None:
    """As every call warns of it, once for all sequences."""
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None:
        return
    named = f"BOS ({model.tokenizer.bos_token})"
    first = sequences.ids[sequences.starts[:-1]] == bos
    missing = (~first).nonzero().flatten()
    if len(missing):
        warn(
            f"{len(missing)} of {len(sequences)} sequences, the first of them {int(missing[0])}, do not "
            f"begin with {named}, which Gemma was trained with; give text, or put token id {bos} first.",
            PromptWarning,
        )
    after = (sequences.starts[:-1] + 1).clamp(max=len(sequences.ids) - 1)
    twice = (first & (sequences.lengths > 1) & (sequences.ids[after] == bos)).nonzero().flatten()
    if len(twice):
        warn(
            f"{len(twice)} of {len(sequences)} sequences, the first of them {int(twice[0])}, begin with "
            f"{named} twice: the tokenizer puts one before a text that has one. Take it out of the text.",
            PromptWarning,
        )


def _unknown(name: str) -> str:
    known = [each for each, p in signature(harvest).parameters.items() if p.kind is not p.VAR_KEYWORD]
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    meant = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(known[4:])}."
    return f"harvest has no option `{name}`. {meant}"
