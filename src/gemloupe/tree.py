"""The tree of standard names that a model has, as rich prints it: one block stands for all that are alike."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .support import Support, SupportRow, spans

__all__ = ["names_tree"]

_BLOCK = "layers[i]"


def names_tree(support: Support) -> Tree:
    """The names that are there, with layouts and meanings; of blocks that have the same names, the first."""
    tree = Tree(Text("model", style="bold"), guide_style="dim")
    rows = [row for row in support if row.available]
    shared = [row for row in rows if not _place(row).startswith(_BLOCK)]
    _add_places(tree, shared, "")
    per_block = [row for row in rows if _place(row).startswith(_BLOCK)]
    (first, names), *others = _alike(per_block, support.num_layers).items()
    node = tree.add(_label(first))
    _add_places(node, [row for row in per_block if row.path in names], _BLOCK)
    for blocks, theirs in others:
        changes = [f"no {_short(row)}" for row in per_block if row.path in names - theirs]
        changes += [_short(row) for row in per_block if row.path in theirs - names]
        tree.add(Text.assemble(_label(blocks), f": the same, {', '.join(changes)}"))
    return tree


def _alike(rows: list[SupportRow], num_layers: int) -> dict[tuple[int, ...], set[str]]:
    """The blocks that have the same values, and the paths of those."""
    alike: dict[frozenset[str], list[int]] = {}
    for block in range(num_layers):
        alike.setdefault(frozenset(row.path for row in rows if block in (row.blocks or ())), []).append(block)
    return {tuple(blocks): set(paths) for paths, blocks in alike.items()}


def _add_places(tree: Tree, rows: list[SupportRow], root: str) -> None:
    """The values of `root` itself, then a branch for each place under it."""
    for place in dict.fromkeys(map(_place, rows)):
        here = tree if place == root else tree.add(Text(place.removeprefix(root).lstrip("."), style="bold"))
        here.add(_names(row for row in rows if _place(row) == place))


def _names(rows: Iterable[SupportRow]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(no_wrap=True, style="dim")
    for row in rows:
        table.add_row(row.path.rpartition(".")[2], str(row.layout), row.meaning)
    return table


def _label(blocks: tuple[int, ...]) -> Text:
    first = f"layers[{blocks[0]}]"
    return Text.assemble((first, "bold"), (f" for blocks {spans(blocks)}" if len(blocks) > 1 else "", "dim"))


def _place(row: SupportRow) -> str:
    return row.path.rpartition(".")[0]


def _short(row: SupportRow) -> str:
    return row.path.removeprefix(_BLOCK).lstrip(".")
