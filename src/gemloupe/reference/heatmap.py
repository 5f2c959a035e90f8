"""A report as a page: a heatmap of value by block for each look. It loads nothing and runs nothing."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from .looks import LOOKS, MEANINGS, Look

if TYPE_CHECKING:
    from .report import Report, Row

__all__ = ["page"]

# {the least difference in units of the tolerance: (a cell's class, its colour, what it means)}
_SHADES: Final[dict[float, tuple[str, str, str]]] = {
    0.0: ("a", "#e8f1ea", "less than a thousandth of what is allowed"),
    1e-3: ("b", "#cfe6d4", "a hundredth"),
    1e-2: ("c", "#a9d3b2", "a tenth"),
    1e-1: ("d", "#f2e3a0", "half"),
    0.5: ("e", "#efc05a", "all of it"),
    math.nextafter(1.0, 2.0): ("f", "#d43d3d", "more: it does not hold"),
}
_ABSENT: Final = "n"
_FAULTS_SHOWN: Final = 40

_STYLE: Final = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:92em;padding:0 1em;color:#222}
h1{font-size:1.3em}.yes{color:#1b7a35}.no{color:#b3261e}
table{border-collapse:collapse;font-size:12px}
th{font-weight:400;color:#555;text-align:left;padding:0 .5em 0 0}
thead th{text-align:center;padding:0;min-width:1.3em}td{width:1.3em;height:1.2em;border:1px solid #fff}
section{display:none;overflow-x:auto}input{margin-left:1.2em}.n{background:#fafafa}
.key td{width:auto;padding:0 .7em}small{color:#555}li{margin:.15em 0}
"""


def page(report: Report) -> str:
    """The HTML page of a report."""
    verdict = "yes" if report.held else "no"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(report.model)}: verify</title><style>{_STYLE}{_colours()}</style></head><body>",
            f"<h1>{escape(report.model)}: {report.num_layers} blocks, {escape(report.precision)}</h1>",
            f'<p class="{verdict}"><b>{escape(report.verdict)}</b></p>',
            *_faults(report),
            "<p>Each value is computed by the reference:</p>",
            *(_button(look) for look in LOOKS),
            *(_section(report, look) for look in LOOKS),
            f"<p>{_key()}</p>",
            f"<p><small>{escape(report.derivation)}</small></p>",
            *_absent(report),
            "</body></html>\n",
        ]
    )


def _colours() -> str:
    cells = "".join(f".{name}{{background:{colour}}}" for name, colour, _ in _SHADES.values())
    # A radio button shows the section of its look, which comes after it.
    shown = "".join(f"#{look}:checked~#by-{look}{{display:block}}" for look in LOOKS)
    return f"{cells}{shown}"


def _button(look: Look) -> str:
    checked = " checked" if look == LOOKS[0] else ""
    label = f'<label for="{look}">{look}: {escape(MEANINGS[look])}</label>'
    return f'<input type="radio" name="look" id="{look}"{checked}>{label}'


def _section(report: Report, look: Look) -> str:
    by_value: dict[str, dict[int | None, Row]] = {}
    for row in report.rows:
        if row.look == look:
            by_value.setdefault(row.value, {})[row.block] = row
    # A tower may have more blocks than the text model.
    blocks = range(max(report.num_layers, *(1 + (row.block or 0) for row in report.rows), 0))
    head = "".join(f"<th>{block}</th>" for block in blocks)
    lines = [f'<section id="by-{look}"><table><thead><tr><th></th><th></th>{head}</tr></thead>']
    for value, rows in by_value.items():
        cells = "".join(_cell(rows.get(block)) for block in (None, *blocks))
        lines.append(f"<tr><th>{escape(value)}</th>{cells}</tr>")
    return "\n".join([*lines, "</table></section>"])


def _cell(row: Row | None) -> str:
    if row is None:
        return f'<td class="{_ABSENT}"></td>'
    shade = [name for least, (name, _, _) in _SHADES.items() if row.difference.excess >= least][-1]
    told = f"{row.name}: {row.relative:.1e} of {row.scale:.2g}, allowed {row.tolerance:.1e}"
    return f'<td class="{shade}" title="{escape(told)}"></td>'


def _key() -> str:
    cells = "".join(f'<td class="{name}">{meaning}</td>' for name, _, meaning in _SHADES.values())
    return f'<table class="key"><tr><th>up to</th>{cells}<td class="{_ABSENT}">not there</td></tr></table>'


def _faults(report: Report) -> list[str]:
    faults = report.faults
    if not faults:
        return []
    more = len(faults) - _FAULTS_SHOWN
    lines = [f"<li>{escape(str(row))}</li>" for row in faults[:_FAULTS_SHOWN]]
    return ["<ol>", *lines, f"<li>and {more} more</li>" if more > 0 else "", "</ol>"]


def _absent(report: Report) -> list[str]:
    if not report.absent:
        return []
    lines = [f"<li>{escape(line)}</li>" for line in report.absences]
    return ["<p>Not compared</p><ul>", *lines, "</ul>"]
