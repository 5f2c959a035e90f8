"""The same jobs in the peers: bare nnsight in our process, TransformerLens and nnterp each in its own.

Every job runs the whole forward on both sides, but `collect`, which stops after the last block. The tensors
that a job gives are compared with the other side's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import nnsight
import torch

from benchmarks import memory
from benchmarks.attention import read_patterns
from benchmarks.capture import collect_outputs
from benchmarks.forward import (
    HOOKS,
    Run,
    blocks,
    direction,
    edit,
    hook_outputs,
    hooked,
    keep_output,
    length,
    middle,
    outside,
    read_outputs,
    read_steps,
    row,
)
from benchmarks.measure import (
    Measurement,
    Memory,
    Sample,
    Side,
    alternate,
    command,
    insist,
    python,
    timed_in_process,
)
from benchmarks.models import Size, Twins, twins
from benchmarks.peer import NNTERP, TRANSFORMERLENS, Kind, alone, environment, saved, started
from benchmarks.row import Row

__all__ = ["ROWS"]

TOLERANCE: Final = 1e-3
"""How far a peer's tensors may be from ours, whose largest are about ten: where it runs eager attention it
adds up in another order, twelve blocks deep."""
STEPS: Final = 8
"""Of `generate`, as in benchmarks/peers."""


# ---- the jobs, ours and nnsight's --------------------------------------------------------------------------


def read_one(pair: Twins) -> torch.Tensor:
    with pair.model.trace(pair.inputs):
        kept = pair.model.layers[middle(pair)].layer_output.save()
    return kept


def hook_one(pair: Twins) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    with hooked([blocks(pair)[middle(pair)].register_forward_hook(keep_output(kept))]):
        pair.bare(**pair.inputs)
    return kept[0]


def nnsight_outside(pair: Twins) -> torch.Tensor:
    return pair.nnsight._module(**pair.inputs).logits


def nnsight_one(pair: Twins) -> torch.Tensor:
    model = pair.nnsight
    with model.trace(pair.inputs):
        kept = model.model.layers[middle(pair)].output.save()
    return kept


def nnsight_outputs(pair: Twins) -> list[torch.Tensor]:
    model = pair.nnsight
    with model.trace(pair.inputs):
        kept = nnsight.save([layer.output for layer in model.model.layers])
    return kept


def nnsight_patterns(pair: Twins) -> list[torch.Tensor]:
    """On the eager twin, where transformers returns the pattern."""
    model = pair.nnsight_eager
    with model.trace(pair.inputs):
        kept = nnsight.save([layer.self_attn.output[1] for layer in model.model.layers])
    return kept


def nnsight_edit(pair: Twins) -> torch.Tensor:
    model, vector = pair.nnsight, direction(pair)
    with model.trace(pair.inputs):
        layer = model.model.layers[middle(pair)]
        layer.output = layer.output + vector
        logits = model.output.logits.save()
    return logits


def nnsight_steps(pair: Twins) -> list[torch.Tensor]:
    model = pair.nnsight
    with model.generate(pair.inputs, **length(STEPS)) as tracer:
        kept = nnsight.save([])
        for _step in tracer.iter[:STEPS]:
            kept += [layer.output for layer in model.model.layers]
    return kept


@dataclass(frozen=True)
class Job:
    """One thing that every library does."""

    name: str
    """In the rows' names."""
    what: str
    ours: Run
    nnsight: Run
    asked: str
    """The job that a peer's process runs, by the name that benchmarks/peers gives it."""
    pairs: int = 11


OUTSIDE: Final = Job(
    "outside", "dense: the wrapped model outside a trace", outside, nnsight_outside, "outside"
)
ONE: Final = Job("one", "dense: one `layer_output`", read_one, nnsight_one, "one")
COLLECT: Final = Job(
    "collect", "dense: `collect` of every `layer_output`", collect_outputs, nnsight_outputs, "outputs"
)
PATTERNS: Final = Job(
    "patterns",
    "dense: the patterns of all blocks, under sdpa",
    read_patterns,
    nnsight_patterns,
    "patterns",
)
EDIT: Final = Job("edit", "dense: a `layer_output` assigned", edit, nnsight_edit, "edit")
GENERATE: Final = Job(
    "generate",
    f"dense: every `layer_output` of {STEPS} steps of `generate`",
    read_steps(STEPS),
    nnsight_steps,
    "generate",
    pairs=7,
)
JOBS: Final = (OUTSIDE, ONE, COLLECT, PATTERNS, EDIT, GENERATE)


# ---- against a peer's process ------------------------------------------------------------------------------


def against(kind: Kind, job: Job, shape: str) -> Callable[[Size, int], Measurement]:
    def measure(size: Size, pairs: int) -> Measurement:
        pair = twins(shape, size)
        with torch.no_grad(), started(kind, pair) as peer:
            agree(job, len(blocks(pair)), job.ours(pair), peer.kept(job.asked))
            theirs = Side(lambda: peer.time(job.asked), clock=_itself)
            return alternate(Side(lambda: job.ours(pair)), theirs, pairs)

    return measure


def agree(job: Job, layers: int, ours: Any, theirs: list[torch.Tensor]) -> None:
    """Insist that both sides gave the same tensors; of a generation the same shapes, and the same tensors on
    the prompt: two tokens of about one probability change places between two kinds of attention.

    Raises: AssertionError.
    """
    if job is not GENERATE:
        insist(ours, theirs, TOLERANCE)
        return
    assert [each.shape for each in ours] == [each.shape for each in theirs], "the steps have other shapes"
    insist(ours[:layers], theirs[:layers], TOLERANCE)


def peaks(kind: Kind) -> Callable[[Size, int], Memory]:
    """Our peak and a peer's, both with every block's output kept."""

    def measure(size: Size, pairs: int) -> Memory:
        pair = twins("31b", size)
        with torch.no_grad(), started(kind, pair) as peer:
            insist(read_outputs(pair), peer.kept("outputs"), TOLERANCE)
            peer.peak("outputs")  # the first run is not the rule
            theirs = tuple(peer.peak("outputs") for _ in range(pairs))
            ours = memory.compare(lambda: read_outputs(pair), lambda: read_outputs(pair), pairs, unit=1).ours
        return Memory(ours, theirs, output_bytes(size))

    return measure


def peaks_here(theirs: Run) -> Callable[[Size, int], Memory]:
    def measure(size: Size, pairs: int) -> Memory:
        pair = twins("31b", size)
        with torch.no_grad():
            insist(read_outputs(pair), theirs(pair))
            return memory.compare(
                lambda: read_outputs(pair), lambda: theirs(pair), pairs, unit=output_bytes(size)
            )

    return measure


def output_bytes(size: Size) -> int:
    """Of one block's output, `[batch seq hidden]` in float32."""
    return size.batch * size.seq * size.hidden * 4


def _itself(sample: Sample) -> Sample:
    return sample


# ---- import and tree ---------------------------------------------------------------------------------------

OURS: Final = "from gemloupe import StandardizedTransformer"
IMPORTS: Final = {
    TRANSFORMERLENS: "from transformer_lens.model_bridge import TransformerBridge",
    NNTERP: "from nnterp import StandardizedTransformer",
}
WRAP: Final = """
import json, sys, time, transformers
{imports}
transformers.logging.set_verbosity_error()
module = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
{wrap}
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""
WRAPS: Final = {
    TRANSFORMERLENS: "TransformerBridge.boot_transformers(sys.argv[1], hf_model=module, device='cpu')",
    NNTERP: "StandardizedTransformer(module, tokenizer=tokenizer)",
}


def importing(kind: Kind) -> Callable[[Size, int], Measurement]:
    """Whole processes that import each library's class."""

    def measure(_size: Size, pairs: int) -> Measurement:
        theirs = [str(environment(kind) / "bin" / "python"), "-c", IMPORTS[kind]]
        return alternate(
            Side(lambda: command(python(OURS)), clock=_itself),
            Side(lambda: command(theirs, PYTHONPATH=""), clock=_itself),
            pairs,
        )

    return measure


def wrapping(kind: Kind) -> Callable[[Size, int], Measurement]:
    """What it takes to wrap a loaded module, first in its process."""

    def measure(size: Size, pairs: int) -> Measurement:
        with saved(twins("31b", size)) as folder:
            ours = WRAP.format(imports=OURS, wrap="StandardizedTransformer(module, tokenizer=tokenizer)")
            theirs = WRAP.format(imports=IMPORTS[kind], wrap=WRAPS[kind])
            their_python = str(environment(kind) / "bin" / "python")
            return alternate(
                Side(lambda: timed_in_process(python(ours, folder)), clock=_itself),
                Side(
                    lambda: timed_in_process([their_python, "-c", theirs, folder], env=alone()),
                    clock=_itself,
                ),
                pairs,
            )

    return measure


# ---- the rows ----------------------------------------------------------------------------------------------

PEAK: Final = "dense: every `layer_output`, peak memory above that, in outputs of one block"


def here_row(job: Job, label: str, described: str, theirs: Run, **fields: Any) -> Row:
    """A row of two sides in our process, whose tensors are equal but where nnsight needs eager attention."""
    tolerance = TOLERANCE if job is PATTERNS else 0.0
    name = f"{job.name}-{label}"
    return row(
        "31b", name, job.what, described, job.ours, theirs, tolerance=tolerance, pairs=job.pairs, **fields
    )


def nnsight_row(job: Job) -> Row:
    needs = ", which needs the model in eager" if job is PATTERNS else ""
    return here_row(job, "nnsight", f"bare nnsight{needs}", job.nnsight)


def peer_row(kind: Kind, job: Job, shape: str = "31b", **fields: Any) -> Row:
    eager = kind is TRANSFORMERLENS or job is PATTERNS
    described = f"{kind.name} {kind.release}, in its own process{' (eager attention)' if eager else ''}"
    what = job.what.replace("dense", {"31b": "dense", "e2b": "E2B-like"}[shape])
    name = f"{shape}/{job.name}-{kind.name.lower()}"
    return Row(name, what, described, against(kind, job, shape), **{"pairs": job.pairs, **fields})


def start_rows(kind: Kind) -> list[Row]:
    """The rows of what stands before the first forward."""
    named, peer = f"{kind.name} {kind.release}", kind.name.lower()
    wrapped = "dense: a loaded module wrapped, first in its process"
    return [
        Row(f"import/class-{peer}", f"`{OURS}`", f"`{IMPORTS[kind]}` ({named})", importing(kind), pairs=7),
        Row(f"tree/wrap-{peer}", wrapped, f"{named}'s wrapper of the same", wrapping(kind), pairs=7),
    ]


PEERS: Final = (TRANSFORMERLENS, NNTERP)

ROWS: list[Row] = [
    here_row(ONE, "hooks", "a plain hook that keeps the same tensor", hook_one, bound=1.05),
    *(nnsight_row(job) for job in JOBS),
    *(peer_row(kind, job) for job in JOBS for kind in PEERS if (kind, job) != (TRANSFORMERLENS, COLLECT)),
    peer_row(TRANSFORMERLENS, COLLECT, bound=1.0, pairs=31),
    Row("31b/memory-outputs-hooks", PEAK, HOOKS, peaks_here(hook_outputs), pairs=5),
    Row("31b/memory-outputs-nnsight", PEAK, "bare nnsight", peaks_here(nnsight_outputs), pairs=5),
    *(
        Row(
            f"31b/memory-outputs-{kind.name.lower()}",
            PEAK,
            f"{kind.name} {kind.release}, in its own process",
            peaks(kind),
            pairs=5,
        )
        for kind in PEERS
    ),
    peer_row(TRANSFORMERLENS, COLLECT, "e2b", bound=1.0, pairs=31),
    *(each for kind in PEERS for each in start_rows(kind)),
]
