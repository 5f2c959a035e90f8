"""The same edits by hand: plain torch hooks on the bare model, at the modules transformers has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.core.models import Case
from tests.core.places import Place

Edit = Callable[[Tensor], Tensor]

# {value: (module inside the block, "output" or which argument of its call)}
IN_BLOCK: dict[str, tuple[str, str | int]] = {
    "layer_input": ("", 0),
    "per_layer_input": ("", 1),
    "attention_input": ("input_layernorm", "output"),
    "attention_projection": ("self_attn.o_proj", "output"),
    "attention_output": ("post_attention_layernorm", "output"),
    "mlp_input": ("mlp", 0),
    "mlp_neurons": ("mlp.down_proj", 0),
    "shared_expert_output": ("mlp", "output"),
    "router_logits": ("router.proj", "output"),
    "routed_output": ("experts", "output"),
    "mlp_projection": ("post_feedforward_layernorm", 0),
    "mlp_output": ("post_feedforward_layernorm", "output"),
    "per_layer_output": ("post_per_layer_input_norm", "output"),
    "layer_output": ("", "output"),
}
IN_STACK: dict[str, tuple[str, str | int]] = {
    "token_embeddings": ("embed_tokens", "output"),
    "per_layer_token_inputs": ("embed_tokens_per_layer", "output"),
    "per_layer_context_inputs": ("per_layer_projection_norm", "output"),
}
# Values that no module has at its edge: the edit is made of others, so it agrees to rounding only.
COMPOSED = {"mid_stream", "expert_outputs"}


def edited_logits(case: Case, place: Place, edit: Edit) -> Tensor:
    """The bare model's logits with `edit` applied to one value, given in its standard layout."""
    module, inputs = case.bare(), case.inputs
    root = module.model
    stack: Any = getattr(root, "language_model", root)
    batch, seq = inputs["input_ids"].shape

    def flat(tensor: Tensor) -> Tensor:
        """The edit in the standard layout; the mixture's tensors are flat over tokens."""
        if tensor.shape[0] == batch:
            return edit(tensor)
        return edit(tensor.unflatten(0, (batch, seq))).flatten(0, 1)

    handles = []
    if place.name == "per_layer_inputs":
        sliced = PerLayerInputs(stack, edit)
        handles += [
            block.register_forward_pre_hook(sliced.hook(i), with_kwargs=False)
            for i, block in enumerate(stack.layers)
        ]
    elif place.name == "raw_logits":
        handles.append(module.lm_head.register_forward_hook(lambda _m, _a, out: edit(out)))
    elif place.name != "logits":
        owner = stack if place.block is None else stack.layers[place.block]
        handles += hooks(owner, place, edit, flat, stack, (batch, seq))
    try:
        with torch.no_grad():
            logits = module(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return edit(logits) if place.name == "logits" else logits


def hooks(owner: Any, place: Place, edit: Edit, flat: Edit, stack: Any, size: tuple[int, int]) -> list[Any]:
    name = place.name
    if name in IN_STACK or name in IN_BLOCK:
        path, where = (IN_STACK | IN_BLOCK)[name]
        target = owner.get_submodule(path)
        if where == "output":
            change = flat
            if name == "per_layer_token_inputs":
                sizes = (stack.config.num_hidden_layers, stack.config.hidden_size_per_layer_input)

                def change(tensor: Tensor, /) -> Tensor:
                    return edit(tensor.unflatten(-1, sizes)).flatten(-2)

            return [target.register_forward_hook(lambda _m, _a, out: change(out))]

        at = int(where)

        def argument(_module: Any, args: tuple) -> tuple:
            return (*args[:at], edit(args[at]), *args[at + 1 :])

        return [target.register_forward_pre_hook(argument)]
    if name == "mid_stream":
        entered: list[Tensor] = []
        return [
            owner.register_forward_pre_hook(lambda _m, args: entered.append(args[0])),
            owner.post_attention_layernorm.register_forward_hook(
                lambda _m, _a, out: edit(entered[0] + out) - entered[0]
            ),
        ]
    if name == "router_probabilities":

        def again(router: Any, _args: tuple, out: tuple) -> tuple:
            probabilities = flat(out[0])
            weights, chosen = probabilities.topk(out[2].shape[-1], -1)
            weights = weights / weights.sum(-1, keepdim=True)
            return probabilities, weights * router.per_expert_scale[chosen], chosen

        return [owner.router.register_forward_hook(again)]
    if name == "expert_weights":
        return [owner.router.register_forward_hook(lambda _m, _a, out: (out[0], flat(out[1]), out[2]))]
    if name == "expert_outputs":
        # An edit that adds the same whatever it is given: its sum over the choices is added to theirs.
        top_k = stack.config.top_k_experts

        def added(_module: Any, _args: tuple, out: Tensor) -> Tensor:
            nothing = torch.zeros(*size, top_k, out.shape[-1], dtype=out.dtype)
            return out + edit(nothing).sum(2).flatten(0, 1)

        return [owner.experts.register_forward_hook(added)]
    raise KeyError(name)


class PerLayerInputs:
    """The blocks receive one slice each: the whole is put together again to be edited at once."""

    def __init__(self, stack: Any, edit: Edit) -> None:
        self.count = len(stack.layers)
        self.edit = edit

    def hook(self, block: int) -> Callable[[Any, tuple], tuple]:
        def change(_module: Any, args: tuple) -> tuple:
            whole = args[1][:, :, None].repeat(1, 1, self.count, 1)
            return (args[0], self.edit(whole)[:, :, block], *args[2:])

        return change
