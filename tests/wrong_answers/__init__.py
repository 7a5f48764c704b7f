"""Wrong answers to the exercises, each with the name by which its check must call it ("" where any rejection will do).

    python -m tests.wrong_answers             the share of them that the checks catch
    python -m tests.wrong_answers checkpoint  of one exercise

Most are what people do write: the mistakes were seen in courses and repositories, or are one slip away from a right
answer.  Each is right in something, so that an easier check would let it pass.

    answers.py     what a wrong answer is, and the list of them
    together.py    many answers in one job
    precision    fsdp    memory
                   a file for each notebook
"""
