"""Challenges: an open task in each notebook, with a score that is the same on any machine.

    ✓ slow_wire: 63.1 points of 100
      …
      straightforward 46.6, the course's own 63.1, known to be possible 75.2, the bound 100

`beat.<name>(fn)` is the challenge in labs/exercises/<chapter>/<name>.py, whose `task` says what `fn` is called with.  A
learner's function is judged by a real job: by its numbers first, then by what it sent, held or waited for.  100 points
stand for a bound that nobody can beat, derived in the notebook.  Each try is drawn, and kept in scores.json where a
notebook of the course runs; LABS_PLOT=off in the environment leaves the drawing away.

ALL has them in the order of the course:

"""

from labs import exercises
from labs.exercises.engine.challenge import Challenge

__all__ = ["ALL"]  # and each challenge
ALL: tuple[Challenge, ...] = tuple(exercises.of_kind(Challenge).values())
for challenge in ALL:
    globals()[challenge.name] = challenge
    __all__.append(challenge.name)
__doc__ += exercises.listed(__all__)
del challenge
