"""The reference shares no code with what it checks: in a process that runs it, none of that is imported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import torch

from gemloupe.reference import forward
from tests.reference.served import case

FOREIGN = ("transformers", "nnsight", "gemloupe.envoys", "gemloupe.families", "gemloupe.served")

SCRIPT = """
import pickle, sys
import torch
{more}
from gemloupe.reference import forward
with open({plan!r}, "rb") as file:
    plan = pickle.load(file)
values = forward(plan, torch.load({state!r}), torch.tensor([[2, 30, 40, 50]]))
torch.save(values["logits"], {logits!r})
print(*sorted(name for name in {foreign!r} if name in sys.modules))
"""


def run(folder: Path, more: str = "") -> tuple[list[str], torch.Tensor]:
    """What of the foreign code was imported, and the logits, of the reference run in a process of its own."""
    one = case("e2b")
    (folder / "plan").write_bytes(pickle.dumps(one.plan))
    torch.save(one.state, folder / "state")
    paths = {name: str(folder / name) for name in ("plan", "state", "logits")}
    script = SCRIPT.format(more=more, foreign=FOREIGN, **paths)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split(), torch.load(folder / "logits")


def test_the_reference_runs_without_what_it_checks(tmp_path: Path):
    imported, logits = run(tmp_path)
    assert imported == []
    one = case("e2b")
    assert torch.equal(logits, forward(one.config, one.state, torch.tensor([[2, 30, 40, 50]]))["logits"])


def test_the_test_above_can_fail(tmp_path: Path):
    imported, _ = run(tmp_path, more="import gemloupe.envoys.attention")
    assert {"transformers", "nnsight", "gemloupe.envoys", "gemloupe.served"} <= set(imported)
