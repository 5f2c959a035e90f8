"""Peers that cannot share our environment: each in one of its own, asked for one run of a job at a time.

The process stays alive between requests, so that its runs and ours are still measured in turn.
An environment is made on first use, or named: `--transformerlens PATH` and `--nnterp PATH`, or the variables
GEMLOUPE_TRANSFORMERLENS and GEMLOUPE_NNTERP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.measure import NotMeasured, Sample
from benchmarks.models import Twins
from gemloupe.testing import tiny_tokenizer

__all__ = ["NNTERP", "TRANSFORMERLENS", "Kind", "Peer", "environment", "saved", "started"]

ROOT: Final = Path(__file__).parents[1]
PLACE: Final = ROOT / "benchmarks" / "peers"
LIMIT: Final = 1800
"""Seconds that making an environment may take: it is more than a gigabyte."""


@dataclass(frozen=True)
class Kind:
    """One of the peers."""

    name: str
    package: str
    release: str
    """That is measured, as its requirements have it."""

    @property
    def variable(self) -> str:
        """Names an environment that has it."""
        return f"GEMLOUPE_{self.name.upper()}"

    @property
    def server(self) -> Path:
        return PLACE / f"serve_{self.name.lower()}.py"

    @property
    def requirements(self) -> Path:
        return PLACE / f"requirements-{self.name.lower()}.txt"

    @property
    def own(self) -> Path:
        """The environment that is made where none is named."""
        return ROOT / f".venv-{self.name.lower()}"


TRANSFORMERLENS: Final = Kind("TransformerLens", "transformer-lens", "4.3")
NNTERP: Final = Kind("nnterp", "nnterp", "1.3")


class Peer:
    """The process of a peer, which has the same weights and the same prompt as the twins."""

    def __init__(self, kind: Kind, process: subprocess.Popen[str], errors: Any) -> None:
        self.kind = kind
        self.process = process
        self.errors = errors
        about = self._answer()
        self.weights: int = about["weights"]
        self.versions: str = about["versions"]

    def time(self, job: str) -> Sample:
        """What one run of a job took the peer, by its own clock."""
        return Sample(*self._ask(f"time {job}"))

    def peak(self, job: str) -> int:
        """The most bytes that torch's allocator held at once during one run of a job."""
        return self._ask(f"peak {job}")

    def kept(self, job: str) -> list[torch.Tensor]:
        """The tensors that one run of a job gives."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "kept.pt"
            self._ask(f"keep {job} {place}")
            return torch.load(place)

    def _ask(self, request: str) -> Any:
        assert self.process.stdin is not None
        try:
            print(request, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self._give_up()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._give_up()

    def _give_up(self) -> None:
        self.process.wait()
        self.errors.seek(0)
        raise NotMeasured(f"{self.kind.name}'s process ended: {last_line(self.errors.read())}")


@contextmanager
def started(kind: Kind, pair: Twins) -> Iterator[Peer]:
    """A peer on the twins' model and prompt, with as many threads as we have.

    Raises: NotMeasured, where it has no environment, is another release, or ends before it has answered.
    """
    python = environment(kind) / "bin" / "python"
    with saved(pair) as folder, tempfile.TemporaryFile("w+") as errors:
        torch.save(pair.inputs["input_ids"], Path(folder) / "prompt.pt")
        process = subprocess.Popen(
            [python, kind.server, folder, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=alone(),
        )
        with process:  # on the way out its input is closed, which ends it
            peer = Peer(kind, process, errors)
            if not peer.versions.startswith(f"{kind.package} {kind.release}."):
                raise NotMeasured(f"{kind.name} {kind.release} is compared with, not {peer.versions}")
            weights = sum(weight.numel() for weight in pair.bare.parameters())
            assert peer.weights == weights, f"{kind.name} has {peer.weights} weights, we have {weights}"
            yield peer


@contextmanager
def saved(pair: Twins) -> Iterator[str]:
    """A directory of the twins' model and tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        pair.bare.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        yield folder


def alone() -> dict[str, str]:
    """The environment variables of a peer's process: its packages are its own, ours must not come first."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def environment(kind: Kind) -> Path:
    """The environment that was named, or our own, made where it is not there yet.

    Raises: NotMeasured, where there is none to be had.
    """
    if named := os.environ.get(kind.variable):
        if not (Path(named) / "bin" / "python").exists():
            raise NotMeasured(f"there is no environment for {kind.name} at {named}")
        return Path(named)
    done = kind.own / ".installed"  # an installation that was interrupted lacks it
    if not done.exists():
        try:
            make(kind)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise NotMeasured(
                f"{kind.name}'s environment cannot be made: {last_line(said)}. "
                f"Name one that has it by --{kind.name.lower()} or {kind.variable}"
            ) from error
        done.touch()
    return kind.own


def make(kind: Kind) -> None:
    """An environment with a peer: minutes, and more than a gigabyte."""
    print(f"Installing {kind.name} into {kind.own}.", file=sys.stderr)
    run([sys.executable, "-m", "venv", "--clear", kind.own])
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "30"]
    run([kind.own / "bin" / "python", "-m", "pip", "install", *options, "-r", kind.requirements])


def run(arguments: list[Any]) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=LIMIT)


def last_line(text: str) -> str:
    """The last line that says something; of pip and of a traceback, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removesuffix(".") if lines else "it said nothing"
