"""The model card: what a config says of a model, its blocks, its values and its traps. No weights, no module.

card = read_card("google/gemma-4-E2B")
print(card.plan.num_parameters, card.traps)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .envoys.absence import no_audio, no_audio_tower, no_tower, no_vision
from .envoys.facts import BlockFacts
from .errors import GemloupeError, LoadError
from .families import family
from .loading import read_config, text_config
from .plan import BlockPlan, ModelPlan, TowerBlockPlan
from .served import Served, served_values
from .support import HOSTS, TEXT_HOSTS, SupportRow, by_reason, num_blocks, spans
from .targets import tiny_target
from .traps import traps

__all__ = ["Card", "read_card"]


def read_card(target: str) -> Card:
    """The card of a repo id, a directory with a config.json, or `tiny:SHAPE`, `tiny:SHAPE:wrapper`.

    Raises: LoadError, where there is no config or it cannot be read; UnsupportedModel, for a model that this
    package does not know; BadArgument, for an unknown tiny model.
    """
    of_tiny = tiny_target(target)
    config = _config(target) if of_tiny is None else _tiny_config(*of_tiny)
    return Card(target, family(text_config(config).model_type).plan(config))


@dataclass(frozen=True)
class Card:
    """A model by its config; a rich console prints it, `to_json` is the same for programs."""

    target: str
    plan: ModelPlan

    @cached_property
    def values(self) -> tuple[SupportRow, ...]:
        """Every standard value and where the model has it: the rows of `model.support()`."""
        return tuple(
            _row(self.plan, pattern, name, value)
            for pattern, kind in HOSTS.items()
            for name, value in served_values(kind).items()
        )

    @cached_property
    def traps(self) -> tuple[str, ...]:
        """What surprises people in this model."""
        return traps(self.plan)

    def to_json(self) -> str:
        """The card as a JSON object: the plan's fields, and `target`, `num_parameters`, `values`, `traps`."""
        facts = asdict(self.plan)
        blocks = facts.pop("blocks")
        values = [
            {
                "path": row.path,
                "layout": row.layout.axes,
                "meaning": row.meaning,
                "writable": row.writable,
                "available": row.available,
                "blocks": row.blocks,
                "why_not": row.reason,
            }
            for row in self.values
        ]
        return json.dumps(
            {
                "target": self.target,
                **facts,
                "num_parameters": self.plan.num_parameters,
                "kv_sharing": self.plan.kv_sharing(),
                "blocks": blocks,
                "values": values,
                "traps": self.traps,
            },
            indent=2,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.target, style="bold")
        yield Padding(_facts(self.plan), (0, 0, 0, 2))
        for title, part in (
            ("Blocks", _block_table(self.plan)),
            ("Values", _value_table(self)),
            ("Traps", _bullets(self.traps)),
        ):
            yield Text(f"\n{title}", style="bold")
            yield Padding(part, (0, 0, 0, 2))


# -- reading the target --------------------------------------------------------------------------


def _tiny_config(shape: str, wrapper: bool) -> Any:
    from .testing import tiny_config

    return tiny_config(shape, wrapper=wrapper)


def _config(target: str) -> Any:
    try:
        return read_config(target)
    except GemloupeError:
        raise
    except Exception as error:  # a config class may refuse a field of its file by any error
        raise LoadError(f"the config of {target} cannot be read: {error}") from error


# -- what there is -------------------------------------------------------------------------------


class _Host(BlockFacts):
    """A place in the tree as far as a config tells: what a value asks to know whether it is there.

    The kernels are those that transformers chooses unless it is told otherwise.
    """

    def __init__(self, plan: ModelPlan, index: int) -> None:
        self.model_plan = plan
        self.index = index
        self.block = self.experts = self
        self._module = SimpleNamespace(
            config=SimpleNamespace(_attn_implementation="sdpa", _experts_implementation="grouped_mm")
        )

    @property
    def block_plan(self) -> BlockPlan:
        return self.model_plan.blocks[self.index]


def _absent(host: _Host, pattern: str) -> str | None:
    """Why the place of a pattern is not there."""
    stack, _, inside = pattern.partition(".")
    for names, modality, tower in (
        (("vision", "projector"), no_vision, no_tower),
        (("audio", "audio_projector"), no_audio, no_audio_tower),
    ):
        if stack in names:
            return modality(host) or (tower(host) if inside else None)
    return None


def _row(plan: ModelPlan, pattern: str, name: str, value: Served) -> SupportRow:
    per_block = "[i]" in pattern
    blocks = num_blocks(plan, pattern) if per_block else 1
    hosts = [_Host(plan, i) for i in range(max(blocks, 1))]
    reasons = [_absent(host, pattern) or value.why_not(host) for host in hosts]
    having = tuple(i for i, reason in enumerate(reasons) if reason is None)
    return SupportRow(
        path=f"{pattern}.{name}" if pattern else name,
        layout=value.layout,
        meaning=value.meaning,
        writable=value.read_only is None,
        blocks=having if per_block else None,
        num_blocks=blocks if per_block else 0,
        available=bool(having),
        reason=next((reason for reason in reasons if reason is not None), None),
        lacking=by_reason(reasons, per_block=per_block and blocks > 0),
    )


# -- as text -------------------------------------------------------------------------------------


def _facts(plan: ModelPlan) -> Table:
    rows = {
        "model type": plan.model_type + (", inside the multimodal wrapper" if plan.wrapper else ""),
        "layers": f"{plan.num_layers}{_kinds(plan)}",
        "hidden size": str(plan.hidden_size),
        "parameters": f"{_short(plan.num_parameters)} ({plan.num_parameters:,}; {_counted(plan)})",
        "vocabulary": f"{plan.vocab_size:,}",
        "logit cap": "none" if plan.logit_cap is None else f"{plan.logit_cap:g}",
        "positions": f"{plan.max_positions:,}",
        "inputs": ", ".join(_modalities(plan)),
        **_ways_in(plan),
    }
    table = Table.grid(padding=(0, 2))
    for name, fact in rows.items():
        table.add_row(Text(name, style="dim"), fact)
    return table


def _kinds(plan: ModelPlan) -> str:
    counts = {kind: sum(block.kind == kind for block in plan.blocks) for kind in ("sliding", "full")}
    return f" ({', '.join(f'{count} {kind}' for kind, count in counts.items() if count)})"


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _counted(plan: ModelPlan) -> str:
    return f"text model, {'tied head counted once' if plan.tied else 'embedding and head are two'}"


def _modalities(plan: ModelPlan) -> Iterator[str]:
    yield "text"
    if plan.has_vision:
        yield from ("images", "video")
    if plan.has_audio:
        yield "audio"


def _ways_in(plan: ModelPlan) -> dict[str, str]:
    """How images and sound get into the stream, where they do."""
    facts = {}
    if (vision := plan.vision) is not None:
        side, pooling = vision.patch_size, vision.pooling
        patches = f"patches of {side} x {side} pixels"
        patches += f", {pooling} x {pooling} of them a soft token" if pooling > 1 else ", each a soft token"
        facts["images"] = f"{_tower(vision.blocks, 'an embedder', vision.hidden_size)}; {patches}"
    if (audio := plan.audio) is not None:
        facts["sound"] = _tower(audio.blocks, "frames of raw samples", audio.hidden_size)
    return facts


def _tower(blocks: tuple[TowerBlockPlan, ...], instead: str, width: int) -> str:
    if not blocks:
        return f"no tower, {instead}, {width} wide"
    block = blocks[0]
    heads = f"{block.num_heads} heads of {block.head_dim}"
    return f"a tower of {len(blocks)} blocks, {width} wide, {heads}, MLP width {block.intermediate_size}"


def _block_table(plan: ModelPlan) -> Table:
    """A row for each set of equal blocks, those with the same source of keys and values."""
    groups: dict[BlockPlan, list[BlockPlan]] = {}
    for block in plan.blocks:
        source = block.kv_source if block.borrows_keys else -1
        groups.setdefault(replace(block, index=-1, kv_source=source), []).append(block)
    rows = [_cells(group) for group in groups.values()]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in shown:
        number = all(row[name].isdigit() for row in rows if row[name])
        table.add_column(name, justify="right" if number and name != "blocks" else "left")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _cells(group: list[BlockPlan]) -> dict[str, str]:
    block = group[0]
    experts = f"{block.top_k} of {block.num_experts}, {block.expert_intermediate_size} wide"
    return {
        "blocks": spans(tuple(member.index for member in group)),
        "kind": block.kind,
        "window": str(block.window or ""),
        "heads": str(block.num_heads),
        "kv heads": str(block.num_kv_heads),
        "head_dim": str(block.head_dim),
        "MLP width": str(block.intermediate_size),
        "keys and values": _keys(block),
        "experts": experts if block.has_experts else "",
        "ple": str(block.per_layer_input_size or ""),
    }


def _keys(block: BlockPlan) -> str:
    if block.borrows_keys:
        return f"block {block.kv_source}'s"
    kinds = ["own"]
    if block.values_from_keys:
        kinds.append("values from k_proj")
    if block.kv_borrowers:
        kinds.append(f"lent to {spans(block.kv_borrowers)}")
    return ", ".join(kinds)


def _value_table(card: Card) -> Table:
    """The names at each place, those on the same blocks together, and last the ones that are nowhere."""
    there: dict[tuple[str, tuple[int, ...] | None], list[str]] = {}
    nowhere: dict[str, list[str]] = {}
    for row in card.values:
        place, _, name = row.path.rpartition(".")
        if row.available:
            some = row.blocks if row.blocks is not None and len(row.blocks) != row.num_blocks else None
            there.setdefault((place, some), []).append(name)
        else:
            reason = (row.reason or "").split("\n")[0]
            known = nowhere.setdefault(reason, [])
            name = name if place in TEXT_HOSTS else _absent_as(card, row)
            known += [] if name in known else [name]
    table = Table.grid(padding=(0, 2))
    for (place, blocks), names in there.items():
        where = place or "the model"
        if blocks is not None:
            where += f", blocks {spans(blocks)}"
        table.add_row(Text(where, style="dim"), " ".join(names))
    for reason, names in nowhere.items():
        table.add_row(Text("not here", style="dim"), Group(" ".join(names), Text(reason, style="dim")))
    return table


def _absent_as(card: Card, row: SupportRow) -> str:
    """A value of images or sound that is nowhere: with all of its place that is absent with it, or alone."""
    parts = row.path.split(".")
    for place in (".".join(parts[:size]) for size in range(1, len(parts))):
        beside = [other for other in card.values if other.path.startswith(f"{place}.")]
        if all(not other.available and other.reason == row.reason for other in beside):
            return f"{place}.*"
    return row.path


def _bullets(sentences: tuple[str, ...]) -> Table:
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", sentence)
    return table
