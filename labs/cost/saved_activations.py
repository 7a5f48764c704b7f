"""Activations that a forward saves for backward, in bytes: the course's GPT term by term, and GPT-3's layer.

    activations(job)             all saved activations, term by term, under the job's recomputation
    layer_activations(job)       those of one layer without recomputation, which it holds while its own backward runs
    backward(job)                bytes alive while backward passes through the model, part after part
    korthikanti(s, b, h, a)      activations of one layer of GPT-3 in 16 bits: s b h (34 + 5 a s / h)

Source: [Korthikanti] et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
"""

from dataclasses import dataclass
from fractions import Fraction

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, gpt_layers


def activations(job: Job) -> dict[str, int]:
    """Return the bytes that are saved at the end of a forward of `GPT(config)` with targets, by term: their sum is A.

    Each operator saves the tensors that its derivative needs, and a tensor that several operators save counts once.
    There is no T x T: the fused attention saves one number per query, its log-sum-exp. The table has numbers per token,
    of 4 bytes in float32 and 2 in 16 bits, except those marked *, which are always float32:

        norms       each norm: x, x / rms(x), 1 / rms(x)                      2D* + 1*
        attention   its input, q, k, v, y, y with the heads side by side,     4D + 2KE + H*
                    the log-sum-exps
        rotary      cos and sin, for q and for k, once for all sequences      2E*
        mlp         its input, gate, silu(gate), up, their product            D + 4F
        head        its input, the logarithms of the probabilities            D + V*
        tokens      tokens and targets, as int64, of all micro-batches; and one number for the loss

    With one head, or for one token, y with the heads side by side is a view of y: D less. If RMSNorm is one kernel
    (`fused_norms`), it saves x in its own dtype and 1 / rms(x): D + 1*.

    `labs.memory.recompute` saves for each layer instead:

        selective            its input; the outputs of matmuls and attention  5D + 2KE + H* + 2F
        all but attention    its input; the outputs of attention              2D + H*
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
    """Return the bytes of one layer with all activations that its backward needs."""
    return sum(layer_terms(job, "none").values())


def layer_terms(job: Job, recompute: str) -> dict[str, int]:
    own, tokens, itemsize = job.own, job.tokens, job.itemsize
    D, H, F, E = own.dim, own.heads, own.hidden, own.head_size
    HE, KE = H * E, own.kv_heads * E
    side_by_side = HE if H > 1 and job.T > 1 else 0  # otherwise it is a view of y
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
    """Return the bytes that one norm saves for one token."""
    D = job.config.dim
    return job.itemsize * D + FLOAT if job.fused_norms else FLOAT * (2 * D + 1)


# ---- while backward runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within:
    """A moment within a part.

    A, temporary, comm: bytes of activations, of temporaries, and of buffers of collectives
    gradients: elements of the gradients of the part's parameters so far
    newest: elements of the newest of them, which may still have to be added to another gradient
    """

    name: str
    A: int
    temporary: int
    gradients: int
    newest: int = 0
    comm: int = 0


@dataclass(frozen=True)
class Part:
    """A part of the model that backward passes through.

    sizes: elements of its parameters
    worst: the moments in which it may hold the most
    left: bytes of activations when it is done
    input_gradient: bytes of the gradient of its input
    shared: whether its parameters belong to a part that comes later
    """

    name: str
    sizes: list[int]
    worst: list[Within]
    left: int
    input_gradient: int
    shared: bool = False


def backward(job: Job) -> list[Part]:
    """Return loss, head, norm, the layers from the last to the first, and embedding, with the bytes that each holds.

    loss         gradients of the log-probabilities and of the logits; the loss itself is no longer needed
    head         gradients of the logits, of its input and of its weight
    norm         its input; five tensors of that size while 1 / rms(x) is differentiated; the gradient of its weight
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
            extra = recomputed_extra(job)
            within = [Within(f"recomputed {number}", A + whole + extra, 2 * x, 0), *within]
        parts += [Part(f"layer {number}", layer, within, A, x)]
    return [*parts, Part("embedding", embedding, [Within("embedding", inputs, x, V * D, V * D)], inputs, 0)]


def within_layer(job: Job, number: int, A: int, whole: int) -> list[Within]:
    """Return the moments in which a layer may hold the most.

    In the mlp, it holds the gradient of the mlp's output x, and these gradients on the way back to its input:

        mlp     those of the product (which is freed), of silu(gate), of up, and of down's weight
        up      those of silu(gate), of up, of the input, and of two weights
        gate    those of gate, of the input, twice, and of three weights

    Finally, in its first norm, it holds what a norm needs, and the gradients of all the layer's parameters.
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


def recomputed_extra(job: Job) -> int:
    """Return the bytes that a recomputed layer holds besides its activations.

    These are its input, if the norm saves a float32 copy of it; and, under "selective", q and k before the rotation,
    and the outputs of o and down.
    """
    D, KE = job.config.dim, job.config.dim // job.config.heads * job.config.kv_heads
    own_input = not job.fused_norms and job.itemsize != FLOAT
    return job.itemsize * job.tokens * (D * own_input + (3 * D + KE) * (job.recompute == "selective"))


def most_activations(job: Job) -> int:
    """Return the most bytes of activations: at the end of the forward, or while the last layer is recomputed."""
    parts = backward(job)
    return max(FLOAT + parts[0].worst[0].A, *(at.A for part in parts for at in part.worst))


# ---- as published ----------------------------------------------------------------------------------------


def korthikanti(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Fraction:
    """Return the bytes of one layer of GPT-3 in 16 bits.

    There are s tokens, b sequences, width h and a heads, on t tensor-parallel ranks:

        none         s b h (10 + 24 / t + 5 a s / (h t)); with sequence parallelism s b h (34 / t + 5 a s / (h t))
        selective    the same without 5 a s / (h t): the core of attention is recomputed
        full         2 s b h: the layer's input

    Attention, which is not fused, has 11 s b h + 5 a s² b; the MLP (GELU, F = 4h) 19 s b h; two LayerNorms 4 s b h. A
    dropout mask has one byte per element; the norms' own statistics are left out [Korthikanti, equations 1 and 2,
    table 2].
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
