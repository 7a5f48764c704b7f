"""Wrong answers to the exercises on paper of 01 and 02: bytes by kind, and the seconds of an all-reduce."""

import math

from tests.wrong_answers.answers import wrong

# ---- ring_seconds, tree_seconds --------------------------------------------------------------------------


def ring_seconds(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def tree_seconds(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * (latency + size / bandwidth)


@wrong("ring_seconds", "only the first half of the ring")
def reduced_and_scattered(size, ranks, latency, bandwidth):
    return (ranks - 1) * (latency + size / ranks / bandwidth)


@wrong("ring_seconds", "whole tensors travel")
def uncut(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size / bandwidth)


@wrong("ring_seconds", "the bytes of one round only")
def one_piece(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * latency + size / ranks / bandwidth


@wrong("ring_seconds", "the latency is left out")
def bytes_alone(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds", "the latency paid only once")
def one_latency(size, ranks, latency, bandwidth):
    return latency + 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds", "a tree's rounds, and not a ring's")
def rounds_of_a_tree(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * latency + 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds", "N rounds, and not N − 1")
def all_the_way_round(size, ranks, latency, bandwidth):
    return 2 * ranks * (latency + size / ranks / bandwidth)


@wrong("ring_seconds", "two tensors, however few the ranks")
def in_the_limit(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * latency + 2 * size / bandwidth


@wrong("ring_seconds", "bytes are multiplied by bytes per second, and not divided")
def times_the_bandwidth(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size / ranks * bandwidth)


@wrong("ring_seconds")
def cut_down_to_whole_bytes(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size // ranks / bandwidth)


@wrong("ring_seconds")
def latency_shared(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) / ranks * (latency + size / bandwidth)


@wrong("ring_seconds", "the latency paid only once")
def one_latency_in_each_half(size, ranks, latency, bandwidth):
    return 2 * latency + 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds", "the latency of one half only")
def once_to_each(size, ranks, latency, bandwidth):
    return (ranks - 1) * latency + 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds")
def of_bits(size, ranks, latency, bandwidth):
    return ring_seconds(8 * size, ranks, latency, bandwidth)


@wrong("ring_seconds", "nothing is returned")
def printed_seconds(size, ranks, latency, bandwidth):
    print(ring_seconds(size, ranks, latency, bandwidth))


@wrong("ring_seconds", "a different kind of answer")
def both_parts(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * latency, 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds")
def nothing_for_nothing(size, ranks, latency, bandwidth):
    return ring_seconds(size, ranks, latency, bandwidth) if size else 0.0


@wrong("tree_seconds", "the way back is left out")
def reduced(size, ranks, latency, bandwidth):
    return math.ceil(math.log2(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds", "the rounds are not rounded up")
def fractions_of_rounds(size, ranks, latency, bandwidth):
    return 2 * math.log2(ranks) * (latency + size / bandwidth)


@wrong("tree_seconds", "the rounds are not rounded up")
def rounded_down(size, ranks, latency, bandwidth):
    return 2 * int(math.log2(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds", "one round too many")
def bits_of_the_ranks(size, ranks, latency, bandwidth):
    return 2 * ranks.bit_length() * (latency + size / bandwidth)


@wrong("tree_seconds", "a round for each rank, and not for each doubling")
def one_after_the_other(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size / bandwidth)


@wrong("tree_seconds", "pieces travel as in a ring, and not whole tensors")
def by_pieces(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * (latency + size / ranks / bandwidth)


@wrong("tree_seconds", "the latency is left out")
def a_tree_of_bytes(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * size / bandwidth


@wrong("tree_seconds", "the latency paid only once")
def one_latency_in_a_tree(size, ranks, latency, bandwidth):
    return latency + 2 * math.ceil(math.log2(ranks)) * size / bandwidth


@wrong("tree_seconds", "the bytes of one round only")
def sent_once(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * latency + size / bandwidth


@wrong("tree_seconds", "bytes are multiplied by bytes per second, and not divided")
def a_tree_times_the_bandwidth(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * (latency + size * bandwidth)


@wrong("tree_seconds")
def by_the_natural_logarithm(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def rounded_together(size, ranks, latency, bandwidth):
    return math.ceil(2 * math.log2(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def doubled(size, ranks, latency, bandwidth):
    """Recursive doubling."""
    rounds = ranks.bit_length() - 1
    return (rounds + 2 * (ranks != 2**rounds)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def a_ring(size, ranks, latency, bandwidth):
    return ring_seconds(size, ranks, latency, bandwidth)


@wrong("tree_seconds", "nothing is returned")
def a_tree_printed(size, ranks, latency, bandwidth):
    print(tree_seconds(size, ranks, latency, bandwidth))


# ---- bytes_by_kind ---------------------------------------------------------------------------------------


def bytes_by_kind(parameters, mixed):
    p, g, s, per_tensor = (2, 2, 12, 0) if mixed else (4, 4, 8, 4)
    trained = [math.prod(shape) for shape, trained in parameters if trained]
    return {
        "P": p * sum(math.prod(shape) for shape, _ in parameters),
        "G": g * sum(trained),
        "S": s * sum(trained) + per_tensor * len(trained),
    }


def every(parameters):
    """All of them trained."""
    return [(shape, True) for shape, _ in parameters]


def numbers(parameters):
    return sum(math.prod(shape) for shape, trained in parameters if trained)


@wrong("bytes_by_kind", "the steps are not counted")
def eight_per_parameter(parameters, mixed):
    return bytes_by_kind(parameters, mixed) | {"S": (12 if mixed else 8) * numbers(parameters)}


@wrong("bytes_by_kind", "a number of steps in mixed precision, where none is kept")
def always_counted(parameters, mixed):
    trained = sum(trained for _, trained in parameters)
    return bytes_by_kind(parameters, mixed) | {"S": (12 if mixed else 8) * numbers(parameters) + 4 * trained}


@wrong("bytes_by_kind", "no masters")
def without_masters(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    return held | {"S": held["S"] - 4 * numbers(parameters) * mixed}


@wrong("bytes_by_kind", "masters in float32, where there are none")
def always_masters(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    return held | {"S": held["S"] + 4 * numbers(parameters) * (not mixed)}


@wrong("bytes_by_kind", "masters in P, not in S")
def masters_are_parameters(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    more = 4 * sum(math.prod(shape) for shape, _ in parameters) * mixed
    return held | {"P": held["P"] + more, "S": held["S"] - 4 * numbers(parameters) * mixed}


@wrong("bytes_by_kind", "gradients in float32")
def four_for_gradients(parameters, mixed):
    return bytes_by_kind(parameters, mixed) | {"G": 4 * numbers(parameters)}


@wrong("bytes_by_kind", "the optimizer's numbers not in float32")
def all_in_two_bytes(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    return held | {"S": held["S"] // 2} if mixed else held


@wrong("bytes_by_kind", "what is frozen counts as trained")
def all_alike(parameters, mixed):
    return bytes_by_kind(every(parameters), mixed)


@wrong("bytes_by_kind", "a gradient, though it is frozen")
def gradients_for_all(parameters, mixed):
    return bytes_by_kind(parameters, mixed) | {"G": bytes_by_kind(every(parameters), mixed)["G"]}


@wrong("bytes_by_kind", "optimizer state of what is frozen, where there is none")
def remembered_for_all(parameters, mixed):
    return bytes_by_kind(parameters, mixed) | {"S": bytes_by_kind(every(parameters), mixed)["S"]}


@wrong("bytes_by_kind", "the parameters that are frozen are left out")
def frozen_passed_over(parameters, mixed):
    return bytes_by_kind([(shape, trained) for shape, trained in parameters if trained], mixed)


@wrong("bytes_by_kind", "dims added, not multiplied")
def added_up(parameters, mixed):
    return bytes_by_kind([((sum(shape),), trained) for shape, trained in parameters], mixed)


@wrong("bytes_by_kind", "no number in a tensor without dims")
def no_dims_no_numbers(parameters, mixed):
    return bytes_by_kind([(shape or (0,), trained) for shape, trained in parameters], mixed)


@wrong("bytes_by_kind", "numbers, and not bytes")
def numbers_alone(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    return {kind: n // (4 if not mixed or kind == "S" else 2) for kind, n in held.items()}


@wrong("bytes_by_kind", "a different kind of answer")
def added_together(parameters, mixed):
    return sum(bytes_by_kind(parameters, mixed).values())


@wrong("bytes_by_kind", "a different kind of answer")
def without_names(parameters, mixed):
    return list(bytes_by_kind(parameters, mixed).values())


@wrong("bytes_by_kind")
def sixteen_per_parameter(parameters, mixed):
    n = sum(math.prod(shape) for shape, _ in parameters)
    return {"P": 4 * n, "G": 4 * n, "S": 8 * n}


@wrong("bytes_by_kind")
def a_count_for_all(parameters, mixed):
    return bytes_by_kind(parameters, mixed) | {"S": (12 if mixed else 8) * numbers(parameters) + 4 * (not mixed)}


@wrong("bytes_by_kind")
def counted_for_the_frozen(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    return held | {"S": held["S"] + 4 * sum(not trained for _, trained in parameters) * (not mixed)}


@wrong("bytes_by_kind")
def all_or_nothing(parameters, mixed):
    frozen = any(not trained for _, trained in parameters)
    held = bytes_by_kind(parameters, mixed)
    return held | {"G": 0, "S": 0} if frozen else held


@wrong("bytes_by_kind", "nothing is returned")
def bytes_printed(parameters, mixed):
    print(bytes_by_kind(parameters, mixed))


@wrong("bytes_by_kind")
def takes_the_frozen_out(parameters, mixed):
    held = bytes_by_kind(parameters, mixed)
    parameters[:] = [each for each in parameters if each[1]]
    return held
