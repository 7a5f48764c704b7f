"""Packages that a test needs and that are not installed with the course."""

import os

import pytest

from labs.deepspeed import engine
from labs.kit.extras import jax_devices


def need_jax() -> None:
    need(jax_devices.jax_missing())


def need_deepspeed() -> None:
    need(engine.missing())


def need(reason: str) -> None:
    """Skip the test, with the reason; fail in CI, which should install the package."""
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
