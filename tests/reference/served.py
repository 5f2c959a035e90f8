"""The models that the reference is compared with, and what they serve, collected in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gemloupe.layouts import Layout
from gemloupe.plan import ModelPlan, plan
from gemloupe.reference import Weights, forward, names
from gemloupe.served import served_values
from gemloupe.support import TEXT_HOSTS
from gemloupe.testing import tiny
from tests.core.models import LENGTHS, SEED, ids, padded

LAYOUTS: dict[str, Layout] = {
    name: served.layout for host in TEXT_HOSTS.values() for name, served in served_values(host).items()
}
"""The layout of each value, by the last word of its name."""


@dataclass(frozen=True)
class Case:
    """One model and one input."""

    shape: str
    wrapper: bool = False
    batched: bool = False
    dtype: torch.dtype = torch.float32
    attention: str | None = None
    experts: str | None = None
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [self.shape, "wrapper" if self.wrapper else "text", "batched" if self.batched else "one"]
        return "-".join(parts + [str(value) for _, value in self.overrides])

    @cached_property
    def model(self) -> Any:
        return tiny(
            self.shape,
            wrapper=self.wrapper,
            seed=SEED,
            dtype=self.dtype,
            attn_implementation=self.attention,
            experts_implementation=self.experts,
            **dict(self.overrides),
        )

    @property
    def config(self) -> Any:
        return self.model._module.config

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model._module.state_dict()

    @cached_property
    def plan(self) -> ModelPlan:
        return plan(self.config)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.config, self.state)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Prompts on which a model in float32 can be held to the definitions.

        There is none of a token whose experts are all but a tie, or whose per-layer branch is all but
        nothing before a norm makes it as large as any: float32 has lost its digits.
        """
        for salt in count():
            rows = [ids(length, salt) for length in (LENGTHS if self.batched else LENGTHS[:1])]
            inputs = padded(rows)
            values = forward(self.weights.plan, self.state, inputs["input_ids"], inputs["attention_mask"])
            indices = range(self.plan.num_layers)
            if all(
                routes_clearly(self.plan, values, i) and branches_clearly(self.weights, values, i)
                for i in indices
            ):
                return inputs
        raise AssertionError

    @property
    def mask(self) -> Tensor:
        return self.inputs["attention_mask"]

    @cached_property
    def collected(self) -> dict[str, Tensor]:
        """Every value of one forward, as the wrapped model serves it."""
        found = self.model.collect(self.inputs, list(names(self.plan)))
        return {name: found[name] for name in names(self.plan)}


def routes_clearly(plan: ModelPlan, values: dict[str, Tensor], index: int) -> bool:
    """Whether rounding leaves every token's experts, and their order, as they are."""
    if (top_k := plan.blocks[index].top_k) is None:
        return True
    probabilities = values[f"layers[{index}].mlp.router_probabilities"]
    gaps = -probabilities.sort(-1, descending=True).values[..., : top_k + 1].diff()
    return bool(gaps.min() > 1e-5)


def branches_clearly(weights: Weights, values: dict[str, Tensor], index: int, *, least: float = 0.2) -> bool:
    """Whether every token's per-layer branch is more than the rounding of what enters it."""
    if not weights.plan.blocks[index].has_per_layer_input:
        return True
    at = f"layers[{index}]"
    stream = values[f"{at}.mid_stream"] + values[f"{at}.mlp.mlp_output"]
    gate = stream @ weights.of_block(index)["per_layer_input_gate.weight"].double().T
    branch = torch.nn.functional.gelu(gate) * values[f"{at}.per_layer_input"]
    real = values["attention_mask"].bool()
    return bool(branch.abs().amax(-1)[real].min() > least)  # it is 5 for a token in the middle


@cache
def case(shape: str, **fields: Any) -> Case:
    """The case with these fields, one for the whole session."""
    return Case(shape, **fields)


def layout(name: str) -> Layout:
    return LAYOUTS[name.rpartition(".")[2]]


def on_tokens(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """A value's rows on real tokens, `[tokens ...]`; all of a value that is not one per token."""
    axes = [axis for axis in ("seq", "query", "key") if axis in layout(name).axes]
    return value.movedim(layout(name).axis(axes[0]), 1)[mask.bool()] if axes else value


def difference(name: str, found: Tensor, expected: Tensor, mask: Tensor) -> float:
    """The largest difference on real tokens, in units of the largest expected magnitude.

    What both say is hidden (-inf, or hugely negative under eager attention) counts as equal.
    """
    assert found.shape == expected.shape
    found, expected = (on_tokens(name, value, mask).double() for value in (found, expected))
    if name.endswith("attention_scores"):
        seen = expected > -torch.inf
        assert torch.equal(found > -1e30, seen)
        found, expected = found[seen], expected[seen]
    return ((found - expected).abs().max() / expected.abs().max()).item()
