"""The reference against transformers' own formulas, once nothing in them is rounded to float32.

transformers computes norms, softmax and rotary tables in float32 whatever the model's precision. Asked for
float32, torch is here made to give float64: what remains is a difference in the last digits, or a mistake.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gemloupe.testing import SHAPES
from tests.reference.served import Case
from tests.reference.test_forward import by_block, end_to_end, too_far

BY_BLOCK: Final = 1e-13
END_TO_END: Final = 1e-11


class InFloat64(TorchFunctionMode):
    """Where a computation asks for float32, it gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


# Eager attention is asked about one prompt alone: in a padded batch transformers 5.24 makes a float64 model's
# values NaN, since what it adds to a hidden score is -inf once its softmax has rounded it to float32.
@pytest.mark.parametrize(("attention", "batched"), [(None, True), ("eager", False)], ids=["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_is_the_definitions_to_the_last_digits(shape: str, attention: str | None, batched: bool):
    experts = "eager" if shape == "26b-a4b" else None  # grouped_mm refuses float64
    check(Case(shape, batched=batched, attention=attention, experts=experts))


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_full_blocks_divide_their_frequencies_by_the_configs_factor(factor: float):
    rotary = Case("e4b").config.to_dict()["rope_parameters"]
    rotary["full_attention"] |= {"factor": factor, "partial_rotary_factor": 0.4}
    other = Case("e4b", batched=True, overrides=(("rope_parameters", rotary),))
    assert other.plan.blocks[-1].rotary.factor == factor
    check(other)


def check(exact: Case) -> None:
    module = exact.model._module.double()
    with InFloat64(), torch.no_grad():
        module._init_weights(module.model.rotary_emb)
        _ = exact.collected
    assert not too_far(exact, by_block(exact), BY_BLOCK)
    assert not too_far(exact, end_to_end(exact), END_TO_END)
