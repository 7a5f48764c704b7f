"""What a rank holds, in bytes: by parameter, by layer, and at the moments when a step may peak.

    by parameter    PIE, parameter_sizes(config), optimizer_state(sizes)
    by token        activations(config, batch), workspace(config, batch)
    the answers     Held, Prediction

Source: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MiB = 2**20
FLOAT = 4  # bytes of a float32
INDEX = 8  # bytes of an int64: tokens and targets

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


@dataclass(frozen=True)
class Prediction:
    """One rank, one step: bytes sent, in how many all-reduces; the textbook's limit; bytes held."""

    sent: int
    all_reduces: int
    textbook: Fraction
    held: Held


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
