"""Questions of tests to the recording of a job with several trainings."""

from dataclasses import asdict

import pytest


def held(recording, rank, number, steps):
    """Return `recording.steady` of one training of a job, by its number, where each training has this many steps."""
    later = [recording.held(rank, step) for step in range(number * steps + 1, (number + 1) * steps)]
    return {kind: min(held[kind] for held in later) for kind in later[0]}


ABOUT = {"peak": 0.05, "comm": 0.15}  # P, G, S and A are exact


def as_predicted(measured, predicted):
    """Return the measured bytes of the kinds that are predicted, and their prediction, to be compared.

    The peak is a closed form, which is near the measured one; so are the buffers.
    """
    known = {kind: n for kind, n in asdict(predicted).items() if n is not None}
    about = {kind: pytest.approx(known[kind], rel=part) for kind, part in ABOUT.items() if kind in known}
    return {kind: measured[kind] for kind in known}, known | about
