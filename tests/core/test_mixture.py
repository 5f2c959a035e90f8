"""The mixture of experts: its routing, rerouting and contributions, under every experts implementation."""

from __future__ import annotations

import re
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, BadWrite, OutOfOrder, OutsideTrace, ReadOnly, Unavailable
from gemloupe.testing import tiny
from tests.core.models import SEED, Case, ids
from tests.core.oracle import Oracle
from tests.core.places import Place, reading

SHAPE = "26b-a4b"
BLOCK = 2
EXPERTS = ("eager", "batched_mm", "grouped_mm")
every_experts = pytest.mark.parametrize("experts", EXPERTS)
one_or_batched = pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
GREEDY = {"do_sample": False, "eos_token_id": -1}
AFTER = ("router_probabilities", "expert_weights", "expert_indices", "expert_outputs", "routed_output")


def run(case: Case, edit: Any, invoke: int = 0) -> dict[str, Tensor]:
    """What follows from an edit of the routing, in the invoke that makes it; and all rows' logits."""
    model, rows = case.model(), case.prompts
    found: dict[str, Tensor] = {}
    logits: list[Tensor] = [torch.empty(0)] * len(rows)
    with model.trace() as tracer:
        for i, row in enumerate(rows):
            with tracer.invoke(row):
                if i == invoke:
                    mlp = model.layers[BLOCK].mlp
                    found["mid_stream"] = nnsight.save(model.layers[BLOCK].mid_stream)
                    edit(mlp)
                    for name in AFTER:
                        found[name] = nnsight.save(getattr(mlp, name))
                logits[i] = model.logits.save()
    found["logits"] = torch.cat(logits)
    return {name: value.detach() for name, value in found.items()}


def assert_follows(case: Case, found: dict[str, Tensor], probabilities: Tensor, indices: Tensor) -> None:
    """Weights, contributions and their sum are those of the given routing."""
    oracle = Oracle(case.bare())
    weights = oracle.expert_weights(BLOCK, probabilities.double(), indices)
    outputs = oracle.expert_outputs(BLOCK, found["mid_stream"].double(), indices, weights)
    assert torch.equal(found["expert_indices"], indices)
    for name, wanted in [
        ("expert_weights", weights),
        ("expert_outputs", outputs),
        ("routed_output", outputs.sum(2)),
    ]:
        assert (found[name].double() - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


def random_scores(rows: int, seq: int) -> Tensor:
    random = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, seq, 8, generator=random) * 2


@every_experts
@one_or_batched
@pytest.mark.parametrize("style", ["assigned", "in place"])
def test_other_logits_reroute(experts, batched, style):
    case = Case(SHAPE, experts=experts, batched=batched)
    scores = random_scores(1, 13)

    def edit(mlp: Any) -> None:
        if style == "assigned":
            mlp.router_logits = scores
        else:
            mlp.router_logits[:] = scores

    found = run(case, edit, int(batched))
    probabilities = scores.double().softmax(-1)
    assert torch.allclose(found["router_probabilities"].double(), probabilities, rtol=0, atol=1e-6)
    assert_follows(case, found, probabilities, probabilities.topk(3, -1).indices)


@every_experts
@one_or_batched
@pytest.mark.parametrize("style", ["assigned", "in place"])
def test_other_probabilities_reroute(experts, batched, style):
    """They need not sum to one: the chosen are renormalised."""
    case = Case(SHAPE, experts=experts, batched=batched)
    scores = random_scores(1, 13).exp()

    def edit(mlp: Any) -> None:
        if style == "assigned":
            mlp.router_probabilities = scores
        else:
            mlp.router_probabilities[:] = scores

    found = run(case, edit, int(batched))
    assert torch.equal(found["router_probabilities"], scores)
    assert_follows(case, found, scores, scores.topk(3, -1).indices)


@every_experts
@one_or_batched
def test_reroute_sends_tokens_to_the_chosen_experts(experts, batched):
    case = Case(SHAPE, experts=experts, batched=batched)
    invoke = int(batched)
    chosen = random_scores(1, 13).topk(3, -1).indices.roll(1, -1)  # in no order of their probabilities
    found = run(case, lambda mlp: mlp.reroute(chosen), invoke)
    probabilities = reading(case)[invoke][Place("router_probabilities", BLOCK, "mlp")].detach()
    assert torch.equal(found["router_probabilities"], probabilities)
    assert_follows(case, found, probabilities, chosen)
    others = [i for i in range(len(case.prompts)) if i != invoke]
    clean = case.logits()
    assert not torch.equal(found["logits"][invoke], clean[invoke])
    if experts == "batched_mm":
        assert torch.equal(found["logits"][others], clean[others])
    elif others:
        assert (found["logits"][others] - clean[others]).abs().max() <= 1e-5 * clean.abs().max()


@every_experts
def test_rerouting_to_the_same_experts_moves_no_bit(experts):
    case = Case(SHAPE, experts=experts)
    found = run(case, lambda mlp: mlp.reroute(mlp.expert_indices.clone()))
    assert torch.equal(found["logits"], case.logits())


@every_experts
def test_rerouting_after_other_probabilities_takes_those(experts):
    case = Case(SHAPE, experts=experts)
    scores = random_scores(1, 13).exp()
    chosen = random_scores(1, 13).topk(3, -1, largest=False).indices

    def edit(mlp: Any) -> None:
        mlp.router_probabilities = scores
        mlp.reroute(chosen)

    assert_follows(case, run(case, edit), scores, chosen)


def test_reroute_takes_any_integers():
    case = Case(SHAPE)
    chosen = random_scores(1, 13).topk(3, -1).indices
    found = [
        run(case, lambda mlp, kind=kind: mlp.reroute(chosen.to(kind))) for kind in (torch.int32, torch.uint8)
    ]
    for one in found:
        assert torch.equal(one["expert_indices"], chosen)


@every_experts
@one_or_batched
@pytest.mark.parametrize("style", ["assigned", "in place"])
def test_silencing_one_expert_takes_its_contribution_out(experts, batched, style):
    case = Case(SHAPE, experts=experts, batched=batched)
    invoke = int(batched)
    before = {
        name: reading(case)[invoke][Place(name, BLOCK, "mlp")].detach()
        for name in ("expert_outputs", "expert_indices")
    }
    silent = before["expert_outputs"].masked_fill((before["expert_indices"] == 5)[..., None], 0)

    def edit(mlp: Any) -> None:
        of_five = (mlp.expert_indices == 5)[..., None]
        if style == "assigned":
            mlp.expert_outputs = mlp.expert_outputs.masked_fill(of_five, 0)
        else:
            mlp.expert_outputs.masked_fill_(of_five, 0)

    found = run_outputs(case, edit, invoke)
    assert torch.allclose(found, silent.sum(2), rtol=0, atol=1e-6)


def run_outputs(case: Case, edit: Any, invoke: int) -> Tensor:
    model = case.model()
    found: list[Tensor] = []
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                if i == invoke:
                    edit(model.layers[BLOCK].mlp)
                    found.append(model.layers[BLOCK].mlp.routed_output.detach().save())
                model.logits.save()
    return found[0]


@every_experts
@one_or_batched
def test_other_weights_scale_the_contributions(experts, batched):
    case = Case(SHAPE, experts=experts, batched=batched)
    invoke = int(batched)
    found: list[Tensor] = []

    def edit(mlp: Any) -> None:
        mlp.expert_weights = mlp.expert_weights * torch.tensor([2.0, 0.0, -1.0])
        found.append(mlp.expert_outputs.detach().save())

    routed = run_outputs(case, edit, invoke)
    before = reading(case)[invoke][Place("expert_outputs", BLOCK, "mlp")].detach()
    wanted = before * torch.tensor([2.0, 0.0, -1.0])[:, None]
    assert torch.allclose(found[0], wanted, rtol=0, atol=1e-6)
    assert torch.allclose(routed, wanted.sum(2), rtol=0, atol=1e-6)


@every_experts
def test_every_invoke_may_route_its_own_way(experts):
    case = Case(SHAPE, experts=experts, batched=True)
    model = case.model()
    scores = random_scores(3, 13)
    kept: list[dict[str, Tensor]] = [{} for _ in range(3)]
    with model.trace() as tracer:
        for i, row in enumerate(case.prompts):
            with tracer.invoke(row):
                mlp = model.layers[BLOCK].mlp
                kept[i]["mid_stream"] = nnsight.save(model.layers[BLOCK].mid_stream)
                mlp.router_logits = scores[i : i + 1]
                if i == 1:
                    mlp.reroute(scores[1:2].topk(3, -1, largest=False).indices)
                if i == 2:
                    mlp.expert_outputs *= 2
                for name in AFTER:
                    kept[i][name] = nnsight.save(getattr(mlp, name))
    for i, found in enumerate(kept):
        probabilities = scores[i : i + 1].double().softmax(-1)
        chosen = probabilities.topk(3, -1, largest=i != 1).indices
        if i == 2:
            for name in ("expert_outputs", "routed_output"):
                found[name] = found[name] / 2
        assert_follows(case, {name: value.detach() for name, value in found.items()}, probabilities, chosen)


# -- single tokens, where a flat tensor is as long as the batch ---------------------------------------


@every_experts
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_prompts_of_one_token(experts, rows):
    case = Case(SHAPE, experts=experts)
    model, oracle = case.model(), Oracle(case.bare())
    prompts = [torch.tensor([[2]]) for _ in range(rows)]
    kept: list[dict[str, Tensor]] = [{} for _ in prompts]
    with model.trace() as tracer:
        for i, (row, found) in enumerate(zip(prompts, kept, strict=True)):
            with tracer.invoke(row):
                mlp = model.layers[BLOCK].mlp
                found["mid_stream"] = nnsight.save(model.layers[BLOCK].mid_stream)
                mlp.router_logits = mlp.router_logits.roll(i, -1)
                for name in AFTER:
                    found[name] = nnsight.save(getattr(mlp, name))
    for i, found in enumerate(kept):
        found = {name: value.detach() for name, value in found.items()}
        scores = oracle.router_logits(BLOCK, found["mid_stream"].double()).roll(i, -1)
        assert found["expert_outputs"].shape == (1, 1, 3, 40)
        assert_follows(case, found, scores.softmax(-1), scores.topk(3, -1).indices)


@every_experts
@pytest.mark.parametrize("edited", [0, 1])
def test_decoding_steps_of_several_invokes(experts, edited):
    """From the second step on every row is one token; one invoke silences an expert there."""
    case = Case(SHAPE, experts=experts)
    model = case.model()
    kept: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {0: [], 1: []}
    rows = [ids(5), ids(3)]
    with model.generate(max_new_tokens=3, **GREEDY) as tracer:
        for i, row in enumerate(rows):
            with tracer.invoke(row):
                for step in tracer.iter[:3]:
                    mlp = model.layers[BLOCK].mlp
                    outputs = mlp.expert_outputs
                    if i == edited and step:
                        mlp.expert_outputs = outputs * torch.tensor([0.0, 1.0, 1.0])[:, None]
                    kept[i].append(nnsight.save((outputs, mlp.expert_outputs, mlp.routed_output)))
    for i, steps in kept.items():
        assert [outputs.shape[1] for outputs, _, _ in steps] == [5, 1, 1]
        for step, (outputs, after, routed) in enumerate(steps):
            silent = i == edited and step > 0
            wanted = outputs[:, :, 1:] if silent else outputs
            assert torch.allclose(routed, wanted.sum(2), rtol=0, atol=1e-6), (i, step)
            assert (after[:, :, 0] == 0).all() == silent, (i, step)


@every_experts
@pytest.mark.parametrize(
    "options", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 4}], ids=str
)
def test_returned_sequences_and_beams_are_rows(experts, options):
    model = Case(SHAPE, experts=experts).model()
    kept = []
    with model.generate(ids(5), max_new_tokens=3, **{**GREEDY, **options}) as tracer:
        for _ in tracer.iter[:3]:
            mlp = model.layers[BLOCK].mlp
            kept.append(nnsight.save((mlp.router_logits, mlp.expert_outputs, mlp.routed_output)))
    rows = options.get("num_return_sequences") or options["num_beams"]
    for step, (logits, outputs, routed) in enumerate(kept):
        assert logits.shape == (rows, 1 if step else 5, 8)
        assert torch.allclose(outputs.sum(2), routed, rtol=0, atol=1e-6)


@every_experts
def test_rerouting_in_every_step(experts):
    model = Case(SHAPE, experts=experts).model()
    seen = []
    with model.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            mlp = model.layers[BLOCK].mlp
            mlp.reroute(torch.tensor([7, 0, 3]).expand(1, mlp.router_logits.shape[1], 3))
            seen.append(mlp.expert_indices.save())
    assert [one.shape[1] for one in seen] == [5, 1, 1]
    assert all((one == torch.tensor([7, 0, 3])).all() for one in seen)


# -- refusals ----------------------------------------------------------------------------------------

GOOD = torch.tensor([0, 1, 2]).expand(1, 5, 3)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (GOOD + 6, "numbered 0 to 7; the indices go from 6 to 8"),
        (GOOD - 1, "numbered 0 to 7; the indices go from -1 to 1"),
        (GOOD.float(), "integer tensor [batch seq top_k]"),
        (GOOD.bool(), "integer tensor [batch seq top_k]"),
        ([[0, 1, 2]], "integer tensor [batch seq top_k]"),
        (GOOD[:, :4], "(1, 5, 3) [batch seq top_k], not (1, 4, 3)"),
        (GOOD[..., :2], "(1, 5, 3) [batch seq top_k], not (1, 5, 2)"),
        (GOOD[0], "(1, 5, 3) [batch seq top_k], not (5, 3)"),
    ],
)  # fmt: skip
@every_experts
def test_reroute_refuses_what_cannot_be_meant(experts, indices, message):
    model = Case(SHAPE, experts=experts).model()
    with pytest.raises(BadArgument, match=re.escape("layers[2].mlp.reroute")) as refused:
        with model.trace(ids(5)):
            model.layers[BLOCK].mlp.reroute(indices)
    assert message in str(refused.value)


def test_reroute_works_inside_a_trace_of_a_mixture():
    model = Case(SHAPE).model()
    with pytest.raises(
        OutsideTrace, match=re.escape("with model.trace(prompt): model.layers[2].mlp.reroute")
    ):
        model.layers[BLOCK].mlp.reroute(GOOD)
    dense = Case("e2b").model()
    for inside in (False, True):
        with pytest.raises(Unavailable, match=re.escape("layers[2].mlp.reroute: block 2 has no mixture")):
            if inside:
                with dense.trace(ids(5)):
                    dense.layers[BLOCK].mlp.reroute(GOOD)
            else:
                dense.layers[BLOCK].mlp.reroute(GOOD)


@pytest.mark.parametrize("after", ["expert_outputs", "routed_output", "layer_output"])
@every_experts
def test_reroute_comes_before_the_experts(experts, after):
    model = Case(SHAPE, experts=experts).model()
    with pytest.raises(OutOfOrder, match=re.escape("layers[2].mlp.reroute comes too late")):
        with model.trace(ids(5)):
            block = model.layers[BLOCK]
            (block if after == "layer_output" else block.mlp).__getattribute__(after).save()
            block.mlp.reroute(GOOD)


def test_indices_are_read_only_and_name_reroute():
    model = Case(SHAPE).model()
    for style in ("assigned", "in place"):
        with pytest.raises(ReadOnly, match=re.escape("Write `mlp.reroute(indices)`")):
            with model.trace(ids(5)):
                if style == "assigned":
                    model.layers[BLOCK].mlp.expert_indices = GOOD
                else:
                    model.layers[BLOCK].mlp.expert_indices[:] = 1
                    model.layers[BLOCK].mlp.routed_output.save()


@every_experts
@pytest.mark.parametrize(
    "name", ["router_logits", "router_probabilities", "expert_weights", "expert_outputs", "routed_output"]
)
def test_a_write_of_another_shape_or_dtype_is_refused(experts, name):
    model = Case(SHAPE, experts=experts).model()
    for spoil in (
        lambda value: value[:, :3],
        lambda value: value.flatten(0, 1),
        lambda value: value.double(),
    ):
        with pytest.raises(BadWrite, match=re.escape(f"layers[2].mlp.{name}")):
            with model.trace(ids(5)):
                value = getattr(model.layers[BLOCK].mlp, name)
                setattr(model.layers[BLOCK].mlp, name, spoil(value))


def test_another_experts_implementation_says_what_it_does_not_hold():
    model = tiny(SHAPE)
    config: Any = model._module.config
    config._experts_implementation = "deepgemm"
    path = "layers[2].mlp.expert_outputs"
    assert not model.has(path)
    assert "experts implementation 'deepgemm'" in (model.why_not(path) or "")
    assert "eager, batched_mm, grouped_mm" in (model.why_not(path) or "")
    with pytest.raises(Unavailable, match="routed_output, their sum"):
        model.layers[2].mlp.expert_outputs
    for name in (
        "router_logits",
        "router_probabilities",
        "expert_weights",
        "expert_indices",
        "routed_output",
    ):
        assert model.has(f"layers[2].mlp.{name}")
