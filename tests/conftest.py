"""What the whole suite shares: the seed of its models and prompts, and how hypothesis is run."""

from __future__ import annotations

import os
import random

import hypothesis
import pytest


def pytest_configure(config: pytest.Config) -> None:
    # One seed, so that what is green stays green; `GEMLOUPE_TEST_SEED=random` draws another. In the
    # environment, so that every worker of a parallel run has the seed of the header.
    if os.environ.setdefault("GEMLOUPE_TEST_SEED", "0") == "random":
        os.environ["GEMLOUPE_TEST_SEED"] = str(random.randrange(1000))
    hypothesis.settings.register_profile(
        "gemloupe", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("gemloupe")


def pytest_report_header(config: pytest.Config) -> str:
    return f"tiny weights and prompts: GEMLOUPE_TEST_SEED={os.environ['GEMLOUPE_TEST_SEED']}"
