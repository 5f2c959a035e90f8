"""Writes what can be generated of the documents: docs/vocabulary.md, the tables of two other pages, drawings.

    python docs/generate.py            writes them
    python docs/generate.py --check    exit status 1 where a committed page differs

The source is the package: the descriptors of the values, the facts' properties, the methods, the errors. A
test compares the committed pages with `pages()`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

from gemloupe import errors
from gemloupe.capture import in_forward_order
from gemloupe.card import read_card
from gemloupe.envoys.facts import BlockFacts, TowerFacts
from gemloupe.geometry import ImageGeometry
from gemloupe.reference.drawing import drawing
from gemloupe.served import Served, served_values
from gemloupe.standardized import StandardizedTransformer
from gemloupe.support import HOSTS, MEDIA_HOSTS, TEXT_HOSTS
from gemloupe.testing import SHAPES

__all__ = ["AXES", "CHECKPOINTS", "anchor", "moments", "pages", "title"]

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
    "key": (
        "tokens attended to: those of this forward and the cached ones; in a later step of `generate` a "
        "sliding block has the window that its cache keeps, so an index is no absolute position (`collect` "
        "and `record` join the steps at absolute positions)"
    ),
    "vocab": "tokens of the vocabulary, `vocab_size`",
    "layers": "blocks of the text stack, `num_layers`",
    "ple": "the width of one block's per-layer input",
    "experts": "experts of a mixture block, `num_experts`",
    "top_k": "experts each token is routed to",
    "intermediate": "the width of the dense MLP, `intermediate_size`",
    "images": "images of the call; where the tower runs on video, the frames of all its videos",
    "patches": "patches of one image, padded rows included",
    "vision_hidden": "the width of the vision tower's stream, `plan.vision.hidden_size`",
    "image_tokens": "soft tokens of all images of the call, one after the other; padding makes none",
    "video_tokens": "soft tokens of all frames of the call, one after the other",
    "audios": "sounds of the call",
    "frames": "frames of one sound, padded ones included",
    "audio_hidden": "the width of the audio tower's stream, `plan.audio.hidden_size`",
    "audio_tokens": "soft tokens of all sounds of the call, one after the other; padding makes none",
    "projected": "the width of the audio tower's answer, after its `output_proj`",
}

PLACES: Final = {
    "": "On the model",
    "layers[i]": "On a block, `layers[i]`",
    "layers[i].self_attn": "On its attention, `layers[i].self_attn`",
    "layers[i].mlp": "On its MLP, `layers[i].mlp`",
    "vision": "On the way of images and video, `vision`",
    "vision.layers[i]": "On a block of the vision tower, `vision.layers[i]`",
    "vision.layers[i].self_attn": "On its attention, `vision.layers[i].self_attn`",
    "vision.layers[i].mlp": "On its MLP, `vision.layers[i].mlp`",
    "projector": "On the projector of images, `projector`",
    "audio": "On the way of sound, `audio`",
    "audio.layers[i]": "On a block of the audio tower, `audio.layers[i]`",
    "audio.layers[i].feed_forward1": "On its first half of a feed-forward, `audio.layers[i].feed_forward1`",
    "audio.layers[i].self_attn": "On its attention, `audio.layers[i].self_attn`",
    "audio.layers[i].lconv1d": "On its convolution, `audio.layers[i].lconv1d`",
    "audio.layers[i].feed_forward2": "On its second half of a feed-forward, `audio.layers[i].feed_forward2`",
    "audio_projector": "On the projector of sound, `audio_projector`",
}

DRAWN: Final = {
    "dense": ("e2b", 0, "The data flow of a block with per-layer embeddings"),
    "mixture": ("26b-a4b", 0, "The data flow of a block with a mixture of experts"),
}
"""The drawings of docs/reference.md: a block of a shape, and what a screen reader says of it."""

NOT_CALLED_BY_USERS: Final = ("interleave",)
"""Public methods of the root that override nnsight's and that nnsight calls."""

INTRO: Final = """\
# Vocabulary

<!-- Written by docs/generate.py from the descriptors in src/gemloupe; do not edit. -->

A value has one name, one meaning and one layout on every checkpoint. This page lists them all, as the code
defines them. `model.support()` prints the same table for the model at hand; `model.why_not(path)` says why
a value is not there.

## Axes

A layout is the order of a value's axes, in these words.

{axes}

## All values

`all`: every block has it. `some`: some blocks do. `-`: the checkpoint lacks it, and reading it raises
[`Unavailable`](errors.md#unavailable).

{matrix}

### Images, video and sound

The same for what a published checkpoint has beside its text model; of `*ForCausalLM`, the text model alone,
it is `-` throughout. The blocks are the tower's, under the names of a text block where they compute the same.
[Images, video and sound](images.md) is the page about them.

{media_matrix}

## Order

Inside a trace values come in forward order: a read of a value that the forward has passed raises
[`OutOfOrder`](errors.md#outoforder). This is the order. The values of one line belong to one
moment and may be read in any order among themselves. `collect` and `record` have no order.

{order}

The tower runs on images first and then on frames of video: where a call has both, the values of `vision` and
`projector` pass once for each. An invoke of video alone is given the frames' pass. In `generate` transformers
runs the vision tower before the first forward: there `vision.patch_mask` to `projector.soft_tokens` come
before `input_ids`.

Edits within a line have an order too:

- `own_keys` before `own_values` is read.
- Queries and keys, then the scores, then the pattern; and all of them, the values too, before
  `attention_head_outputs` is read.
- `router_logits` before `router_probabilities` is read, that before `expert_weights` or `expert_indices` is,
  and `expert_weights` before `expert_outputs` is.

An edit that comes too late raises [`LateEdit`](errors.md#lateedit) or `OutOfOrder`. So does
`mlp.expert_weights[mlp.expert_indices == 5] = 0`, for Python reads the weights first. Take the indices first:
`chosen = mlp.expert_indices`, then `mlp.expert_weights[chosen == 5] = 0`.
"""

TAIL: Final = """\
## Facts

Plain attributes, read from the config. They need no forward.

On the model:

{root_facts}

On a block, its attention and its MLP:

{block_facts}

A block also has `layer_scalar`, the tensor that multiplies its sum, and `index`. `model.plan` holds all facts
as frozen dataclasses, one `BlockPlan` a block in `model.plan.blocks`; `gemloupe.plan(config)` makes it from a
config alone.

On a block of a tower, its attention and its MLP:

{tower_facts}

`model.plan.vision` and `model.plan.audio` are what the config says of the towers, `None` where a load has
none.

## Methods

{methods}

`steer`, `intervene` and `skip_layers` return a report, complete when the trace is over. `counts` is the
number of positions edited in each block, over rows and steps; `positions` is that of the block edited least.

`collect` and `record` return a mapping, by the path or pattern that was asked for. A pattern gives a tensor
with a leading axis of blocks, or a dictionary by path where shapes differ. `paths(pattern)` and
`blocks(pattern)` are what it found, in that order; `input_ids` and `attention_mask` are what was fed.

On the MLP of a mixture block:

{mixture_methods}

## Where a token lies in the picture

`model.image_geometry` and `model.video_geometry` answer a list of `gemloupe.ImageGeometry`, one an image or
a frame. [Images, video and sound](images.md#where-a-token-lies-in-the-picture) shows one in use.

{geometry_fields}

{geometry_methods}

## Errors

Every error is a `gemloupe.errors.GemloupeError`; `NothingEdited`, `PromptWarning`, `StepsWarning` and
`StoreWarning` are warnings. [Errors](errors.md) says what to do about each.

{errors}
"""


def pages() -> dict[Path, str]:
    """The text that each page with a generated part should have."""
    readme, wrong = ROOT / "README.md", ROOT / "docs" / "errors.md"
    return {
        ROOT / "docs" / "vocabulary.md": vocabulary(),
        readme: between(readme.read_text(encoding="utf-8"), "vocabulary", short_tables()),
        wrong: between(wrong.read_text(encoding="utf-8"), "errors", error_table(link="#{}")),
        **{ROOT / "docs" / f"block-{name}.svg": block_drawing(*block) for name, block in DRAWN.items()},
    }


def block_drawing(shape: str, index: int, title: str) -> str:
    """The data flow of one block of a shape, the layouts as the values' descriptors say."""
    layouts = {name: str(value.layout) for place, name, value in values() if place in TEXT_HOSTS}
    return drawing(read_card(f"tiny:{shape}").plan.blocks[index], layouts, title)


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
    tables = {"matrix": matrix(TEXT_HOSTS), "media_matrix": matrix(MEDIA_HOSTS)}
    parts = [INTRO.format(axes=axes, **tables, order="\n".join(order()))]
    for pattern, heading in PLACES.items():
        parts.append(f"## {heading}\n")
        parts += [entry(place, name, value) for place, name, value in values() if place == pattern]
    parts.append(
        TAIL.format(
            root_facts=facts(StandardizedTransformer),
            block_facts=facts(BlockFacts),
            tower_facts=facts(TowerFacts),
            methods=methods(StandardizedTransformer),
            mixture_methods=methods(HOSTS["layers[i].mlp"]),
            geometry_fields=fields(ImageGeometry),
            geometry_methods=methods(ImageGeometry),
            errors=error_table(link="errors.md#{}"),
        )
    )
    return "\n".join(parts)


def values() -> list[tuple[str, str, Served]]:
    """Every value: its place, its name, its descriptor."""
    return [
        (place, name, value) for place, kind in HOSTS.items() for name, value in served_values(kind).items()
    ]


def path_of(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def title(place: str, name: str) -> str:
    """The heading of a value: a name of the text model stands for itself, others come with their place."""
    return name if place in TEXT_HOSTS else path_of(place, name)


def anchor(place: str, name: str) -> str:
    """What a heading's link is: its letters, digits and underscores, as both mkdocs and a forge make it."""
    return re.sub(r"\W", "", title(place, name))


def matrix(hosts: Iterable[str]) -> str:
    """All values of some places, and which checkpoints have them."""
    cards = [read_card(f"tiny:{shape}:wrapper") for shape in CHECKPOINTS.values()]
    rows = []
    for place, name, value in values():
        if place in hosts:
            path = path_of(place, name)
            where = [
                cell(row.blocks, row.num_blocks, row.available)
                for row in (next(row for row in card.values if row.path == path) for card in cards)
            ]
            link = f"[{code(title(place, name))}](#{anchor(place, name)})"
            rows.append((link, code(str(value.layout)), *where))
    return table(("value", "layout", *CHECKPOINTS), rows)


def cell(blocks: tuple[int, ...] | None, num_blocks: int, available: bool) -> str:
    if not available:
        return "-"
    return "all" if blocks is None or len(blocks) == num_blocks else "some"


def entry(place: str, name: str, value: Served) -> str:
    """One value: its docstring, and what a table would say of it."""
    write = "read and write" if value.read_only is None else "read only"
    head = f"{code(str(value.layout))}, {value.layout.kind}, {write}."
    return f"### {title(place, name)}\n\n{head}\n\n{prose(value.__doc__)}\n"


def moments() -> list[list[str]]:
    """The paths of the values in the order of the forward, those of one moment together."""
    known = {path_of(place, name): (place, value) for place, name, value in values()}
    lines: list[tuple[Any, list[str]]] = []
    for path in in_forward_order(known):
        moment = moment_of(*known[path])
        if lines and lines[-1][0] == moment:
            lines[-1][1].append(path)
        else:
            lines.append((moment, [path]))
    return [paths for _, paths in lines]


def order() -> Iterator[str]:
    """The moments as a numbered list; those of a stack's blocks as a list of their own inside it."""
    stacks = [
        (stack, list(lines)) for stack, lines in groupby(moments(), key=lambda paths: block_of(paths[0]))
    ]
    number = 0
    for stack, lines in stacks:
        if stack:
            number += 1
            yield f"{number}. {code(stack)}, block by block:"
            shorts = [path.rpartition(".")[2] for paths in lines for path in paths]
        for inner, paths in enumerate(lines, 1):
            if stack:
                names = [path.removeprefix(f"{stack}.") for path in paths]
                names = [n if shorts.count(s := n.rpartition(".")[2]) > 1 else s for n in names]
                yield f"    {inner}. {', '.join(map(code, names))}"
            else:
                number += 1
                yield f"{number}. {', '.join(map(code, paths))}"


def block_of(path: str) -> str:
    """`vision.layers[i]` of a value of such a block, nothing of others."""
    before, inside, _ = path.partition("[i]")
    return before + inside if inside else ""


def moment_of(place: str, value: Served) -> Any:
    """What the values of one moment have in common."""
    if "attention_call" in value.at:
        return place, "attention_call"
    if value.moment is not None:
        return place, value.moment.name
    # Those at the scatter are of `vision` and `audio` alike.
    return "" if value.of == "scatter" else place, value.of, value.at


def short_tables() -> str:
    """The tables of README.md: a value a row; of a tower's block, the names that a text block has too."""
    parts = []
    for pattern, heading in PLACES.items():
        if "[i]" in pattern and pattern in MEDIA_HOSTS:
            if pattern.endswith("[i]"):
                paths = [path_of(place, name) for place, name, _ in values() if block_of(place) == pattern]
                names = (code(path.removeprefix(f"{pattern}.")) for path in paths)
                parts.append(f"**{heading}**: {', '.join(names)}.")
            continue
        here = [(name, value) for place, name, value in values() if place == pattern]
        rows = [
            (
                code(name),
                code(str(value.layout)),
                value.meaning + ("" if value.read_only is None else " Read only."),
            )
            for name, value in here
        ]
        parts.append(f"**{heading}**\n\n{table(('name', 'layout', 'meaning'), rows)}")
    return "\n\n".join(parts)


# -- facts, methods, errors ----------------------------------------------------------------------


def facts(kind: type) -> str:
    """The public properties that a class and its bases of the same module define, as a table."""
    bases = [base for base in reversed(kind.__mro__) if base.__module__ == kind.__module__]
    members = {name: value for base in bases for name, value in vars(base).items()}
    rows = [
        (code(name), code(annotation(value.fget)), first_line(value))
        for name, value in members.items()
        if isinstance(value, property) and value.fget is not None and not name.startswith("_")
    ]
    return table(("name", "type", "meaning"), rows)


def fields(kind: type) -> str:
    """The public fields and properties of a dataclass as a table.

    A field's meaning is the first paragraph of the string that follows it.
    Raises: ValueError, for a field that no string follows.
    """
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    rows = []
    for field, after in pairwise([*definition.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and not (name := ast.unparse(field.target)).startswith("_"):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise ValueError(f"{kind.__name__}.{name} has no docstring")
            meaning = prose(str(after.value.value)).split("\n\n")[0]
            rows.append((code(name), code(axes_or_type(field.annotation)), meaning))
    properties = facts(kind).split("\n")[2:]
    return "\n".join([table(("field", "type", "meaning"), rows), *properties])


def axes_or_type(annotation: ast.expr) -> str:
    """A type as written; of a tensor its axes, `[tokens 4]` of `Float[Tensor, "tokens 4"]`."""
    axes = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    axes = [axis for axis in axes if isinstance(axis, str)]
    return f"[{axes[0].strip()}]" if axes else ast.unparse(annotation).replace(" | ", " or ")


def annotation(function: Callable[..., Any]) -> str:
    # A bar would end the table's cell.
    return str(inspect.signature(function).return_annotation).replace(" | ", " or ")


def methods(kind: type) -> str:
    """The public methods that a class defines, as a table."""
    rows = [
        (code(name + arguments(value)), re.sub(r" See `.*`\.$", "", first_line(value)))
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in NOT_CALLED_BY_USERS
    ]
    return table(("method", "what it does"), rows)


def arguments(method: Callable[..., Any]) -> str:
    """The arguments of a method without `self` and types; those of the function that it hands on to."""
    place = re.search(r"See\s+`(gemloupe\.\w+)\.(\w+)`", inspect.getdoc(method) or "")
    function = method if place is None else getattr(import_module(place[1]), place[2])
    _, *parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def error_table(link: str) -> str:
    """Every error and warning, with what Python calls it."""
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        builtin = next(
            base for base in kind.__mro__ if base.__module__ == "builtins" and base is not Exception
        )
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
    text = re.sub(r"\nLayout: \[[\w ]+\]\.\s*", r"\n\n", text)  # the entry's first line says it
    text = re.sub(r"\n(Layout|Raises|Source): ", r"\n\n**\1.** ", text)
    text = re.sub(
        rf"(?<![`\w])\[(?:(?:{'|'.join(AXES)}|\.\.\.) ?)+\]", lambda match: code(match.group()), text
    )
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    stale = [
        path
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from the package: run `python docs/generate.py`.")
        return bool(stale)
    for path, text in pages().items():
        if path in stale:
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
