"""Every step of `generate`: the whole prompt on every block, absolute positions, any cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import OutOfOrder, StepsWarning
from gemloupe.testing import SHAPES
from tests.attention.values import CALL, OWN, attention, sources, with_heads
from tests.core.models import SEED, Case, ids, padded, shortcut

NEW = 4
LONG = 10  # longer than the window of six
BORROWERS = {"e2b": range(5, 10), "e4b": range(6, 12)}
Touch = Callable[[Any], None]

# Of the largest logit, which is about ten: 1e-4 and a little in float32.
CLOSE = 2e-5

# An open loop over steps ends by outrunning the run.
outruns = pytest.mark.filterwarnings("ignore::gemloupe.errors.StepsWarning")


def run(
    case: Case, prompt: Any, touch: Touch | None = None, before: Touch | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The tokens of a greedy run, and each step's logits of the last position, `[batch step vocab]`.

    `before` edits once, outside the loop; `touch` in every step.
    """
    model = case.model()
    logits: list[Tensor] = []
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    with torch.no_grad():
        with model.generate(prompt, **kwargs) as tracer:
            if before is not None:
                before(model)
            for _ in tracer.iter[: kwargs["max_new_tokens"]]:
                if touch is not None:
                    touch(model)
                logits.append(model.logits[:, -1].clone())
            tokens = tracer.result.save()
    return tokens, torch.stack(logits, 1)


def batch(*lengths: int) -> dict[str, Tensor]:
    """Prompts of unequal length, padded on the left, as a tokenizer would give them."""
    return {k: v for k, v in padded([ids(length) for length in lengths]).items() if k != "position_ids"}


def vector() -> Tensor:
    return 3 * torch.randn(40, generator=torch.Generator().manual_seed(SEED))


def lender(case: Case) -> int:
    """A sliding block that lends its keys and values, where the shape has one."""
    lent = {source for block, source in sources(case).items() if block != source}
    return min(lent, default=2)


def last(case: Case) -> int:
    return case.model().num_layers - 1


# -- what is served ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_every_block_serves_every_position_as_one_uncached_forward_over_them(shape, load, kernel):
    case = Case(shape, wrapper=load, attention=kernel, experts="batched_mm" if shape == "26b-a4b" else None)
    model = case.model()
    blocks = range(model.num_layers)
    names = ("attention_input", "attention_queries", "attention_head_outputs", "attention_output")
    axis = {"attention_queries": 2}
    seen: dict[tuple[int, str], list[Tensor]] = {(i, name): [] for i in blocks for name in names}
    with torch.no_grad():
        with model.generate(ids(LONG), max_new_tokens=2, do_sample=False, eos_token_id=None) as tracer:
            for _ in tracer.iter[:2]:
                for (i, name), found in seen.items():
                    found.append(nnsight.save(getattr(attention(model, i), name)))
            tokens = tracer.result.save()
        assert tokens.shape == (1, LONG + 2)
        wanted: dict[tuple[int, str], Tensor] = {}
        with model.trace(tokens[:, :-1]):
            for i, name in seen:
                wanted[i, name] = nnsight.save(getattr(attention(model, i), name))
    for (i, name), found in seen.items():
        joined = torch.cat(found, axis.get(name, 1))
        assert joined.shape[axis.get(name, 1)] == LONG + 1
        whole = wanted[i, name]
        assert (joined - whole).abs().max() <= 2e-5 * whole.abs().max(), (i, name)


@shortcut
@pytest.mark.parametrize("shape", ["e2b", "e4b"])
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
def test_the_fast_path_runs_borrowing_blocks_on_the_last_position_alone(shape, load):
    case = Case(shape, wrapper=load)
    model = case.model()

    def lengths(**options: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        with torch.no_grad():
            with model.generate(ids(LONG), max_new_tokens=2, do_sample=False, **options):
                for block in model.layers:
                    pattern = block.self_attn.attention_probabilities
                    found.append((pattern.shape[2], block.layer_output.shape[1]))
                nnsight.save(found)
        return found

    blocks = range(model.num_layers)
    assert lengths() == [(LONG, LONG) for _ in blocks]
    assert lengths(full_prefill=False) == [(1, 1) if i in BORROWERS[shape] else (LONG, LONG) for i in blocks]


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_both_paths_and_the_bare_model_generate_the_same(shape):
    case = Case(shape)
    tokens, logits = run(case, ids(LONG))
    fast_tokens, fast_logits = run(case, ids(LONG), full_prefill=False)
    bare = case.bare().generate(ids(LONG), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, bare)
    assert torch.equal(fast_tokens, bare)
    assert (logits - fast_logits).abs().max() <= 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_reading_every_step_changes_no_token_and_no_bit_of_the_logits(shape, kernel):
    case = Case(shape, attention=kernel, experts="batched_mm" if shape == "26b-a4b" else None)

    def touch(model: Any) -> None:
        for block in range(model.num_layers):
            for name in (*OWN, *CALL):
                if model.has(f"layers[{block}].self_attn.{name}"):
                    getattr(attention(model, block), name)

    for prompt in (ids(LONG), batch(LONG, 5)):
        for got, wanted in zip(run(case, prompt, touch), run(case, prompt), strict=True):
            assert torch.equal(got, wanted)


@outruns
@pytest.mark.parametrize("loop", ["bounded", "open", "all"])
def test_every_kind_of_loop_stands_at_its_own_step(loop):
    case = Case("e2b")
    model = case.model()
    found: list[tuple[int, int, int, int]] = []
    with torch.no_grad():
        with model.generate(ids(LONG), max_new_tokens=3, do_sample=False, eos_token_id=None) as tracer:
            nnsight.save(found)
            kinds = {"bounded": lambda: tracer.iter[:3], "open": lambda: tracer.iter[:], "all": tracer.all}
            for step in kinds[loop]():
                own = attention(model, 4).own_keys
                pattern = attention(model, 9).attention_probabilities  # full, borrows block 4's
                found.append((step, own.shape[2], *pattern.shape[2:]))
    assert found == [(0, 10, 10, 10), (1, 1, 1, 11), (2, 1, 1, 12)]


def test_one_chosen_step_is_that_step():
    model = Case("e2b").model()
    shapes: list[Any] = []
    with torch.no_grad():
        with model.generate(ids(LONG), max_new_tokens=4, do_sample=False, eos_token_id=None) as tracer:
            nnsight.save(shapes)
            for _ in tracer.iter[[1, 3]]:
                shapes.append(tuple(attention(model, 9).attention_probabilities.shape))  # noqa: PERF401
    assert shapes == [(1, 4, 1, 11), (1, 4, 1, 13)]


@pytest.mark.parametrize(
    "name", ["attention_queries", "attention_keys", "attention_probabilities", "own_keys"]
)
@pytest.mark.parametrize("step", [0, 1])
def test_a_late_read_in_a_loop_never_binds_the_next_step(name, step):
    model = Case("e2b").model()
    with pytest.raises(
        OutOfOrder, match=rf"layers\[3\]\.self_attn\.{name} .*after layers\[7\]\.layer_output"
    ):
        with model.generate(ids(LONG), max_new_tokens=4, do_sample=False, eos_token_id=None) as tracer:
            for i in tracer.iter[:4]:
                if i < step:
                    getattr(attention(model, 3), name)
                model.layers[7].layer_output
                if i == step:
                    getattr(attention(model, 3), name)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "two rows"])
def test_patterns_of_every_step_follow_from_its_keys_and_make_its_heads(kernel, cache, several):
    """Under the masks that `generate` makes: a window that has moved, empty slots, padded rows."""
    case = Case("e2b", attention=kernel)
    model = case.model()
    prompt = batch(LONG, 5) if several else ids(LONG)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    found: list[dict[str, Tensor]] = []
    with torch.no_grad():
        with model.generate(prompt, **options) as tracer:
            nnsight.save(found)
            for _ in tracer.iter[:NEW]:
                for block in (3, 4, 7, 9):
                    found.append({name: getattr(attention(model, block), name).clone() for name in CALL})  # noqa: PERF401
    for i, values in enumerate(found):
        step, block = divmod(i, 4)
        pattern = values["attention_probabilities"]
        heads = torch.einsum("bhqk,bhkd->bqhd", pattern, with_heads(values["attention_values"], 4))
        real = [slice(0, None), slice(LONG - 5 if step == 0 else 0, None)][: 1 + several]
        for row, rows in enumerate(real):
            difference = (values["attention_head_outputs"] - heads)[row, rows]
            assert difference.abs().max() <= 2e-6 * heads.abs().max(), (step, block)
            assert (pattern[row, :, rows].sum(-1) - 1).abs().max() <= 1e-6
            length = [LONG, 5][row] + step
            seen = (pattern[row, 0, -1] > 0).sum().item()
            assert seen == (min(6, length) if block in (0, 2) else length), (step, block, row)
        scores = values["attention_queries"] @ with_heads(values["attention_keys"], 4).transpose(-1, -2)
        seen = values["attention_scores"] > -1e30
        assert (values["attention_scores"] - scores)[seen].abs().max() <= 2e-6 * scores.abs().max()


# -- with and without the cache ------------------------------------------------------------------------


def halve(name: str, block: Callable[[Case], int], case: Case) -> Touch:
    """Changes a value's heads in every place alike, so that what is cached was changed as well."""

    def touch(model: Any) -> None:
        host = attention(model, block(case))
        value = getattr(host, name)
        heads = 2 if name == "attention_head_outputs" else 1
        scale = torch.linspace(-1, 0.6, value.shape[heads]).view(-1, *[1] * (3 - heads))
        if name == "attention_scores":  # a scale below zero would show what is masked
            scale = scale.abs()
        setattr(host, name, value * scale)

    return touch


EDITS: dict[str, Callable[[Case], dict[str, Touch]]] = {
    "nothing": lambda case: {},
    "steer": lambda case: {"before": lambda model: model.steer([1, last(case)], vector())},
    "skip_layers": lambda case: {"before": lambda model: model.skip_layers(1, lender(case))},
    "skip the last": lambda case: {"before": lambda model: model.skip_layers(last(case) - 1, last(case))},
    "skip in the loop": lambda case: {"touch": lambda model: model.skip_layers(2, 3)},
    "own_keys": lambda case: {"touch": halve("own_keys", lender, case)},
    "own_values": lambda case: {"touch": halve("own_values", lender, case)},
    **{
        f"{name} of the {where}": lambda case, name=name, block=block: {"touch": halve(name, block, case)}
        for name in CALL
        for where, block in (("lender", lender), ("last", last))
    },
}


@pytest.mark.parametrize(
    ("shape", "kernel"), [*((shape, "sdpa") for shape in SHAPES), ("e2b", "eager"), ("31b", "eager")]
)
@pytest.mark.parametrize("edit", EDITS)
def test_the_run_with_the_cache_is_the_run_without_it(shape, edit, kernel):
    case = Case(shape, attention=kernel, experts="batched_mm" if shape == "26b-a4b" else None)
    for prompt in (ids(LONG), batch(LONG, 5)):
        tokens, logits = run(case, prompt, **EDITS[edit](case))
        plain_tokens, plain_logits = run(case, prompt, **EDITS[edit](case), use_cache=False)
        assert torch.equal(tokens, plain_tokens)
        assert (logits - plain_logits).abs().max() <= CLOSE * plain_logits.abs().max()
        if edit != "nothing":
            assert (logits - run(case, prompt)[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("shape", ["e2b", "12b"])
def test_own_keys_and_values_edited_in_the_prompt_reach_later_steps(name, shape):
    """The cache holds the edited ones; a private edit ends with its step."""
    case = Case(shape)
    model = case.model()
    block = {"e2b": 4, "12b": 5}[shape]  # a full block, whose cache holds the whole prompt
    private = name.replace("own", "attention")
    for edited in (name, private):
        found: list[Tensor] = []
        with torch.no_grad():
            with model.generate(ids(LONG), max_new_tokens=3, do_sample=False, eos_token_id=None) as tracer:
                nnsight.save(found)
                for step in tracer.iter[:3]:
                    host = attention(model, block)
                    if step == 0:
                        found.append(getattr(host, name).clone())
                        setattr(host, edited, -getattr(host, edited))
                    else:
                        found.append(getattr(host, private).clone())
        before, *later = found
        for value in later:
            assert torch.equal(value[:, :, :LONG], -before if edited == name else before), edited


def test_a_block_that_is_silenced_still_fills_its_cache():
    case = Case("e2b")
    model = case.model()
    lengths: list[int] = []
    with torch.no_grad():
        with model.generate(ids(LONG), max_new_tokens=3, do_sample=False, eos_token_id=None) as tracer:
            nnsight.save(lengths)
            model.skip_layers(3, 8)
            for _ in tracer.iter[:3]:
                lengths.append(attention(model, 9).attention_keys.shape[2])  # noqa: PERF401
    assert lengths == [10, 11, 12]


# -- steering ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["e2b", "e4b", "12b"])
@pytest.mark.parametrize("layer", [1, -2])
@pytest.mark.parametrize(
    ("when", "positions", "count"),
    [
        ("prompt", None, LONG),
        ("new", None, NEW - 1),
        ("both", None, LONG + NEW - 1),
        ("both", [0, 9, 10, 12], 4),
        ("both", slice(8, 11), 3),
        ("prompt", [0, 9, 10, 12], 2),
        ("new", [0, 9, 10, 12], 2),
        ("new", 11, 1),
    ],
)
def test_steering_counts_positions_through_prompt_and_new_tokens(shape, layer, when, positions, count):
    case = Case(shape)
    layer = layer % case.model().num_layers
    reports: list[Any] = []

    def steer(model: Any) -> None:
        reports.append(model.steer(layer, vector(), when=when, positions=positions))

    logits = run(case, ids(LONG), before=steer)[1]
    # Without the cache every step edits the whole text so far, so its report counts more.
    assert reports[0].positions == count
    assert reports[0].counts == {layer: count}
    uncached = run(case, ids(LONG), before=steer, use_cache=False)[1]
    assert (logits - uncached).abs().max() <= CLOSE * uncached.abs().max()


def test_steering_counts_each_row_from_its_first_real_token():
    """A batch of unequal prompts is each prompt alone."""
    case = Case("e2b")

    def steer(model: Any) -> None:
        reports.append(model.steer(1, vector(), positions=[0, 4, 11]))

    reports: list[Any] = []
    together = run(case, batch(LONG, 5), before=steer)[1]
    # Position 4 is the short prompt's last, and 11 is past its five and three new ones.
    assert reports[0].counts == {1: 3 + 2}
    for row, length in zip(together, (LONG, 5), strict=True):
        alone = run(case, ids(length), before=steer)[1][0]
        assert (row - alone).abs().max() <= CLOSE * alone.abs().max()


@pytest.mark.parametrize(
    "cached",
    [
        True,
        pytest.param(
            False,
        ),
    ],
)
def test_steering_the_prompt_s_last_token_does_not_wander(cached):
    case = Case("e2b")

    def at(positions: int) -> Tensor:
        def steer(model: Any) -> None:
            model.steer(1, vector(), when="prompt", positions=positions)

        return run(case, ids(LONG), before=steer, use_cache=cached)[1]

    assert torch.equal(at(-1), at(LONG - 1))


# -- borrowing blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_nothing_but_the_last_position_of_a_borrowing_block_s_stream_reaches_the_answer(shape, load, cached):
    """No later block reads keys or values off it, so a logit that moved would mean a wrong position."""
    case = Case(shape, wrapper=load)
    plain = run(case, ids(LONG), use_cache=cached, max_new_tokens=1)[1]
    for block in BORROWERS[shape]:

        def elsewhere(model: Any, block=block) -> None:
            value = model.layers[block].layer_output
            value[:, :-1] = torch.randn_like(value[:, :-1])

        def at_last(model: Any, block=block) -> None:
            value = model.layers[block].layer_output
            value[:, -1] = torch.randn_like(value[:, -1])

        assert torch.equal(run(case, ids(LONG), elsewhere, use_cache=cached, max_new_tokens=1)[1], plain), (
            block
        )
        assert not torch.equal(run(case, ids(LONG), at_last, use_cache=cached, max_new_tokens=1)[1], plain)


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_in_a_trace_too(shape):
    case = Case(shape)
    model, row = case.model(), case.prompts[0]
    for block in BORROWERS[shape]:
        with model.trace(row):
            value = model.layers[block].layer_output
            value[:, :-1] = torch.randn_like(value[:, :-1])
            logits = model.logits.save()
        assert torch.equal(logits[:, -1], case.logits()[:, -1]), block
        assert not torch.equal(logits[:, -2], case.logits()[:, -2]), block


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_steering_the_prompt_at_a_borrowing_block_changes_no_later_step(shape):
    """But through the prompt's last token, whose logits choose the first new one."""
    case = Case(shape)
    plain = run(case, ids(LONG))[1]
    reports: list[Any] = []

    def steer(model: Any) -> None:
        reports.append(model.steer(BORROWERS[shape][1], vector(), when="prompt", positions=slice(0, -1)))

    assert torch.equal(run(case, ids(LONG), before=steer)[1], plain)
    assert reports[0].positions == LONG - 1


@shortcut
@pytest.mark.filterwarnings("ignore::gemloupe.errors.NothingEdited")
def test_the_fast_path_reports_what_it_did_not_edit():
    case = Case("e2b")
    reports: list[Any] = []

    def steer(model: Any) -> None:
        for positions in (0, LONG - 1, None):
            reports.append(model.steer(7, vector(), when="prompt", positions=positions))  # noqa: PERF401

    run(case, ids(LONG), before=steer, full_prefill=False)
    assert [report.positions for report in reports] == [0, 1, 1]


@pytest.mark.parametrize("loop", ["open", "bounded"])
def test_a_loop_that_outruns_the_run_says_so_in_the_users_words(loop):
    model = Case("e2b").model()
    saved: list[Tensor] = []
    with pytest.warns(StepsWarning) as told:  # noqa: PT031
        with torch.no_grad():
            with model.generate(ids(LONG), max_new_tokens=2, do_sample=False, eos_token_id=None) as tracer:
                nnsight.save(saved)
                for _ in tracer.iter[:] if loop == "open" else tracer.iter[:4]:
                    saved.append(model.layers[2].layer_output)  # noqa: PERF401
    text = str(told[0].message)
    assert "asked for layers[2].layer_output in step 2" in text
    assert ("An open loop ends in no other way" in text) == (loop == "open")
    assert told[0].filename == __file__
    assert len(saved) == 2
