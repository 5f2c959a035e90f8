"""A block's data flow as a drawing: an operation is a box, a value is the arrow that leaves it.

What each value is computed from is a table, which the tests hold to the reference: they change one value
and see which ones follow from it directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

from ..plan import BlockPlan
from .names import names_of

__all__ = ["Box", "Flow", "arrows", "boxes", "drawing", "flows"]


@dataclass(frozen=True)
class Flow:
    """How a value comes about inside its block."""

    operation: str
    reads: tuple[str, ...]
    """The values of the block that the operation reads, beside weights."""
    lane: int
    """The column in which the operation is drawn; the stream runs down column 0."""


FLOWS: Final[dict[str, Flow]] = {
    "layer_input": Flow("the stream", (), 0),
    "self_attn.attention_input": Flow("rmsnorm", ("layer_input",), 1),
    "self_attn.own_keys": Flow("rope(rmsnorm(k_proj))", ("self_attn.attention_input",), 3),
    "self_attn.own_values": Flow("rmsnorm_unit(v_proj)", ("self_attn.attention_input",), 4),
    "self_attn.attention_queries": Flow("rope(rmsnorm(q_proj))", ("self_attn.attention_input",), 2),
    "self_attn.attention_keys": Flow("with those cached", ("self_attn.own_keys",), 3),
    "self_attn.attention_values": Flow("with those cached", ("self_attn.own_values",), 4),
    "self_attn.attention_scores": Flow(
        "queries · keys, masked", ("self_attn.attention_queries", "self_attn.attention_keys"), 2
    ),
    "self_attn.attention_probabilities": Flow("softmax", ("self_attn.attention_scores",), 2),
    "self_attn.attention_head_outputs": Flow(
        "pattern · values", ("self_attn.attention_probabilities", "self_attn.attention_values"), 2
    ),
    "self_attn.attention_projection": Flow("o_proj", ("self_attn.attention_head_outputs",), 1),
    "self_attn.attention_output": Flow("rmsnorm", ("self_attn.attention_projection",), 1),
    "mid_stream": Flow("+", ("layer_input", "self_attn.attention_output"), 0),
    "mlp.mlp_input": Flow("rmsnorm", ("mid_stream",), 1),
    "mlp.mlp_neurons": Flow("gelu(gate_proj) * up_proj", ("mlp.mlp_input",), 1),
    "mlp.shared_expert_output": Flow("down_proj", ("mlp.mlp_neurons",), 1),
    "mlp.router_logits": Flow("proj(rmsnorm_unit * scale)", ("mid_stream",), 2),
    "mlp.router_probabilities": Flow("softmax", ("mlp.router_logits",), 2),
    "mlp.expert_indices": Flow("the top_k likeliest", ("mlp.router_probabilities",), 3),
    "mlp.expert_weights": Flow(
        "share * per_expert_scale", ("mlp.router_probabilities", "mlp.expert_indices"), 2
    ),
    "mlp.expert_outputs": Flow(
        "weight * expert(rmsnorm)", ("mid_stream", "mlp.expert_indices", "mlp.expert_weights"), 3
    ),
    "mlp.routed_output": Flow("sum over top_k", ("mlp.expert_outputs",), 3),
    "mlp.mlp_projection": Flow("down_proj", ("mlp.mlp_neurons",), 1),
    "mlp.mlp_output": Flow("rmsnorm", ("mlp.mlp_projection",), 1),
    "per_layer_input": Flow("per_layer_inputs[:, :, i]", (), 3),
    "per_layer_output": Flow(
        "rmsnorm(proj(gate * input))", ("mid_stream", "mlp.mlp_output", "per_layer_input"), 2
    ),
    "layer_output": Flow("+, * layer_scalar", ("mid_stream", "mlp.mlp_output", "per_layer_output"), 0),
}
"""How each value of a block comes about, in the order in which they are drawn."""

_IN_A_MIXTURE: Final = {
    "mlp.mlp_projection": Flow("rmsnorm + rmsnorm", ("mlp.shared_expert_output", "mlp.routed_output"), 1)
}
_VALUES_FROM_KEYS: Final = {
    "self_attn.own_values": Flow("rmsnorm_unit(k_proj)", ("self_attn.attention_input",), 4)
}
_IN_A_BORROWER: Final = {
    "self_attn.attention_keys": Flow("the own_keys of kv_source", (), 3),
    "self_attn.attention_values": Flow("the own_values of kv_source", (), 4),
}


def flows(block: BlockPlan) -> dict[str, Flow]:
    """How each value that a block has comes about."""
    other = (
        (_IN_A_MIXTURE if block.has_experts else {})
        | (_VALUES_FROM_KEYS if block.values_from_keys else {})
        | (_IN_A_BORROWER if block.borrows_keys else {})
    )
    there = set(names_of(block))
    return {
        name: Flow(flow.operation, tuple(read for read in flow.reads if read in there), flow.lane)
        for name, flow in ({name: other.get(name, flow) for name, flow in FLOWS.items()}).items()
        if name in there
    }


# ---- where things are drawn -------------------------------------------------------------------------------

_WIDTH: Final = 204
_HEIGHT: Final = 28
_LANE: Final = 222
_ROW: Final = 78
_MARGIN: Final = 14
# Arrows that reach one box come in side by side, so far apart, and turn at different heights.
_APART: Final = 18
_TURN: Final = 5
# A layout is written to the right of its arrow, and may be longer than half a box.
_LABEL: Final = 96


@dataclass(frozen=True)
class Box:
    """An operation as it is drawn, by its upper left corner."""

    name: str
    operation: str
    x: int
    y: int

    @property
    def middle(self) -> int:
        return self.x + _WIDTH // 2

    @property
    def foot(self) -> int:
        return self.y + _HEIGHT


Arrow = tuple[tuple[int, int], ...]
"""The corners of an arrow, from the foot of a box to the head of another."""


def boxes(block: BlockPlan) -> dict[str, Box]:
    """The boxes of a block's drawing, by the value that leaves them."""
    return {
        name: Box(name, flow.operation, _MARGIN + flow.lane * _LANE, _MARGIN + row * _ROW)
        for row, (name, flow) in enumerate(flows(block).items())
    }


def arrows(block: BlockPlan) -> Iterator[tuple[str, str, Arrow]]:
    """Each arrow: the value that it is, the value whose operation it enters, its corners."""
    placed = boxes(block)
    for name, flow in flows(block).items():
        to = placed[name]
        for side in (-1, 0, 1):
            beside = [placed[read] for read in flow.reads if _side(placed[read], to) == side]
            # The nearest comes in nearest and turns first, so that none crosses another.
            beside.sort(key=lambda box: abs(box.x - to.x))
            for i, start in enumerate(beside):
                x = to.middle + side * (i + 1) * _APART
                turn = to.y - 9 - _TURN * (len(beside) - 1 - i)
                corners = ((start.middle, turn), (x, turn)) if side else ()
                yield start.name, name, ((start.middle, start.foot), *corners, (x, to.y))


def _side(box: Box, to: Box) -> int:
    return (box.x > to.x) - (box.x < to.x)


_STYLE: Final = (
    "text{font:12px ui-monospace,monospace}.o{fill:#333}.v{fill:#0b4fa0;font-weight:600}"
    ".l{fill:#777;font-size:10px}"
    "rect{fill:#eef3fa;stroke:#8aa4c8}path{fill:none;stroke:#555;stroke-width:1.3}"
)


def drawing(block: BlockPlan, layouts: Mapping[str, str], title: str) -> str:
    """The data flow of a block as an SVG.

    layouts: the layout of each value, by the last word of its name.
    title: what a screen reader says of it.
    """
    placed = boxes(block)
    width = max(box.x for box in placed.values()) + _WIDTH + _LABEL
    height = max(box.foot for box in placed.values()) + _ROW - _HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#555;stroke:none"/></marker></defs>',
        f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for _, _, corners in arrows(block):
        track = "L".join(f"{x} {y}" for x, y in corners)
        lines.append(f'<path d="M{track}" marker-end="url(#head)"/>')
    last = placed["layer_output"]
    leaving = f"M{last.middle} {last.foot}V{height - 4}"
    lines.append(f'<path d="{leaving}" marker-end="url(#head)"/>')
    for name, box in placed.items():
        lines += _shown(box, name.rpartition(".")[2], layouts)
    return "\n".join([*lines, "</svg>", ""])


def _shown(box: Box, name: str, layouts: Mapping[str, str]) -> list[str]:
    middle, foot = box.middle, box.foot
    return [
        f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>',
        f'<text class="o" x="{middle}" y="{box.y + 18}" text-anchor="middle">{escape(box.operation)}</text>',
        f'<text class="v" x="{middle + 6}" y="{foot + 14}">{escape(name)}</text>',
        f'<text class="l" x="{middle + 6}" y="{foot + 26}">{escape(layouts[name])}</text>',
    ]
