"""Marks of these tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "flex: compiles flex attention, which takes seconds a shape; `-m 'not flex'` leaves these out",
    )
