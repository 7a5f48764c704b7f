"""The all-reduce explorer's picture: the seconds of one all-reduce, by its algorithm and its size.

    picture({"ring": cost.ring_seconds, ...}, **BEGIN)     a line and a formula per algorithm, a dot at the chosen size

`labs.kit.play.all_reduce_times` shows this picture below its controls.  Every number of ranks to choose from is a power
of two.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from labs.kit.drawing.formulas import Captioned, Line, formula, term
from labs.kit.drawing.times_by_size import amount, by_size, rate, span

Formula = Callable[[int, int, float, float], float]  # (bytes, ranks, latency in s, bandwidth in bytes/s) -> seconds

# CONTROLS has the label and the values of each control (slider), by its name; BEGIN has the control's first value.
CONTROLS: dict[str, tuple[str, Sequence]] = {
    "ranks": ("ranks", (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    "megabytes": ("MB", (0.001, 0.01, 0.1, 1, 10, 100, 1000)),
    "latency": ("latency, µs", (1, 2, 5, 10, 20, 50, 100)),
    "bandwidth": ("GB/s", (0.1, 1, 10, 25, 50, 100, 400)),
}
BEGIN = {"ranks": 8, "megabytes": 1, "latency": 20, "bandwidth": 10}


def picture(
    seconds: Mapping[str, Formula], ranks: int, megabytes: float, latency: float, bandwidth: float
) -> Captioned:
    """Draw the seconds of an all-reduce by size, a line per algorithm, below the formulas of the algorithms.

    seconds: {name of an algorithm: function that predicts its seconds}; names without an entry in FORMULAS are drawn
        without a formula.
    megabytes: MB on each rank.
    latency: µs per message.
    bandwidth: GB/s per link.
    """
    alpha, size, W = 1e-6 * latency, 1e6 * megabytes, 1e9 * bandwidth
    lines = {name: partial(taken, each, ranks, alpha, W) for name, each in seconds.items()}
    title = f"{ranks} ranks, {amount(size)}, {span(alpha)} per message, {rate(W)} per link"
    message = [term(span(alpha), "latency"), " + ", term(amount(size), "megabytes"), " / ", term(rate(W), "bandwidth")]
    formulas = [FORMULAS[name](ranks, message) for name in seconds if name in FORMULAS]
    return formula(by_size(title, lines, size), *formulas)


def taken(seconds: Formula, ranks: int, latency: float, bandwidth: float, size: float) -> float:
    return seconds(int(size), ranks, latency, bandwidth)


def ring(ranks: int, message: Line) -> Line:
    latency, plus, *sent = message
    rounds, tensors = term(f"2 ({ranks} − 1)", "ranks"), term(f"2 ({ranks} − 1)/{ranks}", "ranks")
    return ["ring: ", rounds, " × ", latency, plus, tensors, " × ", *sent]


def doubling(ranks: int, message: Line) -> Line:
    return ["doubling: ", term(f"log₂ {ranks}", "ranks"), " × (", *message, ")"]


def tree(ranks: int, message: Line) -> Line:
    return ["reduce, broadcast: ", term(f"2 log₂ {ranks}", "ranks"), " × (", *message, ")"]


FORMULAS = {"ring": ring, "doubling": doubling, "reduce, broadcast": tree}
