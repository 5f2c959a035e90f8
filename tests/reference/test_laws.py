"""What follows from the definitions: the laws that the operations obey, on random numbers."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from gemloupe.reference import ops
from tests.reference.numbers import normal, seeds, sizes, tensors

N, M = 5, 3
positive = st.floats(0.01, 100)


def close(found: Tensor, expected: Tensor | float, within: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(found)
    torch.testing.assert_close(found, expected, rtol=within, atol=within)


# ---- softmax ----------------------------------------------------------------------------------------------


@given(scores=tensors(M, N, scale=3), mask=tensors(M, N))
def test_softmax_sums_to_one_over_the_visible_and_is_zero_elsewhere(scores: Tensor, mask: Tensor):
    visible = mask > 0
    pattern = ops.softmax(scores, visible)
    assert (pattern[~visible] == 0).all()
    assert (pattern[visible] > 0).all()
    close(pattern.sum(-1), visible.any(-1).double())


@given(scores=tensors(M, N, scale=3), mask=tensors(M, N), shift=st.floats(-1000, 1000))
def test_softmax_is_the_same_for_shifted_scores(scores: Tensor, mask: Tensor, shift: float):
    close(ops.softmax(scores + shift, mask > 0), ops.softmax(scores, mask > 0), within=1e-10)


@given(scores=tensors(N, scale=3), mask=tensors(N), seed=seeds)
def test_softmax_moves_with_its_scores(scores: Tensor, mask: Tensor, seed: int):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    close(ops.softmax(scores[order], (mask > 0)[order]), ops.softmax(scores, mask > 0)[order])


@given(scores=tensors(N, scale=3), mask=tensors(N))
def test_softmax_has_quotients_that_the_scores_differences_decide(scores: Tensor, mask: Tensor):
    seen = mask > 0
    logs = ops.softmax(scores, seen)[seen].log()
    close(logs - logs[:1], scores[seen] - scores[seen][:1])


@given(scores=tensors(N), hidden=st.floats(-1e300, 1e300))
def test_softmax_does_not_see_what_is_hidden(scores: Tensor, hidden: float):
    visible = torch.arange(N) != 2
    scores[0] = 700  # whose exponential a sum of a few would overflow
    pattern = ops.softmax(scores, visible)
    scores[2] = hidden
    assert torch.equal(ops.softmax(scores, visible), pattern)
    assert torch.equal(ops.softmax(scores), ops.softmax(scores, torch.ones(N, dtype=torch.bool)))


# ---- attention --------------------------------------------------------------------------------------------


@st.composite
def attentions(draw: st.DrawFn, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; as many queries as keys if not said otherwise."""
    random = torch.Generator().manual_seed(draw(seeds))
    keys, heads, group, width = draw(st.integers(2, 7)), draw(sizes), draw(sizes), draw(sizes)
    q = normal(random, queries or keys, heads, group, width)
    return q, normal(random, keys, heads, width), normal(random, keys, heads, width)


def in_place(q: Tensor) -> Tensor:
    return torch.arange(q.shape[0])


@given(qkv=attentions(), scale=positive, beyond=st.integers(0, 3))
def test_a_window_that_spans_the_sequence_is_no_window(qkv: tuple, scale: float, beyond: int):
    q, k, v = qkv
    found = ops.sliding_gqa(scale, len(k) + beyond, in_place(q), q, k, v)
    close(found, ops.causal_gqa(scale, in_place(q), q, k, v))


@given(qkv=attentions(), scale=positive)
def test_the_narrowest_windows_see_nothing_and_the_query_itself(qkv: tuple, scale: float):
    q, k, v = qkv
    assert (ops.sliding_gqa(scale, 0, in_place(q), q, k, v) == 0).all()
    close(ops.sliding_gqa(scale, 1, in_place(q), q, k, v), v[:, :, None].expand_as(q))


@given(qkv=attentions(), window=st.integers(1, 8))
def test_each_query_of_a_window_attends_to_its_last_keys_alone(qkv: tuple, window: int):
    q, k, v = qkv
    found = ops.sliding_gqa(1.0, window, in_place(q), q, k, v)
    for s in range(len(q)):
        seen = slice(max(0, s - window + 1), s + 1)
        close(found[s], ops.decode_gqa(1.0, q[s], k[seen], v[seen]))


@given(qkv=attentions(), scale=positive)
def test_decoding_is_the_last_row_of_causal_attention(qkv: tuple, scale: float):
    q, k, v = qkv
    close(ops.decode_gqa(scale, q[-1], k, v), ops.causal_gqa(scale, in_place(q), q, k, v)[-1])


@given(qkv=attentions(queries=1), scale=positive, seed=seeds)
def test_decoding_does_not_mind_the_order_of_its_keys(qkv: tuple, scale: float, seed: int):
    (q,), k, v = qkv
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed))
    close(ops.decode_gqa(scale, q, k[order], v[order]), ops.decode_gqa(scale, q, k, v))


@given(qkv=attentions(), scale=positive)
def test_a_group_of_one_query_head_is_plain_attention(qkv: tuple, scale: float):
    q, k, v = qkv
    found = ops.causal_gqa(scale, in_place(q), q[:, :, :1], k, v)[:, :, 0]
    heads = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q[:, :, 0], k, v)), is_causal=True, scale=scale
    )
    close(found, heads.transpose(0, 1), within=1e-10)


@given(qkv=attentions(), scale=positive)
def test_grouped_heads_are_plain_attention_with_each_key_head_repeated(qkv: tuple, scale: float):
    q, k, v = qkv
    heads, group = q.shape[1:3]
    repeated = (x.repeat_interleave(group, 1) for x in (k, v))
    plain = ops.causal_gqa(scale, in_place(q), q.reshape(len(q), heads * group, 1, -1), *repeated)
    close(ops.causal_gqa(scale, in_place(q), q, k, v), plain.view_as(q))


@given(qkv=attentions(), place=st.integers(0, 6), seed=seeds)
def test_nothing_done_to_unseen_keys_changes_anything(qkv: tuple, place: int, seed: int):
    q, k, v = qkv
    place, random = min(place, len(k) - 1), torch.Generator().manual_seed(seed)
    before = ops.causal_gqa(1.0, torch.tensor([place]), q[:1], k, v)
    order = torch.cat(
        [torch.arange(place + 1), place + 1 + torch.randperm(len(k) - place - 1, generator=random)]
    )
    close(ops.causal_gqa(1.0, torch.tensor([place]), q[:1], k[order], v[order]), before)
    k[place + 1 :], v[place + 1 :] = 1e6, -1e6
    close(ops.causal_gqa(1.0, torch.tensor([place]), q[:1], k, v), before)


@given(qkv=attentions())
def test_a_query_before_the_first_key_sees_nothing(qkv: tuple):
    q, k, v = qkv
    assert (ops.causal_gqa(1.0, in_place(q) - len(q), q, k, v) == 0).all()


@given(qkv=attentions(), scale=positive)
def test_a_mix_lies_among_the_values_seen(qkv: tuple, scale: float):
    q, k, v = qkv
    found = ops.causal_gqa(scale, in_place(q), q, k, v)
    low, high = (getattr(v, f"cum{end}")(0).values[:, :, None] for end in ("min", "max"))
    assert ((low - 1e-12 <= found) & (found <= high + 1e-12)).all()


@given(qkv=attentions(), factor=positive)
def test_attention_is_linear_in_its_values_and_the_scale_is_the_queries(qkv: tuple, factor: float):
    q, k, v = qkv
    one = ops.causal_gqa(factor, in_place(q), q, k, v)
    close(ops.causal_gqa(factor, in_place(q), q, k, -3 * v), -3 * one)
    close(ops.causal_gqa(1.0, in_place(q), factor * q, k, v), one)
    close(ops.causal_gqa(1.0, in_place(q), q, factor * k, v), one)


@given(qkv=attentions())
def test_with_scale_zero_a_query_averages_what_it_sees(qkv: tuple):
    q, k, v = qkv
    means = v.cumsum(0) / torch.arange(1, len(v) + 1)[:, None, None]
    close(ops.causal_gqa(0.0, in_place(q), q, k, v), means[:, :, None].expand_as(q))


@given(out=tensors(M, N), gate=tensors(M, N, scale=3))
def test_a_sigmoid_gate_and_its_opposite_share_what_they_gate(out: Tensor, gate: Tensor):
    close(ops.sigmoid_gate(out, gate) + ops.sigmoid_gate(out, -gate), out)
    close(ops.sigmoid_gate(out, torch.zeros_like(gate)), out / 2)


# ---- linear maps, activations, residuals, embeddings ------------------------------------------------------


@given(w=tensors(M, N), u=tensors(M, N), x=tensors(4, N), y=tensors(4, N), a=positive)
def test_linear_is_linear_in_both_arguments(w: Tensor, u: Tensor, x: Tensor, y: Tensor, a: float):
    close(ops.linear(w, a * x + y), a * ops.linear(w, x) + ops.linear(w, y), within=1e-10)
    close(ops.linear(a * w + u, x), a * ops.linear(w, x) + ops.linear(u, x), within=1e-10)
    close(ops.linear(torch.eye(N), x), x)


@given(w=tensors(M, N), u=tensors(4, M), x=tensors(4, N))
def test_a_linear_map_after_another_is_that_of_their_product(w: Tensor, u: Tensor, x: Tensor):
    close(ops.linear(u, ops.linear(w, x)), ops.linear(u @ w, x))
    module = torch.nn.Linear(N, M, bias=False, dtype=torch.float64)
    module.weight = torch.nn.Parameter(w)
    close(ops.linear(w, x), module(x).detach())


@given(gate=tensors(M, N), up=tensors(M, N), x=tensors(4, N))
def test_gate_up_is_its_two_halves(gate: Tensor, up: Tensor, x: Tensor):
    both = ops.gate_up(gate, up, x)
    assert torch.equal(both[:, :M], ops.linear(gate, x))
    assert torch.equal(both[:, M:], ops.linear(up, x))
    close(both, ops.linear(torch.cat([gate, up]), x))


@given(gate=tensors(M, N), up=tensors(M, N, scale=2))
def test_the_gated_activations_are_the_activation_of_the_first_half(gate: Tensor, up: Tensor):
    both = torch.cat([gate, up], -1)
    close(ops.silu_mul(both), torch.nn.functional.silu(gate) * up)
    close(ops.gelu_mul(both), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    close(ops.silu_mul(torch.cat([gate, torch.ones_like(up)], -1)), ops.silu(gate))
    close(ops.gelu_mul(torch.cat([gate, torch.ones_like(up)], -1)), ops.gelu_tanh(gate))


@given(x=tensors(M, N, scale=4))
def test_an_activation_and_its_mirror_image_differ_by_the_input(x: Tensor):
    close(ops.silu(x) - ops.silu(-x), x)
    close(ops.gelu_tanh(x) - ops.gelu_tanh(-x), x)
    close(ops.sigmoid(x) + ops.sigmoid(-x), 1)


@given(x=tensors(M, N), h=tensors(M, N), r=st.floats(-3, 3))
def test_a_residual_adds_a_multiple(x: Tensor, h: Tensor, r: float):
    assert torch.equal(ops.residual(0, x, h), x)
    assert torch.equal(ops.residual(1, x, h), x + h)
    close(ops.residual(-r, ops.residual(r, x, h), h), x)


@given(table=tensors(M, N), seed=seeds, c=positive)
def test_an_embedding_is_a_linear_map_of_the_token(table: Tensor, seed: int, c: float):
    tokens = torch.randint(M, (2, 4), generator=torch.Generator().manual_seed(seed))
    one_hot = torch.nn.functional.one_hot(tokens, M).double()
    close(ops.embed(c, table, tokens), c * ops.linear(table.T, one_hot))


@given(weight=tensors(M, N), x=tensors(4, N), multiplier=positive, cap=st.floats(1, 50))
def test_the_head_is_a_linear_map_that_may_be_capped(
    weight: Tensor, x: Tensor, multiplier: float, cap: float
):
    raw = ops.lm_head(multiplier, None, weight, x)
    close(raw, multiplier * ops.linear(weight, x))
    close(ops.lm_head(multiplier, cap, weight, x), ops.softcap(cap, raw))
    close(ops.lm_head(multiplier, 1e9, weight, x), raw, within=1e-6)


@given(x=tensors(N, scale=20), cap=st.floats(1, 50))
def test_the_soft_cap_is_odd_monotone_and_bounded(x: Tensor, cap: float):
    capped = ops.softcap(cap, x)
    assert torch.equal(ops.softcap(cap, -x), -capped)
    assert torch.equal(capped.sign(), x.sign())
    assert (capped.abs() <= cap).all()
    assert (capped.abs() <= x.abs()).all()
    assert (ops.softcap(cap, x.sort().values).diff() >= 0).all()
    close(ops.softcap(cap, 1e-5 * x), 1e-5 * x, within=1e-9)


@given(x=tensors(N), cap=st.floats(5, 50))
def test_the_soft_cap_can_be_undone(x: Tensor, cap: float):
    close(cap * torch.atanh(ops.softcap(cap, x) / cap), x, within=1e-9)


# ---- norms ------------------------------------------------------------------------------------------------


@given(x=tensors(M, N), w=tensors(N), by=positive)
def test_a_norm_without_eps_does_not_see_the_scale(x: Tensor, w: Tensor, by: float):
    close(ops.rmsnorm(0, by * x, w), ops.rmsnorm(0, x, w))
    close(ops.rmsnorm(0, -x, w), -ops.rmsnorm(0, x, w))
    close(ops.rms(0, by * x), by * ops.rms(0, x))


@given(x=tensors(M, N), eps=st.floats(1e-6, 1))
def test_a_norm_leaves_a_mean_square_of_one(x: Tensor, eps: float):
    close(ops.rms(0, ops.rmsnorm_unit(0, x)), 1)
    assert (ops.rms(0, ops.rmsnorm_unit(eps, x)) < 1).all()
    close(ops.rms(eps, x).square() - eps, x.square().mean(-1))
    close(ops.rms(eps, torch.zeros(N)), math.sqrt(eps))


@given(x=tensors(M, N), w=tensors(N), eps=st.floats(1e-6, 1))
def test_a_norm_times_the_rms_is_the_row_times_the_weight(x: Tensor, w: Tensor, eps: float):
    close(ops.rmsnorm(eps, x, w) * ops.rms(eps, x)[:, None], x * w)
    close(ops.rmsnorm(eps, x, w), torch.nn.functional.rms_norm(x, (N,), w, eps))


@given(x=tensors(M, N), z=tensors(M, N), w=tensors(N), eps=st.floats(1e-6, 1))
def test_the_norms_are_each_other_with_other_weights(x: Tensor, z: Tensor, w: Tensor, eps: float):
    close(ops.rmsnorm_offset(eps, x, w), ops.rmsnorm(eps, x, 1 + w))
    close(ops.rmsnorm_unit(eps, x), ops.rmsnorm(eps, x, torch.ones(N)))
    close(ops.rmsnorm_offset(eps, x, torch.zeros(N)), ops.rmsnorm_unit(eps, x))
    close(ops.rmsnorm_gated(eps, x, z, w), ops.rmsnorm(eps, x, w) * ops.silu(z))
    close(ops.l2norm(eps, x), ops.rmsnorm_unit(eps / N, x) / math.sqrt(N))


@given(x=tensors(M, N))
def test_l2norm_without_eps_leaves_rows_of_length_one(x: Tensor):
    close(ops.l2norm(0, x).norm(dim=-1), 1)


# ---- rotary embedding -------------------------------------------------------------------------------------

WIDTH = 8
positions = st.integers(0, 100_000)
thetas = st.sampled_from([10_000.0, 1_000_000.0, 2.0])


@given(theta=thetas, denom=st.integers(1, 20), active=st.integers(0, 6))
def test_frequencies_fall_from_one_and_end(theta: float, denom: int, active: int):
    found = ops.inv_freq(theta, denom, active, torch.arange(6))
    assert (found[active:] == 0).all()
    assert (found[:active] > 0).all()
    assert (found[:active].diff() < 0).all()
    if active:
        assert found[0] == 1
    close(found[1:active], found[: max(active - 1, 0)] * theta ** (-2 / denom))


def turned(x: Tensor, pos: int, theta: float, active: int = 3) -> Tensor:
    return ops.rope(theta, WIDTH, WIDTH, active, torch.tensor(pos), x)


@given(x=tensors(M, WIDTH), pos=positions, theta=thetas, active=st.integers(0, 4))
def test_turning_keeps_the_length_of_a_head_and_of_each_pair(x: Tensor, pos: int, theta: float, active: int):
    found = turned(x, pos, theta, active)
    pairs, before = (y.unflatten(-1, (2, WIDTH // 2)) for y in (found, x))
    close(pairs.norm(dim=-2), before.norm(dim=-2))
    close(found.norm(dim=-1), x.norm(dim=-1))


@given(
    q=tensors(WIDTH),
    k=tensors(WIDTH),
    at=st.integers(0, 500),
    back=st.integers(0, 500),
    shift=st.integers(0, 500),
)
def test_scores_depend_on_the_difference_of_positions_alone(
    q: Tensor, k: Tensor, at: int, back: int, shift: int
):
    score = turned(q, at + back, 10_000.0) @ turned(k, at, 10_000.0)
    moved = turned(q, at + back + shift, 10_000.0) @ turned(k, at + shift, 10_000.0)
    close(moved, score, within=1e-10)
    close(turned(q, back, 10_000.0) @ k, score, within=1e-10)


@given(x=tensors(M, WIDTH), theta=thetas, active=st.integers(0, 4))
def test_turning_is_the_identity_at_position_zero(x: Tensor, theta: float, active: int):
    assert torch.equal(turned(x, 0, theta, active), x)


@given(x=tensors(M, WIDTH), pos=positions, theta=thetas, active=st.integers(0, 4))
def test_inactive_pairs_stay_as_they_are(x: Tensor, pos: int, theta: float, active: int):
    found = turned(x, pos, theta, active).unflatten(-1, (2, WIDTH // 2))
    assert torch.equal(found[..., active:], x.unflatten(-1, (2, WIDTH // 2))[..., active:])
    if active and pos:
        assert not torch.equal(found[..., :active], x.unflatten(-1, (2, WIDTH // 2))[..., :active])


@given(x=tensors(M, WIDTH), rot=st.integers(0, WIDTH), pos=positions)
def test_coordinates_past_the_rotated_ones_stay_as_they_are(x: Tensor, rot: int, pos: int):
    found = ops.rope_std(10_000.0, rot, torch.tensor(pos), x)
    past = rot // 2 * 2
    assert torch.equal(found[:, past:], x[:, past:])


@given(x=tensors(M, WIDTH), one=st.integers(0, 500), two=st.integers(0, 500))
def test_turning_twice_is_turning_by_the_sum(x: Tensor, one: int, two: int):
    close(turned(turned(x, one, 10_000.0), two, 10_000.0), turned(x, one + two, 10_000.0), within=1e-10)
    close(turned(turned(x, one, 10_000.0), -one, 10_000.0), x, within=1e-10)


@given(x=tensors(M, WIDTH), theta=thetas, rot=st.integers(0, WIDTH), pos=positions)
def test_the_standard_embedding_is_the_one_in_which_every_pair_turns(
    x: Tensor, theta: float, rot: int, pos: int
):
    assume(rot > 0)
    place = torch.tensor(pos)
    found = ops.rope_std(theta, rot, place, x)
    assert torch.equal(found, ops.rope(theta, rot, rot, rot // 2, place, x))
    assert torch.equal(found, ops.rope(theta, rot, rot, rot, place, x))


@given(x=tensors(M, WIDTH), pos=positions, active=st.integers(0, 4))
def test_a_pair_is_turned_as_a_complex_number(x: Tensor, pos: int, active: int):
    pairs = torch.complex(x[:, : WIDTH // 2], x[:, WIDTH // 2 :])
    angle = pos * ops.inv_freq(10_000.0, WIDTH, active, torch.arange(WIDTH // 2))
    expected = pairs * torch.exp(1j * angle)
    close(turned(x, pos, 10_000.0, active), torch.cat([expected.real, expected.imag], -1), within=1e-10)
