"""A small GPT for one device: the decoder-only transformer as it is built today.

    tokens_BT --embed--> x_BTD --layer "0"--> x_BTD ... --layer "N-1"--> x_BTD --norm--> --head--> logits_BTV --loss

    Layer       x = x + attention(norm(x));  x = x + mlp(norm(x))
    Attention   q, k, v from x;  core;  o
    Core        rotate q and k by position (labs.rope);  softmax(q k / sqrt(E)) v over the past
    MLP         down(silu(gate(x)) * up(x))

This file knows nothing of parallelism, and is written so that every strategy can be put around it: layers are
held in a ModuleDict, so that a layer keeps its name when a pipeline splits the model; a layer maps x_BTD to
x_BTD and needs nothing else; there are no buffers (data parallelism would broadcast them at every step); and
each parameter starts from numbers that depend on its own name only, so that any way of cutting the model
starts from the same weights.

Shape suffixes, here and in the whole course:

    B batch    T time (position)    D dim (width of the model)    V vocabulary    F hidden width of the MLP
    H heads of queries    K heads of keys and values    E width of one head = D / H

Sources: SwiGLU, Shazeer 2020, arXiv 2002.05202, section 2; grouped-query attention, Ainslie et al. 2023, arXiv
2305.13245, section 2.2; RMSNorm, Zhang and Sennrich 2019, arXiv 1910.07467, section 3; the Llama shapes, Llama
Team 2024, arXiv 2407.21783, table 3.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs.rope import RopeScaling, at_least_float32, rotate

IGNORED = -100  # a target that has no loss, as in F.cross_entropy


@dataclass(frozen=True)
class Config:
    """The shape of a GPT. Raises ValueError where no such model can be built.

    vocab, dim, depth, heads, kv_heads, hidden are V, D, the number of layers, H, K and F. `context` is the
    longest sequence in tokens; `tied` lets the head share the embedding's weight; `rope_base` is the rotary
    base, and `rope_scaling` what has been done to it for a longer context; `eps` is added to the mean square
    that a norm divides by.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    tied: bool = False
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "depth", "heads", "kv_heads", "hidden", "context", "rope_base", "eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by {self.heads} heads: change one of them")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads are not divisible by {self.kv_heads} kv_heads: "
                "each head of keys and values serves the same number of query heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head size {self.head_size} (dim {self.dim} / {self.heads} heads) is odd: "
                "rotary positions turn pairs of numbers, so make it even"
            )

    @property
    def head_size(self) -> int:
        """E, the width of one head."""
        return self.dim // self.heads


PRESETS: dict[str, Config] = {
    "tiny": Config(vocab=256, dim=64, depth=4, heads=4, kv_heads=2, hidden=160, context=64),
    "small": Config(vocab=256, dim=128, depth=4, heads=4, kv_heads=2, hidden=352, context=128),
    "medium": Config(vocab=256, dim=768, depth=12, heads=12, kv_heads=4, hidden=2048, context=1024),
    "llama3-8b": Config(128_256, 4096, 32, 32, 8, 14_336, context=8192, rope_base=500_000.0),
    "llama3-70b": Config(128_256, 8192, 80, 64, 8, 28_672, context=8192, rope_base=500_000.0),
    "llama3-405b": Config(128_256, 16_384, 126, 128, 8, 53_248, context=8192, rope_base=500_000.0),
}


class GPT(nn.Module):
    """The model of a configuration, with the weights of a seed (on the meta device: only shapes)."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleDict({str(i): Layer(config) for i in range(config.depth)})
        self.norm = rms_norm(config)
        self.head = linear(config.dim, config.vocab)
        self.loss = CrossEntropy()
        if config.tied:
            self.head.weight = self.embed.weight
        initialise(self, seed)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, over: float | None = None) -> Tensor:
        """logits_BTV, or where targets are given the mean cross-entropy in nats per token (0-dim).

        over: what `CrossEntropy` divides by.

        Raises ValueError for more than `config.context` tokens: rotary positions have no table that would end
        there, but the model has never been trained beyond, and its answers would be wrong without a word.
        """
        require_context(self.config, tokens_BT.shape[1])
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.loss(self.head(self.norm(x_BTD)), targets_BT, over)


class Layer(nn.Module):
    """Attention, then MLP, each reading a normalised x and adding to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = rms_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = rms_norm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Attention(nn.Module):
    """Causal attention of H query heads, H / K of which share one head of keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q = linear(config.dim, config.heads * config.head_size)
        self.k = linear(config.dim, config.kv_heads * config.head_size)
        self.v = linear(config.dim, config.kv_heads * config.head_size)
        self.o = linear(config.heads * config.head_size, config.dim)
        self.core = Core(config.rope_base, config.rope_scaling)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The heads are counted off the projections: under tensor parallelism a rank has only some of them.
        q_BHTE, k_BKTE, v_BKTE = (
            project(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        y_BHTE = self.core(q_BHTE, k_BKTE, v_BKTE)
        return self.o(y_BHTE.transpose(1, 2).flatten(2))


class Core(nn.Module):
    """Attention between its projections. It has no parameters: generation exchanges it for one with a cache."""

    def __init__(self, rope_base: float, rope_scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.rope_base, self.rope_scaling = rope_base, rope_scaling

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        positions_T = torch.arange(q_BHTE.shape[2], device=q_BHTE.device)
        q_BHTE, k_BKTE = (rotate(heads, positions_T, self.rope_base, self.rope_scaling) for heads in (q_BHTE, k_BKTE))
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)


class MLP(nn.Module):
    """SwiGLU: one projection, through silu, decides how much of the other goes on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class CrossEntropy(nn.Module):
    """The mean cross-entropy in nats per token (0-dim); the logits themselves where there are no targets.

    Targets of -100 are ignored.  Parts of a batch may ignore different numbers of them, and then the mean of the parts'
    means is not the batch's mean.  `over` divides the sum of a part's losses instead: by the targets that count in the
    whole batch, divided by the number of parts of which the mean is taken.
    """

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor | None = None, over: float | None = None) -> Tensor:
        if targets_BT is None:
            return logits_BTV
        logits_MV, targets_M = at_least_float32(logits_BTV).flatten(0, 1), targets_BT.flatten()
        if over is None:
            return F.cross_entropy(logits_MV, targets_M)
        return F.cross_entropy(logits_MV, targets_M, reduction="sum") / over


def counted(targets: Tensor) -> int:
    """Return the number of targets that are not ignored."""
    return int((targets != IGNORED).sum())


def initialise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter, in place, with `initial_value` of its qualified name; parameters on meta stay as
    they are.

    A part of the model (a pipeline stage) whose parameters keep their names gets the whole model's numbers.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, seed))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The full float32 CPU tensor that the parameter `name` starts from, the same on every machine and in
    every dtype.

    Norms start at one, all others normal with variance 1 / (3 * fan-in): 0.05 at dim 128. The projections
    that write into x are ten times smaller, so that a layer begins close to the identity. Zero learns as
    well, but then the first step has no gradient behind them, and two strategies compared on it would seem to
    agree.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    std = (3 * shape[-1]) ** -0.5
    if name.endswith(("attention.o.weight", "mlp.down.weight")):
        std /= 10
    return std * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def parameters(config: Config) -> int:
    """How many parameters the model has, counted on the meta device: no memory, whatever the size."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


def require_context(config: Config, tokens: int) -> None:
    if tokens > config.context:
        raise ValueError(
            f"{tokens} tokens are more than the context of {config.context}: "
            "shorten them, or build the model with dataclasses.replace(config, context=...)"
        )


def rms_norm(config: Config) -> nn.RMSNorm:
    return nn.RMSNorm(config.dim, eps=config.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
