"""All that nnsight offers goes on working on the wrapped model, by native names and by standard ones."""

from __future__ import annotations

import copy
from typing import Any

import nnsight
import pytest
import torch
import transformers
from torch import Tensor

from gemloupe import StandardizedTransformer
from gemloupe.testing import SHAPES, save_tiny, tiny, tiny_module, tiny_tokenizer
from tests.core.models import SEED, Case, every_case, ids, padded
from tests.core.places import ATTENTION_CALL, Place, forward_order, reading

GREEDY = {"do_sample": False, "eos_token_id": -1}
CASE = Case("e2b")
both_loads = pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shape
@both_loads
def test_native_names_serve_what_standard_names_do(shape, load):
    case = Case(shape, wrapper=load)
    model, values = case.model(), reading(case)[0]
    stack = model.model.language_model if load else model.model
    with model.trace(case.prompts[0]):
        embedded = stack.embed_tokens.output.save()
        entered = stack.layers[1].input.save()
        normed = stack.layers[1].input_layernorm.output.save()
        projected = stack.layers[1].self_attn.o_proj.output.save()
        inside = stack.layers[1].mlp.down_proj.input.save()
        left = stack.layers[1].output.save()
        raw = model.lm_head.output.save()
        answer = model.output.save()
    for value, place in [
        (embedded, Place("token_embeddings")),
        (entered, Place("layer_input", 1)),
        (normed, Place("attention_input", 1, "self_attn")),
        (projected, Place("attention_projection", 1, "self_attn")),
        (inside, Place("mlp_neurons", 1, "mlp")),
        (left, Place("layer_output", 1)),
        (raw, Place("raw_logits")),
        (answer.logits, Place("logits")),
    ]:
        assert torch.equal(value, values[place]), place
    assert type(answer).__name__.endswith("CausalLMOutputWithPast")


def test_native_and_standard_edits_mix():
    model = CASE.model()
    with model.trace(CASE.prompts[0]):
        model.model.layers[0].output = model.model.layers[0].output * 2
        model.layers[1].mlp.mlp_output = model.layers[1].mlp.mlp_output * 2
        model.model.layers[2].self_attn.o_proj.output[:] = 0
        projection = model.layers[2].self_attn.attention_projection.save()
        native = model.logits.save()
    with model.trace(CASE.prompts[0]):
        model.layers[0].layer_output[:] *= 2
        model.model.layers[1].post_feedforward_layernorm.output[:] *= 2
        model.layers[2].self_attn.attention_projection = torch.zeros_like(projection)
        standard = model.logits.save()
    assert not projection.any()
    assert torch.equal(native, standard)


def test_a_block_can_be_skipped_natively():
    model = Case("31b").model()
    with model.trace(ids(6)):
        entered = model.layers[2].layer_input.save()
        model.layers[2].skip(entered)
        received = model.layers[3].layer_input.save()
    assert torch.equal(received, entered)


def test_a_session_shares_values_between_traces():
    model = CASE.model()
    other = ids(13, salt=1)
    with model.session():
        with model.trace(other):
            stream = model.layers[4].layer_output
        with model.trace(CASE.prompts[0]):
            model.layers[4].layer_output = stream
            patched = model.layers[5].layer_input.save()
    with model.trace(other):
        wanted = model.layers[4].layer_output.save()
    assert torch.equal(patched, wanted)


@pytest.mark.parametrize("style", ["assigned", "in place"])
def test_an_edit_in_place_stays_until_it_is_cleared(style):
    model = tiny("e2b", seed=SEED)
    with model.edit(inplace=True):
        if style == "assigned":
            model.layers[2].mlp.mlp_output = model.layers[2].mlp.mlp_output * 0
        else:
            model.layers[2].mlp.mlp_output[:] = 0
    for _ in range(2):
        with model.trace() as tracer:
            with tracer.invoke(CASE.prompts[0]):
                seen = model.layers[2].mlp.mlp_output.save()
                logits = model.logits.save()
            with tracer.invoke(ids(4)):
                other = model.layers[2].mlp.mlp_output.save()
        assert not seen.any()
        assert not other.any()
        assert not torch.equal(logits, CASE.logits())
    model.clear_edits()
    with model.trace(CASE.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, CASE.logits())


def test_an_edit_of_a_copy_leaves_the_model():
    model = CASE.model()
    with model.edit() as (_tracer, edited):
        edited.layers[2].mlp.mlp_output[:] = 0
    assert edited.has("layers[2].mlp.mlp_output")
    assert edited.num_layers == 10
    with edited.trace(CASE.prompts[0]):
        seen = edited.layers[2].mlp.mlp_output.save()
    with model.trace(CASE.prompts[0]):
        logits = model.logits.save()
    assert not seen.any()
    assert torch.equal(logits, CASE.logits())


def test_an_edit_applies_in_every_step():
    model = CASE.model()
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.layers[2].mlp.mlp_output[:] = 0
    seen = []
    with edited.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            seen.append(nnsight.save(edited.layers[2].mlp.mlp_output))  # noqa: PERF401
    assert [value.any().item() for value in seen] == [False] * 3


SCANNED = every_case(dtypes=(torch.float32,), experts=("batched_mm",), batched=(False,))


@pytest.mark.parametrize("case", SCANNED, ids=str)
def test_a_scan_knows_the_shapes_without_weights(case, tmp_path):
    model = StandardizedTransformer(
        save_tiny(tmp_path, case.shape, **case.options), experts_implementation=case.experts
    )
    shapes: dict[Place, tuple] = {}
    # What is computed from the mask's numbers needs numbers.
    wanted = [p for p in reading(case)[0] if p.block in (None, 1) and p.name not in ATTENTION_CALL]
    with model.scan(case.prompts[0]):
        for place in wanted:
            shapes[place] = tuple(place.read(model).shape)
    assert not model.dispatched
    for place in wanted:
        assert shapes[place] == tuple(reading(case)[0][place].shape), place


def test_a_cache_keeps_what_the_modules_gave():
    model = CASE.model()
    with model.trace(CASE.prompts[0]) as tracer:
        cache = tracer.cache(modules=[model.layers[1], model.layers[2].mlp])
        model.layers[0].layer_output[:] *= 2
        left = model.layers[1].layer_output.save()
    assert torch.equal(cache["model.model.layers.1"].output, left)
    assert "model.model.layers.2.mlp" in cache
    with model.trace(CASE.prompts[0]) as tracer:
        everything = tracer.cache()
    assert torch.equal(everything["model.lm_head"].output, reading(CASE)[0][Place("raw_logits")])


def test_operations_inside_a_forward_can_be_reached():
    model = CASE.model()
    values = reading(CASE)[0]
    assert "attention_interface_1" in str(model.layers[1].self_attn.source)
    with model.trace(CASE.prompts[0]):
        normed = model.layers[1].source.self_input_layernorm_0.output.save()
        interface = model.layers[1].self_attn.source.attention_interface_1.output.save()
        output = model.layers[1].self_attn.attention_projection.save()
    assert torch.equal(normed, values[Place("attention_input", 1, "self_attn")])
    assert interface[0].shape == (1, 13, 4, 16)
    assert torch.equal(output, values[Place("attention_projection", 1, "self_attn")])


@every_shape
@both_loads
def test_generating_traced_or_not_gives_transformers_tokens(shape, load):
    case = Case(shape, wrapper=load)
    model, row = case.model(), case.prompts[0]
    wanted = case.bare().generate(row, max_new_tokens=5, **GREEDY)
    assert torch.equal(model.generate(row, max_new_tokens=5, **GREEDY), wanted)
    steps = []
    with model.generate(row, max_new_tokens=5, **GREEDY) as tracer:
        for _ in tracer.iter[:5]:
            steps.append(nnsight.save((model.logits, model.next_token_probs)))  # noqa: PERF401
        tokens = tracer.result.save()
    assert torch.equal(tokens, wanted)
    for step, (logits, probabilities) in enumerate(steps):
        assert logits[0, -1].argmax() == wanted[0, 13 + step]
        assert torch.equal(probabilities, logits[:, -1].softmax(-1))


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
def test_a_write_to_the_logits_decides_the_next_token(shape):
    model = Case(shape).model()
    with model.generate(max_new_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(ids(5)):
            for step in tracer.iter[:3]:
                model.logits[:, -1, 70 + step] = 1000
        with tracer.invoke(ids(3)):
            for step in tracer.iter[:3]:
                logits = model.logits.clone()
                logits[:, -1, 90 + step] = 1000
                model.logits = logits
        with tracer.invoke():
            tokens = tracer.result.save()
    assert tokens[:, -3:].tolist() == [[70, 71, 72], [90, 91, 92]]


def test_a_pipeline_runs_traced():
    model = CASE.model()
    with model.pipe("a cat", max_new_tokens=3, do_sample=False) as tracer:
        stream = model.layers[2].layer_output.save()
        answer = tracer.result.save()
    assert stream.shape == (1, 6, 40)
    assert answer[0]["generated_text"].startswith("a cat")
    assert model.pipe("a cat", max_new_tokens=3, do_sample=False) == answer


def test_a_stop_ends_the_forward_there():
    model = CASE.model()
    ran = []
    handle = model._module.model.layers[3].register_forward_pre_hook(lambda *_: ran.append(3))
    with model.trace(CASE.prompts[0]) as tracer:
        stream = model.layers[1].layer_output.save()
        tracer.stop()
    handle.remove()
    assert not ran
    assert torch.equal(stream, reading(CASE)[0][Place("layer_output", 1)])


def test_invokes_meet_at_a_barrier():
    model = CASE.model()
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ids(6)):
            stream = model.layers[2].layer_output
            barrier()
            one = model.logits.save()
        with tracer.invoke(ids(6, salt=1)):
            barrier()
            model.layers[2].layer_output = stream
            two = model.layers[3].layer_input.save()
    with model.trace() as tracer:
        with tracer.invoke(ids(6)):
            wanted = model.layers[2].layer_output.save()
        with tracer.invoke(ids(6, salt=1)):
            model.logits.save()
    assert torch.equal(two, wanted)
    assert one.shape == (1, 6, 288)


def test_a_groupless_invoke_sees_all_rows():
    case = Case("26b-a4b", batched=True)
    model = case.model()
    found = {}
    with model.trace() as tracer:
        for row in case.prompts:
            with tracer.invoke(row):
                model.layers[1].layer_output.save()
        with tracer.invoke():
            found["mask"] = model.attention_mask.save()
            found["scores"] = model.layers[2].mlp.router_logits.save()
            model.layers[4].layer_output[:] *= 2
            found["logits"] = model.logits.save()
    assert torch.equal(found["mask"], case.inputs["attention_mask"])
    assert torch.equal(
        found["scores"], torch.cat([values[Place("router_logits", 2, "mlp")] for values in reading(case)])
    )
    assert (found["logits"] != case.logits()).any(-1).all()


def test_the_bare_module_goes_on_working_between_traces():
    model = CASE.model()
    with torch.no_grad():
        before = model._module(CASE.prompts[0]).logits
        with model.trace(CASE.prompts[0]):
            model.layers[1].layer_output[:] = 0
        after = model._module(CASE.prompts[0]).logits
    assert torch.equal(before, CASE.logits())
    assert torch.equal(after, before)


def test_a_trace_without_a_block_is_a_call():
    model = CASE.model()
    answer = model.trace(CASE.prompts[0], trace=False)
    assert torch.equal(answer.logits, CASE.logits())


def test_labels_give_a_loss():
    model = CASE.model()
    row = CASE.prompts[0]
    with model.trace(row, labels=row):
        loss = model.output.loss.save()
    with torch.no_grad():
        assert torch.equal(loss.detach(), CASE.bare()(row, labels=row).loss)


def test_embeddings_can_be_given_in_place_of_ids():
    case = Case("31b")
    model = case.model()
    embedded = reading(case)[0][Place("token_embeddings")].detach()
    with model.trace(inputs_embeds=embedded):
        stream = model.layers[0].layer_input.save()
        logits = model.logits.save()
    assert torch.equal(stream, embedded)
    assert torch.equal(logits, case.logits())


def test_two_models_can_be_traced_in_turn():
    one, other = CASE.model(), Case("31b").model()
    with one.trace(ids(5)):
        early = one.layers[1].layer_output.save()
    with other.trace(ids(5)):
        other.layers[1].layer_output = early
        late = other.layers[2].layer_input.save()
    assert torch.equal(late, early)


def test_a_mask_and_a_position_can_be_given():
    model = CASE.model()
    inputs = padded([ids(7), ids(4)])
    with model.trace(**inputs):
        logits = model.logits.save()
    with torch.no_grad():
        assert torch.equal(logits, CASE.bare()(**inputs).logits)


# -- adapters ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved model, a saved adapter that changes it, and its answer."""
    peft = pytest.importorskip("peft", reason="adapters are peft's, an optional dependency")
    place = tmp_path_factory.mktemp("adapter")
    save_tiny(place / "base", "e2b", seed=SEED)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        adapted = peft.get_peft_model(tiny_module("e2b", seed=SEED), config).eval()
    adapted.save_pretrained(place / "adapter")
    with torch.no_grad():
        logits = adapted(input_ids=CASE.prompts[0]).logits
    assert not torch.equal(logits, CASE.logits())
    return place, adapted, logits


def answer(model: Any) -> tuple[Tensor, Tensor]:
    with model.trace(CASE.prompts[0]):
        neurons = model.layers[0].mlp.mlp_neurons
        assert neurons.shape == (1, 13, 56)
        output = model.layers[9].mlp.mlp_output.save()
        logits = model.logits.save()
    return output, logits


def test_an_adapter_is_loaded_with_the_model(adapter):
    place, _, logits = adapter
    model = StandardizedTransformer(place / "base", peft=str(place / "adapter"))
    assert not model.dispatched
    assert torch.equal(answer(model)[1], logits)


def test_an_adapter_is_attached_and_taken_off(adapter):
    place, _, logits = adapter
    model = StandardizedTransformer(place / "base")
    for given, wanted in [(str(place / "adapter"), logits), (None, CASE.logits())]:
        model.load_adapter(given)
        assert torch.equal(answer(model)[1], wanted)


def test_a_model_that_peft_wrapped_is_served(adapter):
    _, adapted, logits = adapter
    model = StandardizedTransformer(adapted, tokenizer=tiny_tokenizer())
    assert model.has("layers[9].mlp.mlp_output")
    assert torch.equal(answer(model)[1], logits)


def test_an_adapted_layer_can_be_edited(adapter):
    place, _, _ = adapter
    model = StandardizedTransformer(place / "base", peft=str(place / "adapter"))
    with model.trace(CASE.prompts[0]):
        model.layers[9].mlp.mlp_neurons[:] = 0
        output = model.layers[9].mlp.mlp_output.save()
    assert not output.any()


def test_transformers_is_a_release_this_suite_was_written_for():
    """The names under `.source` above are of its source text."""
    assert transformers.__version__.startswith("5.")


def halved(model: Any) -> Any:
    """A deep copy, its weights halved."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied._module.parameters():
            weight *= 0.5
    return copied


@pytest.mark.parametrize(
    "case", [Case("e2b"), Case("26b-a4b", experts="batched_mm"), Case("12b", wrapper=True)]
)
@pytest.mark.parametrize("traced", [False, True], ids=["fresh", "traced"])
def test_a_deep_copy_is_a_model_of_its_own(case, traced):
    model = tiny(case.shape, **case.options)
    paths = [str(place) for place in forward_order(model)]
    before = model.collect(CASE.prompts[0], paths) if traced else {}
    copied = halved(model)
    assert copied.interleaver is not model.interleaver
    assert not {id(p) for p in model._module.parameters()} & {id(p) for p in copied._module.parameters()}
    with torch.no_grad():
        bare = {one: one._module(CASE.prompts[0]).logits for one in (model, copied)}
    after = {one: one.collect(CASE.prompts[0], paths) for one in (copied, model)}
    for one, logits in bare.items():
        assert torch.equal(after[one]["logits"], logits)
    assert not torch.equal(bare[model], bare[copied])
    for path in before:
        assert torch.equal(before[path], after[model][path]), path
    with torch.no_grad():
        with copied.generate(CASE.prompts[0], max_new_tokens=2, do_sample=False, eos_token_id=-1) as tracer:
            copied.layers[3].self_attn.attention_probabilities[:, 1] = 0
            seen = copied.layers[3].self_attn.attention_head_outputs.save()
            tokens = tracer.result.save()
    assert not seen[:, :, 1].any()
    assert tokens.shape[1] == CASE.prompts[0].shape[1] + 2


def test_a_deep_copy_takes_the_edits_with_it_and_each_clears_its_own():
    model, direction = tiny("e2b", seed=SEED), torch.ones(40)
    with model.edit(inplace=True):
        model.layers[2].mlp.mlp_output = torch.zeros_like(model.layers[2].mlp.mlp_output)
        model.steer(4, direction)
    edited = model.collect(CASE.prompts[0], "logits")["logits"]
    copied = copy.deepcopy(model)
    assert torch.equal(copied.collect(CASE.prompts[0], "logits")["logits"], edited)
    copied.clear_edits()
    assert torch.equal(copied.collect(CASE.prompts[0], "logits")["logits"], CASE.logits())
    assert torch.equal(model.collect(CASE.prompts[0], "logits")["logits"], edited)
    assert not torch.equal(edited, CASE.logits())


def test_a_deep_copy_of_a_model_without_weights_loads_its_own(tmp_path):
    model = StandardizedTransformer(save_tiny(tmp_path, "e2b", seed=SEED))
    copied = copy.deepcopy(model)
    assert not copied.dispatched
    logits = copied.collect(CASE.prompts[0], "logits")["logits"]
    assert copied.dispatched
    assert not model.dispatched
    assert torch.equal(logits, CASE.logits())
    assert torch.equal(model.collect(CASE.prompts[0], "logits")["logits"], logits)
