"""Several processes that share one harvest, as `torchrun` starts them.

Each takes its share of the batches. Where they hold one model between them (`tp_plan`), they run every
batch together and the first of them writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nnsight.modeling.tp import device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..errors import BadArgument, HarvestStopped
from .rows import Form

__all__ = ["Ranks", "is_divided", "joined"]


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    share: tuple[int, int] = (0, 1)
    """Which share of the batches is this process's, and of how many shares."""
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this process does what is done once."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Whether this process writes shards."""
        return self.share[1] > 1 or self.first

    def gather(self, thing: Any) -> list[Any]:
        """What every process gives, by rank. All must call it.

        Raises: HarvestStopped, where another process has ended.
        """
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(things, thing, group=self.group)
        except RuntimeError as error:
            raise HarvestStopped(
                "harvest stopped: another process of the run has ended. Complete shards stay; make the same "
                "call again, with as many processes or another number."
            ) from error
        return things

    def whole(self, rows: torch.Tensor, form: Form) -> torch.Tensor:
        """Rows as one process would have them, where the processes hold one model between them.

        nnsight makes whole what a module takes and gives. What lies between two of them is as each process
        has it: some of the heads, or each expert's part of a sum.
        """
        if self.size == 1 or self.share[1] > 1:
            return rows
        if form.partial:
            return torch.stack(self.gather(rows)).sum(0).to(rows.dtype)
        if form.split is None or rows.shape[form.split[0]] == form.split[1]:
            return rows
        return torch.cat(self.gather(rows), form.split[0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all do, each for itself, and go on from only if it went well for all.

        Raises: the error of this process; HarvestStopped, for another's.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        told = self.gather(None if failed is None else str(failed))
        if failed is not None:
            raise failed
        for rank, reason in enumerate(told):
            if reason is not None:
                raise HarvestStopped(f"harvest stopped, because process {rank} did: {reason}")

    def check_same(self, what: str, thing: Any) -> None:
        """Refuse processes that were given different things.

        Raises: BadArgument.
        """
        for rank, other in enumerate(self.gather(thing)):
            if other != thing:
                raise BadArgument(
                    f"harvest: process {rank} was given another {what} than process {self.rank}. All are "
                    f"given the same; each takes its share by itself."
                )


@contextmanager
def joined(model: Any) -> Iterator[Ranks]:
    """The processes of this run: those of torch.distributed, or those `torchrun` started, else this one
    alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not model.dispatched:
        model.dispatch()  # a model that is divided forms the group when it loads
    started = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and _launched()
    if started:
        _join()
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield Ranks()
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    # Objects are gathered on the CPU, whatever moves the tensors; and shares may end hours apart.
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    try:
        yield Ranks(rank, size, (0, 1) if is_divided(model) else (rank, size), group)
    finally:
        if started:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(group)


def _join() -> None:
    """Form the group that `torchrun` meant. A second one in one run needs names of its own to meet under."""
    store, rank, size = next(rendezvous("env://"))
    number = store.add(f"gemloupe/{rank}", 1)
    store = PrefixStore(f"gemloupe/{number}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def is_divided(model: Any) -> bool:
    """Whether the processes hold one model between them."""
    return device_mesh(model) is not None


def _launched() -> bool:
    return dist.is_available() and all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
