"""What a test needs that is not installed with the course."""

import os

import pytest

from labs.kit import virtual


def need_jax() -> None:
    """Skips, with the reason; in CI, which is to install it, fails."""
    if reason := virtual.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
