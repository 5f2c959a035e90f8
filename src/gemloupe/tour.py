"""The tour: what the library does, shown on a tiny model and checked while it is shown.

Each step prints the code that it runs, then what came out, and leaves checks for the table at the end. The
answers are compared with transformers' own model, unwrapped, and with plain PyTorch hooks on it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .standardized import StandardizedTransformer
from .support import SupportRow, spans
from .testing import tiny, tiny_module

__all__ = ["Check", "take_tour"]

PROMPT: Final = "The capital of France is"
MIXTURE: Final = "26b-a4b"


def take_tour(shape: str, console: Console) -> bool:
    """Show what a tiny model of this shape is and does; whether every check on the way held."""
    with torch.no_grad():
        model, bare = tiny(shape), tiny_module(shape)
        _say(console, f"A tiny {shape}", f"{model.num_layers} blocks, random weights, as transformers runs them")
        checks = [
            *_names(console, model),
            *_reading(console, model, bare),
            *_identity(console, model),
            *_lens(console, model),
            *_editing(console, model, bare),
            *_routing(console, model if shape == MIXTURE else tiny(MIXTURE)),
            *_steering(console, model, bare),
        ]
    _say(console, "What held", f"{sum(check.held for check in checks)} of {len(checks)} checks")
    console.print(_verdict(checks))
    return all(check.held for check in checks)


# -- the code that is shown: each function's body is printed before it runs ----------------------


def read(model: Any, block: int) -> dict[str, torch.Tensor]:
    with model.trace(PROMPT):
        middle = model.layers[block].mid_stream.save()
        neurons = model.layers[block].mlp.mlp_neurons.save()
        added = model.layers[block].mlp.mlp_output.save()
        after = model.layers[block].layer_output.save()
        logits = model.logits.save()
    return {
        "mid_stream": middle,
        "mlp_neurons": neurons,
        "mlp_output": added,
        "layer_output": after,
        "logits": logits,
    }


def read_every_block(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    with model.trace(PROMPT):
        for layer in model.layers:
            stream = layer.layer_input + layer.self_attn.attention_output
            stream = stream + layer.mlp.mlp_output
            if layer.has_per_layer_input:
                stream = stream + layer.per_layer_output
            pairs.append(((stream * layer.layer_scalar).save(), layer.layer_output.save()))
    return pairs


def look_through_the_lens(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    streams = []
    with model.trace(PROMPT):
        for layer in model.layers:
            streams.append(layer.layer_output.save())
        logits = model.logits.save()
    return streams, logits


def silence_an_mlp(model: Any, block: int) -> torch.Tensor:
    with model.trace(PROMPT):
        model.layers[block].mlp.mlp_output[:] = 0
        logits = model.logits.save()
    return logits


def read_the_routing(model: Any, block: int) -> dict[str, torch.Tensor]:
    with model.trace(PROMPT):
        probabilities = model.layers[block].mlp.router_probabilities.save()
        chosen = model.layers[block].mlp.expert_indices.save()
        outputs = model.layers[block].mlp.expert_outputs.save()
        total = model.layers[block].mlp.routed_output.save()
    return {
        "router_probabilities": probabilities,
        "expert_indices": chosen,
        "expert_outputs": outputs,
        "routed_output": total,
    }


def steer_a_text(model: Any, block: int, vector: torch.Tensor) -> tuple[torch.Tensor, Any]:
    with model.generate(PROMPT, max_new_tokens=8, do_sample=False) as tracer:
        report = model.steer(block, vector, factor=2.0)
        tokens = tracer.result.save()
    return tokens, report
