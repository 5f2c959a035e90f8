"""What stands before the first forward: the import, and the tree of a large model without its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from nnsight import TransformersModel

from benchmarks.measure import Measurement, Sample, Side, alternate, command, python, timed_in_process
from benchmarks.models import Size, config_31b
from benchmarks.row import Row
from gemloupe import StandardizedTransformer
from gemloupe.testing import tiny_tokenizer

__all__ = ["ROWS"]

# Each prints the seconds that its construction took, as `timed_in_process` wants them.
FIRST_TREE: Final = """
import json, time
from gemloupe import StandardizedTransformer
wall, cpu = time.perf_counter(), time.process_time()
StandardizedTransformer(sys.argv[1])
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""
FIRST_NATIVE: Final = """
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
            return Side(lambda: timed_in_process(arguments), clock=_itself)

        return alternate(first(FIRST_TREE), first(FIRST_NATIVE), pairs)


# ---- imports -----------------------------------------------------------------------------------------------


def importing(statement: str) -> Callable[[Size, int], Measurement]:
    """Whole processes: one that runs the statement, and one that imports nnsight."""

    def process(code: str) -> Side:
        arguments = python(code)
        return Side(lambda: command(arguments), clock=_itself)

    return lambda _size, pairs: alternate(process(statement), process("import nnsight"), pairs)


def _itself(sample: Sample) -> Sample:
    return sample


# ---- the rows ----------------------------------------------------------------------------------------------


def tree(
    name: str, what: str, against: str, measure: Callable[[Size, int], Measurement], **fields: Any
) -> Row:
    return Row(f"tree/{name}", what, against, measure, unit="seconds", **fields)


def imported(name: str, statement: str) -> Row:
    return Row(
        f"import/{name}", f"`{statement}`", "`import nnsight`", importing(statement), bound=1.1, pairs=21
    )


FROM_DIRECTORY: Final = "the tree of the 60-layer 31B from a directory, weights not loaded"

ROWS: list[Row] = [
    tree(
        "directory",
        FROM_DIRECTORY,
        "transformers' own meta build alone",
        tree_of_directory,
        bound=1.0,
        pairs=21,
    ),
    tree(
        "module",
        "the same on a module that is on the meta device",
        "nnsight's tree, without names",
        tree_of_module,
        bound=1.0,
        pairs=21,
    ),
    tree("first", f"{FROM_DIRECTORY}, first in its process", "transformers' own", first_tree, pairs=7),
    imported("package", "import gemloupe"),
    imported("class", "from gemloupe import StandardizedTransformer"),
]
