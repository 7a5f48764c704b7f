"""Answers to held_and_sent (06): what FSDP's settings hold and send, in models."""

from tests.answers import Exercise

answers = Exercise("held_and_sent")
LINE = "right on all 4 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def plain(shards, replicas):
    gather = (shards - 1) / shards
    across = 2 * (replicas - 1) / replicas / shards
    full, kept, hybrid = (1 / shards, 3 * gather), (1, 2 * gather), (1 / shards, 3 * gather + across)
    return {"FULL_SHARD": full, "SHARD_GRAD_OP": kept, "HYBRID_SHARD": hybrid}


@answers.right
def ring(shards, replicas):
    """Count the bytes that each rank of a ring sends."""

    def gather(n, ranks):
        return sum(n / ranks for _ in range(ranks - 1))

    full = gather(1, shards) + gather(1, shards) + gather(1, shards)
    twice = gather(1 / shards, replicas) * 2
    return {
        "FULL_SHARD": (1 / shards, full),
        "SHARD_GRAD_OP": (1.0, gather(1, shards) + gather(1, shards)),
        "HYBRID_SHARD": (1 / shards, full + twice),
    }


# ---- wrong -----------------------------------------------------------------------------------------------

ACROSS = "2 * (replicas - 1) / replicas / shards"
FULL, KEPT = "(1 / shards, 3 * gather),", "(1, 2 * gather)"

instead = answers.slips(plain)
instead("the replicas are made to reduce everything", {ACROSS: "2 * (replicas - 1) / replicas"})
instead("SHARD_GRAD_OP is given only a shard", {KEPT: "(1 / shards, 2 * gather)"})
instead("only what is held is wrong", {FULL: "(1, 3 * gather),"})
