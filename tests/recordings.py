"""What tests ask of the recording of a job with several trainings."""

from dataclasses import asdict


def held(recording, rank, number, steps):
    """As `recording.steady`, of the training with this number among those of a job, which have so many steps each."""
    later = [recording.held(rank, step) for step in range(number * steps + 1, (number + 1) * steps)]
    return {kind: min(held[kind] for held in later) for kind in later[0]}


def as_predicted(measured, predicted):
    """Return what was measured of the kinds that are predicted, and the prediction of these, to be compared."""
    known = {kind: n for kind, n in asdict(predicted).items() if n is not None}
    return {kind: measured[kind] for kind in known}, known
