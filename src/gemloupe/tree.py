"""The tree of standard names that a model has, as rich prints it: one block stands for all that are alike."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .support import MEDIA_HOSTS, Support, SupportRow, spans

__all__ = ["names_tree"]

_BLOCK = "layers[i]"
_NARROW = 40
"""Columns that a meaning needs to stand beside its layout; with fewer it stands below."""


def names_tree(support: Support) -> Tree:
    """The names that are there, with layouts and meanings; of blocks that have the same names, the first."""
    tree = Tree(Text("model", style="bold"), guide_style="dim")
    rows = [row for row in support if row.available]
    _add_part(tree, rows, "")
    for part in dict.fromkeys(place.partition(".")[0] for place in MEDIA_HOSTS):
        if any(row.path.startswith(f"{part}.") for row in rows):
            _add_part(tree.add(Text(part, style="bold")), rows, part)
    return tree


def _add_part(tree: Tree, rows: list[SupportRow], part: str) -> None:
    """The values of the model itself (`""`) or of a part, such as `vision`, then those of its blocks."""
    _add_places(tree, [row for row in rows if _place(row) == part], part)
    block = f"{part}.{_BLOCK}" if part else _BLOCK
    per_block = [row for row in rows if _place(row) == block or _place(row).startswith(f"{block}.")]
    if not per_block:
        return
    (first, names), *others = _alike(per_block).items()
    node = tree.add(_label(first))
    _add_places(node, [row for row in per_block if row.path in names], block)
    for blocks, theirs in others:
        changes = [f"no {_under(row, block)}" for row in per_block if row.path in names - theirs]
        changes += [_under(row, block) for row in per_block if row.path in theirs - names]
        tree.add(Text.assemble(_label(blocks), f": the same, {', '.join(changes)}"))


def _alike(rows: list[SupportRow]) -> dict[tuple[int, ...], set[str]]:
    """The blocks that have the same values, and the paths of those."""
    alike: dict[frozenset[str], list[int]] = {}
    for block in range(rows[0].num_blocks):
        alike.setdefault(frozenset(row.path for row in rows if block in (row.blocks or ())), []).append(block)
    return {tuple(blocks): set(paths) for paths, blocks in alike.items()}


def _add_places(tree: Tree, rows: list[SupportRow], root: str) -> None:
    """The values of `root` itself, then a branch for each place under it."""
    for place in dict.fromkeys(map(_place, rows)):
        here = tree if place == root else tree.add(Text(place.removeprefix(root).lstrip("."), style="bold"))
        here.add(_Names(row for row in rows if _place(row) == place))


class _Names:
    """Names with their layouts and meanings: beside one another, or in a narrow terminal below."""

    def __init__(self, rows: Iterable[SupportRow]) -> None:
        self._rows = list(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table(beside=True)
        taken = sum(max(len(str(cell)) for cell in column.cells) + 2 for column in wide.columns[:2])
        yield wide if options.max_width - taken >= _NARROW else self._table(beside=False)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(beside=True))

    def _table(self, *, beside: bool) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="cyan")
        if beside:
            table.add_column(no_wrap=True, style="dim")
        for row in self._rows:
            name, layout = row.path.rpartition(".")[2], str(row.layout)
            if beside:
                table.add_row(name, layout, row.meaning)
            else:
                table.add_row(name, Text.assemble((layout, "dim"), "\n", row.meaning))
        return table


def _label(blocks: tuple[int, ...]) -> Text:
    first = f"layers[{blocks[0]}]"
    return Text.assemble((first, "bold"), (f" for blocks {spans(blocks)}" if len(blocks) > 1 else "", "dim"))


def _place(row: SupportRow) -> str:
    return row.path.rpartition(".")[0]


def _under(row: SupportRow, block: str) -> str:
    return row.path.removeprefix(block).lstrip(".")
