"""What backward needs of a forward, in bytes: the course's GPT term by term, and GPT-3's layer as it was published.

    activations(config, batch)         by term; recompute= says what is kept of a layer, the rest being computed again
    layer_activations(config, ...)     of one layer, all of them: what it holds while its own backward runs
    backward(config, batch)            what is alive as backward passes through the model, part after part
    korthikanti(s, b, h, a)            of one layer of GPT-3 in 16 bit: s b h (34 + 5 a s / h)

Source: [Korthikanti] et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
"""

from dataclasses import dataclass
from fractions import Fraction

from labs.cost.memory import FLOAT, INDEX, gpt_layers

RECOMPUTE = ("none", "selective", "all but attention", "full")


def activations(
    config,
    batch: int,
    context: int | None = None,
    itemsize: int = FLOAT,
    recompute: str = "none",
    fused_norms: bool = False,
) -> dict[str, int]:
    """Bytes that wait for the backward at the end of a forward of `GPT(config)` with targets: their sum is A.

    Each operator keeps what its derivative is made of, and a tensor that several keep counts once. There is no
    T x T: the fused attention keeps one number a query, its log-sum-exp. Numbers for each token, in `itemsize`
    bytes (4 in float32, 2 in 16 bit) but for those marked *, which are float32 always:

        norms       of each: x, x / rms(x), 1 / rms(x)                        2D* + 1*
        attention   its input, q, k, v, y, y with the heads side by side,     4D + 2KE + H*
                    the log-sum-exps
        rotary      cos and sin, for q and for k, once for all sequences      2E*
        mlp         its input, gate, silu(gate), up, their product            D + 4F
        head        its input, the logarithms of the probabilities            D + V*
        tokens      and targets, as int64; and one number of the loss

    `fused_norms`: where RMSNorm is one kernel (CUDA), it keeps x as it is and 1 / rms(x): D + 1*.

    `recompute`: what `labs.recompute` keeps of each layer instead.

        selective            its input; what matmuls and attention gave       5D + 2KE + H* + 2F
        all but attention    its input; what attention gave                   2D + H*
        full                 its input                                        D
    """
    T = config.context if context is None else context
    tokens, L, D = batch * T, config.depth, config.dim
    layer = layer_terms(config, batch, T, itemsize, fused_norms, recompute)
    terms = {name: L * size for name, size in layer.items()}
    return terms | {
        "norms": terms.get("norms", 0) + tokens * norm_bytes(D, itemsize, fused_norms),
        "head": tokens * (itemsize * D + FLOAT * config.vocab),
        "tokens": 2 * INDEX * tokens + FLOAT,
    }


def layer_activations(
    config, batch: int, context: int | None = None, itemsize: int = FLOAT, fused_norms: bool = False
) -> int:
    """Bytes of one layer with all that its backward needs."""
    T = config.context if context is None else context
    return sum(layer_terms(config, batch, T, itemsize, fused_norms).values())


def layer_terms(
    config, batch: int, T: int, itemsize: int, fused_norms: bool, recompute: str = "none"
) -> dict[str, int]:
    tokens, D, H, F, E = batch * T, config.dim, config.heads, config.hidden, config.dim // config.heads
    KE = config.kv_heads * E
    gave = {"attention": tokens * (itemsize * D + FLOAT * H)}  # y, and the log-sum-exps
    kept = {"inputs": itemsize * tokens * D}
    match recompute:
        case "none":
            return {
                "norms": 2 * tokens * norm_bytes(D, itemsize, fused_norms),
                "attention": gave["attention"] + itemsize * tokens * (3 * D + 2 * KE),
                "rotary": FLOAT * T * 2 * E,
                "mlp": itemsize * tokens * (D + 4 * F),
            }
        case "selective":
            projections = itemsize * tokens * (2 * D + 2 * KE)  # q, k, v and o
            mlp = itemsize * tokens * (2 * F + D)  # gate, up and down
            return kept | {"attention": gave["attention"] + projections, "mlp": mlp}
        case "all but attention":
            return kept | gave
        case "full":
            return kept
    raise ValueError(f"recompute is {recompute!r}: it must be one of {', '.join(map(repr, RECOMPUTE))}")


def norm_bytes(D: int, itemsize: int, fused: bool) -> int:
    return itemsize * D + FLOAT if fused else FLOAT * (2 * D + 1)


# ---- while backward passes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within:
    """A moment within a part: activations and temporaries in bytes, gradients of its own parameters in elements."""

    name: str
    A: int
    temporary: int
    gradients: int


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


def backward(
    config,
    batch: int,
    context: int | None = None,
    itemsize: int = FLOAT,
    recompute: str = "none",
    fused_norms: bool = False,
) -> list[Part]:
    """Loss, head, norm, the layers from the last to the first, embedding: where a step may have its peak.

        loss         gradients of the log-probabilities and of the logits; the loss itself is no longer needed
        head         gradients of the logits, of its input and of its weight
        norm         its input; five tensors of that size as 1 / rms(x) is differentiated; the gradient of its weight
        layer        see `within_layer`
        embedding    gradients of its output and of its weight

    itemsize, recompute, fused_norms: as in `activations`.
    """
    T = config.context if context is None else context
    V, D, tokens = config.vocab, config.dim, batch * T
    terms = activations(config, batch, T, itemsize, recompute, fused_norms)
    whole = layer_activations(config, batch, T, itemsize, fused_norms)
    kept = sum(layer_terms(config, batch, T, itemsize, fused_norms, recompute).values())
    inputs, x, logits = terms["tokens"] - FLOAT, itemsize * tokens * D, FLOAT * tokens * V
    embedding, layer, *_ = (shapes.sizes for shapes in gpt_layers(config))

    A = sum(terms.values()) - FLOAT
    parts = [Part("loss", [], [Within("loss", A, 2 * logits, 0)], A - logits, itemsize * tokens * V)]
    in_head = Within("head", A - logits, itemsize * tokens * V + x, V * D)
    parts += [Part("head", embedding, [in_head], A - logits - x, x, shared=config.tied)]
    A = inputs + config.depth * kept
    parts += [Part("norm", [D], [within_norm("norm", A, tokens * D, D)], A, x)]
    for number in reversed(range(config.depth)):
        A -= kept
        within = within_layer(config, number, A, whole, tokens, itemsize)
        if recompute != "none":
            besides = recomputed_besides(config, tokens, itemsize, recompute, fused_norms)
            within = [Within(f"recomputed {number}", A + whole + besides, 2 * x, 0), *within]
        parts += [Part(f"layer {number}", layer, within, A, x)]
    return [*parts, Part("embedding", embedding, [Within("embedding", inputs, x, V * D)], inputs, 0)]


def within_layer(config, number: int, A: int, whole: int, tokens: int, itemsize: int) -> list[Within]:
    """In the mlp: gradients of x, of the product (which is gone), of silu(gate), of up, and of down's weight. In its
    first norm, at last: what a norm needs, and the gradients of all the layer's parameters."""
    x, f, layer = itemsize * tokens * config.dim, itemsize * tokens * config.hidden, gpt_layers(config)[1]
    return [
        Within(f"mlp {number}", A + whole - f, x + 3 * f, config.dim * config.hidden),
        within_norm(f"norm {number}", A, tokens * config.dim, sum(layer.sizes)),
    ]


def within_norm(name: str, A: int, n: int, gradients: int) -> Within:
    return Within(name, A + FLOAT * n, 5 * FLOAT * n, gradients)


def recomputed_besides(config, tokens: int, itemsize: int, recompute: str, fused_norms: bool) -> int:
    """What a layer that has been computed again holds besides its activations: its input, where the norm keeps it in
    float32; and where matmuls are handed out, q and k before they were rotated, and what o and down gave."""
    D, KE = config.dim, config.dim // config.heads * config.kv_heads
    own_input = not fused_norms and itemsize != FLOAT
    return itemsize * tokens * (D * own_input + (3 * D + KE) * (recompute == "selective"))


def most_activations(
    config,
    batch: int,
    context: int | None = None,
    itemsize: int = FLOAT,
    recompute: str = "none",
    fused_norms: bool = False,
) -> int:
    """Bytes of activations at their most: at the end of the forward, or while the last layer is computed again."""
    parts = backward(config, batch, context, itemsize, recompute, fused_norms)
    return max(FLOAT + parts[0].worst[0].A, *(at.A for part in parts for at in part.worst))


# ---- as published ----------------------------------------------------------------------------------------


def korthikanti(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Fraction:
    """Bytes of one layer of GPT-3 in 16 bit: s tokens, b sequences, width h, a heads, on t tensor-parallel ranks.

        none         s b h (10 + 24 / t + 5 a s / (h t)); with sequence parallelism s b h (34 / t + 5 a s / (h t))
        selective    the same without 5 a s / (h t): the core of attention is computed again
        full         2 s b h: the layer's input

    Of attention, which is not fused, 11 s b h + 5 a s² b; of the MLP (GELU, F = 4h) 19 s b h; of two LayerNorms
    4 s b h. A mask of dropout has one byte, the norms' own statistics are left out [Korthikanti, equations 1 and 2,
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
