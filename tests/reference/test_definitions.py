"""Each operation is the Lean definition that its docstring names, and treats leading axes alike."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor

from gemloupe.reference import ops
from tests.reference import lean
from tests.reference.numbers import normal, seeds, sizes

# ---- the seed's definitions, in its order, and what this library calls them --------------------------------

DEFINITIONS: Final = {
    "softmax": "softmax",
    "causalGQA": "causal_gqa",
    "slidingGQA": "sliding_gqa",
    "decodeGQA": "decode_gqa",
    "sigmoidGate": "sigmoid_gate",
    "linear": "linear",
    "gateUp": "gate_up",
    "siluMul": "silu_mul",
    "geluMul": "gelu_mul",
    "residual": "residual",
    "embed": "embed",
    "lmHead": "lm_head",
    "rms": "rms",
    "rmsnorm": "rmsnorm",
    "rmsnormOffset": "rmsnorm_offset",
    "rmsnormUnit": "rmsnorm_unit",
    "rmsnormGated": "rmsnorm_gated",
    "l2norm": "l2norm",
    "invFreq": "inv_freq",
    "rope": "rope",
    "ropeStd": "rope_std",
}
BASE: Final = {"sigmoid": "sigmoid", "silu": "silu", "geluTanh": "gelu_tanh", "softcap": "softcap"}
PIECES: Final = {"causal", "sliding", "gqa_logits", "gqa_mix"}


@pytest.mark.parametrize("name", ops.__all__)
def test_every_operation_is_one_definition_and_says_which(name: str):
    doc = inspect.getdoc(getattr(ops, name))
    assert doc is not None
    (source,) = re.findall(r"^Lean: (.*)", doc, re.MULTILINE)
    if name not in PIECES:
        (definition,) = [d for d, ours in (DEFINITIONS | BASE).items() if ours == name]
        assert source.startswith(f"`{definition}`")
        assert hasattr(lean, definition)


@pytest.mark.parametrize("name", ops.__all__)
def test_the_shapes_in_a_docstring_are_the_signatures(name: str):
    hints = typing.get_type_hints(getattr(ops, name))
    answer = hints.pop("return")
    shapes = ", ".join(f"{arg} [{axes(hint)}]" for arg, hint in hints.items() if axes(hint) is not None)
    doc = " ".join((inspect.getdoc(getattr(ops, name)) or "").split())
    assert f"Shapes: {shapes} -> [{axes(answer)}]." in doc


def axes(hint: Any) -> str | None:
    """The axes of an annotation, `None` if it is no tensor's; those of the first of several."""
    hint = next((option for option in typing.get_args(hint) if hasattr(option, "dim_str")), hint)
    return hint.dim_str.strip() if hasattr(hint, "dim_str") else None


def test_every_definition_is_an_operation():
    assert {*DEFINITIONS.values(), *BASE.values(), *PIECES} == set(ops.__all__)


# ---- what each is called with: one row of every axis, drawn -----------------------------------------------


@dataclass(frozen=True)
class Call:
    """Arguments, and how many trailing axes of each tensor are the operation's own."""

    definition: str
    args: tuple[Any, ...]
    own_axes: tuple[int | None, ...]
    """`None` for a number, and for a weight that all rows share."""


@st.composite
def calls(draw: st.DrawFn, definition: str) -> Call:
    random = torch.Generator().manual_seed(draw(seeds))
    queries, keys, heads, group, width = (draw(sizes) for _ in range(5))
    number = draw(st.floats(0.1, 3))
    eps = draw(st.sampled_from([1e-6, 1e-2, 1.0]))

    def real(*shape: int) -> Tensor:
        return normal(random, *shape)

    def whole(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=random)

    pos = whole(keys + 2, queries)
    q, k, v = real(queries, heads, group, width), real(keys, heads, width), real(keys, heads, width)
    x, weight = real(queries, width), real(width)
    theta, rot, denom, active = 1 + 100 * number, draw(st.integers(0, width + 3)), 2 * width, draw(sizes) - 1
    rows: dict[str, tuple[tuple[Any, ...], tuple[int | None, ...]]] = {
        "sigmoid": ((x,), (0,)),
        "silu": ((x,), (0,)),
        "geluTanh": ((x,), (0,)),
        "softcap": ((number, x), (None, 0)),
        "softmax": ((3 * x, real(queries, width) > 0), (1, 1)),
        "causalGQA": ((number, pos, q, k, v), (None, 1, 4, 3, 3)),
        "slidingGQA": ((number, draw(sizes), pos, q, k, v), (None, None, 1, 4, 3, 3)),
        "decodeGQA": ((number, q[0], k, v), (None, 3, 3, 3)),
        "sigmoidGate": ((x, real(queries, width)), (1, 1)),
        "linear": ((real(heads, width), x), (None, 1)),
        "gateUp": ((real(heads, width), real(heads, width), x), (None, None, 1)),
        "siluMul": ((real(queries, 2 * width),), (1,)),
        "geluMul": ((real(queries, 2 * width),), (1,)),
        "residual": ((number, x, real(queries, width)), (None, 1, 1)),
        "embed": ((number, real(keys, width), whole(keys, queries)), (None, None, 0)),
        "lmHead": ((number, draw(st.none() | st.just(2.0)), real(heads, width), x), (None, None, None, 1)),
        "rms": ((eps, x), (None, 1)),
        "rmsnorm": ((eps, x, weight), (None, 1, None)),
        "rmsnormOffset": ((eps, x, weight), (None, 1, None)),
        "rmsnormUnit": ((eps, x), (None, 1)),
        "rmsnormGated": ((eps, x, real(queries, width), weight), (None, 1, 1, None)),
        "l2norm": ((eps, x), (None, 1)),
        "invFreq": ((theta, denom, active, whole(width + 1, queries)), (None, None, None, 0)),
        "rope": ((theta, rot, denom, active, pos, x), (None, None, None, None, 0, 1)),
        "ropeStd": ((theta, rot, pos, x), (None, None, 0, 1)),
    }
    return Call(definition, *rows[definition])


def ours(call: Call) -> Callable[..., Tensor]:
    return getattr(ops, (DEFINITIONS | BASE)[call.definition])


def by_definition(call: Call) -> Any:
    """The definition's own answer, row by row where Lean's definition is of one row or one number."""
    definition = getattr(lean, call.definition)
    args = [arg.tolist() if isinstance(arg, Tensor) else arg for arg in call.args]
    match call.definition:
        case "sigmoid" | "silu" | "geluTanh" | "softcap":
            return [[definition(*args[:-1], number) for number in row] for row in args[-1]]
        case "softmax":
            return [definition(row, seen.__getitem__) for row, seen in zip(*args, strict=True)]
        case "rms":
            return [definition(args[0], row) for row in args[1]]
        case "invFreq":
            return [definition(*args[:-1], pair) for pair in args[-1]]
    return definition(*args)


each_definition = pytest.mark.parametrize("definition", DEFINITIONS | BASE)


@each_definition
@given(data=st.data())
def test_an_operation_is_its_definition(definition: str, data: st.DataObject):
    call = data.draw(calls(definition))
    found = ours(call)(*call.args)
    assert found.dtype == torch.float64
    check_shapes(ours(call), call.args, found)
    expected = torch.tensor(by_definition(call), dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def check_shapes(operation: Callable[..., Tensor], args: tuple[Any, ...], found: Tensor) -> None:
    hints = typing.get_type_hints(operation)
    tensors = [(hints.pop("return"), found), *zip(hints.values(), args, strict=True)]
    # `2*intermediate` is known once `intermediate` is.
    tensors.sort(key=lambda pair: "*" in (axes(pair[0]) or ""))
    with jaxtyped("context"):  # in which an axis has one size
        for hint, value in tensors:
            assert not isinstance(value, Tensor) or isinstance(value, hint), (hint, value.shape)


@each_definition
@settings(max_examples=30)
@given(data=st.data())
def test_leading_axes_are_rows_that_are_treated_alike(definition: str, data: st.DataObject):
    call = data.draw(calls(definition))
    # Other numbers of the same kind; what all rows share stays.
    other = [arg if axes is None else arg.flip(0) for arg, axes in zip(call.args, call.own_axes, strict=True)]
    both = [
        one if axes is None else torch.stack([one, two])[None]
        for one, two, axes in zip(call.args, other, call.own_axes, strict=True)
    ]
    operation = ours(call)
    expected = torch.stack([operation(*call.args), operation(*other)])[None]
    torch.testing.assert_close(operation(*both), expected, rtol=1e-12, atol=1e-12)


@each_definition
@settings(max_examples=30)
@given(data=st.data())
def test_a_tensor_of_low_precision_is_the_numbers_that_it_holds(definition: str, data: st.DataObject):
    call = data.draw(calls(definition))

    def stored(arg: Any, dtype: torch.dtype) -> Any:
        real = isinstance(arg, Tensor) and arg.is_floating_point()
        return arg.bfloat16().to(dtype) if real else arg

    low, high = ([stored(arg, dtype) for arg in call.args] for dtype in (torch.bfloat16, torch.float64))
    found = ours(call)(*low)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, ours(call)(*high), rtol=0, atol=0)
