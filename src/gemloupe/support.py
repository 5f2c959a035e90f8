"""What a model has and what it lacks, answered without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .envoys.attention import Attention
from .envoys.audio import (
    Audio,
    AudioAttention,
    AudioConvolution,
    AudioLayer,
    AudioProjector,
    HalfFeedForward,
)
from .envoys.layer import Layer
from .envoys.mlp import Mlp
from .envoys.root import Root
from .envoys.vision import Projector, Vision, VisionAttention, VisionLayer, VisionMlp
from .errors import Unavailable
from .layouts import Layout
from .paths import expand, find, is_pattern
from .served import Served, served_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .plan import ModelPlan
    from .references import Reference

__all__ = [
    "HOSTS",
    "MEDIA_HOSTS",
    "TEXT_HOSTS",
    "Support",
    "SupportRow",
    "by_reason",
    "num_blocks",
    "support",
    "why_not",
]

TEXT_HOSTS: dict[str, type] = {
    "": Root,
    "layers[i]": Layer,
    "layers[i].self_attn": Attention,
    "layers[i].mlp": Mlp,
}
"""Where the text model's values are, and the class of the envoy there."""
MEDIA_HOSTS: dict[str, type] = {
    "vision": Vision,
    "vision.layers[i]": VisionLayer,
    "vision.layers[i].self_attn": VisionAttention,
    "vision.layers[i].mlp": VisionMlp,
    "projector": Projector,
    "audio": Audio,
    "audio.layers[i]": AudioLayer,
    "audio.layers[i].feed_forward1": HalfFeedForward,
    "audio.layers[i].self_attn": AudioAttention,
    "audio.layers[i].lconv1d": AudioConvolution,
    "audio.layers[i].feed_forward2": HalfFeedForward,
    "audio_projector": AudioProjector,
}
"""Where the values of images, video and sound are."""
HOSTS: dict[str, type] = {**TEXT_HOSTS, **MEDIA_HOSTS}
"""Where values are, and the class of the envoy there."""


def why_not(model: Any, value: str | Reference) -> str | None:
    """Why the model lacks a value, or `None` where it has it."""
    try:
        if is_pattern(value):
            expand(model, value)
            return None
        host, served = find(model, value)
    except Unavailable as error:
        return str(error).partition(": ")[2]
    return None if served is None else served.why_not(host)


@dataclass(frozen=True)
class SupportRow:
    """One value: where it is served, and why not elsewhere."""

    path: str
    layout: Layout
    meaning: str
    writable: bool
    blocks: tuple[int, ...] | None
    """The blocks that have it, of the text stack or of a tower; `None` for a value of no block."""
    num_blocks: int
    """How many blocks there are that could have it."""
    available: bool
    """Whether any place has it."""
    reason: str | None
    """Why the first place that lacks it does."""
    lacking: tuple[tuple[tuple[int, ...], str], ...]
    """The blocks that lack it, with their reason: a pair for each reason."""


@dataclass(frozen=True)
class Support:
    """Every standard value of a model, as rows; prints as a table."""

    rows: tuple[SupportRow, ...]
    num_layers: int

    def __iter__(self) -> Iterator[SupportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> SupportRow:
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table(Column("value", no_wrap=True), Column("layout", no_wrap=True), "where", "not where")
        last = ""
        for row in self.rows:
            reason = self._reason(row)
            shown = "the same" if reason and reason == last else reason
            # `[i]` is italics in rich's markup.
            table.add_row(escape(row.path), escape(str(row.layout)), self._where(row), escape(shown))
            last = reason
        return table

    def _where(self, row: SupportRow) -> str:
        if row.blocks is None:
            return "yes" if row.available else "no"
        if row.blocks and len(row.blocks) == row.num_blocks:
            return "every block"
        return spans(row.blocks) if row.blocks else "no block"

    def _reason(self, row: SupportRow) -> str:
        lines = [(blocks, reason.split("\n")[0]) for blocks, reason in row.lacking]
        if len(lines) == 1:
            return lines[0][1]
        return "\n".join(f"{spans(blocks)}: {reason}" for blocks, reason in lines)

    def __str__(self) -> str:
        console = Console(width=150, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    __repr__ = __str__


def support(model: Any) -> Support:
    """Every standard value of `model`."""
    rows = []
    for pattern, kind in HOSTS.items():
        for name, served in served_values(kind).items():
            rows.append(_row(model, pattern, name, served))
    return Support(tuple(rows), model.num_layers)


def _row(model: Any, pattern: str, name: str, served: Served) -> SupportRow:
    path = f"{pattern}.{name}" if pattern else name
    per_block = "[i]" in pattern
    blocks = num_blocks(model.plan, pattern) if per_block else 1
    # Where there is no tower, its first block says why.
    places = [path.replace("[i]", f"[{i}]") for i in range(max(blocks, 1))]
    reasons = [why_not(model, place) for place in places]
    having = tuple(i for i, reason in enumerate(reasons) if reason is None)
    return SupportRow(
        path=path,
        layout=served.layout,
        meaning=served.meaning,
        writable=served.read_only is None,
        blocks=having if per_block else None,
        num_blocks=blocks if per_block else 0,
        available=bool(having),
        reason=next((reason for reason in reasons if reason is not None), None),
        lacking=by_reason(reasons, per_block=blocks > 0 and per_block),
    )


def by_reason(reasons: list[str | None], per_block: bool) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The blocks of each reason; a reason that names its own block is one with those of its like.

    Of several blocks it says "each": `each computes no keys, it borrows block 3's`.
    """
    alike: dict[str, dict[int, str]] = {}
    for index, reason in enumerate(reasons):
        if reason is not None:
            first = reason.split("\n")[0]  # the rest is what to write for that block
            alike.setdefault(first.replace(f"block {index} ", "each ", 1), {})[index] = reason
    return tuple(
        (tuple(blocks) if per_block else (), said if len(blocks) > 1 else next(iter(blocks.values())))
        for said, blocks in alike.items()
    )


def num_blocks(plan: ModelPlan, pattern: str) -> int:
    """How many blocks the stack of a pattern has: the text stack's, or a tower's, which may be absent."""
    stack = pattern.partition(".")[0]
    if stack not in ("vision", "audio"):
        return plan.num_layers
    tower = plan.vision if stack == "vision" else plan.audio
    return 0 if tower is None else len(tower.blocks)


def spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers as ranges: `0-3, 5, 7-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
