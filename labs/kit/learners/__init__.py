"""Learners' records: the exercises that they have passed.

progress   the file with the exercises that a learner has passed, and tables of passed exercises
"""
