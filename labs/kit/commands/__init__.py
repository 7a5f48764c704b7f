"""The commands of the course, python -m labs NAME.  A command's dataclass has its flags; `labs/__main__.py` lists all.

tour         each strategy compared with one process
doctor       can this machine run the course?
progress     the exercises that a learner, or each of several, has passed
challenges   the challenges, with the best scores of a learner, or of each of several
dryrun       what a rank of many would hold and send
plan         the layouts in which a model fits on a cluster, the fastest first
"""
