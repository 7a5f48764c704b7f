"""Challenges: each is a value, in a file of the same name (slow_wire is a good one to read first).

challenge    the class of all challenges, and the way in which an answer is judged
fair         guards against answers that score nothing: patched clocks and recordings, the course's own answer
scores       the tries of a learner, or of a class: python -m labs challenges
tries        a drawing of a learner's scores
shared_disk  the disk of cheap_save, which several ranks share, and its contents after a power cut
"""
