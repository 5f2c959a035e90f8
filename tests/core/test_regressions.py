"""What a hostile reader broke once: each stays mended."""

from __future__ import annotations

import pytest
import torch

from gemloupe import StandardizedTransformer
from gemloupe.errors import BadArgument, BadWrite, LateEdit, OutOfOrder, StepsWarning, UnknownName
from gemloupe.testing import tiny

ONE, TWO = "The capital of France is", "The capital of Italy is big"


@pytest.fixture(scope="module")
def model() -> StandardizedTransformer:
    return tiny("e2b")


@pytest.fixture(scope="module")
def mixture() -> StandardizedTransformer:
    return tiny("26b-a4b", experts_implementation="eager")


def test_a_read_before_a_barrier_leaves_the_write_after_it_alone(model):
    handed: dict[str, torch.Tensor] = {}
    written = []
    for reads in (False, True):
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(ONE):
                handed["stream"] = model.layers[4].layer_output[:, -1].clone()
                barrier()
            with tracer.invoke(TWO):
                if reads:
                    model.layers[2].layer_output
                barrier()
                model.layers[4].layer_output[:, -1] = handed["stream"]
                written.append(model.raw_logits.detach().clone())
    assert torch.equal(*written)


def test_an_edit_in_time_before_a_barrier_is_kept(model):
    with model.trace(TWO):
        plain = model.logits.save()
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TWO):
            model.layers[2].layer_output[:] = 0
            barrier()
            edited = model.logits.save()
        with tracer.invoke(ONE):
            barrier()
    assert not torch.allclose(edited, plain, atol=1e-2)


def test_a_trace_under_inference_mode_is_refused(model):
    with torch.inference_mode():
        with pytest.raises(BadArgument, match="no_grad"):
            with model.trace(ONE):
                model.layers[4].self_attn.attention_values[:] = 0


@pytest.mark.parametrize("option", ["num_beams", "num_return_sequences"])
def test_invokes_whose_rows_are_multiplied_are_refused(model, option):
    with pytest.raises(BadArgument, match=option):
        with model.generate(max_new_tokens=2, **{option: 2}) as tracer:
            with tracer.invoke(ONE):
                model.layers[3].layer_output[:] = 0
            with tracer.invoke(TWO):
                tracer.result.save()


def test_values_edited_after_an_edit_of_the_model_fixed_the_pattern_are_used(model):
    with model.edit() as (_tracer, edited):
        pattern = edited.layers[4].self_attn.attention_probabilities
        pattern[:, 2] = 0
    with edited.trace(ONE):
        edited.layers[4].self_attn.attention_values[:] = 0
        heads = edited.layers[4].self_attn.attention_head_outputs.save()
    assert heads.detach().abs().max() == 0
    with pytest.raises(OutOfOrder, match="fixed the scores or the pattern"):
        with edited.trace(ONE):
            edited.layers[4].self_attn.attention_keys[:] = 0
            edited.layers[4].layer_output.save()


def test_a_late_edit_through_a_slice_of_a_view_is_told(model):
    with pytest.raises(LateEdit, match=r"layers\[3\]\.mlp\.mlp_output"):
        with model.trace() as tracer:
            with tracer.invoke(ONE):
                model.logits.save()
            with tracer.invoke(TWO):
                part = model.layers[3].mlp.mlp_output[:, -1]
                model.layers[5].layer_output.sum()
                part[:] = 100


@pytest.mark.parametrize("steered_first", [True, False])
def test_skipped_blocks_hand_on_what_was_edited_between_them(model, steered_first):
    push = torch.ones(model.hidden_size)
    with model.trace(ONE):
        model.skip_layers(2, 4)
        plain = model.layers[4].layer_output.save()
    with model.trace(ONE):
        if steered_first:
            model.steer(3, push)
        model.skip_layers(2, 4)
        if not steered_first:
            model.steer(3, push)
        model.layers[2].layer_output[:] += 5
        edited = model.layers[4].layer_output.save()
    assert torch.allclose(edited, plain + 6, atol=1e-5)


def test_generation_is_joined_alike_with_and_without_a_cache(model):
    names = [
        "layers[4].layer_output",
        "layers[3].self_attn.attention_keys",
        "layers[4].self_attn.attention_probabilities",
    ]
    options = {"max_new_tokens": 3, "do_sample": False}
    cached = model.collect(ONE, names, generate=options)
    uncached = model.collect(ONE, names, generate={**options, "use_cache": False})
    for name in names:
        scale = cached[name].abs().max()
        assert torch.allclose(cached[name], uncached[name], atol=float(1e-5 * scale)), name
    with pytest.raises(BadArgument, match="num_beams"):
        model.collect(ONE, names, generate={**options, "num_beams": 3})


def test_a_loop_honours_its_step_and_waits_for_it(model):
    seen: list[int] = []
    edited: list[int] = []
    with model.generate(ONE, max_new_tokens=5, min_new_tokens=5, do_sample=False) as tracer:
        for step in tracer.iter[0:5:2]:
            model.layers[0].layer_output
            seen.append(step)
    assert seen == [0, 2, 4]
    with pytest.warns(StepsWarning, match="which this call did not make"):  # noqa: PT031
        with model.generate(ONE, max_new_tokens=4, min_new_tokens=4, do_sample=False) as tracer:
            for step in tracer.all():
                if step == 2:
                    model.layers[3].layer_output[:] = 0
                    edited.append(step)
    assert edited == [2]


def test_a_detached_write_stops_the_gradient_in_every_invoke(model):
    found = []
    for second in (False, True):
        with model.trace() as tracer:
            with tracer.invoke(ONE):
                embeddings = model.token_embeddings
                model.layers[4].layer_output = model.layers[4].layer_output.detach()
                loss = model.logits.sum()
                with loss.backward():
                    gradient = embeddings.grad.abs().max().save()
            if second:
                with tracer.invoke(TWO):
                    pass
        found.append(float(gradient))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_what_was_read_under_one_name_is_not_edited_under_another(model):
    with model.trace(ONE):
        clean = model.layers[3].layer_output.save()
        model.layers[4].layer_input[:, -1] = 0
        received = model.layers[4].self_attn.attention_input.save()
    assert clean[:, -1].abs().max() > 0
    assert received[:, -1].abs().max() == 0


def test_experts_of_two_blocks_are_read_in_one_trace(mixture):
    with mixture.trace(ONE):
        plain = mixture.logits.save()
    with mixture.trace(ONE):
        mixture.layers[1].mlp.expert_outputs
        mixture.layers[2].mlp.expert_outputs
        read = mixture.logits.save()
    assert torch.equal(plain, read)
    assert mixture.collect(ONE, "layers.*.mlp.expert_outputs")["layers.*.mlp.expert_outputs"].shape[0] == 6


def test_a_mask_of_positions_covers_the_prompt_of_a_generation(model):
    mask = torch.zeros(1, 25, dtype=torch.bool)
    mask[0, 3] = True
    with model.generate(ONE, max_new_tokens=3, do_sample=False):
        report = model.steer(3, torch.ones(model.hidden_size), positions=mask)
    assert report.counts == {3: 1}


def test_the_next_token_of_a_row_padded_on_the_right_is_its_own(model):
    ids = model.tokenizer([TWO], return_tensors="pt")["input_ids"]
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=ids.dtype)], -1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 4, dtype=ids.dtype)], -1)
    with model.trace(ids):
        alone = model.next_token_probs.save()
    with model.trace(input_ids=padded, attention_mask=mask):
        beside = model.next_token_probs.save()
    assert torch.allclose(alone, beside, atol=1e-5)


def test_routings_that_cannot_be_are_refused(mixture):
    host = mixture.layers[1].mlp
    with pytest.raises(BadArgument, match="one expert twice"):
        with mixture.trace(ONE):
            host.reroute(torch.ones(1, 25, 3, dtype=torch.int64))
    with pytest.raises(BadWrite, match="keeps 0 experts"):
        with mixture.trace(ONE):
            host.router_logits[:] = -torch.inf
            host.mlp_output


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("mlp_output", "layers[3].mlp.mlp_output"),
        ("attention_probabilities", "layers[3].self_attn.attention_probabilities"),
        ("router_logits", "layers[3].mlp.router_logits"),
        ("resid_post", "layer_output"),
        ("resid_mid", "mid_stream"),
        ("attn", "self_attn"),
    ],
)
def test_an_unknown_name_points_to_what_was_meant(model, path, meant):
    with pytest.raises(UnknownName) as caught:
        getattr(model.layers[3], path)
    assert f"Did you mean `{meant}`?" in str(caught.value)


def test_the_gradient_of_two_values_of_one_moment_is_right_beside_a_padded_invoke(mixture):
    found = []
    for beside in (None, "hi"):
        with mixture.trace() as tracer:
            with tracer.invoke(ONE):
                weights = mixture.layers[1].mlp.expert_weights
                mixture.layers[1].mlp.expert_outputs
                loss = mixture.logits[:, -1].sum()
                with loss.backward():
                    gradient = weights.grad.clone().save()
            if beside:
                with tracer.invoke(beside):
                    pass
        found.append(gradient)
    assert torch.allclose(*found, atol=float(1e-4 * found[0].abs().max()))
