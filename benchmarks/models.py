"""The models that are measured: random weights, real proportions, and twins that nothing has touched."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
import transformers
from nnsight import TransformersModel

from gemloupe import StandardizedTransformer
from gemloupe.testing import tiny_module, tiny_tokenizer

__all__ = ["FULL", "TINY", "VOCABULARY", "Size", "Twins", "config_31b", "prompt", "twins"]


@dataclass(frozen=True)
class Size:
    """How big the measured models and their input are."""

    hidden: int
    layers: int
    batch: int
    seq: int


FULL: Final = Size(hidden=512, layers=12, batch=4, seq=256)
VOCABULARY: Final = 288
"""Tokens of the tiny tokenizer. A head of 262,144 would take most of a forward at this width, and nothing is
served inside it."""
TINY: Final = Size(hidden=64, layers=6, batch=2, seq=12)
"""For the tests, which only ask whether the rows run."""


def overrides(shape: str, size: Size) -> dict[str, Any]:
    """The text config's fields: the real checkpoints' proportions at another width.

    The vocabulary is the tiny tokenizer's, see `VOCABULARY`.
    """
    fields: dict[str, Any] = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": 4 * size.hidden,
        "sliding_window": size.seq // 2,
        "head_dim": size.hidden // 4,
        "global_head_dim": size.hidden // 2,
    }
    if shape == "e2b":
        fields |= {"hidden_size_per_layer_input": size.hidden // 8}
    if shape == "31b":  # twice the heads
        fields |= {"head_dim": size.hidden // 8, "global_head_dim": size.hidden // 4}
    if shape == "26b-a4b":
        fields |= {"intermediate_size": 3 * size.hidden // 4, "moe_intermediate_size": size.hidden // 4}
        fields |= {"num_experts": 32, "top_k_experts": 8}
    return fields


@dataclass(frozen=True)
class Twins:
    """Modules that compute with the same tensors: two that nothing has touched, one wrapped and traced."""

    bare: Any
    second: Any
    wrapped: Any
    model: StandardizedTransformer
    inputs: dict[str, torch.Tensor]

    @cached_property
    def eager(self) -> Any:
        """An untouched twin under eager attention, where transformers has the pattern."""
        module = twin(self.bare)
        module.set_attn_implementation("eager")
        return module

    @cached_property
    def nnsight(self) -> TransformersModel:
        """A twin under nnsight alone, without our names."""
        return traced(TransformersModel(twin(self.bare), tokenizer=tiny_tokenizer()))

    @cached_property
    def nnsight_eager(self) -> TransformersModel:
        """The eager twin's own twin under nnsight alone."""
        return traced(TransformersModel(twin(self.eager), tokenizer=tiny_tokenizer()))


@lru_cache(maxsize=1)  # the rows of one shape follow each other
def twins(shape: str, size: Size, attn_implementation: str | None = None) -> Twins:
    """The twins of a shape, with a prompt."""
    bare = tiny_module(shape, attn_implementation=attn_implementation, **overrides(shape, size))
    second, wrapped = twin(bare), twin(bare)
    model = traced(StandardizedTransformer(wrapped, tokenizer=tiny_tokenizer()))
    return Twins(bare, second, wrapped, model, prompt(size))


def traced(model: Any) -> Any:
    """The model after its first trace, which leaves in its forwards what every later one finds there."""
    with torch.no_grad():
        with model.trace(prompt(TINY)):
            model.output.save()
    return model


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """A module of its own that computes with the very weights of another.

    Two sets of equal weights lie differently in memory, and one can be a few percent faster for that alone.
    """
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def prompt(size: Size) -> dict[str, torch.Tensor]:
    """Random tokens after `<bos>`, as a tokenizer returns them: ids and a mask without padding."""
    ids = torch.randint(20, VOCABULARY, (size.batch, size.seq), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def config_31b() -> transformers.PreTrainedConfig:
    """The text config of the 60-layer 31B, at its real sizes."""
    return transformers.AutoConfig.for_model(
        "gemma4_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 10,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        use_bidirectional_attention="vision",
        max_position_embeddings=262144,
        vocab_size=262144,
        architectures=["Gemma4ForCausalLM"],
    )
