"""Faults put into a model, of a thousandth and more: each is found, first where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemloupe import StandardizedTransformer, verify
from gemloupe.errors import BadArgument
from gemloupe.paths import find
from gemloupe.reference import names
from gemloupe.reference.looks import LOOKS
from gemloupe.testing import SHAPES, tiny, tiny_module, tiny_tokenizer
from tests.core.models import SEED, ids

MIXTURE = "26b-a4b"
PROMPT = ids(13)
SLIGHTLY = 1.002
READ_ONLY = ("input_ids", "attention_mask", "expert_indices", "next_token_probs")


def wrapped(module: Any) -> Any:
    return StandardizedTransformer(module, tokenizer=tiny_tokenizer())


def answers(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """The module's forward answers something else."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def scaled(path: str, factor: float = SLIGHTLY) -> Callable[[Any], None]:
    return lambda model: answers(model.get_submodule(path), lambda out: out * factor)


def without(path: str) -> Callable[[Any], None]:
    """The module does nothing, and is there."""

    def drop(model: Any) -> None:
        model.get_submodule(path).forward = lambda x: x

    return drop


def attribute(path: str, name: str, factor: float = SLIGHTLY) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        host = model.get_submodule(path)
        setattr(host, name, getattr(host, name) * factor)

    return change


def shifted(path: str, by: int = 1) -> Callable[[Any], None]:
    """The attention is given the rotary tables of the position `by` before."""

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        tables = tuple(table.roll(by, 1) for table in kwargs["position_embeddings"])
        return args, kwargs | {"position_embeddings": tables}

    return lambda model: model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True)


def swapped(path: str, one: int, other: int) -> Callable[[Any], None]:
    """Each of two experts does the other's work."""

    def before(_module: nn.Module, args: Any) -> Any:
        states, indices, weights = args
        first, second = indices == one, indices == other
        return states, indices.masked_fill(first, other).masked_fill(second, one), weights

    return lambda model: model.get_submodule(path).register_forward_pre_hook(before)


BLOCK = "model.layers.4"
IN_BLOCK = {
    "input_layernorm": "self_attn.attention_input",
    "self_attn.q_norm": "self_attn.attention_queries",
    "self_attn.k_norm": "self_attn.own_keys",
    "self_attn.v_norm": "self_attn.own_values",
    "self_attn.o_proj": "self_attn.attention_projection",
    "post_attention_layernorm": "self_attn.attention_output",
    "pre_feedforward_layernorm": "mlp.mlp_input",
    "mlp.gate_proj": "mlp.mlp_neurons",
    "mlp.up_proj": "mlp.mlp_neurons",
    "mlp.down_proj": "mlp.mlp_projection",
    "post_feedforward_layernorm": "mlp.mlp_output",
}
FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    f"scaled {part}": ("e2b", scaled(f"{BLOCK}.{part}"), f"layers[4].{name}")
    for part, name in IN_BLOCK.items()
}
FAULTS |= {
    f"dropped {part}": ("31b", without(f"{BLOCK}.{part}"), f"layers[4].{name}")
    for part, name in IN_BLOCK.items()
    if part.endswith("norm")
}
FAULTS |= {
    "scaled per-layer gate": (
        "e4b",
        scaled(f"{BLOCK}.per_layer_input_gate", 1.1),
        "layers[4].per_layer_output",
    ),
    "scaled per-layer norm": (
        "e4b",
        scaled(f"{BLOCK}.post_per_layer_input_norm", 1.02),
        "layers[4].per_layer_output",
    ),
    "scores' scale": (
        "12b",
        attribute(f"{BLOCK}.self_attn", "scaling"),
        "layers[4].self_attn.attention_scores",
    ),
    "embedding's scale": ("12b", attribute("model.embed_tokens", "embed_scale"), "token_embeddings"),
    "per-layer embedding's scale": (
        "e2b",
        attribute("model.embed_tokens_per_layer", "embed_scale"),
        "per_layer_token_inputs",
    ),
    "per-layer projection's norm": (
        "e2b",
        scaled("model.per_layer_projection_norm"),
        "per_layer_context_inputs",
    ),
    "last norm": ("12b", scaled("model.norm"), "raw_logits"),
    "head": ("12b", scaled("lm_head"), "raw_logits"),
    "shifted position": ("12b", shifted(f"{BLOCK}.self_attn"), "layers[4].self_attn.own_keys"),
    "shifted position of a borrower": (
        "e2b",
        shifted("model.layers.7.self_attn"),
        "layers[7].self_attn.attention_queries",
    ),
    "router's scale": (
        MIXTURE,
        attribute("model.layers.2.router", "scalar_root_size"),
        "layers[2].mlp.router_logits",
    ),
    "router's projection": (MIXTURE, scaled("model.layers.2.router.proj"), "layers[2].mlp.router_logits"),
    "experts' norm": (
        MIXTURE,
        scaled("model.layers.2.pre_feedforward_layernorm_2"),
        "layers[2].mlp.expert_outputs",
    ),
    "dense branch's norm": (
        MIXTURE,
        scaled("model.layers.2.post_feedforward_layernorm_1"),
        "layers[2].mlp.mlp_projection",
    ),
    "routed branch's norm": (
        MIXTURE,
        without("model.layers.2.post_feedforward_layernorm_2"),
        "layers[2].mlp.mlp_projection",
    ),
    "swapped experts": (MIXTURE, swapped("model.layers.2.experts", 3, 5), "layers[2].mlp.expert_outputs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_module_is_found_where_it_is(fault: str):
    shape, inject, name = FAULTS[fault]
    module = tiny_module(shape, seed=SEED)
    inject(module)
    report = verify(wrapped(module))
    assert report.first is not None
    assert (report.first.name, report.first.look) == (name, "step")
    # It is one fault: what is computed from the model's own values beside it holds.
    assert len({row.block for row in report.faults if row.look == "step"}) == 1
    assert not report.held


@pytest.mark.parametrize("rows", [1, 3])
def test_a_fault_that_one_of_the_forwards_shows_is_found(rows: int):
    module = tiny_module("12b", seed=SEED)
    answers(module.model.layers[3].self_attn.o_proj, lambda out: out * (1.01 if len(out) == rows else 1))
    report = verify(wrapped(module))
    assert report.first is not None
    assert report.first.name == "layers[3].self_attn.attention_projection"


def test_a_fault_shows_in_its_step_then_in_its_block_then_in_the_whole():
    module = tiny_module("12b", seed=SEED)
    answers(module.model.layers[3].self_attn.o_proj, lambda out: out + 0.1 * out.roll(1, -1))
    faults = verify(wrapped(module)).faults
    found = {look: [row.name for row in faults if row.look == look] for look in LOOKS}
    first, last = "layers[3].self_attn.attention_projection", "layers[3].layer_output"
    assert found["step"] == [first]
    assert (found["block"][0], found["block"][-1]) == (first, last)
    assert (found["whole"][0], found["whole"][-1]) == (first, "next_token_probs")


def test_a_window_that_changed_since_the_model_was_loaded_is_found_in_the_scores():
    module: Any = tiny_module("31b", seed=SEED)
    model = wrapped(module)
    module.config.sliding_window -= 1
    report = verify(model)
    assert report.first is not None
    assert (report.first.name, report.first.absolute) == (
        "layers[0].self_attn.attention_scores",
        float("inf"),
    )


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_swapped_experts_are_found_under_every_implementation(experts: str):
    module = tiny_module(MIXTURE, seed=SEED, experts_implementation=experts)
    swapped("model.layers.2.experts", 3, 5)(module)
    report = verify(wrapped(module))
    assert report.first is not None
    assert report.first.name == "layers[2].mlp.expert_outputs"


def test_a_hook_is_found_at_the_value_that_reads_what_it_changed():
    module = tiny_module("e2b", seed=SEED)
    module.model.layers[4].post_attention_layernorm.register_forward_hook(lambda *_: _[-1] * SLIGHTLY)
    report = verify(wrapped(module))
    assert [row.name for row in report.faults if row.look == "step"] == ["layers[4].mid_stream"]


def test_what_is_no_number_is_found():
    module = tiny_module("12b", seed=SEED)
    answers(module.model.layers[4].mlp.down_proj, lambda out: out * torch.nan)
    report = verify(wrapped(module))
    assert report.first is not None
    assert report.first.name == "layers[4].mlp.mlp_projection"
    assert report.first.relative != report.first.relative


def test_a_fault_on_padding_is_none_and_on_one_token_is_one():
    def only(row: int, column: int) -> Callable[[Tensor], Tensor]:
        where = torch.zeros(2, 5, 1)
        where[row, column] = 1
        return lambda out: out + where

    tokens = torch.tensor([[0, 0, 2, 30, 40], [2, 50, 60, 70, 80]])
    inputs = {"input_ids": tokens, "attention_mask": tokens.ne(0).long()}
    for place, found in (((0, 1), False), ((0, 3), True)):
        module = tiny_module("12b", seed=SEED)
        answers(module.model.layers[5].post_feedforward_layernorm, only(*place))
        report = verify(wrapped(module), inputs)
        assert report.held is not found


# ---- edits left in the model ------------------------------------------------------------------------------


def edit(model: Any, name: str) -> None:
    host, _ = find(model, name)
    value = name.rpartition(".")[2]
    # Where its gates are all but shut, float32 leaves a token's per-layer branch no more than this.
    factor = 1.02 if value == "per_layer_output" else SLIGHTLY
    with model.edit(inplace=True):
        setattr(host, value, getattr(host, value) * factor)


def editable() -> list[tuple[str, str]]:
    """The values of the whole model, and of a block that lends, one that borrows, and a mixture."""
    chosen = {"e2b": ("", "layers[4].", "layers[7]."), MIXTURE: ("layers[2].",)}
    return [
        (shape, name)
        for shape, prefixes in chosen.items()
        for name in names(tiny(shape).plan)
        for prefix in prefixes
        if (name.startswith(prefix) if prefix else "[" not in name) and not name.endswith(READ_ONLY)
    ]


@pytest.mark.parametrize(("shape", "name"), editable())
def test_an_edit_left_in_the_model_is_found_at_the_value_it_edits(shape: str, name: str):
    model = tiny(shape, seed=SEED)
    edit(model, name)
    report = verify(model, PROMPT)
    assert report.first is not None
    assert (report.first.name, report.first.look) == (name, "step")
    model.clear_edits()
    assert verify(model, PROMPT).held


# ---- the choice of experts --------------------------------------------------------------------------------


def tied(module: Any, one: int, other: int) -> None:
    """Two experts of block 2 that the router cannot tell apart; what they compute differs."""
    router = module.model.layers[2].router
    with torch.no_grad():
        router.proj.weight[other] = router.proj.weight[one]
        router.per_expert_scale[other] = router.per_expert_scale[one]


def rerouted(model: Any, one: int, other: int) -> None:
    """A token that goes to one of two experts goes to the other."""
    mlp = model.layers[2].mlp
    with model.edit(inplace=True):
        chosen = mlp.expert_indices
        both = (chosen == one).any(-1, keepdim=True) & (chosen == other).any(-1, keepdim=True)
        moved = torch.where(chosen == one, other, torch.where(chosen == other, one, chosen))
        mlp.reroute(torch.where(both, chosen, moved))


def test_of_two_experts_that_tie_either_may_be_chosen():
    module = tiny_module(MIXTURE, seed=SEED)
    tied(module, 3, 5)
    model = wrapped(module)
    assert verify(model).held
    rerouted(model, 3, 5)
    report = verify(model)
    assert report.held, report.first


def test_another_choice_of_experts_is_found_at_the_choice():
    model = tiny(MIXTURE, seed=SEED)
    rerouted(model, 3, 5)
    report = verify(model)
    assert report.first is not None
    assert (report.first.name, report.first.look) == ("layers[2].mlp.expert_indices", "step")
    # All that follows is of the experts that were chosen, and holds.
    assert {row.name for row in report.faults} == {"layers[2].mlp.expert_indices"}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fault_in_bfloat16_is_found_too(shape: str):
    module = tiny_module(shape, seed=SEED, dtype=torch.bfloat16)
    answers(module.model.layers[3].self_attn.o_proj, lambda out: out * 1.1)
    report = verify(wrapped(module))
    assert report.first is not None
    assert report.first.name == "layers[3].self_attn.attention_projection"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [8, 64])
def test_the_runner_up_in_place_of_a_chosen_expert_is_found(monkeypatch, dtype, experts):
    """In bfloat16 too, where the probabilities of many experts lie close together."""
    model = tiny(MIXTURE, dtype=dtype, num_experts=experts, top_k_experts=3)
    assert verify(model, PROMPT).held
    real = torch.topk

    def wrong(values: Tensor, *args: Any, **options: Any) -> Any:
        k = options.pop("k", args[0] if args else None)
        best, chosen = real(values, k + 1, **options)
        kept = [*range(k - 1), k]
        return torch.return_types.topk((best[..., kept], chosen[..., kept]))

    monkeypatch.setattr(torch, "topk", wrong)
    report = verify(model, PROMPT)
    monkeypatch.undo()
    assert report.first is not None
    assert report.first.name == "layers[0].mlp.expert_indices"
    assert report.first.look == "step"


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_found():
    module = tiny_module("12b")
    assert module.config.tie_word_embeddings
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach() * SLIGHTLY)
    report = verify(wrapped(module), PROMPT)
    assert report.first is not None
    assert report.first.name == "raw_logits"


@pytest.mark.parametrize("wrapper", [False, True])
def test_what_a_hook_on_the_model_itself_changes_is_found(wrapper):
    module = tiny_module("12b", wrapper=wrapper)

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        output["logits"] = output["logits"] * SLIGHTLY
        return output

    handle = module.register_forward_hook(hook)
    model = wrapped(module)
    report = verify(model, PROMPT)
    assert report.first is not None
    assert report.first.name == "logits"
    handle.remove()
    assert verify(model, PROMPT).held


@pytest.mark.parametrize("shape", ["e2b", "12b"])
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_token_in_whose_place_something_else_is_put_is_refused(shape, kind):
    model = tiny(shape, wrapper=True)
    token = getattr(model._module.config, f"{kind}_token_id", None)
    if token is None:
        pytest.skip(f"{shape} has no token of {kind}")
    text = PROMPT.clone()
    text[0, 4] = token
    with pytest.raises(BadArgument, match=f"holds the token of {kind}"):
        verify(model, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("massive", [1, 300])
def test_a_massive_token_hides_nothing_of_the_others(dtype, massive):
    module = tiny_module("12b", dtype=dtype)
    module.model.embed_tokens.weight.data[2] *= massive
    text = torch.tensor([[2, *range(40, 52)]])
    assert verify(wrapped(module), text).held
    module = tiny_module("12b", dtype=dtype)
    module.model.embed_tokens.weight.data[2] *= massive

    def lose(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :1], torch.zeros_like(output[:, 1:])], 1)

    module.model.layers[3].post_feedforward_layernorm.register_forward_hook(lose)
    report = verify(wrapped(module), text)
    assert report.first is not None
    assert report.first.name == "layers[3].layer_output"
    assert report.first.look == "step"
