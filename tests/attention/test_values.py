"""Each value inside the attention is what its definition says, recomputed from weights and inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.values import CALL, CASES, of_block, sees, with_heads
from tests.core.models import Case
from tests.core.oracle import Oracle, norm, softmax, turn
from tests.core.places import reading, rows_of

# Largest difference allowed, in units of the dtype's eps and of the largest expected number.
ROUNDINGS = {torch.float32: 20, torch.bfloat16: 6}
every_case_once = pytest.mark.parametrize("case", CASES, ids=str)


def close(value: Tensor, wanted: Tensor, where: object, roundings: float | None = None) -> None:
    assert value.shape == wanted.shape, where
    allowed = (roundings or ROUNDINGS[value.dtype]) * torch.finfo(value.dtype).eps * wanted.abs().max()
    assert (value.detach().double() - wanted).abs().max() <= allowed, where


def invokes(case: Case):
    """`(values, mask)` of each invoke."""
    for invoke, values in enumerate(reading(case)):
        yield values, rows_of(case.inputs, invoke)["attention_mask"]


@every_case_once
def test_queries_keys_and_values_are_projected_normed_and_turned(case):
    oracle = Oracle(case.bare())
    for values, mask in invokes(case):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for block in range(oracle.blocks):
            got = of_block(values, block)
            x = got["attention_input"].double()
            scale = oracle.of(block, "self_attn.q_norm.weight")
            queries = (x @ oracle.of(block, "self_attn.q_proj.weight").T).unflatten(-1, (-1, len(scale)))
            queries = norm(queries, scale, oracle.eps)
            queries = turn(queries, positions, oracle.text.rope_parameters[oracle.kinds[block]])
            close(got["attention_queries"], queries.transpose(1, 2), (block, "queries"))
            source = of_block(values, oracle.source(block))
            wanted = oracle.keys_and_values(
                oracle.source(block), source["attention_input"].double(), positions
            )
            for name, one in zip(("keys", "values"), wanted, strict=True):
                close(got[f"attention_{name}"], one.transpose(1, 2), (block, name))


@every_case_once
def test_every_block_attends_with_exactly_its_source_s_own_keys_and_values(case):
    oracle = Oracle(case.bare())
    for values, _ in invokes(case):
        for block in range(oracle.blocks):
            source = oracle.source(block)
            assert ("own_keys" in of_block(values, block)) == (source == block)
            for name in ("keys", "values"):
                mine, its = of_block(values, block), of_block(values, source)
                assert torch.equal(mine[f"attention_{name}"], its[f"own_{name}"]), (block, name)


@every_case_once
def test_scores_are_the_products_where_a_query_may_look(case):
    oracle = Oracle(case.bare())
    for values, mask in invokes(case):
        for block in range(oracle.blocks):
            got = of_block(values, block)
            queries, keys = got["attention_queries"].double(), got["attention_keys"].double()
            scores = torch.einsum("bhqd,bhkd->bhqk", queries, with_heads(keys, queries.shape[1]))
            seen = sees(oracle, block, mask).expand_as(scores)
            close(got["attention_scores"][seen], scores[seen], block)
            hidden = got["attention_scores"][~seen]
            assert (hidden <= -1e38).all(), block
            if case.attention == "sdpa":
                assert (hidden == -torch.inf).all(), block


@every_case_once
def test_pattern_is_the_softmax_of_the_scores(case):
    oracle = Oracle(case.bare())
    for values, mask in invokes(case):
        real = mask[0].bool()
        for block in range(oracle.blocks):
            got = of_block(values, block)
            pattern, scores = got["attention_probabilities"], got["attention_scores"]
            assert not pattern.isnan().any(), block
            pattern, scores = pattern[:, :, real], scores[:, :, real]
            seen = sees(oracle, block, mask)[:, :, real].expand_as(pattern)
            close(pattern, softmax(scores.double().masked_fill(~seen, -torch.inf)), block)
            assert (pattern[~seen] == 0).all(), block
            # A row's roundings add up, so the sum is allowed more of them.
            close(pattern.double().sum(-1).to(pattern.dtype), torch.ones(pattern.shape[:3]).double(), block)


@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=str)
def test_a_padded_query_attends_to_nothing_or_evenly(case):
    """transformers' eager mask leaves such a row even; a fused kernel leaves it zero."""
    for values, mask in list(invokes(case))[1:]:
        padding = ~mask[0].bool()
        for block in range(case.bare().config.get_text_config().num_hidden_layers):
            got = of_block(values, block)
            pattern = got["attention_probabilities"][:, :, padding]
            assert all(not got[name].isnan().any() for name in CALL), block
            if case.attention == "sdpa":
                assert not pattern.any()
                assert not got["attention_head_outputs"][:, padding].any()
            else:
                close(pattern, torch.full(pattern.shape, 1 / pattern.shape[-1]).double(), block)


@every_case_once
def test_head_outputs_are_the_pattern_times_the_values(case):
    for values, _mask in invokes(case):
        for block in range(case.bare().config.get_text_config().num_hidden_layers):
            got = of_block(values, block)
            pattern, mixed = got["attention_probabilities"].double(), got["attention_values"].double()
            wanted = torch.einsum("bhqk,bhkd->bqhd", pattern, with_heads(mixed, pattern.shape[1]))
            close(got["attention_head_outputs"], wanted, block)


@every_case_once
def test_projection_is_o_proj_of_the_heads(case):
    oracle = Oracle(case.bare())
    for values, _ in invokes(case):
        for block in range(oracle.blocks):
            got = of_block(values, block)
            wanted = got["attention_head_outputs"].double().flatten(2)
            wanted = wanted @ oracle.of(block, "self_attn.o_proj.weight").T
            close(got["attention_projection"], wanted, block)
