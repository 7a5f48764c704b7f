"""What a test needs that is not installed with the course."""

import os

import pytest

from labs.deepspeed import engine
from labs.kit import virtual


def need_jax() -> None:
    need(virtual.missing())


def need_deepspeed() -> None:
    need(engine.missing())


def need(reason: str) -> None:
    """Skips, with the reason; in CI, which is to install it, fails."""
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
