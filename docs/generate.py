"""Writes what can be generated of the documents: docs/vocabulary.md, and the tables of README.md and docs/errors.md.

    python docs/generate.py            writes them
    python docs/generate.py --check    exit status 1 where a committed page differs

The source is the package: the descriptors of the values, the facts' properties, the methods, the errors. A test
compares the committed pages with `pages()`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from gemloupe import errors
from gemloupe.capture import FORWARD_ORDER
from gemloupe.card import read_card
from gemloupe.envoys.facts import BlockFacts
from gemloupe.layouts import LAYOUTS
from gemloupe.served import Served, served_values
from gemloupe.standardized import StandardizedTransformer
from gemloupe.support import HOSTS
from gemloupe.testing import SHAPES

__all__ = ["AXES", "CHECKPOINTS", "pages"]

ROOT: Final = Path(__file__).parents[1]

CHECKPOINTS: Final = dict(zip(("E2B", "E4B", "26B-A4B", "31B", "12B"), SHAPES, strict=True))
"""The published checkpoints, each with the tiny shape that has its kinds of block."""

AXES: Final = {
    "batch": "rows of the batch; inside an invoke, the rows of that invoke",
    "seq": "tokens of the forward, padding included (on the left); in `generate`, those of one step",
    "hidden": "the width of the residual stream, `hidden_size`",
    "heads": "query heads of the block, `num_heads`",
    "kv_heads": "key and value heads of the block, `num_kv_heads`",
    "head_dim": "the width of one head; sliding and full blocks differ",
    "query": "tokens that attend, the same as `seq`",
    "key": "tokens attended to: those of this forward and the cached ones",
    "vocab": "tokens of the vocabulary, `vocab_size`",
    "layers": "blocks of the text stack, `num_layers`",
    "ple": "the width of one block's per-layer input",
    "experts": "experts of a mixture block, `num_experts`",
    "top_k": "experts each token is routed to",
    "intermediate": "the width of the dense MLP, `intermediate_size`",
    "images": "images of the call",
    "patches": "patches of one image, padded rows included",
    "tokens": "soft tokens, flat over the call's images",
}

PLACES: Final = {
    "": "On the model",
    "layers[i]": "On a block, `layers[i]`",
    "layers[i].self_attn": "On its attention, `layers[i].self_attn`",
    "layers[i].mlp": "On its MLP, `layers[i].mlp`",
}

ROOT_FACTS: Final = ("num_layers", "hidden_size", "vocab_size", "num_heads", "head_dim", "num_kv_heads")
METHODS: Final = (
    "trace",
    "collect",
    "record",
    "steer",
    "skip_layers",
    "project_on_vocab",
    "top_tokens",
    "has",
    "why_not",
    "support",
    "kv_sharing",
)

INTRO: Final = """\
# Vocabulary

<!-- Written by docs/generate.py from the descriptors in src/gemloupe; do not edit. -->

A value has one name, one meaning and one layout on every checkpoint. This page lists them all, as the code defines
them. `model.support()` prints the same table for the model at hand, and `model.why_not(path)` says why a value is not
there.

## Axes

A layout is the order of a value's axes, in these words.

{axes}

## All values

`all`: every block has it. `some`: some blocks do. A dash: the checkpoint lacks it, and reading it raises
[`Unavailable`](errors.md#unavailable).

{matrix}

## Order

Inside a trace values come in forward order: a read of a value that the forward has passed raises
[`OutOfOrder`](errors.md#outoforder). This is the order, block by block. The values of a line belong to one moment and
may be read in any order among themselves. `collect` and `record` have no order.

{order}
"""

TAIL: Final = """\
## Facts

Plain attributes, read from the config. They need no forward.

On the model:

{root_facts}

On a block, its attention and its MLP:

{block_facts}

A block also has `layer_scalar`, the tensor that multiplies its sum, and `index`. `model.plan` holds all facts as frozen
dataclasses, one `BlockPlan` a block in `model.plan.blocks`; `gemloupe.plan(config)` makes it from a config alone.

## Methods

{methods}

On the MLP of a mixture block:

{mixture_methods}

## Errors

Every error is a `gemloupe.errors.GemloupeError`. [Errors](errors.md) says what to do about each.

{errors}
"""


def pages() -> dict[Path, str]:
    """The text that each page with a generated part should have."""
    readme, wrong = ROOT / "README.md", ROOT / "docs" / "errors.md"
    return {
        ROOT / "docs" / "vocabulary.md": vocabulary(),
        readme: between(readme.read_text(encoding="utf-8"), "vocabulary", short_tables()),
        wrong: between(wrong.read_text(encoding="utf-8"), "errors", error_table(link="#{}")),
    }


def between(text: str, name: str, new: str) -> str:
    """`text` with `new` between the two comments that mark the part called `name`.

    Raises: ValueError, where the page has not exactly one such part.
    """
    begin, end = f"<!-- {name}: generated by docs/generate.py -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page has no part between {begin} and {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{new}\n\n{end}{rest.split(end)[1]}"


# -- the page ------------------------------------------------------------------------------------


def vocabulary() -> str:
    """docs/vocabulary.md."""
    used = {axis for _, _, value in values() for axis in value.layout.axes}
    axes = table(("axis", "meaning"), ((code(axis), AXES[axis]) for axis in AXES if axis in used))
    order = "\n".join(f"{number}. {line}" for number, line in enumerate(moments(), 1))
    parts = [INTRO.format(axes=axes, matrix=matrix(), order=order)]
    for pattern, title in PLACES.items():
        parts.append(f"## {title}\n")
        parts += [entry(value) for place, _, value in values() if place == pattern]
    parts.append(
        TAIL.format(
            root_facts=facts(StandardizedTransformer, ROOT_FACTS),
            block_facts=facts(BlockFacts, [n for n, v in vars(BlockFacts).items() if is_fact(n, v)]),
            methods=methods(StandardizedTransformer, METHODS),
            mixture_methods=methods(HOSTS["layers[i].mlp"], ("reroute",)),
            errors=error_table(link="errors.md#{}"),
        )
    )
    return "\n".join(parts)


def values() -> list[tuple[str, str, Served]]:
    """Every value: its place, its name, its descriptor."""
    return [
        (place, name, value) for place, kind in HOSTS.items() for name, value in served_values(kind).items()
    ]


def matrix() -> str:
    """All values, and which checkpoints have them."""
    cards = [read_card(f"tiny:{shape}") for shape in CHECKPOINTS.values()]
    rows = []
    for each in zip(*(card.values for card in cards), strict=True):
        first = each[0]
        name = first.path.rpartition(".")[2]
        where = [cell(row.blocks, card.plan.num_layers, row.available) for row, card in zip(each, cards, strict=True)]
        rows.append((f"[{code(name)}](#{name})", code(str(first.layout)), *where))
    return table(("value", "layout", *CHECKPOINTS), rows)


def cell(blocks: tuple[int, ...] | None, num_layers: int, available: bool) -> str:
    if not available:
        return "–"
    return "all" if blocks is None or len(blocks) == num_layers else "some"


def entry(value: Served) -> str:
    """One value: its docstring, and what a table would say of it."""
    write = "read and write" if value.read_only is None else "read only"
    return f"### {value.name}\n\n{code(str(value.layout))}, {value.layout.kind}, {write}.\n\n{prose(value.__doc__)}\n"


def moments() -> list[str]:
    """The values in the order of the forward, those of one moment on one line."""
    known = {name: value for _, name, value in values()}
    lines: list[tuple[Any, list[str]]] = []
    for name in FORWARD_ORDER:
        value = known[name]
        at_call = "attention_call" in value.at
        moment = "call" if at_call else value.moment.name if value.moment else (value.of, value.at)
        if lines and lines[-1][0] == moment:
            lines[-1][1].append(name)
        else:
            lines.append((moment, [name]))
    return [", ".join(map(code, names)) for _, names in lines]


def short_tables() -> str:
    """The tables of README.md: a value a row."""
    parts = []
    for pattern, title in PLACES.items():
        rows = [
            (code(name), code(str(value.layout)), value.meaning + ("" if value.read_only is None else " Read only."))
            for place, name, value in values()
            if place == pattern
        ]
        parts.append(f"**{title}**\n\n{table(('name', 'layout', 'meaning'), rows)}")
    return "\n\n".join(parts)


# -- facts, methods, errors ----------------------------------------------------------------------


def is_fact(name: str, value: Any) -> bool:
    return isinstance(value, property) and not name.startswith("_") and name != "block_plan"


def facts(kind: type, names: Iterable[str]) -> str:
    """Properties of a class as a table."""
    rows = []
    for name in names:
        fact = inspect.getattr_static(kind, name)
        rows.append((code(name), code(annotation(fact.fget)), first_line(fact)))
    return table(("name", "type", "meaning"), rows)


def annotation(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function).return_annotation).replace("|", "\\|")


def methods(kind: type, names: Iterable[str]) -> str:
    """Methods of a class as a table."""
    rows = [(code(f"{name}{arguments(getattr(kind, name))}"), first_line(getattr(kind, name))) for name in names]
    return table(("method", "what it does"), rows)


def arguments(function: Callable[..., Any]) -> str:
    """The arguments of a method, without `self` and types."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def error_table(link: str) -> str:
    """Every error and warning, with what Python calls it."""
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins" and base is not Exception)
        also = "" if builtin is BaseException else code(builtin.__name__)
        title = code(name) if name == "GemloupeError" else f"[{code(name)}]({link.format(name.lower())})"
        rows.append((title, also, first_line(kind)))
    return table(("error", "also a", "when"), rows)


# -- text ----------------------------------------------------------------------------------------


def code(text: str) -> str:
    return f"`{text}`"


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def prose(docstring: str | None) -> str:
    """A docstring as paragraphs of Markdown: labels in bold, layouts and axes in code."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r"\n(Layout|Raises|Source): ", r"\n\n**\1.** ", text)
    text = re.sub(rf"(?<![`\w])\[(?:(?:{'|'.join(AXES)}|\.\.\.) ?)+\]", lambda match: code(match.group()), text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from the package: run `python docs/generate.py`.")
        return bool(stale)
    for path, text in pages().items():
        if path in stale:
            path.write_text(text, encoding="utf-8")
    return 0


assert {axis for layout in LAYOUTS.values() for axis in layout.axes} <= AXES.keys()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
