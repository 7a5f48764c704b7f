"""Answers to clip_by_stage: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.clip_by_stage import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("clip_by_stage")
answers.right(from_notebook("clip_all_stages"), line="the numbers are one process's")
answers.wrong("each stage has a norm of its own")(faulty)
