"""The tour: that it shows what it says, and that each of its checks can fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from rich.console import Console

from gemloupe import tour
from gemloupe.checks import Check, agree, check_table, hooked
from gemloupe.testing import SHAPES, tiny, tiny_module
from gemloupe.tour import take_tour
from gemloupe.tree import names_tree

NAN: Final = float("nan")


def console() -> Console:
    return Console(width=160, color_system=None, markup=False, highlight=False, emoji=False)


def printed(show: Callable[[Console], Any]) -> tuple[str, Any]:
    """What a step prints, and what it answers."""
    screen = console()
    with screen.capture() as capture:
        answer = show(screen)
    return capture.get(), answer


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"model": tiny("e2b"), "bare": tiny_module("e2b")}


@pytest.fixture(scope="module")
def mixtures() -> dict[str, Any]:
    return {"model": tiny("26b-a4b"), "bare": tiny_module("26b-a4b")}


# ---- the whole tour ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_everything_holds_on_every_shape(shape: str):
    text, held = printed(lambda screen: take_tour(shape, screen))
    assert held
    assert f"A tiny {shape}: " in text
    assert "What held: 11 of 11" in text
    assert " NO" not in text
    assert text.count(" yes") == 11


def test_the_number_of_threads_is_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        printed(lambda screen: take_tour("31b", screen))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_one_failure_is_the_tours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tour, "show_sums", lambda *_: [Check("a", "b", 0.0, 0.0), Check("a", "b", 1.0, 0.0)])
    for step in ("show_names", "show_values", "show_lens", "show_edit", "show_routing", "show_steering"):
        monkeypatch.setattr(tour, step, lambda *_: [])
    text, held = printed(lambda screen: take_tour("e2b", screen))
    assert held is False
    assert "What held: 1 of 2" in text


def test_what_a_trace_read(models: dict[str, Any]):
    text, _ = printed(lambda screen: tour.show_values(screen, models["model"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "with model.trace('The capital of France is'):" in lines
    assert "stream = model.layers[block].layer_output.save()" in lines
    assert "layers[5].mlp.mlp_neurons [batch seq intermediate] 1 x 25 x 112" in lines
    assert "logits [batch seq vocab] 1 x 25 x 288" in lines
    assert "return" not in text


def test_the_lens_shows_the_models_own_answer_last(models: dict[str, Any]):
    with torch.no_grad():
        text, _ = printed(lambda screen: tour.show_lens(screen, models["model"]))
        logits = models["bare"](**models["model"].tokenizer(tour.PROMPT, return_tensors="pt")).logits[0, -1]
    (likeliest,) = models["model"].top_tokens(logits, k=1).tokens
    *_, last = text.rstrip().splitlines()
    assert last.split()[0] == "9"
    assert last.split()[1] == repr(likeliest)


def test_what_the_terminal_cannot_write_is_escaped():
    class Ascii:
        encoding = "ascii"

    assert tour._quoted(Ascii(), "a\ufffd'") == '"a\\ufffd\'"'  # pyright: ignore[reportArgumentType]
    assert tour._quoted(console(), "a") == "'a'"


# ---- the tree ---------------------------------------------------------------------------------------------


def tree_of(shape: str, **options: Any) -> str:
    text, _ = printed(lambda screen: screen.print(names_tree(tiny(shape, **options).support())))
    return text


@pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_has_every_name_that_is_there_and_no_other(shape: str, wrapper: bool):
    text = tree_of(shape, wrapper=wrapper)
    words = set(text.split())
    support = tiny(shape, wrapper=wrapper).support()
    names = {row.path.rpartition(".")[2] for row in support if row.available}
    assert names <= words
    assert not {row.path.rpartition(".")[2] for row in support if not row.available} - names & words
    for row in support:
        assert not row.available or (str(row.layout) in text and row.meaning.split()[-1] in text)


def test_a_tower_hangs_under_its_name():
    names = [
        re.sub(r"^[ │├└─]+", "", line).split("  ")[0] for line in tree_of("e2b", wrapper=True).split("\n")
    ]
    start = names.index("vision")
    assert names[start + 8 :][:6] == [
        "layers[0] for blocks 0-1",
        "layer_input",
        "mid_stream",
        "layer_output",
        "self_attn",
        "attention_input",
    ]
    below = [name for name in names[start:] if name in ("projector", "audio", "lconv1d", "audio_projector")]
    assert below == ["projector", "audio", "lconv1d", "audio_projector"]
    unified = tree_of("12b", wrapper=True)
    assert "patch_embeddings" in unified
    assert "lconv1d" not in unified
    assert "projector" not in unified.replace("`output_proj`", "")
    assert "vision" not in tree_of("e2b")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_name_is_cut_in_a_narrow_terminal(width: int):
    screen = Console(width=width, color_system=None, markup=False, highlight=False)
    with screen.capture() as capture:
        screen.print(names_tree(tiny("e2b", wrapper=True).support()))
    text = capture.get()
    assert max(map(len, text.split("\n"))) <= width
    assert width < 80 or "…" not in text
    for row in tiny("e2b", wrapper=True).support():
        if row.available:
            assert row.path.rpartition(".")[2] in text


def test_one_block_stands_for_all_that_are_alike():
    assert "layers[0] for blocks 0-5" in tree_of("31b")
    e2b = tree_of("e2b")
    assert "layers[0] for blocks 0-4" in e2b
    assert "layers[5] for blocks 5-9: the same, no self_attn.own_keys, no self_attn.own_values" in e2b
    assert e2b.count(" mlp_output ") == 1


def test_a_missing_name_says_why(models: dict[str, Any], mixtures: dict[str, Any]):
    text, _ = printed(lambda screen: tour.show_names(screen, models["model"], "e2b"))
    assert "A tiny e2b: 10 blocks, hidden 40, random weights" in text
    assert "No model.layers[0].mlp.shared_expert_output: block 0 has no mixture of experts" in text
    text, _ = printed(lambda screen: tour.show_names(screen, mixtures["model"], "26b-a4b"))
    assert "No model.per_layer_token_inputs: this checkpoint has no per-layer embeddings" in text


# ---- each check is broken once ----------------------------------------------------------------------------


def moved(*path: int) -> Callable[[Any], Any]:
    """A change of one number of the tensor at `path` in nested tuples and lists."""

    def change(answer: Any) -> Any:
        if not path:
            return answer
        return _replaced(answer, path)

    return change


def _replaced(answer: Any, path: tuple[int, ...]) -> Any:
    if not path:
        answer = answer.clone()
        answer.view(-1)[-1] += 1 if not answer.is_floating_point() else 1e-4
        return answer
    index = path[0] % len(answer)
    items = [_replaced(item, path[1:]) if i == index else item for i, item in enumerate(answer)]
    return type(answer)(items)


def fewer_positions(answer: Any) -> Any:
    tokens, report = answer
    report.counts = {layer: count - 1 for layer, count in report.counts.items()}
    return tokens, report


BREAKS: Final[list[tuple[str, Callable[[Any], Any], str]]] = [
    ("add_up", moved(0, 3, 1), "the middle of 10 blocks"),
    ("add_up", moved(1, 7, 0), "the identity of 10 blocks"),
    ("add_up", moved(2), "a read changes nothing"),
    ("look_through_the_lens", moved(0, -1), "the lens ends at the logits"),
    ("silence_an_mlp", lambda logits: logits + 1e-4, "an edit is causal"),
    ("read", moved(-1), "an edit ends with its trace"),
    ("route", moved(1), "a token's routing sums to one"),
    ("route", moved(2), "the experts add up"),
    ("route", moved(4), "the mixture adds up"),
    ("steer", moved(0), "steering is causal"),
    ("steer", fewer_positions, "the report is complete"),
]
STEPS: Final = {
    "add_up": "show_sums",
    "look_through_the_lens": "show_lens",
    "silence_an_mlp": "show_edit",
    "read": "show_edit",
    "route": "show_routing",
    "steer": "show_steering",
}


@pytest.mark.parametrize(("run", "change", "name"), BREAKS, ids=[name for *_, name in BREAKS])
def test_a_check_that_should_fail_fails(
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, Any],
    mixtures: dict[str, Any],
    run: str,
    change: Callable[[Any], Any],
    name: str,
):
    chosen = mixtures if run == "route" else models
    arguments = [chosen["model"]] if STEPS[run] == "show_lens" else [chosen["model"], chosen["bare"]]
    right = getattr(tour, run)

    @functools.wraps(right)
    def wrong(*args: Any) -> Any:
        return change(right(*args))

    with torch.no_grad():
        _, checks = printed(lambda screen: getattr(tour, STEPS[run])(screen, *arguments))
        monkeypatch.setattr(tour, run, wrong)
        _, broken = printed(lambda screen: getattr(tour, STEPS[run])(screen, *arguments))
    assert [check.name for check in checks if not check.held] == []
    assert [check.name for check in broken if not check.held] == [name]


def test_every_check_is_broken_once(models: dict[str, Any]):
    text, _ = printed(lambda screen: take_tour("e2b", screen))
    names = [
        line.split("  ")[1].strip() for line in text.partition("What held")[2].splitlines() if " yes" in line
    ]
    assert sorted(names) == sorted(name for *_, name in BREAKS)


@pytest.mark.parametrize(
    ("run", "name"), [("silence_an_mlp", "an edit is causal"), ("steer", "steering is causal")]
)
def test_an_edit_without_effect_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Any], run: str, name: str
):
    """Neither the edit nor the hook does anything: the two agree, and nothing was shown."""
    model, bare = models["model"], models["bare"]
    encoded = model.tokenizer(tour.PROMPT, return_tensors="pt")
    right = getattr(tour, run)

    @functools.wraps(right)
    def without(*args: Any) -> Any:
        if run == "silence_an_mlp":
            return bare(**encoded).logits
        _, report = right(*args)
        options = {"max_new_tokens": tour.NEW_TOKENS, "min_new_tokens": tour.NEW_TOKENS}
        return bare.generate(**encoded, **options), report

    monkeypatch.setattr(tour, run, without)
    monkeypatch.setattr(tour, "hooked", lambda module, change: hooked(module, lambda output: output))
    with torch.no_grad():
        _, checks = printed(lambda screen: getattr(tour, STEPS[run])(screen, model, bare))
    (check,) = [check for check in checks if not check.held]
    assert (check.name, check.difference) == (name, 0)


# ---- the checks themselves --------------------------------------------------------------------------------


def pair(one: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(one), torch.tensor(other)


@pytest.mark.parametrize(
    ("pairs", "allowed", "difference", "held"),
    [
        ([pair([1.0, 2.0], [1.0, 2.0])], 0.0, 0.0, True),
        ([pair([1.0], [1.0]), pair([1.0], [1.25])], 0.0, 0.25, False),
        ([pair([1.0], [1.25]), pair([1.0], [1.0])], 0.5, 0.25, True),
        ([pair([1.0], [1.0]), pair([NAN], [1.0])], 9.0, NAN, False),
        ([pair([NAN], [NAN]), pair([1.0], [1.0])], 9.0, NAN, False),
        ([pair([1.0], [[1.0]])], 9.0, float("inf"), False),
        ([pair(3, 5)], 1.0, 2.0, False),
        ([], 9.0, NAN, False),
    ],
)
def test_what_agrees(pairs: list[Any], allowed: float, difference: float, held: bool):
    check = agree("a", "b", iter(pairs), allowed)
    assert check.difference == pytest.approx(difference, nan_ok=True)
    assert check.held is held
    assert not agree("a", "b", pairs, allowed, felt=False).held


def test_the_table_of_checks():
    checks = [
        Check("fine", "one, other", 0.0, 0.0),
        Check("near", "one, other", 1e-7, 1e-6),
        Check("off", "one, other", 0.5, 0.0),
        Check("idle", "one, other", 0.0, 0.0, felt=False),
    ]
    text, _ = printed(lambda screen: screen.print(check_table(checks)))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows == [
        "check compares largest difference held",
        "fine one, other 0 yes",
        "near one, other 1e-07 (allowed 1e-06) yes",
        "off one, other 0.5 NO",
        "idle one, other 0, without effect NO",
    ]
