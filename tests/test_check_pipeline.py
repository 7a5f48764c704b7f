"""The checks of notebook 10 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (generators, tuples, NumPy's numbers, schedules that
were published as text, or found by simulation; gradients by torch.autograd.grad, the input's sent ahead).
Wrong: tests/wrong_answers/pipeline.py.  Those of the first three are in tests/answers.
"""

import pytest
import torch

from labs import pp
from labs.kit import check
from labs.pp import B, F, I, W
from tests.answers.together import together
from tests.wrong_answers import pipeline
from tests.wrong_answers.answers import ANSWERS, let_past

CHECKS = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "obey")

# ---- right answers ---------------------------------------------------------------------------------------


def zero_bubble_found_by_simulation(ranks, microbatches):
    """On a common clock: a forward while few enough are alive, else an I, and a W where a rank would wait."""
    lists, done = [[] for _ in range(ranks)], set()
    count = [{F: 0, I: 0, W: 0} for _ in range(ranks)]
    while any(each[W] < microbatches for each in count):
        now = []
        for r, each in enumerate(count):
            few = each[F] - each[I] < ranks - r and each[F] - each[W] < ranks
            can = {
                F: few and each[F] < microbatches and (r == 0 or F(r - 1, each[F]) in done),
                I: each[I] < each[F] and (r == ranks - 1 or I(r + 1, each[I]) in done),
                W: each[W] < each[I],
            }
            if kind := next((kind for kind in can if can[kind]), None):
                now.append(kind(r, each[kind]))
                each[kind] += 1
        for x in now:
            lists[x.stage].append(x)
        done.update(now)
    return lists


def zero_bubble_whole_on_rank_0(ranks, microbatches):
    """Nobody waits for the gradient of the tokens."""
    first, *others = pipeline.zero_bubble(ranks, microbatches)
    return [[B(0, x.microbatch) if isinstance(x, I) else x for x in first if not isinstance(x, W)], *others]


def zero_bubble_with_the_last_w_first(ranks, microbatches):
    lists = []
    for rank, order in enumerate(pipeline.zero_bubble(ranks, microbatches)):
        last = len(order) - min(rank + 1, microbatches)
        lists.append(order[:last] + order[last:][::-1])
    return lists


def zero_bubble_of_the_course(ranks, microbatches):
    return pp.zb1p(ranks, microbatches)


def obey_by_gradients(instructions, stages, loss, xs, ys, take, put):
    """The gradient of the input leaves before those of the weights are there."""
    ends, losses = {}, [None] * len(ys)
    for x in instructions:
        s, m = x.stage, x.microbatch
        is_last = bool(ys) and s == max(stages)
        if type(x) is F:
            given = xs[m] if s == 0 else take(F(s - 1, m)).detach().clone().requires_grad_(True)
            made = stages[s](given)
            if is_last:
                made = loss(made, ys[m])
                losses[m] = made.detach()
            else:
                put(x, made.data)
            ends[x] = given, made
            continue
        given, made = ends.pop(F(s, m))
        back = torch.tensor(1 / len(ys), dtype=made.dtype) if is_last else take(B(s + 1, m))
        weights = [p for p in stages[s].parameters() if p.requires_grad]
        if s > 0:
            put(x, torch.autograd.grad(made, given, back, retain_graph=True)[0])
        for p, g in zip(weights, torch.autograd.grad(made, weights, back), strict=True):
            p.grad = g if p.grad is None else p.grad + g
        del given, made, back
    return torch.stack(losses) if losses else ()


def obey_by_methods(instructions, stages, loss, xs, ys, take, put):
    class Rank:
        def __init__(self):
            self.graphs, self.losses = {}, {}

        def forward(self, s, m):
            if s == 0:
                given = xs[m]
            else:
                given = take(F(s - 1, m))
                given.requires_grad = True
            out = stages[s](given)
            if s == last:
                out = loss(out, ys[m]) / len(ys)
                self.losses[m] = out.detach() * len(ys)
            else:
                put(F(s, m), out.detach())
            self.graphs[s, m] = given, out

        def backward(self, s, m):
            given, out = self.graphs.pop((s, m))
            torch.autograd.backward([out], [None if s == last else take(B(s + 1, m))])
            if s > 0:
                put(B(s, m), given.grad)

    last = max(stages) if len(ys) else -1
    rank = Rank()
    for x in instructions:
        {"F": rank.forward, "B": rank.backward}[type(x).__name__](x.stage, x.microbatch)
    return [rank.losses[m] for m in range(len(ys))]


RIGHT = [
    *(
        ("zero_bubble", fn)
        for fn in (
            pipeline.zero_bubble,
            zero_bubble_of_the_course,
            zero_bubble_found_by_simulation,
            zero_bubble_whole_on_rank_0,
            zero_bubble_with_the_last_w_first,
        )
    ),
    *(("obey", fn) for fn in (pipeline.obey, obey_by_gradients, obey_by_methods)),
]
LINES = {
    "zero_bubble": "✓ zero_bubble: 4 ranks, 8 micro-batches: bubble 12.5%, activations alive at most 4 4 4 4; run for ",
    "obey": "✓ obey: 11 lists on 1, 2 and 4 ranks: losses and gradients are one process's, bit for bit, and nothing ",
}


@pytest.mark.parametrize("name", LINES)
def test_right_answers_are_accepted(name):
    answers = [fn for check_of, fn in RIGHT if check_of == name]
    for fn, answer in zip(answers, together([(name, (fn,), False) for fn in answers]), strict=True):
        assert answer.ok is True and str(answer).startswith(LINES[name].partition(", bit")[0]), (fn.__name__, answer)


# ---- not yet, and wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(stub)
    assert answer.ok is None
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


@pytest.mark.parametrize("name", LINES)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name and answer.listed for answer in ANSWERS) >= 10
    assert let_past(name) == ""


def test_what_it_raises_is_told_with_its_line():
    answer = check.gpipe(lambda *sizes: sizes[99])
    assert answer.ok is False and "IndexError" in answer.text and "sizes[99]" in answer.text


def test_the_first_wrong_instruction_is_named():
    def early(ranks, microbatches):
        first, *others = pipeline.gpipe(ranks, microbatches)
        return [[*first[1:], first[0]], *others]

    answer = check.gpipe(early, seed=1)
    told = "rank 0 runs 0B0 at its 8th place, but 0F0, which it needs, stands at its 16th"
    assert told in answer.text and told in answer.picture.alt and answer.picture.html in answer._repr_html_()


def test_the_same_seed_gives_the_same_answer():
    first, again = (check.gpipe(pipeline.one_f_one_b, seed=5) for _ in range(2))
    assert str(first) == str(again)
