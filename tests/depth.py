"""Breadth and depth: `make test` shows each claim on one configuration, `make quick` and `make soak` on all of them."""

from typing import Any

import pytest


def deepen(*values: Any) -> list[Any]:
    """Return parameters for further configurations of a claim, which `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.depth) for value in values]
