"""Answers to left_out (14): bytes on a rank that DeepSpeed's estimate of stage 2 does not count."""

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


def spoil(mistake, words):
    answers.spoil(difference, mistake, words)


spoil("activations are shared by the ranks", {"+ activations +": "+ activations // ranks +"})
spoil("the bucket is left out, too", {" + (4 if float32 else 2) * bucket": ""})
spoil("the bucket is shared by the ranks", {"* bucket": "* bucket // ranks"})
spoil("elements of the bucket are taken for bytes", {"(4 if float32 else 2) * bucket": "bucket"})
spoil("16 bits are taken for granted", {"2 * parameters - 2 * parameters // ranks if float32 else 0": "0"})
spoil("in float32 only the parameters are others", {" - 2 * parameters // ranks": ""})
spoil("nothing is returned", {"return states": "states"})
spoil("", {"+ activations": ""})
