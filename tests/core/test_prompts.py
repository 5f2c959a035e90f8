"""What a Gemma prompt must look like: a warning where it does not."""

from __future__ import annotations

import warnings
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, PromptWarning
from tests.core.models import Case, continued, ids, padded

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


def fed(model: Any, run: Any) -> dict[str, Tensor]:
    """The keywords that the module itself is called with."""
    seen: dict[str, Any] = {}
    hook = model._module.register_forward_pre_hook(
        lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    return {name: value for name, value in seen.items() if isinstance(value, Tensor)}


def continuation(model: Any, way: str, rows: Tensor, mask: Tensor, cache: dict[str, Any]) -> Tensor:
    """Logits of `rows`, which continue a cache, given in one of the ways that a trace takes them."""
    found: list[Tensor] = []
    each = "mask in each" in way
    with torch.no_grad():
        if way in ("one call", "encoding"):
            given = (rows,) if way == "one call" else ({"input_ids": rows, "attention_mask": mask},)
            with model.trace(*given, **cache, **({"attention_mask": mask} if way == "one call" else {})):
                logits = model.logits.save()
            return logits
        with model.trace(**cache, **({} if each else {"attention_mask": mask})) as tracer:
            nnsight.save(found)
            for row in [slice(None)] if way == "all in one invoke" else [slice(0, 1), slice(1, 2)]:
                with tracer.invoke(rows[row], **({"attention_mask": mask[row]} if each else {})):
                    found.append(model.logits)
    return torch.cat(found)


WAYS = ["one call", "encoding", "invokes", "invokes, mask in each", "all in one invoke"]


@pytest.mark.parametrize("shape", ["e2b", "12b"])
@pytest.mark.parametrize("way", WAYS)
def test_a_padded_row_is_continued_from_where_its_own_text_ends(shape, way):
    """Whoever fills the cache in a trace counts each row from its first token; so does whoever goes on."""
    case = Case(shape)
    model, batch = case.model(), padded([ids(13), ids(7)])
    rows, mask, bare = batch["input_ids"], batch["attention_mask"], case.bare()
    with torch.no_grad():
        wanted = bare(**batch).logits[:, 9:]
        output = bare(
            rows[:, :9], attention_mask=mask[:, :9], position_ids=batch["position_ids"][:, :9], use_cache=True
        )
    cache = {name: output[name] for name in output.keys() & {"cache", "past_key_values"}}
    logits: list[Tensor] = []
    seen = fed(model, lambda: logits.append(continuation(model, way, rows[:, 9:], mask, cache)))
    assert seen["position_ids"].tolist() == [[9, 10, 11, 12], [3, 4, 5, 6]]
    assert torch.equal(seen["attention_mask"], mask)
    assert (logits[0] - wanted).abs().max() <= 5e-5 * wanted.abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_without_padding_a_continuation_is_the_bare_model_s(way):
    case = Case("e2b")
    model, rows, mask = case.model(), torch.cat([ids(9), ids(9, salt=1)]), torch.ones(2, 9, dtype=torch.int64)
    logits: list[Tensor] = []
    cache = continued(case, rows[:, :4])
    seen = fed(model, lambda: logits.append(continuation(model, way, rows[:, 4:], mask, cache)))
    with torch.no_grad():
        wanted = case.bare()(rows[:, 4:], attention_mask=mask, **continued(case, rows[:, :4])).logits
    assert "position_ids" not in seen
    assert torch.equal(logits[0], wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_counts_alike_wherever_it_is_given(way):
    """Without a cache: nnsight counts where the mask comes with the rows, and not where it stands beside."""
    case = Case("e2b")
    model, batch = case.model(), padded([ids(9), ids(5)])
    logits: list[Tensor] = []
    rows, mask = batch["input_ids"], batch["attention_mask"]
    seen = fed(model, lambda: logits.append(continuation(model, way, rows, mask, {})))
    with torch.no_grad():
        wanted = case.bare()(**batch).logits
    assert torch.equal(seen["position_ids"], batch["position_ids"])
    assert torch.equal(logits[0], wanted)


def test_a_mask_beside_the_invokes_is_the_one_that_positions_count_by():
    model = Case("e2b").model()
    batch = padded([ids(9), ids(5)])
    with torch.no_grad():
        with model.trace(attention_mask=batch["attention_mask"]) as tracer:
            with tracer.invoke(batch["input_ids"][:1]):
                pass
            with tracer.invoke(batch["input_ids"][1:]):
                record = model.record("layers[3].layer_output", positions=0)
                stream = model.layers[3].layer_output.save()
    assert torch.equal(record["layers[3].layer_output"], stream[:, 4])


@pytest.mark.parametrize("beside", [False, True], ids=["with the rows", "beside"])
def test_position_ids_that_are_given_are_fed(beside):
    case = Case("e2b")
    model, batch = case.model(), padded([ids(9), ids(5)])
    given = {"position_ids": torch.arange(4, 9).expand(2, 5), "attention_mask": batch["attention_mask"]}
    cache = continued(case, batch["input_ids"][:, :4])

    def run() -> None:
        with torch.no_grad():
            with model.trace(**cache, **(given if beside else {})) as tracer:
                with tracer.invoke(batch["input_ids"][:, 4:], **({} if beside else given)):
                    model.logits.save()

    assert torch.equal(fed(model, run)["position_ids"], given["position_ids"])
