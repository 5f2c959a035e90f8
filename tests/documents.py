"""Runs a page of the documents as a notebook, and compares what it shows with what comes out.

A page's python blocks run in order in one namespace. What they show is written in one of three ways:

- `value  # -> repr`: the last line of an expression statement; its `repr` is compared;
- a `text` block right below: what the block above printed;
- the same, where the block raises: the last lines of the traceback, `module.Error: message`.

A block `python title="name.py"` is a file: it is written where the page can import it. Numbers with a decimal
point agree to the last digit shown, give or take one, so that a page holds on another machine.

nnsight finds the body of a trace by its source, so the code is in a real file, each line at the number it has
on the page: a traceback shows the page's own lines.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
import traceback
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Fence", "Mismatch", "fences", "run", "same"]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)(?P<rest>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_SHOWN = re.compile(r"# -> (.*)$")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


class Mismatch(AssertionError):
    """A page shows something else than its code does."""


@dataclass(frozen=True)
class Fence:
    """A fenced block."""

    line: int
    """The number of its first line of text, from 1."""
    language: str
    title: str | None
    text: str
    adjacent: bool
    """Whether only blank lines lie between it and the fence before."""


def fences(page: str) -> Iterator[Fence]:
    """The fenced blocks of a page, in order."""
    lines = page.split("\n")
    at, after = 0, -1
    while at < len(lines):
        match = _FENCE.match(lines[at])
        if match is None:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == match["ticks"])
        title = _TITLE.search(match["rest"])
        yield Fence(
            line=at + 2,
            language=match["language"],
            title=title and title[1],
            text=textwrap.dedent("\n".join(lines[at + 1 : end])),
            adjacent=after >= 0 and not any(line.strip() for line in lines[after + 1 : at]),
        )
        at, after = end + 1, end


def run(page: str, name: str, folder: Path, *, without: str | None = None) -> int:
    """Run a page's python blocks, in `folder`; how many things it shows were compared.

    `without`: a pattern; blocks in which it is found are left out.
    Raises: Mismatch, naming the page and the line.
    """
    blocks = list(fences(page))
    script = folder / f"{name}_page.py"
    script.write_text(_script(blocks), encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": f"{name}_page", "__file__": str(script)}
    compared = 0
    modules = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("error")
            torch.manual_seed(0)
            for block, below in zip(blocks, [*blocks[1:], None], strict=True):
                if block.language != "python" or (without and re.search(without, block.text)):
                    continue
                if block.title is not None:
                    (folder / block.title).write_text(block.text + "\n", encoding="utf-8")
                    continue
                shown = below if below is not None and below.adjacent and below.language == "text" else None
                compared += _Block(block, f"{name}:{block.line}", script, namespace).run(shown)
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - modules:
            if str(folder) in (getattr(sys.modules[module], "__file__", None) or ""):
                del sys.modules[module]
    return compared


def _script(blocks: list[Fence]) -> str:
    """The code of a page with every line where it stands on the page."""
    lines: list[str] = []
    for block in blocks:
        if block.language == "python" and block.title is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.split("\n")
    return "\n".join(lines) + "\n"


@dataclass
class _Block:
    fence: Fence
    place: str
    script: Path
    namespace: dict[str, Any]

    def run(self, shown: Fence | None) -> int:
        source = "\n" * (self.fence.line - 1) + self.fence.text
        expected = dict(_comments(source))
        compared = len(expected) + (shown is not None)
        printed = io.StringIO()
        error: BaseException | None = None
        try:
            with redirect_stdout(printed):
                for statement in ast.parse(source, str(self.script)).body:
                    self._run(statement, expected)
        except Mismatch:
            raise
        except Exception as raised:
            error = raised
        got = printed.getvalue()
        if error is not None:
            got += "".join(traceback.format_exception_only(error))
        if error is not None and (shown is None or not same(shown.text, got)):
            raise Mismatch(f"{self.place}: raised, and the page does not show\n{got}") from error
        if shown is None and got:
            raise Mismatch(f"{self.place}: printed, and no text block below shows\n{got}")
        if shown is not None and not same(shown.text, got):
            raise Mismatch(f"{self.place}: the page shows\n{shown.text}\n\nand it is\n{got}")
        if expected and error is None:
            raise Mismatch(
                f"{self.place}: nothing was compared with {expected}: not an expression's last line"
            )
        return compared

    def _run(self, statement: ast.stmt, expected: dict[int, str]) -> None:
        text = expected.get(statement.end_lineno or 0)
        if text is None or not isinstance(statement, ast.Expr):
            exec(compile(ast.Module([statement], []), str(self.script), "exec"), self.namespace)
            return
        value = eval(compile(ast.Expression(statement.value), str(self.script), "eval"), self.namespace)
        del expected[statement.end_lineno or 0]
        if not same(text, repr(value)):
            raise Mismatch(f"{self.place}: line {statement.lineno} shows {text}, and it is {value!r}")


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """What the comments `# -> ...` show, by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _SHOWN.match(token.string)):
            yield token.start[0], match[1]


def same(shown: str, got: str) -> bool:
    """Whether two texts are equal, up to blanks at line ends and the last digit of decimal numbers."""
    shown, got = ("\n".join(line.rstrip() for line in text.strip("\n").split("\n")) for text in (shown, got))
    if _NUMBER.split(shown) != _NUMBER.split(got):
        return False
    return all(_close(a, b) for a, b in zip(_NUMBER.findall(shown), _NUMBER.findall(got), strict=True))


def _close(shown: str, got: str) -> bool:
    mantissa, _, exponent = shown.partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - float(got)) <= 1.01 * last_digit
