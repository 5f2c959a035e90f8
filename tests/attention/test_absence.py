"""What a block or a kernel lacks says so when it is touched, with what to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemloupe.errors import NeverRan, Unavailable
from gemloupe.references import Reference
from gemloupe.testing import tiny
from tests.attention.values import CALL, OWN, attention, sources
from tests.core.models import Case, ids

LENDERS = {"e2b": {3: (5, 6, 7, 8), 4: (9,)}, "e4b": {4: (6, 7, 8, 9, 10), 5: (11,)}}
NO_PATTERN = ("attention_scores", "attention_probabilities")


@pytest.mark.parametrize("shape", LENDERS)
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("name", OWN)
def test_a_borrower_says_whose_keys_and_values_to_edit(shape, load, name):
    case = Case(shape, wrapper=load)
    model = case.model()
    what = name.removeprefix("own_")
    for source, borrowers in LENDERS[shape].items():
        shown = ", ".join(map(str, borrowers))
        for block in borrowers:
            host = attention(model, block)
            wanted = (
                f"layers[{block}].self_attn.{name}: block {block} computes no {what}, "
                f"it borrows block {source}'s.\n"
                f"Edit layers[{source}].self_attn.{name} to change every borrower ({shown}),\n"
                f"or layers[{block}].self_attn.attention_{what} to change block {block} alone."
            )
            with pytest.raises(Unavailable) as error:
                getattr(host, name)
            assert str(error.value) == wanted
            with pytest.raises(Unavailable) as error:
                setattr(host, name, torch.zeros(1))
            assert str(error.value) == wanted
            assert not hasattr(host, name)
            assert not model.has(f"layers[{block}].self_attn.{name}")
            assert model.why_not(f"layers[{block}].self_attn.{name}") == wanted.partition(": ")[2]


@pytest.mark.parametrize("shape", ["e2b", "e4b", "12b"])
def test_every_other_block_has_its_own(shape):
    case = Case(shape)
    model, lender = case.model(), sources(case)
    for block, source in lender.items():
        for name in OWN:
            assert model.has(f"layers[{block}].self_attn.{name}") == hasattr(attention(model, block), name)
            assert hasattr(attention(model, block), name) == (source == block)
        for name in CALL:
            assert hasattr(attention(model, block), name)
    own = [block for block, source in lender.items() if block == source]
    assert model.support()["layers[i].self_attn.own_keys"].blocks == tuple(own)


def test_the_map_of_lenders():
    for shape, lenders in LENDERS.items():
        model = Case(shape).model()
        assert model.kv_sharing() == lenders
        for source, borrowers in lenders.items():
            assert attention(model, source).kv_borrowers == model.layers[source].kv_borrowers == borrowers
            assert all(attention(model, block).kv_source == source for block in (source, *borrowers))
    model = Case("31b").model()
    assert model.kv_sharing() == {}
    assert [block.kv_source for block in model.layers] == list(range(6))


def test_touched_in_a_trace_nothing_runs():
    model = Case("e2b").model()
    ran: list[int] = []
    handles = [
        block._module.register_forward_pre_hook(lambda _m, _a, i=i: ran.append(i))
        for i, block in enumerate(model.layers)
    ]
    try:
        with pytest.raises(Unavailable, match=r"layers\[7\]\.self_attn\.own_keys: .*borrows block 3's"):
            with model.trace(ids(5)):
                attention(model, 7).own_keys
        with pytest.raises(Unavailable, match=r"layers\[7\]\.self_attn\.own_values"):
            with model.trace(ids(5)):
                attention(model, 7).own_values = torch.zeros(1)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == []


def test_a_long_list_of_borrowers_is_cut():
    model = tiny("e2b", num_hidden_layers=20, num_kv_shared_layers=12)
    reason = model.why_not("layers[19].self_attn.own_keys") or ""
    assert "borrows block" in reason
    reason = model.why_not("layers[8].self_attn.own_values") or ""
    assert ", ...)" in reason


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "paged|sdpa"])
@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
def test_a_kernel_that_keeps_no_pattern_says_so(implementation, load):
    model = tiny("e2b", wrapper=load)  # a throwaway: it is never run
    module: Any = model._module
    text = module.config.get_text_config()
    text._attn_implementation_internal = implementation
    assert attention(model, 3)._module.config._attn_implementation == implementation
    for block in (0, 4, 9):
        host = attention(model, block)
        for name in CALL:
            path = f"layers[{block}].self_attn.{name}"
            if name in NO_PATTERN:
                with pytest.raises(Unavailable) as error:
                    getattr(host, name)
                message = str(error.value)
                assert message.startswith(f"{path}: {implementation} keeps neither scores nor pattern")
                assert "attn_implementation='sdpa'" in message
                assert "attention_queries, attention_keys and attention_head_outputs" in message
                assert not model.has(path)
            else:
                assert isinstance(getattr(host, name), Reference)
                assert model.has(path)
    text._attn_implementation_internal = "sdpa"
    assert model.has("layers[3].self_attn.attention_scores")


@pytest.mark.parametrize("name", [*OWN, *CALL, "attention_output"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "after a later block"])
def test_an_attention_that_this_call_does_not_run_says_that(name, later):
    case = Case("31b")
    model = case.model()
    with pytest.raises(
        NeverRan, match=rf"^layers\[2\]\.self_attn\.{name} was asked for, but .*did not run the module"
    ):
        with model.trace(case.prompts[0]):
            stream = model.layers[1].layer_output
            model.layers[2].skip(stream)
            if later:
                model.layers[4].layer_output
            getattr(attention(model, 2), name)


def test_outside_a_trace_a_value_is_its_name():
    model = Case("e2b").model()
    for name in (*OWN, *CALL):
        reference: Any = getattr(attention(model, 3), name)
        assert isinstance(reference, Reference)
        assert str(reference) == f"layers[3].self_attn.{name}"
        assert reference.layout.axes[0] == "batch"
