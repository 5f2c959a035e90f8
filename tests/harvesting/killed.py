"""A process that forks one harvest after another and kills it: the model is made once.

Reads lines `[DIRECTORY, RENAMES, SECONDS]` of JSON from stdin. The harvest kills itself at its rename of
that number, before it (-3: before the third) or after it (3; 0: never), or is killed after so many seconds.
Answers with `[KILLED, SECONDS]`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gemloupe import harvest
from gemloupe.testing import tiny

OPTIONS: dict[str, Any] = {
    "values": ["layers.*.layer_output", "layers[4].self_attn.attention_probabilities"],
    "tokens_per_batch": 24,
    "shard_bytes": 40_000,
    "dtype": torch.bfloat16,
    "robust": True,
    "progress": False,
}
TEXTS = [[2, *range(30, 30 + 1 + at * 7 % 23)] for at in range(26)]


def dies_at(renames: int) -> None:
    """Let this process die at a rename."""
    rename, counted = Path.replace, iter(range(1, 1_000_000))

    def replace(self: Path, target: Path) -> Path:
        number = next(counted)
        if number == -renames:
            os.kill(os.getpid(), signal.SIGKILL)
        result = rename(self, target)
        if number == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = replace  # pyright: ignore[reportAttributeAccessIssue]


def ended_by(child: int, begun: float, seconds: float | None) -> bool:
    """Whether a signal ended the child: its own, or one after so many seconds."""
    # Until it is waited for, the child's number is nobody else's.
    while seconds is not None and time.perf_counter() - begun < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WIFSIGNALED(status)
        time.sleep(0.002)
    if seconds is not None:
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = tiny("e2b")
    model.collect([[2, 30]], "layers[0].layer_output")
    for line in sys.stdin:
        out, renames, seconds = json.loads(line)
        begun = time.perf_counter()
        child = os.fork()
        if child == 0:
            dies_at(renames)
            try:
                harvest(model, TEXTS, out=out, **OPTIONS)
            finally:
                os._exit(0)
        print(json.dumps([ended_by(child, begun, seconds), time.perf_counter() - begun]), flush=True)
