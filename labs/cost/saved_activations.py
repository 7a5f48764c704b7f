"""What backward needs from a forward, in bytes: the course's GPT term by term, and GPT-3's layer as it was published.

    activations(job)             by term, as the job recomputes them
    layer_activations(job)       of one layer, all of them: what it holds while its own backward runs
    backward(job)                what is alive as backward passes through the model, part after part
    korthikanti(s, b, h, a)      of one layer of GPT-3 in 16 bits: s b h (34 + 5 a s / h)

Source: [Korthikanti] et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
"""

from dataclasses import dataclass
from fractions import Fraction

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, gpt_layers


def activations(job: Job) -> dict[str, int]:
    """Bytes that wait for the backward at the end of a forward of `GPT(config)` with targets: their sum is A.

    Each operator keeps what its derivative needs, and a tensor that several keep counts once. There is no T x T: the
    fused attention keeps one number per query, its log-sum-exp. Numbers for each token, of 4 bytes in float32 and 2 in
    16 bits, except those marked *, which are always float32:

        norms       of each: x, x / rms(x), 1 / rms(x)                        2D* + 1*
        attention   its input, q, k, v, y, y with the heads side by side,     4D + 2KE + H*
                    the log-sum-exps
        rotary      cos and sin, for q and for k, once for all sequences      2E*
        mlp         its input, gate, silu(gate), up, their product            D + 4F
        head        its input, the logarithms of the probabilities            D + V*
        tokens      and targets, as int64, of all micro-batches; and one number of the loss

    With one head, or for one token, y with the heads side by side is a view of y: D less. Where RMSNorm is one kernel
    (`fused_norms`), it keeps x as it is and 1 / rms(x): D + 1*.

    What `labs.memory.recompute` keeps of each layer instead:

        selective            its input; what matmuls and attention gave       5D + 2KE + H* + 2F
        all but attention    its input; what attention gave                   2D + H*
        full                 its input                                        D
    """
    tokens, D = job.tokens, job.config.dim
    terms = {name: job.config.depth * size for name, size in layer_terms(job, job.recompute).items()}
    return terms | {
        "norms": terms.get("norms", 0) + job.between * norm_bytes(job),
        "head": tokens * (job.itemsize * D + FLOAT * job.own.vocab),
        "tokens": 2 * INDEX * tokens * job.accumulation + FLOAT,
    }


def layer_activations(job: Job) -> int:
    """Bytes of one layer with all that its backward needs."""
    return sum(layer_terms(job, "none").values())


def layer_terms(job: Job, recompute: str) -> dict[str, int]:
    own, tokens, itemsize = job.own, job.tokens, job.itemsize
    D, H, F, E = own.dim, own.heads, own.hidden, own.head_size
    HE, KE = H * E, own.kv_heads * E
    side_by_side = HE if H > 1 and job.T > 1 else 0  # else a view of y
    gave = {"attention": tokens * (itemsize * HE + FLOAT * H)}  # y, and the log-sum-exps
    kept = {"inputs": itemsize * tokens * D}
    match recompute:
        case "none":
            return {
                "norms": 2 * job.between * norm_bytes(job),
                "attention": gave["attention"] + itemsize * tokens * (D + HE + side_by_side + 2 * KE),
                "rotary": FLOAT * job.T * 2 * E,
                "mlp": itemsize * tokens * (D + 4 * F),
            }
        case "selective":
            projections = itemsize * tokens * (HE + 2 * KE + D)  # q, k, v and o
            mlp = itemsize * tokens * (2 * F + D)  # gate, up and down
            return kept | {"attention": gave["attention"] + projections, "mlp": mlp}
        case "all but attention":
            return kept | gave
    return kept


def norm_bytes(job: Job) -> int:
    """Bytes of one norm and one token."""
    D = job.config.dim
    return job.itemsize * D + FLOAT if job.fused_norms else FLOAT * (2 * D + 1)


# ---- while backward passes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within:
    """A moment within a part: activations, temporaries and buffers of collectives in bytes; in elements, the gradients
    of its own parameters so far, and of them the one that was just made, which may yet have to be added to another."""

    name: str
    A: int
    temporary: int
    gradients: int
    newest: int = 0
    comm: int = 0


@dataclass(frozen=True)
class Part:
    """A part of the model as backward passes through it.

    sizes: elements of its parameters.  worst: when it may hold the most.  left: bytes of activations when it is done.
    handed_on: bytes of the gradient of its input.  shared: its parameters are those of a part that comes later.
    """

    name: str
    sizes: list[int]
    worst: list[Within]
    left: int
    handed_on: int
    shared: bool = False


def backward(job: Job) -> list[Part]:
    """Loss, head, norm, the layers from the last to the first, embedding: where a step may have its peak.

    loss         gradients of the log-probabilities and of the logits; the loss itself is no longer needed
    head         gradients of the logits, of its input and of its weight
    norm         its input; five tensors of that size as 1 / rms(x) is differentiated; the gradient of its weight
    layer        see `within_layer`
    embedding    gradients of its output and of its weight
    """
    V, D, tokens, itemsize = job.config.vocab, job.config.dim, job.tokens, job.itemsize
    terms, whole, kept = activations(job), layer_activations(job), sum(layer_terms(job, job.recompute).values())
    inputs, x, logits = terms["tokens"] - FLOAT, itemsize * tokens * D, FLOAT * tokens * V
    embedding, layer, *_ = (shapes.sizes for shapes in gpt_layers(job.config))

    A = sum(terms.values()) - FLOAT
    parts = [Part("loss", [], [Within("loss", A, 2 * logits, 0)], A - logits, itemsize * tokens * V)]
    in_head = Within("head", A - logits, itemsize * tokens * V + x, V * D, V * D)
    parts += [Part("head", embedding, [in_head], A - logits - x, x, shared=job.config.tied)]
    A = inputs + job.config.depth * kept
    parts += [Part("norm", [D], [within_norm("norm", A, tokens * D, D)], A, x)]
    for number in reversed(range(job.config.depth)):
        A -= kept
        within = within_layer(job, number, A, whole)
        if job.recompute != "none":
            besides = recomputed_besides(job)
            within = [Within(f"recomputed {number}", A + whole + besides, 2 * x, 0), *within]
        parts += [Part(f"layer {number}", layer, within, A, x)]
    return [*parts, Part("embedding", embedding, [Within("embedding", inputs, x, V * D, V * D)], inputs, 0)]


def within_layer(job: Job, number: int, A: int, whole: int) -> list[Within]:
    """In the mlp, gradients of its output x and of each tensor on the way back to its input:

        mlp     of the product (which is gone), of silu(gate), of up, and of down's weight
        up      of silu(gate), of up, of its input, and of two weights
        gate    of gate, of its input, twice, and of three weights

    In its first norm, at last: what a norm needs, and the gradients of all the layer's parameters.
    """
    D, F, layer = job.config.dim, job.config.hidden, gpt_layers(job.config)[1]
    out, x, f = (job.itemsize * n for n in (job.between * D, job.tokens * D, job.tokens * F))
    return [
        Within(f"mlp {number}", A + whole - f, out + 3 * f, D * F),
        Within(f"up {number}", A + whole - 3 * f, out + x + 2 * f, 2 * D * F, D * F),
        Within(f"gate {number}", A + whole - 4 * f, out + 2 * x + f, 3 * D * F, D * F),
        within_norm(f"norm {number}", A, job.between * D, sum(layer.sizes)),
    ]


def within_norm(name: str, A: int, n: int, gradients: int) -> Within:
    return Within(name, A + FLOAT * n, 5 * FLOAT * n, gradients)


def recomputed_besides(job: Job) -> int:
    """What a layer that has been computed again holds besides its activations: its input, where the norm keeps it in
    float32; and where matmuls are handed out, q and k before they were rotated, and what o and down gave."""
    D, KE = job.config.dim, job.config.dim // job.config.heads * job.config.kv_heads
    own_input = not job.fused_norms and job.itemsize != FLOAT
    return job.itemsize * job.tokens * (D * own_input + (3 * D + KE) * (job.recompute == "selective"))


def most_activations(job: Job) -> int:
    """Bytes of activations at their highest: at the end of the forward, or while the last layer is computed again."""
    parts = backward(job)
    return max(FLOAT + parts[0].worst[0].A, *(at.A for part in parts for at in part.worst))


# ---- as published ----------------------------------------------------------------------------------------


def korthikanti(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Fraction:
    """Bytes of one layer of GPT-3 in 16 bits: s tokens, b sequences, width h, a heads, on t tensor-parallel ranks.

        none         s b h (10 + 24 / t + 5 a s / (h t)); with sequence parallelism s b h (34 / t + 5 a s / (h t))
        selective    the same without 5 a s / (h t): the core of attention is computed again
        full         2 s b h: the layer's input

    Attention, which is not fused, has 11 s b h + 5 a s² b; the MLP (GELU, F = 4h) 19 s b h; two LayerNorms 4 s b h. A
    mask of dropout has one byte, the norms' own statistics are left out [Korthikanti, equations 1 and 2, table 2].
    """
    whole, divided = (0, 34) if sequence_parallel else (10, 24)
    match recompute:
        case "none":
            return s * b * h * (whole + Fraction(divided * h + 5 * a * s, h * t))
        case "selective":
            return s * b * h * (whole + Fraction(divided, t))
        case "full":
            return Fraction(2 * s * b * h)
    raise ValueError(f"recompute is {recompute!r}: it must be 'none', 'selective' or 'full'")
