"""Hand out, collect, mark: the exercises as nbgrader's assignments, marked in a sandbox by the course's own checks.

    make release N=03             marking/release/03_ddp/03_ddp.ipynb, which learners put into their notebooks/
    make mark FOLDER=submitted    one folder a learner in FOLDER, with their notebooks anywhere below: points in
                                  marking/grades.csv, the checks' words in marking/feedback/

    handing.py     what is handed out, and what of a submission is marked
    sandbox.py     starts the judge without network, without files, and with limits
    judge.py       runs the checks inside the sandbox; the submission's functions run on ranks only
    slices.py      the functions that a check is called with, and what these need
    learned.py     a function, as the judge holds it: by its source
    nbgrader_config.py    nbgrader's settings: verdicts take the place of running the notebook

What is not prevented: `labs` has the course's own functions, and a rank counts its own bytes.  A submission that calls
the former, or changes the latter in its own process, gets points; a teacher sees both in its cell.
"""
