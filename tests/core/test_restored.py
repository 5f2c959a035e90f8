"""Rule 10: whatever ended a block, the model is as before it, and the next trace knows nothing of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gemloupe.errors import (
    BadArgument,
    BadWrite,
    GemloupeError,
    LateEdit,
    OutOfOrder,
    ReadOnly,
    StepsWarning,
    Unavailable,
)
from gemloupe.testing import SHAPES, tiny
from tests.core.models import Case, ids, stack
from tests.core.places import forward_order

CASE = Case("e2b")
GREEDY = {"do_sample": False, "eos_token_id": -1}
HOOKS = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]


def state(model: Any) -> dict[str, Any]:
    """All that a trace could leave behind, but what it writes on the envoys."""
    module = model._module
    found: dict[str, Any] = {
        "config": copy.deepcopy(module.config.to_dict()),
        "generation": copy.deepcopy(module.generation_config.to_dict()),
        "attention": module.config.get_text_config()._attn_implementation,
        "experts": getattr(module.config.get_text_config(), "_experts_implementation", None),
        "attention functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS},
        "experts functions": {name: ALL_EXPERTS_FUNCTIONS[name] for name in ALL_EXPERTS_FUNCTIONS},
        "grad": torch.Tensor.grad,
        "training": [part.training for part in module.modules()],
        "weights": {
            name: (tensor.data_ptr(), tensor._version) for name, tensor in module.state_dict().items()
        },
        "running": (list(model.interleaver.mediators), model.interleaver.interleaving),
    }
    for path, part in module.named_modules():
        found[f"{path} hooks"] = {name: list(getattr(part, name)) for name in HOOKS}
        found[f"{path} names"] = sorted(vars(part))
    return found


@pytest.fixture
def model() -> Iterator[Any]:
    """A warm model, whose state after the test must be the one before it."""
    model = CASE.model()
    with model.trace(ids(3)):
        model.logits.save()
    before = state(model)
    yield model
    after = state(model)
    assert {name for name in before if before[name] != after.get(name)} == set()
    assert before.keys() == after.keys()
    with model.trace(CASE.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, CASE.logits())
    with torch.no_grad():
        assert torch.equal(model._module(CASE.prompts[0]).logits, CASE.logits())


class Whim(Exception):
    """Something that only the user knows."""


def refuse(*_: Any) -> None:
    raise Whim("from the model")


def edits(model: Any) -> None:
    """Edits of several kinds, all pending when what follows raises."""
    model.steer([0, 5], torch.ones(40))
    model.skip_layers(7, 8)
    model.layers[0].mlp.mlp_output[:] = 0
    model.layers[1].layer_output *= 3


ERRORS = [
    Whim("from the block"),
    KeyboardInterrupt(),
    SystemExit(3),
    RuntimeError("of the user"),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["at once", "midway", "at the end"])
def test_after_an_error_of_the_block(model, error, when):
    with pytest.raises(type(error)):
        with model.trace(ids(5)):
            if when != "at once":
                edits(model)
            if when == "at the end":
                model.logits[:] = 0
            raise error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_after_an_error_of_one_invoke(model, error):
    with pytest.raises(type(error)):
        with model.trace() as tracer:
            with tracer.invoke(ids(5)):
                model.layers[1].layer_output[:] = 0
                model.logits.save()
            with tracer.invoke(ids(3)):
                edits(model)
                raise error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_after_an_error_between_invokes(model, error):
    with pytest.raises(type(error)):
        with model.trace() as tracer:
            with tracer.invoke(ids(5)):
                edits(model)
            raise error


@pytest.mark.parametrize("path", ["model.layers.3", "model.layers.3.mlp.down_proj", "lm_head", ""])
def test_after_an_error_of_the_model(model, path):
    handle = model._module.get_submodule(path).register_forward_pre_hook(refuse)
    try:
        with pytest.raises(Whim, match="from the model"):
            with model.trace(ids(5)):
                edits(model)
                model.logits.save()
    finally:
        handle.remove()


def test_after_a_prompt_the_model_cannot_take(model):
    with pytest.raises(IndexError):
        with model.trace(torch.tensor([[2, 99999]])):
            edits(model)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [0, 2])
def test_after_an_error_in_a_step(model, error, at):
    with pytest.raises(type(error)):
        with model.generate(ids(5), max_new_tokens=4, **GREEDY) as tracer:
            for step in tracer.iter[:4]:
                model.layers[1].layer_output *= 3
                if step == at:
                    raise error
                model.layers[4].layer_output.save()


def test_after_an_error_in_a_backward_block(model):
    with pytest.raises(Whim):
        with model.trace(ids(5)):
            value = model.layers[1].layer_output
            loss = model.logits.sum()
            with loss.backward():
                value.grad.save()
                raise Whim
    model._module.zero_grad(set_to_none=True)


def test_after_an_error_in_a_session(model):
    with pytest.raises(Whim):
        with model.session():
            with model.trace(ids(5)):
                edits(model)
            with model.trace(ids(5)):
                raise Whim


def test_after_an_error_in_a_stored_edit(model):
    with model.edit() as (_tracer, edited):
        edited.layers[1].layer_output[:] = 0
        raise Whim
    with pytest.raises(Whim):
        with edited.trace(ids(5)):
            edited.logits.save()


REFUSED = {
    "unknown": (lambda m: m.layers[0].nothing, GemloupeError),
    "unavailable": (lambda m: m.layers[0].mlp.router_logits, Unavailable),
    "late": (lambda m: (m.logits, m.layers[0].layer_input), OutOfOrder),
    "late edit": (lambda m: late_edit(m), LateEdit),
    "read only": (lambda m: setattr(m, "next_token_probs", torch.ones(1)), ReadOnly),
    "edited read only": (lambda m: m.next_token_probs.zero_() is m.layers[0], ReadOnly),
    "shape": (lambda m: setattr(m.layers[0], "layer_output", torch.ones(1)), BadWrite),
    "dtype": (lambda m: setattr(m.layers[0], "layer_output", m.layers[0].layer_output.half()), BadWrite),
    "layer": (lambda m: m.steer(99, torch.ones(40)), BadArgument),
    "width": (lambda m: m.steer(0, torch.ones(3)), BadArgument),
    "skip": (lambda m: m.skip_layers(3, 1), BadArgument),
}


def late_edit(model: Any) -> None:
    value = model.layers[1].layer_output
    model.layers[2].layer_output.save()
    value.zero_()
    model.layers[3].layer_output.save()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batched"])
def test_after_a_refusal_of_ours(model, name, batched):
    touch, error = REFUSED[name]
    with pytest.raises(error):
        with model.trace() as tracer:
            if batched:
                with tracer.invoke(ids(5)):
                    model.layers[0].mlp.mlp_output[:] = 0
            with tracer.invoke(ids(3)):
                touch(model)


def test_after_an_early_stop(model):
    with model.trace(ids(5)) as tracer:
        edits(model)
        value = model.layers[2].layer_output.save()
        tracer.stop()
    assert value.shape == (1, 5, 40)


def test_after_a_stop_before_anything(model):
    with model.trace(ids(5)) as tracer:
        tracer.stop()


def test_after_an_empty_block(model):
    with model.trace(ids(5)):
        pass


def test_after_a_loop_that_outran_the_run(model):
    with pytest.warns(StepsWarning, match="which this call did not make"):  # noqa: PT031
        with model.generate(ids(5), max_new_tokens=2, **GREEDY) as tracer:
            for _ in tracer.iter[:9]:
                model.layers[1].layer_output *= 3


def test_the_first_trace_of_a_model_leaves_no_hook():
    """Also the one that instruments its forwards."""
    for shape in SHAPES:
        model = tiny(shape)
        before = state(model)
        order = forward_order(model)
        with model.trace(ids(5)):
            for place in order:
                place.read(model)
        after = state(model)
        changed = {name for name in before if before[name] != after[name]}
        assert all(name.endswith(" names") for name in changed), changed
        assert all(" hooks" not in name for name in changed)


def test_the_state_that_is_compared_sees_a_hook():
    model = CASE.model()
    before = state(model)
    handle = stack(model._module).layers[0].register_forward_hook(lambda *_: None)
    assert state(model) != before
    handle.remove()
    assert state(model) == before


# -- memory ------------------------------------------------------------------------------------------


def watch(tensor: Tensor, seen: list[weakref.ref]) -> None:
    seen.append(weakref.ref(tensor))


def alive(seen: list[weakref.ref]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in seen)


@pytest.mark.parametrize("shape", ["e2b", "26b-a4b"])
@pytest.mark.parametrize("ending", ["as it should", "by an error", "by a stop"])
def test_a_finished_trace_holds_no_activation(shape, ending):
    model = Case(shape).model()
    order = forward_order(model)
    seen: list[weakref.ref] = []
    try:
        with model.trace() as tracer:
            for row in (ids(5), ids(3)):
                with tracer.invoke(row):
                    model.steer(0, torch.ones(40))
                    for place in order:
                        watch(place.read(model), seen)
                    if ending == "by an error":
                        raise Whim
                    if ending == "by a stop":
                        tracer.stop()
    except Whim:
        pass
    del tracer
    assert len(seen) >= len(order)
    assert alive(seen) == 0


def saved(seen: list[weakref.ref]) -> Tensor:
    """Apart from the test, whose frame would hold what it once had by name."""
    model = CASE.model()
    with model.trace(ids(5)):
        kept = model.layers[1].layer_output.save()
        watch(kept, seen)
    return kept


def test_what_was_saved_is_the_user_s_alone():
    seen: list[weakref.ref] = []
    kept = saved(seen)
    assert alive(seen) == 1
    del kept
    assert alive(seen) == 0


def test_a_generation_holds_no_activation():
    model = CASE.model()
    seen: list[weakref.ref] = []
    with model.generate(ids(5), max_new_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            watch(model.layers[1].layer_output, seen)
            watch(model.layers[6].mlp.mlp_neurons, seen)
    del tracer
    assert len(seen) == 6
    assert alive(seen) == 0


def traced_and_dropped() -> weakref.ref:
    model = tiny("31b")
    with model.trace(ids(5)):
        model.steer(1, torch.ones(40))
        model.logits.save()
    return weakref.ref(model._module)


def test_a_model_that_is_dropped_is_freed():
    module = traced_and_dropped()
    gc.collect()
    assert module() is None
