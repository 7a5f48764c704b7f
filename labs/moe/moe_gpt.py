"""The course's GPT with experts: every layer's MLP is a mixture of MLPs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from labs.model import GPT, MLP, Config, initialise
from labs.moe.mixture import Experts, Mixture
from labs.moe.router import SCORES, Router


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """The shape of a GPT with experts.

    hidden: F of each expert
    experts, top_k: E and K
    shared: the number of experts that every token passes, besides its K; they are one MLP of `shared` times F
    scores: a name in `labs.moe.SCORES`
    capacity: the factor by which an expert may have more rows than the mean, above which rows are dropped; None drops
        none
    balance: the weight of the balance loss in the model's loss
    is_biased: whether the routers have biases, which `labs.moe.balance_biases` moves
    head_width: E, if it is not D / H
    is_normed: whether each head of queries and keys is normalised, as in Qwen3

    Raises ValueError for numbers of which no model can be built.
    """

    experts: int
    top_k: int
    shared: int = 0
    scores: str = "softmax after top-k"
    capacity: float | None = None
    balance: float = 0.0
    is_biased: bool = False
    head_width: int | None = None
    is_normed: bool = False

    @property
    def head_size(self) -> int:
        return self.head_width or super().head_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, and a token can use 1 to {self.experts} of {self.experts} experts: "
                "change top_k or experts"
            )
        if self.scores not in SCORES:
            raise ValueError(f"scores is {self.scores!r}: it must be one of {', '.join(map(repr, SCORES))}")
        if self.top_k == 1 and self.scores != "softmax before top-k":
            raise ValueError(
                f"top_k is 1 with scores {self.scores!r}: the weight of the only expert would always be 1, and no "
                "gradient would train the router; take scores='softmax before top-k', or a larger top_k"
            )
        if self.capacity is not None and not 0 < self.capacity < float("inf"):
            raise ValueError(
                f"capacity is {self.capacity}, a factor of the mean number of rows per expert: give a number above 0, "
                "such as 1.25, or None to drop no rows"
            )
        if self.shared < 0 or not self.balance >= 0:
            raise ValueError(f"shared is {self.shared} and balance {self.balance}: neither can be negative")


MOE_PRESETS: dict[str, MoEConfig] = {
    "tiny-moe": MoEConfig(256, 64, 4, 4, 2, hidden=80, context=64, experts=8, top_k=2, balance=0.01),
    "mixtral-8x7b": MoEConfig(
        32_000, 4096, 32, 32, 8, 14_336, context=32_768, rope_base=1e6, experts=8, top_k=2, balance=0.02
    ),
    "qwen3-30b-a3b": MoEConfig(
        *(151_936, 2048, 48, 32, 4, 768),
        **{"context": 40_960, "rope_base": 1e6, "eps": 1e-6, "experts": 128, "top_k": 8, "balance": 0.001},
        head_width=128,
        is_normed=True,
    ),
}


class MoEGPT(GPT):
    """A GPT whose MLPs are mixtures of experts; the loss includes the routers' balance loss, if it has a weight."""

    config: MoEConfig

    def __init__(self, config: MoEConfig, seed: int = 0) -> None:
        super().__init__(replace(config, hidden=1), seed)
        self.config = config
        for layer in self.layers.values():
            layer.mlp = mixture(config)
            if config.is_normed:
                layer.attention.q, layer.attention.k = (
                    NormedHeads(config, config.heads),
                    NormedHeads(config, config.kv_heads),
                )
        initialise(self, seed)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, over: float | None = None) -> Tensor:
        out = super().forward(tokens_BT, targets_BT, over)
        balance = sum(layer.mlp.router.take_balance_loss() for layer in self.layers.values())
        return out if targets_BT is None or not self.config.balance else out + self.config.balance * balance


class NormedHeads(nn.Linear):
    """A projection to heads, each of which is normalised."""

    def __init__(self, config: MoEConfig, heads: int) -> None:
        super().__init__(config.dim, heads * config.head_size, bias=False)
        self.norm = nn.RMSNorm(config.head_size, eps=config.eps)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.norm(super().forward(x_BTD).unflatten(-1, (-1, *self.norm.normalized_shape))).flatten(-2)


def mixture(config: MoEConfig) -> Mixture:
    return Mixture(
        Router(config.dim, config.experts, config.top_k, config.scores, config.is_biased),
        Experts({str(number): MLP(config) for number in range(config.experts)}),
        MLP(replace(config, hidden=config.shared * config.hidden)) if config.shared else None,
        config.capacity,
    )


def parameters(config: MoEConfig) -> int:
    """Count all parameters of a model, on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in MoEGPT(config).parameters())


def active_parameters(config: MoEConfig) -> int:
    """Count the parameters that one token uses: all but those of the experts that its routers do not choose."""
    return parameters(replace(config, experts=config.top_k)) + config.depth * config.dim * (
        config.experts - config.top_k
    )


def dropped(model: MoEGPT) -> int:
    """Return the number of rows that the latest forward dropped, in all layers."""
    return sum(int(layer.mlp.dropped) for layer in model.layers.values())
