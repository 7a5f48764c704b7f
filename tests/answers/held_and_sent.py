"""Answers to held_and_sent (06): what FSDP's settings hold and send, in models."""

import numpy as np

from tests.answers import Exercise

answers = Exercise("held_and_sent")
LINE = "right on all 4 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def plain(shards, replicas):
    gather = (shards - 1) / shards
    across = 2 * (replicas - 1) / replicas / shards
    full, kept, hybrid = (1 / shards, 3 * gather), (1, 2 * gather), (1 / shards, 3 * gather + across)
    return {"FULL_SHARD": full, "SHARD_GRAD_OP": kept, "HYBRID_SHARD": hybrid}


@answers.right(blind=True)
def ring(shards, replicas):
    """Counts what a ring sends."""

    def gather(n, ranks):
        return sum(n / ranks for _ in range(ranks - 1))

    full = gather(1, shards) + gather(1, shards) + gather(1, shards)
    twice = gather(1 / shards, replicas) * 2
    return {
        "FULL_SHARD": (1 / shards, full),
        "SHARD_GRAD_OP": (1.0, gather(1, shards) + gather(1, shards)),
        "HYBRID_SHARD": (1 / shards, full + twice),
    }


@answers.right(blind=True)
def one_minus(shards, replicas):
    rest = 1 - 1 / shards
    result = {"SHARD_GRAD_OP": (1.0, rest + rest), "FULL_SHARD": (1 - rest, rest + rest + rest)}
    held, sent = result["FULL_SHARD"]
    result["HYBRID_SHARD"] = (held, sent + 2 * (1 - 1 / replicas) * held)
    return result


@answers.right(blind=True)
def by_settings(shards, replicas):
    settings = {"FULL_SHARD": (True, 1), "SHARD_GRAD_OP": (False, 1), "HYBRID_SHARD": (True, replicas)}
    result = {}
    for name, (reshard, copies) in settings.items():
        gathers = 2 if reshard else 1
        sent = (gathers + 1) * (shards - 1) / shards + 2 * (copies - 1) / (copies * shards)
        result[name] = (1 / shards if reshard else 1, sent)
    return result


@answers.right(blind=True)
def lists(shards, replicas):
    full = 3 * (shards - 1) / shards
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
    held = [shards**-1, 1, shards**-1]
    sent = [full, full * 2 / 3, full + 2 * (replicas - 1) / (replicas * shards)]
    return dict(zip(names, zip(held, sent, strict=True), strict=True))


@answers.right(line=LINE)
def in_numpy(shards, replicas):
    return {name: np.array(pair) for name, pair in plain(shards, replicas).items()}


# ---- wrong -----------------------------------------------------------------------------------------------

GATHER, ACROSS = "(shards - 1) / shards", "2 * (replicas - 1) / replicas / shards"
FULL, KEPT, HYBRID = "(1 / shards, 3 * gather),", "(1, 2 * gather)", "(1 / shards, 3 * gather + across)"

instead = answers.slips(plain)
instead("the replicas are made to reduce everything", {ACROSS: "2 * (replicas - 1) / replicas"}, blind=True)
instead("SHARD_GRAD_OP is given only a shard", {KEPT: "(1 / shards, 2 * gather)"}, blind=True)
instead("only what is held is wrong", {FULL: "(1, 3 * gather),"}, blind=True)
instead("only what is held is wrong", {HYBRID: "(replicas / shards, 3 * gather + across)"}, blind=True)
instead("only what is held is wrong", {HYBRID: "(1 / (shards * replicas), 3 * gather + across)"}, long=True)
instead("", {GATHER: "(shards - 1) // shards"}, blind=True)
instead("", {GATHER: "1", ACROSS: "2 / shards"}, blind=True)
instead("", {ACROSS: "0"}, blind=True)
instead("", {ACROSS: "(replicas - 1) / replicas / shards"}, blind=True)
instead("", {HYBRID: "(1 / shards / replicas, 3 * (1 - 1 / shards / replicas))"}, blind=True)
instead("", {HYBRID: "(1 / replicas, 3 * (replicas - 1) / replicas + 2 * gather / replicas)"}, blind=True)
instead("", {FULL: "(1 / shards, 2 * gather),"}, blind=True)
instead("", {KEPT: "(1, 3 * gather)"}, blind=True)
instead("", {"    return": "    full, kept, hybrid = full[::-1], kept[::-1], hybrid[::-1]\n    return"}, blind=True)
instead("", {"(shards, replicas)": "(replicas, shards)"})
