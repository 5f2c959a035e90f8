"""The attention pattern: of one block on a model that runs sdpa, of all blocks, and the memory of one.

Plain transformers has patterns under eager attention alone, and then computes them in every block. What is
read is checked against those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import nnsight
import torch

from benchmarks import memory
from benchmarks.forward import Run, hooked, plain, row
from benchmarks.measure import Measurement, Memory, Side, alternate, insist
from benchmarks.models import Size, Twins, twins
from benchmarks.row import Row

__all__ = ["ROWS"]

TOLERANCE: Final = 5e-4
"""How far a pattern may be from eager attention's: float32, summed in another order, twelve blocks deep.
Another block's pattern differs by nearly one."""
NAMES: Final = {"31b": "dense", "e2b": "E2B-like"}
KINDS: Final = {"sliding": "sliding_attention", "full": "full_attention"}


# ---- time --------------------------------------------------------------------------------------------------


def read_pattern(kind: str) -> Run:
    def run(pair: Twins) -> torch.Tensor:
        block = last(pair, kind)
        with pair.model.trace(pair.inputs):
            pattern = pair.model.layers[block].self_attn.attention_probabilities.save()
        return pattern

    return run


def nnsight_pattern(kind: str) -> Run:
    """nnsight alone: on the eager twin, where transformers returns the pattern."""

    def run(pair: Twins) -> torch.Tensor:
        model, block = pair.nnsight_eager, last(pair, kind)
        with model.trace(pair.inputs):
            pattern = model.model.layers[block].self_attn.output[1].save()
        return pattern

    return run


def read_patterns(pair: Twins) -> list[torch.Tensor]:
    with pair.model.trace(pair.inputs):
        kept = nnsight.save([layer.self_attn.attention_probabilities for layer in pair.model.layers])
    return kept


def eager_patterns(pair: Twins) -> tuple[torch.Tensor, ...]:
    return pair.eager(**pair.inputs, output_attentions=True).attentions


def last(pair: Twins, kind: str) -> int:
    """The last block of a kind: whatever came before it is in memory by then."""
    kinds = pair.bare.config.layer_types
    return len(kinds) - 1 - kinds[::-1].index(KINDS[kind])


def is_eager_pattern(kind: str) -> Callable[[Twins, Any], None]:
    return lambda pair, pattern: insist(pattern, eager_patterns(pair)[last(pair, kind)], TOLERANCE)


# ---- memory ------------------------------------------------------------------------------------------------


def eager_pattern(kind: str) -> Run:
    """What a user of plain transformers does: eager attention, and a hook that keeps one block's pattern."""

    def run(pair: Twins) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        attention = pair.eager.model.layers[last(pair, kind)].self_attn
        hook = attention.register_forward_hook(lambda _module, _arguments, output: kept.append(output[1]))
        with hooked([hook]):
            pair.eager(**pair.inputs)
        return kept[0]

    return run


def read_logits(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        logits = pair.model.logits.save()
    return logits


def memory_row(
    name: str, what: str, against: str, kind: str, ours: Run, theirs: Run, shape: str = "31b", **fields: Any
) -> Row:
    """A row of the peak above the other side's, in patterns of one block: `[batch heads seq seq]` float32."""

    def measure(size: Size, pairs: int) -> Memory:
        pair = twins(shape, size)
        with torch.no_grad():
            pattern = ours(pair)
            is_eager_pattern(kind)(pair, pattern)
            unit = pattern.numel() * pattern.element_size()
            del pattern
            return memory.compare(lambda: ours(pair), lambda: theirs(pair), pairs, unit=unit)

    return Row(f"{shape}/memory-{name}", what, against, measure, pairs=7, **fields)


# ---- the rows ----------------------------------------------------------------------------------------------


def eager_model(size: Size, pairs: int) -> Measurement:
    """All patterns on a model that is eager already; its twins come last, they are built for this row."""
    pair = twins("31b", size, "eager")

    def theirs() -> Any:
        return pair.bare(**pair.inputs, output_attentions=True).attentions

    with torch.no_grad():
        ours = Side(lambda: read_patterns(pair))
        return alternate(ours, Side(theirs), pairs, same=lambda result: result, tolerance=TOLERANCE)


PLAIN: Final = "the plain sdpa forward"
EAGER: Final = "transformers' eager forward with `output_attentions=True`"
MORE: Final = "peak memory above that, in patterns"


def pattern_row(kind: str) -> Row:
    what = f"dense: the pattern of one {kind} block, under sdpa"
    return row(
        "31b",
        f"pattern-{kind}",
        what,
        PLAIN,
        read_pattern(kind),
        plain,
        check=is_eager_pattern(kind),
        bound=1.10,
    )


ONE_PATTERN: Final = 1.01
"""One pattern, and the ids and mask that nnsight copies for every trace: 16 KiB of 8 MiB."""


def peak_row(shape: str, kind: str) -> Row:
    what = f"{NAMES[shape]}: the pattern of one {kind} block, {MORE}"
    run = read_pattern(kind)
    return memory_row(kind, what, PLAIN, kind, run, plain, shape, bound=ONE_PATTERN)


ROWS: list[Row] = [
    *(pattern_row(kind) for kind in KINDS),
    row(
        "31b",
        "pattern-all",
        "dense: the patterns of all blocks, under sdpa",
        EAGER,
        read_patterns,
        eager_patterns,
        tolerance=TOLERANCE,
        bound=1.10,
    ),
    row(
        "31b",
        "pattern-nnsight",
        "dense: the pattern of one full block, under sdpa",
        "bare nnsight, which needs the model in eager",
        read_pattern("full"),
        nnsight_pattern("full"),
        tolerance=TOLERANCE,
    ),
    *(peak_row(shape, kind) for shape in NAMES for kind in KINDS),
    memory_row(
        "trace",
        f"dense: the pattern of one full block, {MORE}",
        "a trace that reads the logits alone",
        "full",
        read_pattern("full"),
        read_logits,
        bound=1.0,
    ),
    memory_row(
        "eager",
        f"dense: eager attention and a plain hook that keeps the pattern of one full block, {MORE}",
        PLAIN,
        "full",
        eager_pattern("full"),
        plain,
    ),
    Row("31b/pattern-eager", "dense: the patterns of all blocks, on an eager model", EAGER, eager_model),
]
