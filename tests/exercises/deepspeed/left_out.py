"""Answers to left_out (14): bytes on a rank that DeepSpeed's estimate of stage 2 does not count."""

from labs.exercises.deepspeed.left_out import OUT
from tests.answers import Exercise

answers = Exercise("left_out")


@answers.right(line="right on all 4 examples")
def difference(parameters, ranks, activations, bucket, float32):
    states = 2 * parameters - 2 * parameters // ranks if float32 else 0
    return states + activations + (4 if float32 else 2) * bucket


@answers.right
def from_the_estimate(parameters, ranks, activations, bucket, float32):
    estimated = 2 * parameters + 18 * parameters / ranks
    states = 4 * parameters + 16 * parameters / ranks if float32 else estimated
    place = bucket * 4 if float32 else bucket * 2
    return states - estimated + activations + place


answers.instead(OUT)
