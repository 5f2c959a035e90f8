"""Random numbers for property tests: hypothesis draws sizes and a seed, torch the numbers."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 4)


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


@st.composite
def tensors(draw: st.DrawFn, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers of this shape; a size of 0 is drawn."""
    drawn = [size or draw(sizes) for size in shape]
    return scale * normal(torch.Generator().manual_seed(draw(seeds)), *drawn)
