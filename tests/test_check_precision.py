"""The check of notebook 01 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (torch's own AdamW on the master, more than is asked
for).  Wrong: tests/wrong_answers/precision.py.
"""

import torch
from torch import nn

from labs.kit import check, exercises
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.precision import in_the_parameters_dtype, mixed_step, remember

NAME = "mixed_precision"
LINE = "✓ mixed_precision: 16.00 bytes per parameter at rest; the least possible is 16"


def remember_and_count(p):
    return remember(p) | {"steps": 0}


def by_torch(p, kept, t, **settings):
    """AdamW of torch's, made anew for each step."""
    if p.grad is None:
        return
    master = nn.Parameter(kept["master"])
    optimizer = torch.optim.AdamW([master], **settings)
    state = {"step": torch.tensor(t - 1.0), "exp_avg": kept["mean"], "exp_avg_sq": kept["square"]}
    optimizer.state[master] = state
    master.grad = p.grad.float()
    optimizer.step()
    p.data.copy_(kept["master"])


@torch.no_grad()
def in_new_tensors(p, kept, t, lr, betas, eps, weight_decay):
    """In place is only p: what is kept may be other tensors afterwards."""
    if p.grad is None:
        return
    gradient = p.grad.float()
    mean = betas[0] * kept["mean"] + (1 - betas[0]) * gradient
    square = betas[1] * kept["square"] + (1 - betas[1]) * gradient**2
    way = mean / (1 - betas[0] ** t) / ((square / (1 - betas[1] ** t)).sqrt() + eps)
    master = (1 - lr * weight_decay) * kept["master"] - lr * way
    kept.update(master=master, mean=mean, square=square)
    p.copy_(kept["master"])


RIGHT = [
    (remember, mixed_step),
    (remember, in_new_tensors),
    (exercises.remember, exercises.mixed_step),
    (remember_and_count, by_torch),
]


def test_right_answers_are_accepted():
    for functions, answer in zip(RIGHT, together([(NAME, pair, False) for pair in RIGHT]), strict=True):
        assert answer.ok is True and str(answer) == LINE, f"{functions[1].__name__}: {answer}"


def test_wrong_answers_are_called_by_their_names():
    assert sum(answer.check == NAME for answer in ANSWERS) >= 30
    assert let_past(NAME) == ""


def test_untouched_stubs_are_not_yet():
    def stub(*args, **settings):
        raise NotImplementedError("your turn")

    assert check.mixed_precision(stub, stub).ok is None
    assert check.mixed_precision(remember, stub).ok is None


def test_the_words():
    answer = check.mixed_precision(remember, in_the_parameters_dtype, seed=3)
    assert answer.mistake == "small steps are lost" and "of the master is" in answer.text
    assert str(answer) == str(check.mixed_precision(remember, in_the_parameters_dtype, seed=3))
