"""The check of bubbles against right answers, and against wrong ones that are known by name."""

from labs import pp
from tests.answers.together import together
from tests.wrong_answers import pencil
from tests.wrong_answers.answers import let_past


def bubbles_by_simulation(ranks, microbatches, stages_per_rank):
    lists = {
        "GPipe": pp.gpipe(ranks, microbatches),
        "1F1B": pp.one_f_one_b(ranks, microbatches),
        "interleaved": pp.interleaved(ranks, microbatches, stages_per_rank),
        "zero bubble": pp.zb1p(ranks, microbatches),
    }
    return {name: pp.simulate(each).bubble for name, each in lists.items()}


def test_right_answers_are_accepted():
    for fn in (pencil.bubbles, bubbles_by_simulation):
        (answer,) = together([("bubbles", (fn,), False)])
        assert str(answer) == "✓ bubbles: right on all 5 examples", f"{fn.__name__}: {answer}"


def test_wrong_answers_are_called_by_their_names():
    assert let_past("bubbles") == ""
