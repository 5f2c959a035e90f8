"""What a token's row of a value is, for every layout.

| layout | row | |
|---|---|---|
| `[batch seq ...]`, `[batch query ...]` | `[...]` | what the value has at the token |
| `[batch kv_heads seq head_dim]` and the like | the other axes, in their order | |
| `[batch kv_heads key head_dim]` | `[kv_heads head_dim]` | the token as a key |
| `[batch heads query key]` | `[heads key]` | the token as a query; keys by their place in its sequence |
| `[batch vocab]` | `[vocab]` | with `positions="last"` alone: a row per sequence |

The keys of a pattern are as many as the longest sequence has tokens; past a sequence's own there are zeros
(in scores, minus infinity).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..capture import in_forward_order
from ..errors import BadArgument
from ..layouts import Layout
from ..media import TOWERS
from ..paths import expand, find
from ..references import Reference
from .batches import Feed
from .positions import Chooser
from .sources import short

__all__ = ["Form", "forms"]

_TOKENS: Final = ("seq", "query", "key")


@dataclass(frozen=True)
class Form:
    """How the rows of one value are made of what a forward has of it."""

    path: str
    layout: Layout
    axes: tuple[str, ...]
    """Of a row."""
    selected: bool
    """Whether `collect` chooses the tokens; of keys it keeps all."""
    keyed: bool
    """Whether a row has an axis of keys."""
    masked: bool
    """Whether minus infinity means a key that is hidden."""
    split: tuple[int, int] | None
    """The axis of the rows that processes may have divided between them (heads), and how many there are in
    all."""
    partial: bool
    """Whether processes that hold one model between them have a part of each sum."""

    @property
    def block(self) -> int | None:
        """The block the value is of."""
        _, inside, rest = self.path.partition("layers[")
        return int(rest.partition("]")[0]) if inside else None

    def rows(self, value: torch.Tensor, fed: Feed, longest: int) -> torch.Tensor:
        """The rows of a batch, `[rows, ...]`, of what `collect` gave."""
        if not self.selected and "key" in self.layout.axes:
            value = value.movedim(self.layout.axis("key"), 1)[fed.chosen.to(value.device)]
        return self._by_key(value, fed, longest) if self.keyed else value

    def _by_key(self, rows: torch.Tensor, fed: Feed, longest: int) -> torch.Tensor:
        hidden = -torch.inf if self.masked else 0
        placed = rows.new_full((*rows.shape[:-1], longest), hidden)
        width, start = fed.chosen.shape[1], 0
        for length, count in zip(fed.lengths, fed.chosen.sum(-1).tolist(), strict=True):
            placed[start : start + count, ..., :length] = rows[start : start + count, ..., width - length :]
            start += count
        return placed


def forms(model: Any, values: Any, positions: Chooser) -> list[Form]:
    """The values that were asked for, in forward order.

    Raises: UnknownName, Unavailable; BadArgument, for nothing, and for a value that has no row per token.
    """
    many = isinstance(values, Iterable) and not isinstance(values, (str, Reference))
    given: list[Any] = list(values) if many else [values]
    if not given:
        raise BadArgument("harvest: no value was asked for; give paths such as 'layers.*.layer_output'.")
    if wrong := [value for value in given if not isinstance(value, (str, Reference))]:
        raise BadArgument(
            f"harvest: values are paths such as 'layers.*.layer_output', not {short(wrong[0])}."
        )
    paths = dict.fromkeys(path for value in given for path in expand(model, value))
    return [_form(model, path, positions) for path in in_forward_order(paths)]


def _form(model: Any, path: str, positions: Chooser) -> Form:
    _, served = find(model, path)
    assert served is not None  # `expand` names values alone
    layout = served.layout
    if path.partition(".")[0] in TOWERS or layout.axes[0] != "batch":
        raise BadArgument(
            f"harvest: {path} {layout} is a value of images, video or sound, which have no row per token and "
            f"are not harvested; `model.collect(inputs, {path!r})` reads it."
        )
    token = next((name for name in _TOKENS if name in layout.axes), None)
    if token is None and positions != "last":
        raise BadArgument(
            f"harvest: {path} {layout} has one row per sequence, of its last token; harvest it with "
            f"positions='last', or harvest `logits`."
        )
    axes = tuple(axis for axis in layout.axes if axis not in ("batch", token))
    return Form(
        path=path,
        layout=layout,
        axes=axes,
        selected=token in ("seq", "query"),
        keyed="key" in axes,
        masked=path.endswith("attention_scores"),
        split=_split(model, path, axes),
        partial=path.endswith("expert_outputs"),
    )


def _split(model: Any, path: str, axes: tuple[str, ...]) -> tuple[int, int] | None:
    """The axis of heads, counted with that of the rows, and the number of heads that the block has."""
    name = next((name for name in ("heads", "kv_heads") if name in axes), None)
    if name is None:
        return None
    host, _ = find(model, path)
    return axes.index(name) + 1, host.num_heads if name == "heads" else host.num_kv_heads
