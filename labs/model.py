"""A small GPT for one device: the decoder-only transformer as it is built today.

    tokens_BT --embed--> x_BTD --layer "0"--> x_BTD ... --layer "N-1"--> x_BTD --norm--> --head--> logits_BTV --loss

    Layer       x = x + attention(norm(x));  x = x + mlp(norm(x))
    Attention   q, k, v from x;  core;  o
    Core        rotate q and k by position (labs.rope);  softmax(q k / sqrt(E)) v over the past
    MLP         down(silu(gate(x)) * up(x))

This file knows nothing of parallelism, and is written so that every strategy can be put around it.  Layers are held in
a ModuleDict, so that a layer keeps its name when a pipeline splits the model.  A layer maps x_BTD to x_BTD and needs no
other input.  The model has no buffers, which data parallelism would broadcast at every step.  Each parameter's initial
numbers depend on its own name only, so that every way to split the model starts from the same weights.

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
    """The shape of a GPT.

    vocab, dim, heads, kv_heads, hidden: V, D, H, K and F
    depth: number of layers
    context: longest sequence, in tokens
    tied: whether the head shares the embedding's weight
    rope_base: base of the rotary positions
    rope_scaling: change of the rotary positions for a longer context, if any
    eps: number that a norm adds to the mean square before it divides by its root

    Raises ValueError for sizes of which no model can be built.
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
                "each head of keys and values must serve the same number of query heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head size {self.head_size} (dim {self.dim} / {self.heads} heads) is odd: "
                "rotary positions turn pairs of numbers, so make it even"
            )

    @property
    def head_size(self) -> int:
        """Return E, the width of one head."""
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
    """A model with the shape of `config`, and weights drawn from `seed`; on the meta device it has shapes only."""

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
        """Return logits_BTV, or with targets the mean cross-entropy in nats per token (0-dim).

        over: the number that `CrossEntropy` divides by, in place of the number of targets

        Raises ValueError for more than `config.context` tokens.  Rotary positions have no table that ends, but the
        model was never trained on positions beyond its context, and its answers would be silently wrong.
        """
        require_context(self.config, tokens_BT.shape[1])
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.loss(self.head(self.norm(x_BTD)), targets_BT, over)


class Layer(nn.Module):
    """A layer of the transformer: attention, then MLP, each of which reads a normalised x and adds its output to x."""

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
    """Causal attention with H query heads; each head of keys and values is shared by H / K of them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q = linear(config.dim, config.heads * config.head_size)
        self.k = linear(config.dim, config.kv_heads * config.head_size)
        self.v = linear(config.dim, config.kv_heads * config.head_size)
        self.o = linear(config.heads * config.head_size, config.dim)
        self.core = Core(config.rope_base, config.rope_scaling)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads follows from the projections: under tensor parallelism a rank has only some heads.
        q_BHTE, k_BKTE, v_BKTE = (
            project(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        y_BHTE = self.core(q_BHTE, k_BKTE, v_BKTE)
        return self.o(y_BHTE.transpose(1, 2).flatten(2))


class Core(nn.Module):
    """Attention without its projections.  A core has no parameters, so generation can use another one."""

    def __init__(self, rope_base: float, rope_scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.rope_base, self.rope_scaling = rope_base, rope_scaling

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        positions_T = torch.arange(q_BHTE.shape[2], device=q_BHTE.device)
        q_BHTE, k_BKTE = (rotate(heads, positions_T, self.rope_base, self.rope_scaling) for heads in (q_BHTE, k_BKTE))
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)


class MLP(nn.Module):
    """SwiGLU: one projection, after silu, is a gate by which the other is multiplied."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class CrossEntropy(nn.Module):
    """The mean cross-entropy in nats per token (0-dim); without targets, the logits themselves.

    Targets of -100 are ignored.  If parts of a batch ignore different numbers of targets, the mean of the parts' means
    is not the batch's mean.  For such parts give `over`, which divides the sum of a part's losses: the number of
    targets of the whole batch that are not ignored, divided by the number of parts whose losses are averaged.
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
    """Fill every parameter, in place, with `initial_value` of its qualified name.

    Parameters on the meta device do not change.  A part of the model, such as a pipeline stage, gets the whole model's
    numbers if its parameters keep their names.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, seed))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the initial value of the parameter `name`: a float32 tensor on the CPU, the same on every machine.

    Norms start at one.  All other parameters are drawn from a normal distribution with variance 1 / (3 * fan-in), which
    is a standard deviation of 0.05 at dim 128.  The projections that write into x are ten times smaller, so that a
    layer is close to the identity at first.  A model learns as well if these projections start at zero, but then its
    first step has no gradient behind them, and two strategies that are compared on that step would seem to agree.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    std = (3 * shape[-1]) ** -0.5
    if name.endswith(("attention.o.weight", ".down.weight")):
        std /= 10
    return std * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def parameters(config: Config) -> int:
    """Count the parameters of a model, on the meta device: a model of any size takes no memory there."""
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
