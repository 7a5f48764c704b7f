"""bottlenecks: the bottleneck of each of some published training runs.

Most runs are rows of published tables (labs/plan/published.csv), and one has a report's own words.  The check does not
give the answer away.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, WrongSheet, answer_is, form, on_paper, plain

WORDS = ("bubble", "tensor", "gradients", "Python", "memory", "messages")


class Report(NamedTuple):
    """A published run.

    tokens: the tokens per second and GPU.
    best: the most tokens per second and GPU of all published layouts of this model on as many GPUs.
    """

    model: str
    gpus: int
    tp: int
    pp: int
    dp: int
    microbatches: str
    GiB: float | None
    tokens: int | None
    best: int | None


REPORTS = {
    "A": (Report("8B", 32, 32, 1, 1, "16 of 16", 46.3, 1992, 7186), "tensor"),
    "B": (Report("3B", 128, 2, 2, 32, "1 of 8", 46.8, 6990, 13_337), "bubble"),
    "C": (Report("3B", 128, 1, 1, 128, "1 of 2", 64.3, 10_116, 13_337), "gradients"),
    "D": (Report("8B", 32, 1, 4, 8, "16 of 2", 75.5, 1491, 7186), "memory"),
    "E": (Report("3B", 64, 2, 16, 2, "128 of 1", 14.6, 107, 13_310), "messages"),
    "F": (Report("1B", 16, 4, 1, 4, "64 of 1", 10.3, 14_260, 38_840), "Python"),
    "G": (Report("405B, Llama 3", 16_384, 8, 16, 128, "16", None, None, None), "bubble"),
}


@answered
def bottlenecks(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn() -> {report: one of WORDS}`; return the ✓ line."""
    expected = {name: word for name, (_, word) in REPORTS.items()}
    sheet = Sheet((), expected, "the reports", secret=True)
    return on_paper(fn, [sheet], MISTAKES, "What does this run have more of than the best one, or less?")


def reports() -> list[dict[str, Any]]:
    """Return the reports as rows of a table, without the bottlenecks that are to be found."""
    return [{"": name, **report._asdict()} for name, (report, _) in REPORTS.items()]


bottlenecks.reports = reports


def at(name: str) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether the bottleneck of this report is the first wrong one."""

    def matches(seen: WrongSheet) -> str | None:
        found, expected = plain(seen.received), seen.sheet.expected
        return (
            seen.description
            if form(found) == form(expected) and next(n for n in expected if found[n] != expected[n]) == name
            else None
        )

    return matches


# fmt: off
MISTAKES = (
    Mistake("a word that is not in the list", f"Is each of them one of {', '.join(WORDS)}?",
            answer_is(lambda found, expected: form(found) == form(expected)
                      and not {*map(str, found.values())} <= {*WORDS})),
    Mistake("tensor parallelism's traffic is not seen", "On how many nodes are the 32 ranks that share each layer?",
            at("A")),
    Mistake("the bubble is not seen", "With two stages and one micro-batch, what is (p − 1)/m?", at("B")),
    Mistake("the gradients are not seen", "How long does this rank compute, and how many others wait for its sum?",
            at("C")),
    Mistake("a full card is not seen", "How much of its 80 GB does this card have left?", at("D")),
    Mistake("a wait that no arithmetic has", "How long is a step here, and how long is that for each micro-batch?",
            at("E")),
    Mistake("Python's pace is not seen", "One sequence, a small model, split four ways: how long does a layer compute?",
            at("F")),
    Mistake("what fewer micro-batches change", "From 8,192 to 16,384 GPUs the batch stayed as it was. What did not?",
            at("G")),
)
