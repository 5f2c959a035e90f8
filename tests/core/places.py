"""Every value of the design's vocabulary, in the order in which a forward passes it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import nnsight
from torch import Tensor

from tests.core.models import Case

# Written from the design's tables, not read off the descriptors: {host: (name, layout)}, in forward order.
BEFORE = {
    "input_ids": "batch seq",
    "attention_mask": "batch seq",
    "token_embeddings": "batch seq hidden",
    "per_layer_token_inputs": "batch seq layers ple",
    "per_layer_context_inputs": "batch seq layers ple",
    "per_layer_inputs": "batch seq layers ple",
}
BLOCK = {
    ".layer_input": "batch seq hidden",
    ".per_layer_input": "batch seq ple",
    "self_attn.attention_input": "batch seq hidden",
    "self_attn.own_keys": "batch kv_heads seq head_dim",
    "self_attn.own_values": "batch kv_heads seq head_dim",
    "self_attn.attention_queries": "batch heads query head_dim",
    "self_attn.attention_keys": "batch kv_heads key head_dim",
    "self_attn.attention_values": "batch kv_heads key head_dim",
    "self_attn.visible_keys": "batch heads query key",
    "self_attn.attention_scores": "batch heads query key",
    "self_attn.attention_probabilities": "batch heads query key",
    "self_attn.attention_head_outputs": "batch query heads head_dim",
    "self_attn.attention_projection": "batch seq hidden",
    "self_attn.attention_output": "batch seq hidden",
    ".mid_stream": "batch seq hidden",
    "mlp.mlp_input": "batch seq hidden",
    "mlp.mlp_neurons": "batch seq intermediate",
    "mlp.shared_expert_output": "batch seq hidden",
    "mlp.router_logits": "batch seq experts",
    "mlp.router_probabilities": "batch seq experts",
    "mlp.expert_weights": "batch seq top_k",
    "mlp.expert_indices": "batch seq top_k",
    "mlp.expert_outputs": "batch seq top_k hidden",
    "mlp.routed_output": "batch seq hidden",
    "mlp.mlp_projection": "batch seq hidden",
    "mlp.mlp_output": "batch seq hidden",
    ".per_layer_output": "batch seq hidden",
    ".layer_output": "batch seq hidden",
}
AFTER = {
    "raw_logits": "batch seq vocab",
    "logits": "batch seq vocab",
    "next_token_probs": "batch vocab",
}
READ_ONLY = {"next_token_probs", "expert_indices", "visible_keys"}
INTEGERS = {"input_ids", "attention_mask", "expert_indices", "visible_keys"}
# Known at one moment, so that they may be read in any order.
ROUTING = ("router_logits", "router_probabilities", "expert_weights", "expert_indices", "expert_outputs")
# Inside the call of the attention function.
ATTENTION_CALL = {name.partition(".")[2] for name in BLOCK if name.startswith("self_attn.")} - {
    "attention_input",
    "attention_projection",
    "attention_output",
}


class Place(NamedTuple):
    """One value of one host."""

    name: str
    block: int | None = None
    part: str = ""

    def __str__(self) -> str:
        return ".".join([*self._prefix(), self.name])

    def _prefix(self) -> list[str]:
        if self.block is None:
            return []
        return [f"layers[{self.block}]", *([self.part] if self.part else [])]

    def host(self, model: Any) -> Any:
        if self.block is None:
            return model
        block = model.layers[self.block]
        return getattr(block, self.part) if self.part else block

    def read(self, model: Any) -> Any:
        return getattr(self.host(model), self.name)

    def write(self, model: Any, value: Any) -> None:
        setattr(self.host(model), self.name, value)


def block_places(block: int) -> list[Place]:
    return [Place(path.rpartition(".")[2], block, path.rpartition(".")[0]) for path in BLOCK]


def forward_order(model: Any) -> list[Place]:
    """Every value that the model says it has, in forward order."""
    places = [Place(name) for name in BEFORE]
    for block in range(model.num_layers):
        places += block_places(block)
    places += [Place(name) for name in AFTER]
    served = {row.path for row in model.support()}
    return [p for p in places if _pattern(p) in served and model.has(str(p))]


def _pattern(place: Place) -> str:
    return str(place).replace(f"layers[{place.block}]", "layers[i]")


def floating(model: Any) -> list[Place]:
    return [place for place in forward_order(model) if place.name not in INTEGERS]


def writable(model: Any) -> list[Place]:
    return [place for place in floating(model) if place.name not in READ_ONLY]


def first_of_each(places: list[Place], blocks: tuple[int, ...]) -> list[Place]:
    """The root's places and those of some blocks."""
    return [place for place in places if place.block is None or place.block in blocks]


def read_all(model: Any, rows: list[Tensor]) -> list[dict[Place, Tensor]]:
    """Every value, of one prompt or of each of several invokes."""
    order = forward_order(model)
    found: list[dict[Place, Tensor]] = [{} for _ in rows]
    if len(rows) == 1:
        with model.trace(rows[0]):
            for place in order:
                found[0][place] = nnsight.save(place.read(model))
        return found
    with model.trace() as tracer:
        for row, values in zip(rows, found, strict=True):
            with tracer.invoke(row):
                for place in order:
                    values[place] = nnsight.save(place.read(model))
    return found


@cache
def reading(case: Case) -> tuple[dict[Place, Tensor], ...]:
    """Every value of each invoke of a case, for tests that only look at them."""
    return tuple(read_all(case.model(), case.prompts))


def rows_of(inputs: dict[str, Tensor], invoke: int) -> dict[str, Tensor]:
    """One invoke's row of the padded batch."""
    return {name: tensor[invoke : invoke + 1] for name, tensor in inputs.items()}
