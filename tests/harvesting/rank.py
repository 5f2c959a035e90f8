"""One of the processes that `torchrun` starts: makes the harvests that its argument lists, and says what it
got."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemloupe import StandardizedTransformer, harvest
from gemloupe.errors import GemloupeError
from gemloupe.harvesting import directory as folders
from gemloupe.harvesting import shards
from gemloupe.testing import tiny, tiny_tokenizer
from tests.harvesting.data import lose, rows_of_ids

RANK = int(os.environ["RANK"])


def divided(directory: str) -> StandardizedTransformer:
    """A model that the processes hold between them."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(tp_plan="auto")
    module = AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)
    return StandardizedTransformer(module, tokenizer=tiny_tokenizer())


@contextmanager
def disk_full() -> Iterator[None]:
    def full(path: Path, write: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    whole, shards._whole = shards._whole, full
    yield
    shards._whole = whole


@contextmanager
def joined() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    assert dist.is_initialized()  # what was there before stays
    dist.destroy_process_group()


def answer(model: Any, call: dict[str, Any]) -> list[Any]:
    texts = rows_of_ids()
    if call.get("other_data") == RANK:
        texts[0][-1] += 1
    out = f"{call['out']} elsewhere" if call.get("elsewhere") == RANK else call["out"]
    if call.get("other_weights") == RANK:
        model = tiny("e2b", seed=77)
    for number in sorted(call.get("lose", ()), reverse=True):
        if RANK == 0:
            lose(Path(call["out"]), number)
    around = disk_full if call.get("full") == RANK else joined if call.get("joined") else nullcontext
    with around():
        try:
            store = harvest(model, texts, call["values"], out, progress=False, **call.get("options", {}))
        except GemloupeError as error:
            return [type(error).__name__, str(error)]
    return [len(store), store.complete, sorted({batch for s in store.shards for batch in s.batches})]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folders._PATIENCE = 0.5
    directory, calls, answers = json.loads(sys.argv[1])
    model = tiny("e2b") if directory is None else divided(directory)
    found = [answer(model, call) for call in calls]
    assert not dist.is_initialized() or directory is not None
    Path(answers, f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():  # by transformers, for a divided model
        dist.barrier()
        dist.destroy_process_group()
    # 2026-11-30, torch 2.13: gloo's threads now and then abort a process that is torn down beside them.
    sys.stdout.flush()
    os._exit(0)
