"""transformers' models computing in float64 throughout, for differences that are to be finite and small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

WIDE: Final = torch.float64


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps norms and softmaxes in float64.

    transformers runs them in float32 whatever the dtype, which would leave a difference four digits.
    """
    narrow, softmax = Tensor.float, torch.nn.functional.softmax

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == WIDE else narrow(tensor, *args, **kwargs)

    def in_its_own(tensor: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(tensor, *args, dtype=WIDE if tensor.dtype == WIDE else dtype, **kwargs)

    monkeypatch.setattr(Tensor, "float", kept)
    monkeypatch.setattr(torch.nn.functional, "softmax", in_its_own)
    monkeypatch.setattr(torch, "softmax", in_its_own)
    yield
    monkeypatch.undo()
