"""Answers to the exercises, right and wrong, by writers who had seen the notebooks and nothing of the checks.

A file for each part of the course, as it was written, with two tables: RIGHT and WRONG, {exercise: [(name, answer)]}.
The first set of answers to an exercise shows what its check lets past, and the check is mended; then the next set is
written, by somebody else.  Here is the last one.  Nothing in it was changed when its outcome was known, and it is kept
out of the style checks.

    python -m tests.blind               the share of the wrong answers that is caught, and named; of the right, accepted
    python -m tests.blind mesh_and_fsdp        of one file

Those that have moved to tests/answers are no longer here.
"""
