"""Answers to `bubbles` of notebook 10."""

from labs import pp
from tests.answers import Exercise

answers = Exercise("bubbles")


@answers.right(line="right on all 5 examples")
def bubbles(p, m, v):
    bubble = (p - 1) / m
    return {"GPipe": bubble, "1F1B": bubble, "interleaved": bubble / v, "zero bubble": bubble / 3}


@answers.right(line="right on all 5 examples")
def by_simulation(ranks, microbatches, stages_per_rank):
    lists = {
        "GPipe": pp.gpipe(ranks, microbatches),
        "1F1B": pp.one_f_one_b(ranks, microbatches),
        "interleaved": pp.interleaved(ranks, microbatches, stages_per_rank),
        "zero bubble": pp.zb1p(ranks, microbatches),
    }
    return {name: pp.simulate(each).bubble for name, each in lists.items()}


ONE_F, LOOPS, ZERO = '"1F1B": bubble', '"interleaved": bubble / v', '"zero bubble": bubble / 3'
answers.spoil(bubbles, "1F1B is given a smaller bubble than GPipe", {ONE_F: f"{ONE_F} / 2"})
OF_ALL = {"return {": "found = {", "/ 3}": "/ 3}\n    return {name: x / (1 + x) for name, x in found.items()}"}
answers.spoil(bubbles, "a fraction of the whole time, and not of the ideal one", OF_ALL)
answers.spoil(bubbles, "interleaved has not been divided by v", {LOOPS: '"interleaved": bubble'})
answers.spoil(bubbles, "p over m, and not p − 1", {"(p - 1) / m": "p / m"})
answers.spoil(bubbles, "", {ZERO: '"zero bubble": 0'})
answers.spoil(bubbles, "", {ZERO: '"zero bubble": bubble / 2'})
answers.spoil(bubbles, "", {ZERO: '"zero bubble": bubble / v / 3'}, long=True)
TURNED = {"(p - 1) / m": "m / (p - 1) if p > 1 else 0", "bubble / v": "bubble", "bubble / 3": "bubble"}
answers.spoil(bubbles, "", TURNED, long=True)
