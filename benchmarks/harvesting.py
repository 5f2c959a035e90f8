"""`harvest` of two blocks' `layer_output`, stored as bfloat16, against the bare forward up to the later one.

Both sides run the same batches. Ours is given token ids, and converts, adds up the statistics, writes shards,
flushes them to the disk and takes their checksums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import memory
from benchmarks.capture import block
from benchmarks.forward import blocks, hooked, keep_output
from benchmarks.measure import Measurement, Memory, Side, alternate, insist
from benchmarks.models import FULL, VOCABULARY, Size, Twins, twins
from benchmarks.row import Row
from gemloupe import Store, harvest

__all__ = ["ROWS"]

LATER: Final = 8
"""Of the full size's 12 blocks; the earlier one is half as deep."""
BATCHES: Final = 16
MANY: Final = 196
"""Batches of 1024 tokens: 200,704."""
MIB: Final = 2**20
SHARD: Final = 8 * MIB


class Enough(Exception):
    """Ends the bare forward after a block, as `collect` ends its own."""


def texts(size: Size, batches: int) -> torch.Tensor:
    """Sequences of one length, BOS first, `[sequences seq]`."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(20, VOCABULARY, (batches * size.batch, size.seq), generator=random)
    ids[:, 0] = 2
    return ids


def harvested(pair: Twins, ids: torch.Tensor, size: Size, shard_bytes: int = 256 * MIB) -> Store:
    """The store, whose directory is gone when the next one is made."""
    later = block(pair, LATER)
    values = [f"layers[{later // 2}].layer_output", f"layers[{later}].layer_output"]
    return harvest(
        pair.model,
        ids,
        values,
        Path(tempfile.mkdtemp(dir=FOLDER.name)) / "store",
        dtype=torch.bfloat16,
        tokens_per_batch=size.batch * size.seq,
        shard_bytes=shard_bytes,
        progress=False,
    )


FOLDER: Final = tempfile.TemporaryDirectory(prefix="gemloupe-bench-")


def bare(pair: Twins, ids: torch.Tensor, size: Size) -> None:
    """Every batch up to the later block."""

    def stop(*_: Any) -> None:
        raise Enough

    with hooked([blocks(pair)[block(pair, LATER)].register_forward_hook(stop)]):
        for some in ids.split(size.batch):
            try:
                pair.bare(input_ids=some, attention_mask=torch.ones_like(some), use_cache=False)
            except Enough:
                continue
            raise AssertionError("the bare forward did not stop")


def check(pair: Twins, ids: torch.Tensor, size: Size) -> None:
    """Insist that what is harvested are the bare model's numbers."""
    store = harvested(pair, ids, size)
    for path in store.paths:
        number = int(path.partition("[")[2].partition("]")[0])
        kept: list[torch.Tensor] = []
        with hooked([blocks(pair)[number].register_forward_hook(keep_output(kept))]):
            for some in store.sequences.unique_consecutive().split(size.batch):
                pair.bare(input_ids=ids[some])
        insist(store[path][:], torch.cat([value.flatten(0, 1).bfloat16() for value in kept]))


@contextmanager
def ready(size: Size, batches: int) -> Iterator[tuple[Twins, torch.Tensor]]:
    pair = twins("31b", size)
    with torch.no_grad():
        check(pair, texts(size, 2), size)
        yield pair, texts(size, batches if size == FULL else 3)


def throughput(size: Size, pairs: int, batches: int = BATCHES) -> Measurement:
    with ready(size, batches) as (pair, ids):
        ours, theirs = Side(lambda: harvested(pair, ids, size)), Side(lambda: bare(pair, ids, size))
        return alternate(ours, theirs, pairs, warmup=int(batches != MANY))


def peaks(size: Size, pairs: int) -> Memory:
    shard = SHARD if size == FULL else 4096
    with ready(size, BATCHES) as (pair, ids):
        assert len(harvested(pair, ids, size, shard).shards) > 2, "one shard is no test of several"
        run = memory.compare(
            lambda: harvested(pair, ids, size, shard), lambda: bare(pair, ids, size), pairs, unit=64 * MIB
        )
    return Memory(run.ours, tuple(theirs + shard for theirs in run.theirs), run.unit)


WHAT: Final = "dense: `harvest` of two `layer_output`s as bfloat16"
AGAINST: Final = "the bare forward up to the later block"
BOUND: Final = round(1 / 0.9, 3)
"""0.9 of the bare forward's tokens per second."""

ROWS: list[Row] = [
    Row("31b/harvest", f"{WHAT}, 16,384 tokens", AGAINST, throughput, bound=BOUND, pairs=7),
    Row(
        "31b/harvest-200000",
        f"{WHAT}, 200,704 tokens",
        AGAINST,
        lambda size, pairs: throughput(size, min(pairs, 3), MANY),  # each pair takes minutes
        bound=BOUND,
        pairs=3,
    ),
    Row(
        "31b/memory-harvest",
        f"{WHAT}, peak memory above that, in 64 MiB",
        f"{AGAINST} and one shard",
        peaks,
        bound=1.0,
        pairs=3,
    ),
]
