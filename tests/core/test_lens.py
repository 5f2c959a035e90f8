"""The logit lens: what it projects is, bit for bit, what the model answers."""

from __future__ import annotations

import re

import pytest
import torch

from gemloupe import StandardizedTransformer
from gemloupe.errors import BadArgument
from gemloupe.testing import SHAPES, save_tiny, tiny_tokenizer
from tests.core.models import SEED, Case, every_case, ids, unwrapped
from tests.core.oracle import Oracle
from tests.core.places import Place, reading

ALONE = every_case(batched=(False,), experts=("batched_mm",))


@pytest.mark.parametrize("case", ALONE, ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_the_last_stream_projects_to_the_logits(case, inside):
    model = case.model()
    with model.trace(case.prompts[0]):
        stream = model.layers[-1].layer_output.save()
        if inside:
            capped = model.project_on_vocab(stream).save()
            raw = model.project_on_vocab(stream, cap=False).save()
        raw_logits = model.raw_logits.save()
        logits = model.logits.save()
    if not inside:
        capped, raw = model.project_on_vocab(stream), model.project_on_vocab(stream, cap=False)
    assert torch.equal(capped, logits)
    assert torch.equal(raw, raw_logits)
    assert not torch.equal(raw_logits, logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_early_stream_is_normed_projected_and_capped(shape):
    case = Case(shape)
    model, oracle = case.model(), Oracle(case.bare())
    stream = reading(case)[0][Place("layer_output", 1)].detach()
    raw = oracle.vocab(stream.double())
    for found, wanted in [
        (model.project_on_vocab(stream, cap=False), raw),
        (model.project_on_vocab(stream), 30 * torch.tanh(raw / 30)),
    ]:
        assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_it_takes_any_leading_axes_dtype_and_gradient():
    model = Case("e2b").model()
    stream = reading(Case("e2b"))[0][Place("layer_output", 4)].detach()
    whole = model.project_on_vocab(stream)
    assert model.project_on_vocab(stream[0, -1]).shape == (288,)
    assert torch.allclose(model.project_on_vocab(stream[0, -1]), whole[0, -1], rtol=0, atol=1e-5)
    assert model.project_on_vocab(stream[None, None]).shape == (1, 1, *whole.shape)
    assert torch.allclose(model.project_on_vocab(stream.double()), whole, rtol=0, atol=1e-5)
    free = stream.clone().requires_grad_()
    model.project_on_vocab(free).sum().backward()
    assert free.grad is not None
    assert free.grad.norm() > 0
    model._module.zero_grad(set_to_none=True)


def test_projecting_uses_nothing_up():
    case = Case("e2b")
    model = case.model()
    seen = []
    with model.trace(case.prompts[0]):
        for block in model.layers:
            seen.append(model.project_on_vocab(block.layer_output).save())  # noqa: PERF401
        last = model.norm.output.save()
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())
    assert torch.equal(seen[-1], logits)
    assert torch.equal(model.lm_head._module(last).div(30).tanh() * 30, logits)


def test_each_step_of_a_generation_projects_to_its_logits():
    model = Case("26b-a4b", experts="batched_mm").model()
    pairs = []
    with model.generate(ids(6), max_new_tokens=3, do_sample=False, eos_token_id=-1) as tracer:
        for step in tracer.iter[:3]:
            stream = model.layers[-1].layer_output
            if step:
                pairs.append((model.project_on_vocab(stream).save(), model.logits.save()))
    assert len(pairs) == 2
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_model_without_a_cap_has_none():
    from gemloupe.testing import tiny

    model = tiny("31b", final_logit_softcapping=None)
    with model.trace(ids(5)):
        stream = model.layers[-1].layer_output.save()
        raw = model.raw_logits.save()
        logits = model.logits.save()
    assert torch.equal(raw, logits)
    assert torch.equal(model.project_on_vocab(stream), logits)


def test_it_loads_the_weights_it_needs(tmp_path):
    model = StandardizedTransformer(save_tiny(tmp_path, "e2b", seed=SEED))
    assert not model.dispatched
    stream = torch.randn(2, 40, generator=torch.Generator().manual_seed(SEED))
    found = model.project_on_vocab(stream)
    wanted = Case("e2b").model().project_on_vocab(stream)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("hidden", "got"),
    [(torch.ones(3, 39), "(3, 39)"), (torch.tensor(1.0), "()"), ([1.0] * 40, "list"), (None, "NoneType")],
)
def test_what_is_no_stream_is_refused(hidden, got):
    model = Case("e2b").model()
    with pytest.raises(BadArgument, match=re.escape(f"hidden = 40, not {got}")):
        model.project_on_vocab(hidden)


# -- top_tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case("e2b"), Case("12b", dtype=torch.bfloat16)], ids=str)
@pytest.mark.parametrize("of", ["logits", "stream"])
def test_top_tokens_are_the_likeliest(case, of):
    model = case.model()
    values = reading(case)[0]
    logits = values[Place("logits")].detach()
    given = logits if of == "logits" else values[Place("layer_output", model.num_layers - 1)].detach()
    top = model.top_tokens(given, k=4)
    probabilities = torch.exp(logits.double() - torch.logsumexp(logits.double(), -1, keepdim=True))
    assert top.ids.shape == top.probabilities.shape == (1, 13, 4)
    assert top.probabilities.dtype == torch.float32
    assert torch.allclose(top.probabilities.double(), probabilities.gather(-1, top.ids), rtol=1e-5, atol=0)
    assert (top.probabilities.diff(dim=-1) <= 0).all()
    rest = probabilities.scatter(-1, top.ids, 0).max(-1).values
    assert (rest <= top.probabilities[..., -1].double() * (1 + 1e-5)).all()
    tokenizer = tiny_tokenizer()
    for position in range(13):
        words = [tokenizer.decode([i]) for i in top.ids[0, position].tolist()]
        assert top.tokens[0][position] == words
    assert str(top) == str(top.tokens)


def test_top_tokens_of_one_position_and_by_default_five():
    model = Case("e2b").model()
    logits = torch.zeros(288)
    logits[70:76] = torch.arange(6.0)
    top = model.top_tokens(logits)
    assert top.ids.tolist() == [75, 74, 73, 72, 71]
    assert len(top.tokens) == 5
    assert model.top_tokens(logits, k=288).ids.shape == (288,)


def test_top_tokens_inside_a_trace():
    case = Case("e2b")
    model = case.model()
    found = []
    with model.trace(case.prompts[0]):
        found.append(model.top_tokens(model.layers[3].layer_output, k=2))
        found.append(model.top_tokens(model.logits, k=2))
    assert torch.equal(found[1].ids, case.logits().topk(2, -1).indices)
    assert found[0].ids.shape == (1, 13, 2)


@pytest.mark.parametrize("k", [0, -1, 289])
def test_a_k_out_of_range_is_refused(k):
    with pytest.raises(BadArgument, match=f"k = {k}: choose 1 to 288"):
        Case("e2b").model().top_tokens(torch.zeros(288), k=k)


@pytest.mark.parametrize("given", [torch.zeros(39), torch.zeros(2, 41), [0.0] * 40])
def test_what_is_neither_logits_nor_stream_is_refused(given):
    with pytest.raises(BadArgument, match=re.escape("logits [... 288] or a residual stream [... 40]")):
        Case("e2b").model().top_tokens(given)


def test_equal_widths_are_not_guessed():
    from gemloupe.testing import tiny

    model = tiny("31b", hidden_size=288)
    with pytest.raises(BadArgument, match="equally wide"):
        model.top_tokens(torch.zeros(288))


def test_without_a_tokenizer_tokens_are_their_ids():
    model = StandardizedTransformer(unwrapped(Case("e2b", dtype=torch.float64)))
    logits = torch.zeros(288, dtype=torch.float64)
    logits[7] = 1
    assert model.top_tokens(logits, k=1).tokens == ["7"]
