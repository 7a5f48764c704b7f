"""What tests ask of the recording of a job with several trainings."""


def held(recording, rank, number, steps):
    """As `recording.steady`, of the training with this number among those of a job, which have so many steps each."""
    later = [recording.held(rank, step) for step in range(number * steps + 1, (number + 1) * steps)]
    return {kind: min(held[kind] for held in later) for kind in later[0]}
