"""Records of what learners have passed and scored.

progress    the file with the exercises that a learner has passed, and tables of it
standings   python -m labs progress, and python -m labs challenges
"""
