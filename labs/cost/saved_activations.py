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
from labs.cost.split import Share


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
                    (a rank's share: the row of each token and of each target, and a byte or two for each)

    With one head, or for one token, y with the heads side by side is a view of y: D less. If RMSNorm is one kernel
    (`fused_norms`), it saves x, in x's dtype, and one number 1 / rms(x) in float32: D + 1*.

    `labs.memory.recompute` saves for each layer instead:

        selective            its input; the outputs of matmuls and attention  5D + 2KE + H* + 2F
        all but attention    its input; the outputs of attention              2D + H*
        full                 its input                                        D
    """
    tokens, D = job.tokens, job.config.dim
    terms = {name: job.config.depth * size for name, size in layer_terms(job, job.recompute).items()}
    terms |= {
        "norms": terms.get("norms", 0) + job.between * norm_bytes(job),
        "head": tokens * (job.itemsize * D + FLOAT * job.own.vocab),
    }
    if not isinstance(job.config, Share):
        return terms | {"tokens": 2 * INDEX * tokens * job.accumulation + FLOAT}
    here = tokens * (INDEX + 1)
    return terms | {"tokens": here if job.own.vocab else 0, "loss": here + tokens + INDEX}


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
class High:
    """A moment of backward at which a rank may hold the most.

    A, temporary: bytes of activations, and of gradients of activations
    before: elements of the gradients of the parts that backward has passed
    own: elements of the gradients of the part's parameters so far
    newest: elements of the newest of them, which may still have to be added to another gradient
    unit: elements of the part's parameters
    left: bytes of activations when backward has passed the part
    x: bytes of the gradient that the part hands on
    passed: number of layers that backward has passed
    """

    name: str
    A: int
    temporary: int
    before: int = 0
    own: int = 0
    newest: int = 0
    unit: int = 0
    left: int = 0
    x: int = 0
    passed: int = 0


def backward(job: Job, is_first: bool = True, is_last: bool = True) -> list[High]:
    """Return the moments at which backward may hold the most.

    From layer to layer activations go and gradients come, so that the most is at one of the ends. With x, f and logits
    for the bytes of M tokens of D, F and V numbers:

        loss          all activations; gradients of the log-probabilities and of the logits
        head          gradients of the logits, of the head's input and of its weight
        last norm     5 x in float32 on the way to the gradient of its input, and that as well
        layer         all of its activations; gradients of its output, x, and in its mlp, 2 f, besides one of a matrix
        attention     its input and the first norm's; gradients of q, and of the input through k and v, and their sum
        norm          only the layer's first norm is left, which takes as much; all gradients of the layer
        embedding     gradients of its output and of its weight

    The layers are the last, the one before it, and the first.

    A tied head's gradient waits for the embedding's. A recomputed layer is also there when its forward has run again.
    On tensor-parallel ranks, whose logits are parts, the loss holds 20 more bytes per token; if x is cut along the
    sequence, the head's summands of the gradient are scattered by way of two buffers, and a layer gathers that of its
    output.

    is_first, is_last: whether the rank has the embedding, and whether it has the last norm and the head
    """
    own, tokens, itemsize, depth = job.own, job.tokens, job.itemsize, job.config.depth
    D, table, layer = own.dim, own.vocab * own.dim, sum(gpt_layers(job.config)[1].sizes)
    x, out, f, given = (itemsize * n for n in (tokens * D, job.between * D, tokens * own.hidden, tokens * own.vocab))
    logits = FLOAT * tokens * own.vocab
    terms, whole, kept = activations(job), layer_activations(job), sum(layer_terms(job, job.recompute).values())
    loss, norm, before, waiting, highs = terms.get("loss", FLOAT), job.between * norm_bytes(job), 0, 0, []
    inputs = (terms["tokens"] - FLOAT * ("loss" not in terms)) * is_first
    A, six = inputs + depth * kept, FLOAT * job.between * D
    if is_last:
        parts = given + 20 * tokens + (out + logits if itemsize < FLOAT else 0)
        of_loss = parts if isinstance(job.config, Share) else 2 * logits
        highs += [High("loss", A + norm + terms["head"] + loss, of_loss)]
        of_head = x + (max(given, x + out) if own.shards > 1 else given)
        highs += [High("head", A + norm + x, of_head, 0, table, table, table, A + norm, x)]
        before, waiting = (D, itemsize * table) if own.tied else (table + D, 0)
        highs += [High("last norm", A + six, 5 * six + waiting, before)]
    here = out + (max(2 * f, x) if own.shards > 1 else 2 * f) + waiting
    if job.recompute != "none":
        highs += [High("layer", A - kept + whole + recomputed_extra(job), 2 * x + waiting, before)]
    for passed in sorted({0, min(1, depth - 1), depth - 1}):
        part, matrix, left = before + passed * layer, D * own.hidden, A - (passed + 1) * kept
        highs += [High("layer", left + whole, here, part, matrix, matrix, layer, left, out, passed)]
        highs += [High("attention", left + norm + x, out + 4 * x, part, layer - D, matrix, layer, left, out, passed)]
        highs += [High("norm", left + six, 5 * six + waiting, part, layer, 0, layer, left, out, passed)]
    if is_first:
        highs += [High("embedding", inputs, x + waiting, part + layer, table, table, table, inputs, 0, depth)]
    return highs


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
    return max(at.A for at in backward(job))


# ---- as published ----------------------------------------------------------------------------------------

WHOLE_INPUTS = {"none": 2, "selective": 3, "all but attention": 1, "full": 1}  # tensors of x's width in `layer_terms`


def regathered_activations(job: Job, recompute: str) -> int:
    """Return the bytes of a layer whose forward saves only shards of the inputs, which backward gathers again.

    Megatron-LM does so [Korthikanti, section 4.2.2]; the job's config is a `Share`.
    """
    saved = WHOLE_INPUTS[recompute] * job.itemsize * (job.tokens - job.between) * job.own.dim
    return sum(layer_terms(job, recompute).values()) - saved


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
