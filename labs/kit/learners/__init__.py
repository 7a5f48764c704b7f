"""Learners' records: the exercises that they have passed and tried.

progress   the files with the exercises that a learner has passed and tried, and tables of them
"""
