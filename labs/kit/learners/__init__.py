"""Learners' records: the exercises that they have passed, and their scores in the challenges.

progress            the file with the exercises that a learner has passed, and tables of passed exercises
progress_commands   the commands `python -m labs progress` and `python -m labs challenges`
"""
