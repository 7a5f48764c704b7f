"""Model states: the bytes that a rank holds between steps, and the classes of a prediction.

    per parameter   PIE, bytes_held(psi, ranks, stage, precision)
    for the GPT     gpt_layers(config), parameter_sizes(config), optimizer_state(sizes)
    predictions     Moment, HeldBytes, Prediction

Source: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, figure 1 and table 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

from labs.cost.sense import checked

MiB = 2**20
FLOAT = 4  # bytes of a float32
INDEX = 8  # bytes of an int64: tokens and targets

# Bytes per parameter with AdamW, for each precision. In mixed precision the float32 masters count as optimizer state.
PIE = {
    "float32": {"P": 4, "G": 4, "S": 4 + 4},  # 16: PyTorch's own default
    "mixed": {"P": 2, "G": 2, "S": 4 + 4 + 4},  # 16: K = 12 [ZeRO]
    "mixed, float32 gradients": {"P": 2, "G": 4, "S": 4 + 4 + 4},  # 18: Megatron-LM
    "mixed, both gradients": {"P": 2, "G": 2 + 4, "S": 4 + 4 + 4},  # 20: the reason why some count 20
}
Shape = tuple[int, ...]


def bytes_held(psi: int, ranks: int, stage: int, precision: str = "mixed") -> dict[str, float]:
    """Return P, G and S on each of N ranks by the textbook's formula, which divides by N and ignores padding.

        stage    0            1 (P_os)       2 (P_os+g)       3 (P_os+g+p)
                 P + G + S    P + G + S/N    P + (G + S)/N    (P + G + S)/N

    7.5 billion parameters on 64 ranks: 120, 31.4, 16.6, 1.88 GB [ZeRO, figure 1]. Stage 1 of "mixed, float32
    gradients" is Megatron-LM's distributed optimizer: 6 + 12/N bytes per parameter.
    """
    sharded = {"P": stage >= 3, "G": stage >= 2, "S": stage >= 1}
    return {kind: size * psi / (ranks if sharded[kind] else 1) for kind, size in bytes_of(precision).items()}


def bytes_of(precision: str) -> dict[str, int]:
    if precision not in PIE:
        raise ValueError(f"precision is {precision!r}: it must be one of {', '.join(map(repr, PIE))}")
    return PIE[precision]


# ---- the course's GPT ------------------------------------------------------------------------------------


@checked
@dataclass(frozen=True)
class LayerShapes:
    """The shapes of a layer's parameters; uses: how many layers share them (tied weights), each in its forward."""

    trained: tuple[Shape, ...] = ()
    frozen: tuple[Shape, ...] = ()
    uses: int = 1

    @property
    def sizes(self) -> list[int]:
        """Return the elements of each parameter that is trained."""
        return [prod(shape) for shape in self.trained]


@lru_cache(64)
def gpt_layers(config) -> tuple[LayerShapes, ...]:
    """Return embedding, layers, norm and head of `labs.model.GPT(config)`.

    A tied head is a second use of the embedding.
    """
    V, D, F = config.vocab, config.dim, config.hidden
    HE, KE = (heads * config.head_size for heads in (config.heads, config.kv_heads))
    attention, mlp = ((HE, D), (KE, D), (KE, D), (D, HE)), ((F, D), (F, D), (D, F))
    layers = (LayerShapes(((D,), *attention, (D,), *mlp)),) * config.depth
    head = () if config.tied else (LayerShapes(((V, D),)),)
    return (LayerShapes(((V, D),), uses=1 + config.tied), *layers, LayerShapes(((D,),)), *head)


def parameter_sizes(config) -> list[int]:
    """Return the elements of each parameter of `labs.model.GPT(config)`, in order of registration; the sum is Ψ."""
    return [size for layer in gpt_layers(config) for size in layer.sizes]


def optimizer_state(sizes: Sequence[int], moments: int = 2, counter: int = 4) -> int:
    """Return the bytes of an optimizer's state: `moments` per element, and a counter of `counter` bytes per tensor.

    AdamW has 2 moments and a 4-byte counter; SGD has 0 and 0, and with momentum 1 and 0.
    """
    return FLOAT * moments * sum(sizes) + counter * len(sizes)


# ---- predictions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The bytes that a rank holds at one moment of a step besides P and S."""

    name: str
    G: int = 0
    A: int = 0
    comm: int = 0
    temporary: int = 0

    @property
    def all(self) -> int:
        return self.G + self.A + self.comm + self.temporary

    def plus(self, G: int = 0, comm: int = 0, temporary: int = 0) -> "Moment":
        return Moment(self.name, self.G + G, self.A, self.comm + comm, self.temporary + temporary)


@dataclass(frozen=True)
class HeldBytes:
    """The bytes on one rank: the most of each kind during a step, and `peak`, the most of their sum at one moment.

    P parameters, G gradients, S optimizer state, A activations, comm buffers of collectives, temporary the rest.
    P, G and S are exact, the peak is within 5 %. A, comm, temporary and peak are None if they are not predicted.
    """

    P: int
    G: int
    S: int
    A: int | None = None
    comm: int | None = None
    temporary: int | None = None
    peak: int | None = None


def optimizer_step(A: int, G: int, comm: int, sizes: Sequence[int], masters: bool = False) -> Moment:
    """Return the bytes while AdamW steps, one parameter after the other.

    It holds a square root and a quotient for one parameter, and the quotient of the parameter before it. With masters
    (`labs.memory.precision`) it also holds a float32 gradient of one parameter at a time.
    """
    copy = FLOAT * max(sizes, default=0) if masters else 0
    before = [0] * len(sizes) if masters else [0, *sizes]
    work = FLOAT * max((2 * size + last for last, size in zip(before, sizes, strict=False)), default=0)
    return Moment("step", A=A, G=G + copy, comm=comm, temporary=work + FLOAT)


def held(P: int, S: int, step: Iterable[Moment]) -> HeldBytes:
    """Return the most of each kind at any moment of the step, and the most of their sum."""
    moments = list(step)
    most = {kind: max(getattr(moment, kind) for moment in moments) for kind in ("G", "A", "comm", "temporary")}
    return HeldBytes(P=P, S=S, **most, peak=P + S + max(moment.all for moment in moments))


@dataclass(frozen=True)
class Prediction:
    """A prediction for one rank and one step: the bytes sent, {collective: calls}, the textbook's bytes, bytes held."""

    sent: int
    collectives: Mapping[str, int]
    textbook: Fraction
    held: HeldBytes

    @property
    def all_reduces(self) -> int:
        return self.collectives.get("all_reduce", 0)
