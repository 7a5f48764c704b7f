"""Challenges: an open task in each notebook, with a score that is the same on any machine.

    ✓ slow_wire: 63.1 points of 100
      …
      straightforward 46.6, the course's own 63.1, known to be possible 75.2, the bound 100

`beat.<name>(fn)` is the challenge in labs/exercises/<chapter>/<name>.py, whose `task` describes the arguments of `fn`.
A learner's function runs in a real job, and is scored by its results first, then by the bytes that it sent or held, or
by the time that it waited.  100 points stand for a bound that nobody can beat, which the notebook derives.  Each try is
drawn and, in a notebook of the course, stored in scores.json; LABS_PLOT=off in the environment turns the drawing off.

ALL has the challenges in the order of the course:

"""

from labs import exercises
from labs.exercises.engine.challenge import Challenge

__all__ = ["ALL"]  # below, the name of each challenge is added
ALL: tuple[Challenge, ...] = tuple(exercises.of_kind(Challenge).values())
for challenge in ALL:
    globals()[challenge.name] = challenge
    __all__.append(challenge.name)
__doc__ += exercises.listed(__all__)
del challenge
