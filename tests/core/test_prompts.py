"""What a Gemma prompt must look like: a warning where it does not."""

from __future__ import annotations

import warnings

import pytest
import torch

from gemloupe.errors import BadArgument, PromptWarning
from tests.core.models import Case, continued, ids

GREEDY = {"do_sample": False, "eos_token_id": -1}
BARE = torch.tensor([[40, 50, 60]])
DOUBLE = torch.tensor([[2, 2, 50, 60]])


def traced(*rows: object) -> None:
    model = Case("e2b").model()
    with model.trace() as tracer:
        for row in rows:
            with tracer.invoke(row):
                model.layers[0].layer_output.save()


@pytest.mark.parametrize(
    ("rows", "row"),
    [((BARE,), 0), ((ids(5), BARE), 1), ((BARE, ids(5)), 0), ((ids(2), ids(9), BARE), 2)],
    ids=["alone", "padded", "before a longer one", "third"],
)
def test_a_row_without_bos_is_told(rows, row):
    with pytest.warns(PromptWarning, match=rf"row {row} of the prompt does not begin with BOS \(<bos>\)"):
        traced(*rows)


@pytest.mark.parametrize(
    "rows", [(DOUBLE,), (DOUBLE, ids(9)), ("<bos>a cat",)], ids=["alone", "padded", "text"]
)
def test_a_row_with_two_is_told(rows):
    with pytest.warns(PromptWarning, match=r"row 0 of the prompt begins with BOS twice.*leave <bos> out"):
        traced(*rows)


@pytest.mark.parametrize(
    "rows",
    [(ids(5),), (ids(5), ids(2)), ("a cat",), ("a cat", "a caterpillar"), (torch.tensor([[2]]), ids(4))],
    ids=["ids", "batched", "text", "texts", "one token"],
)
def test_a_proper_prompt_is_not_remarked_on(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(*rows)


def test_a_generation_is_told_once():
    model = Case("e2b").model()
    with pytest.warns(PromptWarning) as told:  # noqa: PT031
        with model.generate(BARE, max_new_tokens=3, **GREEDY) as tracer:
            for _ in tracer.iter[:3]:
                model.logits.save()
    assert len(told) == 1


def test_the_warning_can_be_made_an_error_and_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PromptWarning)
        with pytest.raises(PromptWarning):
            traced(BARE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", PromptWarning)
        traced(BARE)


def test_a_continuation_has_its_bos_in_the_cache():
    case = Case("e2b")
    model, bare = case.model(), case.bare()
    with torch.no_grad():
        mask = torch.ones(1, 9, dtype=torch.int64)
        with model.trace(BARE, **continued(case, ids(6)), attention_mask=mask):
            logits = model.logits.save()
        wanted = bare(torch.cat([ids(6), BARE], -1)).logits[:, -3:]
    assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("shape", ["e2b", "12b", "26b-a4b"])
@pytest.mark.parametrize("given", [lambda row: row, lambda row: {"input_ids": row}], ids=["ids", "encoding"])
def test_a_continuation_sees_its_own_tokens(shape, given):
    """nnsight 0.8.1 adds a mask that hides them, beside a cache called `cache`."""
    case = Case(shape)
    model = case.model()
    with torch.no_grad():
        wanted = case.bare()(ids(9)[:, 4:], **continued(case, ids(9)[:, :4])).logits
        with model.trace(given(ids(9)[:, 4:]), **continued(case, ids(9)[:, :4])):
            mask = model.attention_mask.save()
            logits = model.logits.save()
    assert torch.equal(logits, wanted)
    assert mask.tolist() == [[1] * 9]


@pytest.mark.parametrize(
    "rows",
    [({"input_ids": ids(9)[:, 4:], "attention_mask": torch.ones(1, 5)},), (ids(9)[:, 4:], ids(9)[:, 5:])],
    ids=["short mask", "unequal rows"],
)
def test_a_mask_that_leaves_the_cached_tokens_out_is_refused(rows):
    case = Case("e2b")
    model = case.model()
    before = case.logits()
    with pytest.raises(BadArgument, match=r"cache holds 4 tokens and the call brings 5.*one of 9 columns"):
        with model.trace(**continued(case, ids(9)[:, :4])) as tracer:
            for row in rows:
                with tracer.invoke(row):
                    model.logits.save()
    with torch.no_grad():
        with model.trace(case.prompts[0]):
            logits = model.logits.save()
    assert torch.equal(logits, before)
