"""The models that the core's tests run, bare and wrapped, and what they are run on.

A bare model is transformers' own, built apart with the same weights, never wrapped and never traced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from gemloupe.testing import SHAPES, tiny, tiny_module

# transformers 5.20 to 5.22 run every block on the whole prompt, so there the fast path is the full one.
shortcut = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="transformers before 5.23 has no fast path"
)

SEED = int(os.environ["GEMLOUPE_TEST_SEED"])
# So that every test of a text model can be run on the text model inside a wrapper as well.
IN_WRAPPERS = os.environ.get("GEMLOUPE_TEST_WRAPPERS") == "1"
of_the_text_load = pytest.mark.skipif(IN_WRAPPERS, reason="names what the text-only load alone has so")
BOS = 2
# The longest overruns the sliding window of six twice; the shortest is padded by ten.
LENGTHS = (13, 7, 3)


def ids(length: int, salt: int = 0) -> Tensor:
    """A prompt of `length` random tokens, `[1 length]`, BOS first; ids of plain bytes alone."""
    random = torch.Generator().manual_seed(1000 * SEED + 10 * length + salt)
    row = torch.randint(20, 260, (1, length), generator=random)
    row[:, 0] = BOS
    return row


def prompts(batched: bool = True) -> list[Tensor]:
    """One prompt, or several of unequal length."""
    return [ids(length) for length in (LENGTHS if batched else LENGTHS[:1])]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """The rows as one batch, padded on the left, each counted from its first real token."""
    width = max(row.shape[1] for row in rows)
    batch = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for i, row in enumerate(rows):
        batch[i, width - row.shape[1] :] = row
        mask[i, width - row.shape[1] :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": batch, "attention_mask": mask, "position_ids": positions}


@dataclass(frozen=True)
class Case:
    """One model and one way to run it."""

    shape: str
    wrapper: bool = False
    attention: str = "sdpa"
    dtype: torch.dtype = torch.float32
    experts: str | None = None
    batched: bool = False

    def __str__(self) -> str:
        parts = [self.shape, "wrapper" if self.wrapper else "text", self.attention]
        parts += [str(self.dtype).removeprefix("torch."), self.experts, "batched" if self.batched else None]
        return "-".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "wrapper": self.wrapper or IN_WRAPPERS,
            "attn_implementation": self.kernels,
            "experts_implementation": self.experts,
            "dtype": self.dtype,
            "seed": SEED,
        }

    @property
    def kernels(self) -> Any:
        # The audio tower knows eager attention alone: a wrapper cannot be asked for another by one name.
        if self.attention == "sdpa":
            return None
        if self.attention != "eager" and (self.wrapper or IN_WRAPPERS):
            return {"": "eager", "text_config": self.attention, "audio_config": "eager"}
        return self.attention

    @property
    def prompts(self) -> list[Tensor]:
        return prompts(self.batched)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return padded(self.prompts)

    def model(self) -> Any:
        return wrapped(replace(self, batched=False))

    def bare(self) -> Any:
        return unwrapped(replace(self, batched=False))

    def logits(self) -> Tensor:
        """What the bare model answers, `[rows seq vocab]`."""
        with torch.no_grad():
            return self.bare()(**self.inputs).logits


def continued(case: Case, row: Tensor) -> dict[str, Any]:
    """A cache of a row's tokens, under the name that the installed transformers gives it."""
    with torch.no_grad():
        output = case.bare()(row, use_cache=True)
    return {name: output[name] for name in output.keys() & {"cache", "past_key_values"}}


def stack(module: Any) -> Any:
    """The module of a bare model that holds the blocks."""
    return getattr(module.model, "language_model", module.model)


@cache
def wrapped(case: Case) -> Any:
    return tiny(case.shape, **case.options)


@cache
def unwrapped(case: Case) -> Any:
    return tiny_module(case.shape, **case.options)


def every_case(
    *,
    shapes: tuple[str, ...] = SHAPES,
    wrapper: tuple[bool, ...] = (False, True),
    attention: tuple[str, ...] = ("sdpa", "eager"),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    experts: tuple[str, ...] = ("eager", "batched_mm", "grouped_mm"),
    batched: tuple[bool, ...] = (False, True),
) -> list[Case]:
    """The product, in which only the mixture is run under several experts implementations."""
    return [
        Case(shape, load, attn, dtype, expert, rows)
        for shape in shapes
        for load in wrapper
        for attn in attention
        for dtype in dtypes
        for expert in (experts if shape == "26b-a4b" else (None,))
        for rows in batched
    ]
