"""Challenges: each is a value, in a file of its own, named after it (slow_wire is one to begin from).

challenge    what a challenge is, and how an answer is judged
fair         what scores nothing: clocks and recordings that are patched, the course's own answer
scores       the tries of a learner, or of a class: python -m labs challenges
tries        how the scores went, drawn
shared_disk  of several ranks, and what may be there after a power cut: for cheap_save
"""
