"""Answers to `bubbles` of notebook 10."""

from labs import pp
from labs.exercises.pipeline.bubbles import BUBBLES
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


ONE_F = '"1F1B": bubble'
spoil = answers.slips(bubbles)
spoil("1F1B is given a smaller bubble than GPipe", ONE_F, f"{ONE_F} / 2")

answers.instead(BUBBLES)
