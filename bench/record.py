"""The cost of watching a job: a step under each pass of labs.kit.record, and the same step without."""

from bench.figure import Figure, figure, ratios
from bench.record_overhead import RANKS, pairs
from labs.kit.launch import run


def figures(quick: bool) -> list[Figure]:
    found = []
    for kind, target in {"time": "", "communication": "at most 1.10", "memory": ""}.items():
        measured = run(pairs, kind, ranks=RANKS, timeout=600)[0]
        found.append(figure(f"record: step with {kind} pass / without", ratios(measured), target=target))
    return found
