"""Edits of the towers by hand: hooks on the bare module, and an attention function of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Edit = Callable[[Tensor], Tensor]

CALL = (
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
)

# {a value inside a block: the module there, and which end of it}
VISION = {
    "layer_input": ("", "input"),
    "self_attn.attention_input": ("input_layernorm", "output"),
    "self_attn.attention_projection": ("self_attn.o_proj", "output"),
    "self_attn.attention_output": ("post_attention_layernorm", "output"),
    "mlp.mlp_input": ("pre_feedforward_layernorm", "output"),
    "mlp.mlp_neurons": ("mlp.down_proj", "input"),
    "mlp.mlp_projection": ("mlp", "output"),
    "mlp.mlp_output": ("post_feedforward_layernorm", "output"),
    "layer_output": ("", "output"),
}
SOUND = {
    "layer_input": ("", "input"),
    "feed_forward1.mlp_output": ("feed_forward1.post_layer_norm", "half"),
    "self_attn.attention_output": ("norm_post_attn", "output"),
    "lconv1d.convolution_output": ("lconv1d.linear_end", "output"),
    "feed_forward2.mlp_output": ("feed_forward2.post_layer_norm", "half"),
    "layer_output": ("", "output"),
}
OUTSIDE = {
    "vision.patch_embeddings": ("vision_tower.patch_embedder.input_proj", "output"),
    "vision.tower_output": ("vision_tower.encoder", "output"),
    "projector.soft_tokens": ("embed_vision", "input"),
    "vision.image_features": ("embed_vision", "output"),
    "audio.frame_embeddings": ("audio_tower.subsample_conv_projection", "first"),
    "audio.tower_output": ("audio_tower.output_proj", "input"),
    "audio_projector.soft_tokens": ("embed_audio", "input"),
}
UNIFIED = {
    "vision.patch_embeddings": ("embed_vision.patch_ln2", "output"),
    "vision.tower_output": ("embed_vision.pos_norm", "output"),
    "audio.tower_output": ("embed_audio", "input"),
}


def edited(module: Any, path: str, edit: Edit) -> Any:
    """A context in which the value `path` of the bare module is edited."""
    host, _, rest = path.partition("layers[")
    if host in ("vision.", "audio.") and rest:
        block, _, name = rest.partition("].")
        tower = f"{'vision_tower.encoder' if host == 'vision.' else 'audio_tower'}.layers.{block}"
        short = name.rpartition(".")[2].replace("own_", "attention_")
        if host == "vision." and short in CALL:
            return at_call(module, int(block), short, edit)
        if name == "mid_stream":
            return at_add(module.model.get_submodule(tower), edit)
        inner, end = (VISION if host == "vision." else SOUND)[name]
        return at_module(module.model.get_submodule(f"{tower}.{inner}".rstrip(".")), end, edit)
    if path == "audio.audio_features":
        return at_sound(module, edit)
    unified = module.config.model_type == "gemma4_unified"
    if unified and path == "vision.image_features":
        return at_patches(module, edit)
    inner, end = (UNIFIED if unified else OUTSIDE)[path]
    return at_module(module.model.get_submodule(inner), end, edit)


@contextmanager
def at_module(module: torch.nn.Module, end: str, edit: Edit) -> Iterator[None]:
    def before(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (edit(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: edit(kwargs[name])}

    def after(_: Any, __: Any, output: Any) -> Any:
        if end == "half":
            return edit(output * 0.5) / 0.5
        if end == "first":
            return (edit(output[0]), *output[1:])
        if not isinstance(output, Tensor):
            output["last_hidden_state"] = edit(output["last_hidden_state"])
            return output
        return edit(output)

    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if end == "input"
        else module.register_forward_hook(after)
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def at_add(block: Any, edit: Edit) -> Iterator[None]:
    """The stream after the attention's add: through what the attention adds, so up to rounding."""
    entered: list[Tensor] = []
    keep = block.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    norm = block.post_attention_layernorm
    change = norm.register_forward_hook(lambda _, __, out: edit(entered[-1] + out) - entered[-1])
    try:
        yield
    finally:
        keep.remove()
        change.remove()


def at_sound(module: Any, edit: Edit) -> Any:
    """The soft tokens of sound that are put into the stream: those that are no padding."""
    masks: list[Tensor] = []

    def noted(_: Any, args: tuple, kwargs: dict) -> None:
        mask = kwargs["input_features_mask"]
        masks.append(mask if module.config.model_type == "gemma4_unified" else mask[:, ::2][:, ::2])

    def change(features: Tensor) -> Tensor:
        result = features.clone()
        result[masks[-1]] = edit(features[masks[-1]])
        return result

    @contextmanager
    def both() -> Iterator[None]:
        handle = module.register_forward_pre_hook(noted, with_kwargs=True)
        try:
            with at_module(module.model.embed_audio, "output", change):
                yield
        finally:
            handle.remove()

    return both()


def at_patches(module: Any, edit: Edit) -> Any:
    """12B's projected patches that are put into the stream: those that are no padding."""
    masks: list[Tensor] = []

    def noted(_: Any, args: tuple, kwargs: dict) -> None:
        places = kwargs["image_position_ids"] if "image_position_ids" in kwargs else args[1]
        masks.append((places != -1).all(-1))

    def change(features: Tensor) -> Tensor:
        result = features.clone()
        result[masks[-1]] = edit(features[masks[-1]])
        return result

    @contextmanager
    def both() -> Iterator[None]:
        handle = module.model.embed_vision.register_forward_pre_hook(noted, with_kwargs=True)
        try:
            with at_module(module.model.embed_vision.multimodal_embedder, "output", change):
                yield
        finally:
            handle.remove()

    return both()


@contextmanager
def at_call(module: Any, block: int, name: str, edit: Edit) -> Iterator[None]:
    home = sys.modules[type(module.model.vision_tower).__module__]
    attention = module.model.vision_tower.encoder.layers[block].self_attn
    interface = home.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, home.eager_attention_forward
    )
    others = home.ALL_ATTENTION_FUNCTIONS.get_interface

    def run(caller: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        if caller is not attention:
            return others(caller.config._attn_implementation, home.eager_attention_forward)(
                caller, q, k, v, mask, **kwargs
            )
        given = {"attention_queries": q, "attention_keys": k, "attention_values": v}
        if name in given:
            given[name] = edit(given[name])
        q, k, v = given.values()
        if name in given or name == "attention_head_outputs":
            heads, weights = interface(caller, q, k, v, mask, **kwargs)
            return (edit(heads) if name == "attention_head_outputs" else heads), weights
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if mask is not None:
            seen = mask if mask.dtype == torch.bool else mask == 0
            scores = scores.masked_fill(~seen, -torch.inf)
        scores = edit(scores) if name == "attention_scores" else scores
        pattern = scores.softmax(-1)
        pattern = edit(pattern) if name == "attention_probabilities" else pattern
        return torch.einsum("bhqk,bhkd->bqhd", pattern, v), None

    functions = mock.Mock(get_interface=lambda *_: run)
    with mock.patch.object(home, "ALL_ATTENTION_FUNCTIONS", functions):
        yield
