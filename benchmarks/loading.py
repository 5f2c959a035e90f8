"""What stands before the first forward: the import, and the tree of a large model without its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from nnsight import TransformersModel

from benchmarks.measure import Measurement, Sample, Side, alternate, command, python, timed_in_process
from benchmarks.models import Size, config_31b
from benchmarks.row import Row
from gemloupe import StandardizedTransformer
from gemloupe.testing import tiny_tokenizer

__all__ = ["ROWS"]

FIRST_TREE = """
import json, time
from gemloupe import StandardizedTransformer
wall, cpu = time.perf_counter(), time.process_time()
StandardizedTransformer(sys.argv[1])
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""
FIRST_NATIVE = """
import json, time, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config)
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


# ---- the tree of the 31B -----------------------------------------------------------------------------------


def native() -> torch.nn.Module:
    """transformers' own module of the 31B on the meta device."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_31b())


@contextmanager
def directory() -> Iterator[Path]:
    """A model directory of the 31B: its config, a tokenizer, and a weights file that is never opened."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        config_31b().save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
        (place / "model.safetensors").touch()
        yield place


def tree_of_directory(_size: Size, pairs: int) -> Measurement:
    with directory() as place:
        return alternate(Side(lambda: StandardizedTransformer(place)), Side(native), pairs)


def tree_of_module(_size: Size, pairs: int) -> Measurement:
    tokenizer = tiny_tokenizer()

    def wrap(kind: Any) -> Side:
        return Side(lambda module: kind(module, tokenizer=tokenizer, device="meta"), setup=native)

    return alternate(wrap(StandardizedTransformer), wrap(TransformersModel), pairs)


def first_tree(_size: Size, pairs: int) -> Measurement:
    with directory() as place:

        def first(code: str) -> Side:
            arguments = python(code, str(place))
            return Side(lambda: timed_in_process(arguments), clock=lambda sample: sample)

        return alternate(first(FIRST_TREE), first(FIRST_NATIVE), pairs)


# ---- imports -----------------------------------------------------------------------------------------------


def importing(statement: str, other: str) -> Any:
    def process(code: str) -> Side:
        arguments = python(code)
        return Side(lambda: command(arguments), clock=_itself)

    return lambda _size, pairs: alternate(process(statement), process(other), pairs)


def _itself(sample: Sample) -> Sample:
    return sample


ROWS: list[Row] = [
    Row(
        "tree/directory",
        "the tree of the 60-layer 31B, from a directory, no weight loaded",
        "transformers' own meta build alone",
        tree_of_directory,
        bound=1.0,
        unit="seconds",
        pairs=21,
    ),
    Row(
        "tree/module",
        "the tree of the 60-layer 31B, on a module that is on the meta device",
        "nnsight's tree of the same module",
        tree_of_module,
        bound=1.0,
        unit="seconds",
        pairs=21,
    ),
    Row(
        "tree/first",
        "the same from a directory, the first in its process",
        "transformers' first meta build",
        first_tree,
        unit="seconds",
        pairs=11,
    ),
    Row("import/package", "`import gemloupe`", "`import nnsight`", importing("import gemloupe", "import nnsight"), 1.1, pairs=21),
    Row(
        "import/class",
        "`from gemloupe import StandardizedTransformer`",
        "`import nnsight`",
        importing("from gemloupe import StandardizedTransformer", "import nnsight"),
        1.1,
        pairs=21,
    ),
]
