"""Statistics of a store against float64 sums over all its rows at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemloupe import harvest
from gemloupe.errors import UnknownName
from gemloupe.harvesting.statistics import Massive, Moments, Sums, ValueStatistics, merged
from tests.core.models import Case
from tests.harvesting.data import OUTPUT, model, rows_of_ids

HEADS = "layers[4].self_attn.attention_head_outputs"
SCORES = "layers[4].self_attn.attention_scores"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_statistics_are_those_of_the_stored_rows(dtype: torch.dtype | None, tmp_path: Path):
    values = [OUTPUT, HEADS, SCORES, "input_ids"]
    store = harvest(
        model(), rows_of_ids(), values, tmp_path, tokens_per_batch=20, shard_bytes=10_000, dtype=dtype,
        progress=False,
    )  # fmt: skip
    assert len(store.shards) > 3
    assert store.statistics.keys() == {OUTPUT, HEADS}  # whole numbers and raw scores have none
    for path in (OUTPUT, HEADS):
        found, rows = store.statistics[path], store[path][:].double()
        norms = rows.flatten(1).square().sum(1).sqrt()
        assert found.count == len(rows)
        assert found.mean.shape == found.variance.shape == rows.shape[1:]
        torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.std, rows.std(0, correction=0), rtol=1e-10, atol=1e-12)
        numbers = torch.tensor([found.norm_mean, found.norm_std, found.norm_min, found.norm_max])
        wanted = torch.stack([norms.mean(), norms.std(correction=0), norms.min(), norms.max()])
        torch.testing.assert_close(numbers.double(), wanted, rtol=1e-6, atol=0)
        assert found.massive is None


ROWS = st.lists(st.integers(-1000, 1000), min_size=3, max_size=3)


@given(st.lists(ROWS, min_size=1, max_size=20), st.data())
def test_moments_of_parts_make_up_those_of_the_whole(rows: list[list[int]], data: st.DataObject):
    # A mean far from zero, where sums of squares lose everything.
    whole = torch.tensor(rows, dtype=torch.float64) / 16 + 1e8
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    total = Moments(3)
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = Moments(3)
        part.add(whole[start:stop])
        total.merge(part.count, part.mean, part.m2)
    assert total.count == len(rows)
    exact = whole - 1e8
    torch.testing.assert_close(total.mean - 1e8, exact.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(total.m2, (exact - exact.mean(0)).square().sum(0), rtol=1e-6, atol=1e-5)


def sums(rows: torch.Tensor, sequences: torch.Tensor) -> Sums:
    found = Sums(tuple(rows.shape[1:]), robust=True)
    assert found.add(rows, sequences, sequences % 7)
    return found


def test_the_robust_option_finds_massive_activations_and_outlier_dimensions():
    torch.manual_seed(0)
    rows = torch.randn(500, 8, 5) / 10
    rows[:, 3, 2] *= 40  # an outlier dimension, of no massive activation
    rows[17, 0, 4] = -700.0
    rows[400, 7, 1] = 350.0
    rows[50, 1, 1] = 99.0  # below 100
    rows[60] *= 10_000  # large all over: a row's norm, no massive activation
    sequences = torch.arange(500)
    parts = [sums(rows[:300], sequences[:300]), sums(rows[300:], sequences[300:])]
    total = merged([part.tensors("value") for part in parts])["value"]
    found = ValueStatistics.of(total)
    assert found.massive_count == 2
    assert found.massive == (Massive(17, 3, (0, 4), -700.0), Massive(400, 1, (7, 1), 350.0))
    kept = torch.ones(500, dtype=torch.bool)
    kept[[17, 400]] = False
    ordinary = rows[kept].double()
    assert found.ordinary_count == 498
    assert found.ordinary_mean is not None
    assert found.ordinary_variance is not None
    torch.testing.assert_close(found.ordinary_mean, ordinary.mean(0))
    torch.testing.assert_close(found.ordinary_variance, ordinary.var(0, correction=0))
    rms = rows.double().square().mean(0).sqrt()
    wanted = (rms >= 6 * rms.median()).nonzero().tolist()
    assert found.outliers is not None
    assert sorted(map(list, found.outliers)) == wanted
    assert found.outliers == tuple(sorted(found.outliers, key=lambda at: -rms[at]))


def test_an_outlier_dimension_is_one_far_above_the_others():
    rows = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    assert ValueStatistics.of(sums(rows, torch.arange(400))).outliers == ()
    rows[:, 9] += 8
    assert ValueStatistics.of(sums(rows, torch.arange(400))).outliers == ((9,),)


def test_many_massive_activations_are_counted_and_the_largest_are_listed():
    rows = torch.zeros(200, 4)
    rows[:, 1] = torch.arange(200) + 101.0
    found = ValueStatistics.of(sums(rows, torch.arange(200)))
    assert found.massive_count == 200
    assert found.massive is not None
    assert [massive.value for massive in found.massive] == [300.0 - i for i in range(64)]
    assert found.ordinary_count == 0


def test_a_robust_harvest_keeps_what_it_found(tmp_path: Path):
    of = model()
    norm = of.layers[3]._module.post_feedforward_layernorm
    with torch.no_grad():
        before = norm.weight[5].item()
        norm.weight[5] = 1e6
    try:
        store = harvest(
            of, rows_of_ids(), ["layers[3].mlp.mlp_output", "layers[2].layer_output"], tmp_path, robust=True,
            tokens_per_batch=20, shard_bytes=10_000, progress=False,
        )  # fmt: skip
    finally:
        with torch.no_grad():
            norm.weight[5] = before
    found = store.statistics["layers[3].mlp.mlp_output"]
    assert found.outliers == ((5,),)
    assert found.massive
    for one in found.massive:
        assert one.dimension == (5,)
        rows = store["layers[3].mlp.mlp_output"][store.of_sequence(one.sequence)]
        assert float(rows[one.position][one.dimension]) == one.value
    plain = store.statistics["layers[2].layer_output"]
    assert (plain.massive_count, plain.ordinary_count) == (0, plain.count)


def test_what_has_no_statistics_says_why(tmp_path: Path):
    of = Case("26b-a4b").model()
    scores = "layers[0].self_attn.attention_scores"
    values = ["layers[2].mlp.expert_indices", scores, "layers[2].layer_output"]
    found = harvest(of, rows_of_ids(), values, tmp_path / "s", progress=False).statistics
    assert list(found) == ["layers[2].layer_output"]
    assert found[of.layers[2].layer_output].count == found["layers[2].layer_output"].count
    for path in ("layers[2].mlp.expert_indices", scores):
        with pytest.raises(UnknownName, match="has no statistics: whole numbers and masks"):
            found[path]
    with pytest.raises(
        UnknownName, match=r"was not harvested; there are .*Did you mean layers\[2\]\.layer_output"
    ):
        found["layers[2].layer_outptu"]
    assert "layers[2].layer_output" in repr(found)
