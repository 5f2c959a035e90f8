"""A peer that cannot share our environment: TransformerLens in one of its own, asked for one call at a time.

The process stays alive between requests, so that its calls and ours are still measured in turn.
Its environment is made on first use, or named: `--peers PATH`, or the variable GEMLOUPE_PEERS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.measure import NotMeasured, Sample
from benchmarks.models import Twins
from gemloupe.testing import tiny_tokenizer

__all__ = ["PEERS", "Peer", "transformerlens"]

PEERS: Final = "GEMLOUPE_PEERS"
ROOT: Final = Path(__file__).parents[1]
OWN: Final = ROOT / ".venv-transformerlens"
SERVER: Final = ROOT / "benchmarks" / "peers" / "serve_transformerlens.py"
REQUIREMENTS: Final = ROOT / "benchmarks" / "peers" / "requirements-transformerlens.txt"
LIMIT: Final = 1800
"""Seconds that making the environment may take: it is more than a gigabyte."""


class Peer:
    """The process of a peer, which has the same weights and the same prompt as the twins."""

    def __init__(self, process: subprocess.Popen[str], errors: Any) -> None:
        self.process = process
        self.errors = errors
        about = self._answer()
        self.weights: int = about["weights"]
        self.versions: str = about["versions"]

    def time(self) -> Sample:
        """What one call took the peer, by its own clock."""
        return Sample(*self._ask("time"))

    def outputs(self) -> list[torch.Tensor]:
        """What one call of the peer kept."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "outputs.pt"
            self._ask(f"keep {place}")
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
        raise NotMeasured(f"TransformerLens' process ended: {last_line(self.errors.read())}")


@contextmanager
def transformerlens(pair: Twins) -> Iterator[Peer]:
    """TransformerLens on the twins' model and prompt, with as many threads as we have.

    Raises: NotMeasured, where it has no environment or ends before it has answered.
    """
    python = environment() / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        pair.bare.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        torch.save(pair.inputs["input_ids"], Path(folder) / "prompt.pt")
        # Its packages are its own: ours must not be found first.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [python, SERVER, folder, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=own,
        )
        with process:  # on the way out its input is closed, which ends it
            yield Peer(process, errors)


def environment() -> Path:
    """The environment that was named, or our own, made where it is not there yet.

    Raises: NotMeasured, where there is none to be had.
    """
    if named := os.environ.get(PEERS):
        if not (Path(named) / "bin" / "python").exists():
            raise NotMeasured(f"there is no environment for TransformerLens at {named}")
        return Path(named)
    done = OWN / ".installed"  # an installation that was interrupted lacks it
    if not done.exists():
        try:
            make(OWN)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise NotMeasured(
                f"TransformerLens' environment cannot be made: {last_line(said)}. "
                f"Name one that has it by --peers or {PEERS}"
            ) from error
        done.touch()
    return OWN


def make(place: Path) -> None:
    """An environment with TransformerLens: minutes, and more than a gigabyte."""
    print(f"Installing TransformerLens into {place}.", file=sys.stderr)
    run([sys.executable, "-m", "venv", "--clear", place])
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "30"]
    run([place / "bin" / "python", "-m", "pip", "install", *options, "-r", REQUIREMENTS])


def run(arguments: list[Any]) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=LIMIT)


def last_line(text: str) -> str:
    """The last line that says something; of pip and of a traceback, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removesuffix(".") if lines else "it said nothing"
