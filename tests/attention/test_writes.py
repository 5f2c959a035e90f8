"""A write inside the attention is the same edit made by hand, and reaches what it should and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.attention.hand import ByHand
from tests.attention.values import CALL, CASES, EXPERTS, OWN, attention, sources, with_heads
from tests.core.models import Case, every_case

every_style = pytest.mark.parametrize("style", ["assigned", "in place"])
ALONE = every_case(wrapper=(False,), dtypes=(torch.float32,), experts=EXPERTS, batched=(False,))
every_case_alone = pytest.mark.parametrize("case", ALONE, ids=str)


def put(host: Any, name: str, edit: Callable[[Tensor], Tensor], style: str) -> None:
    if style == "assigned":
        setattr(host, name, edit(getattr(host, name)))
    else:
        value = getattr(host, name)
        value[:] = edit(value)


def run(
    case: Case, touch: Callable[[Any], None], invoke: int | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """The logits and every block's head outputs, over all rows, of a run in which one invoke edits.

    `touch` is given each block's attention in turn, before its head outputs are read.
    """
    model, rows = case.model(), case.prompts
    invoke = (1 if case.batched else 0) if invoke is None else invoke
    logits: list[Tensor] = []
    heads: list[dict[int, Tensor]] = [{} for _ in rows]
    with torch.no_grad():
        if not case.batched:
            with model.trace(rows[0]):
                for block in range(model.num_layers):
                    touch(attention(model, block))
                    heads[0][block] = attention(model, block).attention_head_outputs
                logits.append(model.logits)
        else:
            with model.trace() as tracer:
                for i, row in enumerate(rows):
                    with tracer.invoke(row):
                        for block in range(model.num_layers):
                            if i == invoke:
                                touch(attention(model, block))
                            heads[i][block] = attention(model, block).attention_head_outputs
                        logits.append(model.logits)
    return torch.cat(logits), {block: torch.cat([row[block] for row in heads]) for block in heads[0]}


def in_block(block: int, name: str, edit: Callable[[Tensor], Tensor], style: str) -> Callable[[Any], None]:
    def touch(host: Any) -> None:
        if host.block.index == block:
            put(host, name, edit, style)

    return touch


def of_invoke(case: Case, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The edit of the second row alone, where there are several."""

    def change(whole: Tensor) -> Tensor:
        if not case.batched:
            return edit(whole)
        return torch.cat([whole[:1], edit(whole[1:2]), whole[2:]])

    return change


def other(name: str) -> Callable[[Tensor], Tensor]:
    """A change of every number of a value, another in every head and place."""

    def change(x: Tensor) -> Tensor:
        ramp = torch.linspace(0.3, 1.7, x[0].numel(), dtype=x.dtype).view(x.shape[1:])
        return x * ramp if name == "attention_scores" else x.flip(1) * ramp

    return change


@pytest.mark.parametrize(
    ("case", "style"),
    [
        *((case, "assigned") for case in CASES),
        *((case, "in place") for case in CASES if case.dtype == torch.float32 and not case.wrapper),
    ],
    ids=str,
)
def test_a_changed_write_is_the_edit_made_by_hand(case, style):
    lender = sources(case)
    borrower = max(lender)
    blocks = sorted({lender[borrower], borrower} if lender[borrower] != borrower else {2, borrower})
    for block in blocks:
        for name in (*OWN, *CALL):
            if name in OWN and lender[block] != block:
                continue
            edit = other(name)
            private = name.replace("own", "attention")
            reached = [b for b in lender if lender[b] == block] if name in OWN else [block]
            hand = ByHand(case, {(b, private): of_invoke(case, edit) for b in reached})
            wanted = hand.logits()
            logits, heads = run(case, in_block(block, name, edit, style))
            real = case.inputs["attention_mask"].bool()
            assert not torch.equal(wanted[real], case.logits()[real]), (block, name)
            if name not in ("attention_scores", "attention_probabilities"):
                assert torch.equal(logits, wanted), (block, name)
                assert all(torch.equal(heads[b], hand.heads[b].view(heads[b].shape)) for b in heads), (
                    block,
                    name,
                )
                continue
            mine, its = heads[block][real], hand.heads[block].view(heads[block].shape)[real]
            allowed = (20 if case.dtype == torch.float32 else 6) * torch.finfo(case.dtype).eps
            assert (mine - its).abs().max() <= allowed * its.abs().max(), (block, name)
            if (
                case.dtype == torch.float32 and case.shape != "26b-a4b"
            ):  # where an expert may change by a rounding
                assert (logits - wanted)[real].abs().max() <= 1e-4 * wanted.abs().max(), (block, name)


@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=str)
@every_style
def test_an_edit_in_one_invoke_moves_no_bit_of_the_others(case, style):
    untouched = [0, 2]
    for name in (*OWN, *CALL):
        logits, _ = run(case, in_block(2, name, other(name), style))
        assert torch.equal(logits[untouched], case.logits()[untouched]), name
        assert not torch.equal(logits[1], case.logits()[1]), name


def mix(pattern: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqhd", pattern.double(), with_heads(values, pattern.shape[1]).double())


def silent(heads: dict[int, Tensor]) -> list[int]:
    return [block for block, value in heads.items() if not value.any()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("attention_kind", ["sdpa", "eager"])
@every_style
def test_zeroed_values_silence_the_blocks_that_attend_with_them(shape, load, attention_kind, style):
    case = Case(shape, wrapper=load, attention=attention_kind)
    lender = sources(case)
    assert silent(run(case, lambda _: None)[1]) == []
    for block in lender:
        _, heads = run(case, in_block(block, "attention_values", torch.zeros_like, style))
        assert silent(heads) == [block]
        if lender[block] == block:
            _, heads = run(case, in_block(block, "own_values", torch.zeros_like, style))
            assert silent(heads) == [b for b in lender if lender[b] == block]


@every_case_alone
@every_style
def test_zeroed_keys_make_the_blocks_that_attend_with_them_even(case, style):
    lender = sources(case)
    oracle, mask = ByHand(case, {}).oracle, case.inputs["attention_mask"]

    def even(block: int, name: str) -> list[int]:
        found: list[int] = []

        def touch(host: Any) -> None:
            if host.block.index == block:
                put(host, name, torch.zeros_like, style)
            seen = oracle.pattern_mask(host.block.index, mask)[:, None].float()
            wanted = (seen / seen.sum(-1, keepdim=True)).expand_as(host.attention_probabilities)
            if torch.allclose(host.attention_probabilities, wanted, rtol=1e-6, atol=0):
                found.append(host.block.index)

        run(case, touch)
        return found

    for block in lender:
        assert even(block, "attention_keys") == [block]
        if lender[block] == block:
            assert even(block, "own_keys") == [b for b in lender if lender[b] == block]


@every_case_alone
@every_style
def test_a_private_edit_leaves_the_lent_keys_and_values_as_they_were(case, style):
    lender = sources(case)
    model, block = case.model(), lender[max(lender)]
    borrowers = [b for b in lender if lender[b] == block and b != block]
    for name in ("keys", "values"):
        with model.trace(case.prompts[0]):
            own = getattr(attention(model, block), f"own_{name}").clone().save()
            put(attention(model, block), f"attention_{name}", torch.zeros_like, style)
            mine = getattr(attention(model, block), f"attention_{name}").clone().save()
            lent = [getattr(attention(model, b), f"attention_{name}").clone() for b in borrowers]
            nnsight.save(lent)
        assert not mine.any()
        assert all(torch.equal(value, own) for value in lent)


@every_case_alone
@every_style
def test_an_edited_pattern_mixes_the_values_anew(case, style):
    model, row = case.model(), case.prompts[0]
    for block in (0, model.num_layers - 1):
        for edit in (lambda p: p.roll(1, 1), lambda p: p * 0, other("attention_probabilities")):
            with torch.no_grad():
                with model.trace(row):
                    host = attention(model, block)
                    values = host.attention_values.clone().save()
                    before = host.attention_probabilities.clone().save()
                    put(host, "attention_probabilities", edit, style)
                    after = host.attention_probabilities.clone().save()
                    heads = host.attention_head_outputs.save()
            assert torch.equal(after, edit(before))
            assert (heads - mix(after, values)).abs().max() <= 2e-6 * values.abs().max()


@every_case_alone
@every_style
def test_edited_scores_make_the_pattern_and_the_mix(case, style):
    model, row = case.model(), case.prompts[0]

    def look_at_the_first(scores: Tensor) -> Tensor:
        scores = scores * 2
        scores[:, 0, :, 1:] = -torch.inf
        return scores

    for block in (0, model.num_layers - 1):
        with torch.no_grad():
            with model.trace(row):
                host = attention(model, block)
                values = host.attention_values.clone().save()
                put(host, "attention_scores", look_at_the_first, style)
                scores = host.attention_scores.clone().save()
                pattern = host.attention_probabilities.clone().save()
                heads = host.attention_head_outputs.save()
        seen = 6 if model.layers[block].kind == "sliding" else 13
        wanted = scores.double().softmax(-1)
        assert (pattern - wanted)[:, :, :seen].abs().max() <= 1e-6
        assert (pattern[:, 0, :seen, 0] == 1).all()
        wanted = mix(pattern, values)
        assert (heads - wanted).abs().max() <= 2e-6 * values.abs().max()
        assert not heads.isnan().any()


@every_case_alone
@every_style
@pytest.mark.parametrize("name", ["attention_queries", "attention_keys"])
@pytest.mark.parametrize(
    "before", [(), ("attention_scores",), ("attention_scores", "attention_probabilities")]
)
def test_scores_follow_queries_and_keys_edited_before_or_after_they_were_first_read(
    case, style, name, before
):
    model, row = case.model(), case.prompts[0]
    host = attention(model, 4)
    with torch.no_grad():
        with model.trace(row):
            for early in before:
                getattr(host, early)
            put(host, name, other(name), style)
            queries, keys = host.attention_queries.clone().save(), host.attention_keys.clone().save()
            scores = host.attention_scores.clone().save()
            pattern = host.attention_probabilities.clone().save()
            values = host.attention_values.clone().save()
            heads = host.attention_head_outputs.save()
            logits = model.logits.save()
    seen = pattern[0, 0] > 0
    wanted = queries.double() @ with_heads(keys, queries.shape[1]).double().transpose(-1, -2)
    assert (scores - wanted)[:, :, seen].abs().max() <= 2e-6 * wanted.abs().max()
    assert (pattern - scores.double().softmax(-1)).abs().max() <= 1e-6
    assert (heads - mix(pattern, values)).abs().max() <= 2e-6 * values.abs().max()
    assert torch.equal(logits, ByHand(case, {(4, name): other(name)}).logits())


@every_case_alone
def test_all_of_one_moment_s_edits_go_in_together(case):
    """Values edited, then scores, then the pattern that follows from them, then the heads."""
    model = case.model()
    edits = {name: other(name) for name in CALL}
    with torch.no_grad():
        with model.trace(case.prompts[0]):
            host = attention(model, 3)
            for name in CALL:
                put(host, name, edits[name], "in place")
            logits = model.logits.save()
    wanted = ByHand(case, {(3, name): edit for name, edit in edits.items()}).logits()
    assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
