"""A report as text, as JSON and as a page."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from gemloupe.plan import ModelPlan, plan
from gemloupe.reference import names
from gemloupe.reference.compare import Difference, choices, compared, rounding_of
from gemloupe.reference.looks import LOOKS, Look, Seen
from gemloupe.reference.report import Absent, Report, Row
from gemloupe.served import served_values
from gemloupe.support import TEXT_HOSTS
from tests.test_plan import PUBLISHED

LAYOUTS = {name: value.layout for host in TEXT_HOSTS.values() for name, value in served_values(host).items()}


def row(name: str, look: Look, absolute: float, scale: float = 2.0, moved: float = 0.0) -> Row:
    return Row(name, look, Difference(look, absolute, scale, moved, rounding=2**-24))


def report(*rows: Row, num_layers: int = 2, absent: tuple[Absent, ...] = ()) -> Report:
    return Report("tiny", num_layers, "float32", 2**-24, ((1, 13), (3, 12)), rows, absent, 0.25)


RIGHT = (
    row("token_embeddings", "step", 1e-7),
    row("layers[0].mid_stream", "step", 2e-6),
    row("layers[0].mid_stream", "block", 4e-6),
    row("layers[0].mid_stream", "whole", 8e-5),
    row("layers[1].mid_stream", "step", 1e-6),
)
NO_KEYS = Absent("layers[i].self_attn.own_keys", (1,), "block 1 computes no keys, it borrows block 0's.")
NO_VALUES = Absent("layers[i].self_attn.own_values", (1,), "block 1 computes no keys, it borrows block 0's.")
WRONG = (*RIGHT, row("layers[1].mlp.mlp_output", "step", math.nan), row("logits", "step", math.inf))

TEXT = """\
tiny: 2 blocks, float32
Forwards of 1 x 13, 3 x 12 tokens, 0.2 s. Each value is computed
  step   from the model's own values just before it
  block  from the model's own stream entering the block
  whole  from the token ids, end to end
and compared. A cell is the difference and what is allowed, in units of the value's scale.

value             blocks  step                block               whole               held
token_embeddings          5.0e-08 of 2.0e-05                                          yes
mid_stream        2       1.0e-06 of 2.0e-05  2.0e-06 of 2.0e-05  4.0e-05 of 2.0e-04  yes
mlp.mlp_output    1       nan of 2.0e-05                                              NO, block 1
logits                    inf of 2.0e-05                                              NO

Not compared
  layers[i].self_attn.own_keys, layers[i].self_attn.own_values on block 1: block 1 computes no keys, it"""


def test_the_text_of_a_report():
    shown = str(report(*WRONG, absent=(NO_KEYS, NO_VALUES)))
    assert "\n".join(line.rstrip() for line in shown.split("\n")).startswith(TEXT)
    last = " ".join(shown.split()).partition("2 of 7 rows do not hold. ")[2]
    assert last == (
        "The forward meets this one first: layers[1].mlp.mlp_output, from the model's own values just before "
        "it: off by nan of its scale 2, allowed 2e-05."
    )


def test_the_verdict():
    assert report(*RIGHT).held
    assert report(*RIGHT).first is None
    assert report(*RIGHT).verdict == "Every value is what its definition says: 5 of 5 rows hold."
    wrong = report(*WRONG)
    assert not wrong.held
    assert [fault.name for fault in wrong.faults] == ["layers[1].mlp.mlp_output", "logits"]
    assert wrong.first == WRONG[5]
    # Nothing compared, nothing claimed.
    assert not report().held
    with pytest.raises(KeyError, match="was not compared by block"):
        wrong.row("logits", "block")


def test_the_json_is_strict_and_says_the_same():
    wrong = report(*WRONG, absent=(NO_KEYS,))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(wrong.to_json(), parse_constant=refuse)
    assert data["held"] is False
    assert data["first"] == {"name": "layers[1].mlp.mlp_output", "look": "step"}
    assert [each["name"] for each in data["rows"]] == [each.name for each in WRONG]
    assert data["rows"][1] == {
        "name": "layers[0].mid_stream",
        "block": 0,
        "value": "mid_stream",
        "look": "step",
        "absolute": 2e-6,
        "relative": 1e-6,
        "scale": 2.0,
        "tolerance": 2e-5,
        "held": True,
    }
    assert [data["rows"][i]["relative"] for i in (5, 6)] == ["nan", "inf"]
    assert data["absent"] == [{"name": NO_KEYS.name, "blocks": [1], "reason": NO_KEYS.reason}]
    assert "2e-05 by step" in data["derivation"]


# ---- the page ---------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page, each closed where it was opened."""

    VOID = ("meta", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def largest(plan: ModelPlan) -> Report:
    rows = [row(name, look, 1e-6) for name in names(plan) for look in LOOKS]
    return report(*rows, num_layers=plan.num_layers)


@pytest.mark.parametrize("checkpoint", PUBLISHED.values(), ids=PUBLISHED)
def test_the_page_of_a_published_model_is_small_and_whole(checkpoint: Any, tmp_path: Path):
    of = plan(checkpoint.text_config())
    text = largest(of).to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    assert len(text.encode()) < 1_000_000
    page = Page(text)
    told = [cell["title"] or "" for cell in page.named("td") if "title" in cell]
    assert len(told) == len(names(of)) * len(LOOKS)
    assert {title.partition(": ")[0] for title in told} == set(names(of))
    # It loads nothing and runs nothing.
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    attributes = {name for _, each in page.elements for name in each}
    assert attributes <= {"lang", "charset", "class", "title", "type", "name", "id", "checked", "for"}
    assert not any(word in text for word in ("http:", "https:", "url(", "@import"))


def test_the_page_shows_what_does_not_hold():
    page = Page(report(*WRONG).to_html())
    shades = {cell["title"]: cell["class"] for cell in page.named("td") if "title" in cell}
    red = [title for title, shade in shades.items() if shade == "f"]
    assert [title.partition(":")[0] for title in red if title] == ["layers[1].mlp.mlp_output", "logits"]
    assert "2 of 7 rows do not hold" in report(*WRONG).to_html()
    assert "<li>and 10 more</li>" in report(*(row("logits", "step", 1.0) for _ in range(50))).to_html()


def test_the_page_escapes_what_it_is_told():
    one = report(*RIGHT, absent=(Absent("a", None, "<script>alert(1)</script>"),))
    assert "<script" not in one.to_html()


# ---- the differences --------------------------------------------------------------------------------------


def seen(name: str, served: torch.Tensor, exact: torch.Tensor, shaken: torch.Tensor | None = None) -> Seen:
    return Seen("step", name, served, exact, (exact if shaken is None else shaken,), slice(None))


def differ(one: Seen, real: torch.Tensor) -> Difference:
    return compared(one, LAYOUTS[one.name.rpartition(".")[2]], real, 2**-24)


EVERY = torch.ones(1, 3, dtype=torch.bool)


def test_a_difference_is_the_largest_in_units_of_the_scale():
    exact = torch.tensor([[[1.0, -4.0], [2.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    served = exact.clone()
    served[0, 1, 1] = 1
    found = differ(seen("layers[0].mid_stream", served, exact, exact + 0.5), EVERY)
    assert (found.absolute, found.scale, found.relative) == (1, 4, 0.25)
    assert found.tolerance == 4 * (0.125 + 2**-24)
    assert found.held is True
    assert not differ(seen("layers[0].mid_stream", served, exact), EVERY).held
    # The token that differs is padding.
    assert (
        differ(seen("layers[0].mid_stream", served, exact), torch.tensor([[True, False, True]])).absolute == 0
    )


def test_differences_of_parts_are_those_of_the_whole():
    one, other = (Difference("step", *numbers, rounding=0) for numbers in ((1, 2, 3), (2, 1, 4)))
    assert (one | other) == Difference("step", 2, 2, 4, 0)
    nan = Difference("step", math.nan, 1, 0, 0)
    for either in (one | nan, nan | one):
        assert math.isnan(either.absolute)
        assert not either.held
        assert either.excess == math.inf


def test_a_scale_of_nothing():
    assert Difference("step", 0, 0, 0, 0).held
    assert not Difference("step", 1e-9, 0, 0, 0).held
    # What rounding does to nothing cannot be measured, and excuses nothing.
    assert Difference("step", 1, 1, math.nan, 0).tolerance == 2e-5


def test_another_shape_and_another_mask_are_infinitely_far():
    exact = torch.zeros(1, 3, 2, dtype=torch.float64)
    assert differ(seen("layers[0].mid_stream", exact[..., :1], exact), EVERY).absolute == math.inf
    name = "layers[0].self_attn.attention_scores"
    scores = torch.zeros(1, 1, 3, 3).double().masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    assert differ(seen(name, scores, scores), EVERY).absolute == 0
    eager = scores.float().clamp(min=torch.finfo(torch.float32).min)
    assert differ(seen(name, eager, scores), EVERY).absolute == 0
    assert differ(seen(name, scores.clamp(min=-9), scores), EVERY).absolute == math.inf


def test_whole_numbers_are_the_same_or_are_not():
    ids = torch.tensor([[2, 30, 40]])
    assert differ(seen("input_ids", ids.int(), ids), EVERY).absolute == 0
    assert differ(seen("input_ids", ids + 1, ids), EVERY).absolute == math.inf


def chosen(indices: list[int]) -> Difference:
    chances = torch.tensor([[[0.5, 0.2, 0.2, 0.1]] * 3], dtype=torch.float64)
    at = "layers[0].mlp"
    given = [
        seen(f"{at}.router_probabilities", chances, chances),
        seen(f"{at}.expert_indices", torch.tensor([[indices] * 3]), torch.tensor([[[0, 1]] * 3])),
    ]
    _, choice = choices(given)
    return differ(choice, EVERY)


def test_a_choice_of_experts_costs_what_it_gives_up():
    assert chosen([0, 1]).held
    assert chosen([0, 2]).held  # which ties with 1
    assert chosen([0, 3]).absolute == pytest.approx(0.1)
    assert chosen([1, 0]).absolute == pytest.approx(0.3)  # not in the order of their probabilities
    for beyond in (4, -1):
        assert chosen([0, beyond]).absolute == math.inf


def test_a_rounding_is_half_an_epsilon_of_the_coarsest():
    assert rounding_of([torch.float32]) == 2**-24
    assert rounding_of([torch.float32, torch.bfloat16]) == 2**-8
    assert rounding_of([torch.float16]) == 2**-11
