"""Pencil and paper: what a job must send and hold, and how long that takes, before it is run.

    collectives   elements and messages that one rank sends       all_reduce(n, ranks, rank), broadcast, ...
    time          of an all-reduce, by latency and bandwidth      ring_seconds(size, ranks, ...), tree_, doubling_
    memory        bytes by parameter; parameters; activations     PIE, parameter_sizes(config), activations(...)
    strategies    all of it, for one rank and step                ddp(config, batch, ranks, "overlapped")

Integers are exact, down to the pieces that do not divide evenly; the textbook's formula, their limit, stands
beside them. Nothing here imports or runs what it predicts: measurements are held against it.

    n          elements of a tensor                  S    its bytes
    N, ranks   ranks of the group                    c_i  piece i of n elements in N, the longer ones first
    Ψ          parameters of a model                 other letters are those of `labs.model`

Sources: [Hockney] 1994, "The communication challenge for MPP"; [Thakur] Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH", sections 3 and 4; [ZeRO] Rajbhandari et al. 2020,
arXiv 1910.02054, section 3.1; [DDP] Li et al. 2020, arXiv 2006.15704, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MiB = 2**20
FLOAT = 4  # bytes of a float32
INDEX = 8  # bytes of an int64: tokens and targets


# ---- collectives -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What one rank sends: so many elements, in so many messages that are not empty."""

    elements: int
    messages: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.elements + other.elements, self.messages + other.messages)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.elements * times, self.messages * times)


def message(n: int) -> Traffic:
    return Traffic(n, int(n > 0))


def piece(n: int, ranks: int, index: int) -> int:
    """c_index: how many of n elements are in that piece of N; `index` counts modulo N."""
    return n // ranks + (index % ranks < n % ranks)


def pieces_but(n: int, ranks: int, kept: int) -> Traffic:
    """Every piece of n elements in N sent once, but for the one that is kept."""
    own = piece(n, ranks, kept)
    return Traffic(n - own, min(n, ranks) - (own > 0))


def reduce_scatter(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Ring: n - c_r, in the limit (N-1)/N n [Thakur, 4.2]."""
    return pieces_but(n, ranks, rank)


def all_gather(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Ring, n elements when gathered: n - c_(r+1), in the limit (N-1)/N n [Thakur, 4.1]."""
    return pieces_but(n, ranks, rank + 1)


def all_reduce(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Ring: reduce_scatter, then all_gather; in the limit 2 (N-1)/N n, which is the least possible."""
    return reduce_scatter(n, ranks, rank) + all_gather(n, ranks, rank)


def all_to_all(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Pairwise, n elements cut evenly: all but the piece that stays, in the limit (N-1)/N n [Thakur, 4.4]."""
    return pieces_but(n, ranks, rank)


def broadcast(n: int, ranks: int, rank: int = 0, src: int = 0) -> Traffic:
    """Binomial tree: n to each child; (N-1) n by all ranks together [Thakur, 4.3]."""
    place = (rank - src) % ranks
    distances = (1 << k for k in range(place.bit_length(), ranks.bit_length()))
    return message(n) * sum(place + distance < ranks for distance in distances)


def reduce(n: int, ranks: int, rank: int = 0, dst: int = 0) -> Traffic:
    """The same tree, upwards: every rank but the root tells its parent."""
    return message(n) * (rank != dst)


def all_reduce_doubling(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Recursive doubling: n log2 N; beyond a power of two, extra ranks fold in and are told [Thakur, 4.5]."""
    doublings = ranks.bit_length() - 1
    power = 1 << doublings
    return message(n) * (1 if rank >= power else doublings + (rank < ranks - power))


def barrier(ranks: int) -> Traffic:
    """Dissemination: one element a round, ceil(log2 N) rounds."""
    return message(1) * (ranks - 1).bit_length()


def all_reduce_limit(n: int, ranks: int) -> Fraction:
    """2 (N-1)/N n: the textbook's ring all-reduce, as if every n divided evenly."""
    return Fraction(2 * (ranks - 1) * n, ranks)


# An all-reduce of `size` bytes, where a message of m bytes takes latency + m / bandwidth [Hockney]: s, and bytes/s
# out of each rank while as many come in. The additions themselves take no time here.


def ring_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """2 (N-1) rounds that move 2 (N-1)/N S."""
    return 2 * (ranks - 1) * latency + float(all_reduce_limit(size, ranks)) / bandwidth


def tree_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """reduce, then broadcast: 2 ceil(log2 N) rounds, each of S."""
    return 2 * (ranks - 1).bit_length() * (latency + size / bandwidth)


def doubling_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """log2 N rounds, each of S, and two more where N is no power of two [Thakur, 4.5]."""
    doublings = ranks.bit_length() - 1
    rounds = doublings + 2 * (ranks != 1 << doublings)
    return rounds * (latency + size / bandwidth)


# ---- memory ----------------------------------------------------------------------------------------------

# Bytes a parameter, by convention. In mixed precision the float32 masters count as optimizer state.
PIE = {
    "float32, AdamW": {"P": 4, "G": 4, "S": 4 + 4},  # 16
    "mixed precision, AdamW": {"P": 2, "G": 2, "S": 4 + 4 + 4},  # 16: K = 12 [ZeRO]
    "mixed precision, float32 gradients": {"P": 2, "G": 4, "S": 4 + 4 + 4},  # 18
    "mixed precision, both gradients": {"P": 2, "G": 2 + 4, "S": 4 + 4 + 4},  # 20: why some count 20
}


def parameter_sizes(config) -> list[int]:
    """Elements of each parameter of `labs.model.GPT(config)`, in the order of registration; their sum is Ψ."""
    V, D, F = config.vocab, config.dim, config.hidden
    KE = D // config.heads * config.kv_heads
    attention, mlp = [D * D, D * KE, D * KE, D * D], [D * F, D * F, F * D]
    layers = [D, *attention, D, *mlp] * config.depth
    return [V * D, *layers, D] + ([] if config.tied else [V * D])


def optimizer_state(sizes: Sequence[int], moments: int = 2, counter: int = 4) -> int:
    """Bytes of AdamW: two moments, and a 4-byte counter for each tensor. SGD: 0 and 0; with momentum: 1 and 0."""
    return FLOAT * moments * sum(sizes) + counter * len(sizes)


def activations(config, batch: int, context: int | None = None) -> dict[str, int]:
    """Bytes that backward needs of a forward of `GPT(config)` with targets, term by term: their sum is A.

    For float32 on CPU, where each operator keeps what its derivative is made of, and a tensor that several keep
    counts once. There is no T x T: the fused attention keeps one number a query, its log-sum-exp. Per token:

        norms       of each: x, x / rms(x), 1 / rms(x)                        2D + 1
        attention   its input, q, k, v, y, y with the heads side by side,     4D + 2KE + H
                    the log-sum-exps
        rotary      cos and sin, for q and for k, once for all sequences      2E
        mlp         its input, gate, silu(gate), up, their product            D + 4F
        head        its input, the logarithms of the probabilities            D + V
        tokens      and targets, as int64; and one number of the loss
    """
    T = config.context if context is None else context
    tokens = batch * T
    D, E, L = config.dim, config.dim // config.heads, config.depth
    attention = 4 * D + 2 * config.kv_heads * E + config.heads
    return {
        "norms": FLOAT * tokens * (2 * L + 1) * (2 * D + 1),
        "attention": FLOAT * tokens * L * attention,
        "rotary": FLOAT * T * L * 2 * E,
        "mlp": FLOAT * tokens * L * (D + 4 * config.hidden),
        "head": FLOAT * tokens * (D + config.vocab),
        "tokens": 2 * INDEX * tokens + FLOAT,
    }


@dataclass(frozen=True)
class Held:
    """Bytes on one rank: the most of each kind during a step, and `peak`, the most of all at one moment.

    P parameters, G gradients, S optimizer state, A activations, comm buffers of collectives, temporary the rest.
    """

    P: int
    G: int
    S: int
    A: int
    comm: int
    temporary: int
    peak: int


# ---- data parallelism ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One rank, one step: bytes sent, in how many all-reduces; the textbook's limit; bytes held."""

    sent: int
    all_reduces: int
    textbook: Fraction
    held: Held


def buckets(sizes: Sequence[int], variant: str, bucket_bytes: int = 25 * MiB) -> list[int]:
    """Elements of each all-reduce of a step: "single", "naive", "bucketed", "overlapped" or "torch" [DDP].

    Buckets are filled from the last parameter on, and closed when they have reached their size. PyTorch's first
    one is closed at 1 MiB; it fills them in the order in which gradients came in the first step, taken here to
    be the same (which cannot matter as long as all sizes are multiples of N).
    """
    match variant:
        case "single":
            return []
        case "naive":
            return list(sizes)
        case "bucketed" | "overlapped":
            first = bucket_bytes
        case "torch":
            first = MiB
        case _:
            raise ValueError(f"{variant!r} is none of single, naive, bucketed, overlapped, torch")
    full, filled = [], 0
    for size in reversed(sizes):
        filled += size
        if FLOAT * filled >= (bucket_bytes if full else first):
            full, filled = [*full, filled], 0
    return full + [filled] * (filled > 0)


def ddp_sent(
    sizes: Sequence[int],
    ranks: int,
    variant: str,
    rank: int = 0,
    bucket_bytes: int = 25 * MiB,
    find_unused: bool = False,
    buffer_bytes: int = 0,
) -> int:
    """Bytes that `rank` sends in a step, for float32 parameters of these sizes, whatever the model.

    `find_unused` adds one int32 a parameter, all-reduced; buffers go out from rank 0 to each of the others.
    Accumulation adds nothing, thanks to `no_sync`; without it, multiply by the number of micro-batches.
    """
    counts = buckets(sizes, variant, bucket_bytes) + [len(sizes)] * find_unused
    sent = FLOAT * sum(all_reduce(n, ranks, rank).elements for n in counts)
    return sent + (ranks - 1) * buffer_bytes * (rank == 0)


def ddp(
    config,
    batch: int,
    ranks: int,
    variant: str,
    rank: int = 0,
    context: int | None = None,
    bucket_bytes: int = 25 * MiB,
    accumulation: int = 1,
) -> Prediction:
    """A step of `GPT(config)` with AdamW, in float32 on CPU, from the second step on; `batch` sequences at a time."""
    sizes = parameter_sizes(config)
    counts = buckets(sizes, variant, bucket_bytes)
    return Prediction(
        sent=ddp_sent(sizes, ranks, variant, rank, bucket_bytes),
        all_reduces=len(counts),
        textbook=FLOAT * all_reduce_limit(sum(counts), ranks),
        held=ddp_held(config, batch, variant, context, bucket_bytes, accumulation),
    )


def ddp_held(
    config,
    batch: int,
    variant: str,
    context: int | None = None,
    bucket_bytes: int = 25 * MiB,
    accumulation: int = 1,
) -> Held:
    """P, S and A are those of one process ("single"). Where the variants differ, in bytes:

                        gradients of their own    buckets that stay    a buffer that passes
        single, naive            P
        bucketed                 P                                     the largest bucket
        overlapped                                        P
        torch                    P                        P

    In overlapped's buckets live the gradients themselves, and G has one more, on its way into its bucket.
    """
    sizes = parameter_sizes(config)
    P, S, A = FLOAT * sum(sizes), optimizer_state(sizes), sum(activations(config, batch, context).values())
    largest_bucket = FLOAT * max(buckets(sizes, variant, bucket_bytes), default=0)
    rows = {"bucketed": (P, 0, largest_bucket), "overlapped": (0, P, 0), "torch": (P, P, 0)}
    own, staying, passing = rows.get(variant, (P, 0, 0))

    work = workspace(config, batch, context)
    already, yet_to_come = (own, 0) if accumulation > 1 else (0, work.gradients if own else 0)
    moments = (
        A + work.loss + already + staying,
        A - work.freed + work.mlp + already + yet_to_come + staying,
        work.inputs + max(passing, work.optimizer) + own + staying,
    )
    return Held(
        P=P,
        G=own or staying + FLOAT * max(sizes),
        S=S,
        A=A,
        comm=passing + (staying if own else 0),
        temporary=max(work.loss, work.mlp, work.optimizer - FLOAT) + 2 * FLOAT,  # with the loss and its gradient
        peak=P + S + max(moments) + FLOAT,
    )


@dataclass(frozen=True)
class Workspace:
    """Bytes of temporaries at the three moments when a step may peak.

    loss        backward begins: gradients of the log-probabilities and of the logits
    mlp         it is in the last layer: gradients of x, of the product, of silu(gate) and of up; those of the
                head, the last norm and down have come (`gradients`), what these three had kept is gone (`freed`);
                where the head is tied to the embedding, its part of the gradient waits for the other
    optimizer   a square root and a quotient for one parameter, and the quotient of the parameter before it;
                tokens and targets (`inputs`) are still there
    """

    loss: int
    mlp: int
    gradients: int
    freed: int
    optimizer: int
    inputs: int


def workspace(config, batch: int, context: int | None = None) -> Workspace:
    tokens = batch * (config.context if context is None else context)
    sizes = parameter_sizes(config)
    D, V, F = config.dim, config.vocab, config.hidden
    return Workspace(
        loss=FLOAT * tokens * 2 * V,
        mlp=FLOAT * (tokens * (D + 3 * F) + (V * D if config.tied else 0)),
        gradients=FLOAT * ((0 if config.tied else V * D) + D + D * F),
        freed=FLOAT * tokens * (V + 3 * D + 1 + F),
        optimizer=FLOAT * max(2 * size + before for before, size in zip([0, *sizes], sizes, strict=False)),
        inputs=2 * INDEX * tokens,
    )
