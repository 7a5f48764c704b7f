"""Checks for the exercises: each runs a learner's function in real jobs, and answers in one of three ways.

    ✓ reduce_scatter: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×
    not yet: reduce_scatter (the stub is untouched; the notebook goes on with the course's own)
    ✗ reduce_scatter: the pieces are rotated
      4 ranks, 20 elements of float64: on rank 0 element 0 is 1.62, and not -0.87
      Rank 0 holds the sum of piece 1.
      → A partial sum sets out from rank r and takes N - 1 steps. Where does it end?
      (for the same numbers again: seed=81273)

`check.<name>(fn)` is the check of the exercise in labs/exercises/<chapter>/<name>.py; the check's docstring says which
arguments `fn` gets, and what `fn` should do.  The inputs are drawn at random in each call.  Plain torch in one process
computes the expected values; the bytes sent and held are read from recordings (labs/kit/record.py).
`labs.exercises.engine` has the contract of every check.

`check.predict(question, guess, answer)` compares a learner's prediction with the answer.  Every check and `predict`
return an Answer, which is true if all is right.  `course_map()` links to all notebooks, and shows the exercises that
are passed.

The exercises of each notebook:

"""

from labs import exercises
from labs.exercises.engine.answer import Answer, predict
from labs.kit.learners.progress import course_map

__all__ = ["Answer", "course_map", "predict"]  # below, the name of each check is added
for name, check in exercises.of_kind().items():
    globals()[name] = check
    __all__.append(name)
__doc__ += exercises.listed(__all__)
del name, check
