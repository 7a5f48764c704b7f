"""A router: a linear layer that scores all experts for each token, and chooses the k best.

    scores                   a token's weights of its k experts                    used by
    softmax before top-k     their softmax over all experts, which sum below 1     Switch (k = 1)
    softmax after top-k      a softmax over the k chosen logits, which sum to 1    Mixtral, Qwen3-MoE
    sigmoid                  a sigmoid of each logit, divided by the k's sum       DeepSeek-V3

The weights are the router's only link to the loss: no gradient passes through the choice.  So a weight that is always
1, as with k = 1 after top-k, would never train the router.

**Balance.**  A router that favours an expert trains it more than others, and favours it more.  Two remedies:

    loss    E Σ_e f_e P_e is added to the model's loss, where f_e is the fraction of rows that expert e gets, and P_e
            the mean of its normalised scores.  It is 1 if all are equal.  Only P has a gradient, which lowers the
            scores of the experts with the highest f.  It is computed for each forward's tokens, so it asks every
            micro-batch to be balanced, and not only their sum.
    bias    A number per expert is added to its score for the choice alone, and not to its weight.  After each step it
            rises by a fixed rate if the expert had fewer rows than the mean, and falls if it had more.  The loss's
            gradient is left as it is.

Sources: Fedus et al. 2021, arXiv 2101.03961, section 2.2, for the loss; Lepikhin et al. 2020, arXiv 2006.16668, section
2.2, for k = 2; Jiang et al. 2024, arXiv 2401.04088, section 2.1, for the softmax after top-k; DeepSeek-AI 2024,
arXiv 2412.19437, section 2.1.2, for sigmoid and bias.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.model import linear
from labs.rope import at_least_float32


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def normalised(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


# The scores of all experts, by which k are chosen; and the weights of the k, from their scores.
SCORES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax before top-k": (softmax, lambda scores_NK: scores_NK),
    "softmax after top-k": (softmax, normalised),
    "sigmoid": (torch.sigmoid, normalised),
}


class Router(nn.Module):
    """A choice of `top_k` experts for each token.

    dim, experts, top_k: D, E and K
    scores: a name in SCORES
    is_biased: whether a bias that `balance_biases` adjusts takes part in the choice

    After a forward, `take_balance_loss` returns the loss of its tokens, and `load_E` counts the rows of each expert
    since `balance_biases` was called last.
    """

    def __init__(self, dim: int, experts: int, top_k: int, scores: str, is_biased: bool) -> None:
        super().__init__()
        self.top_k, self.scores = top_k, scores
        self.gate = linear(dim, experts)
        self.register_buffer("bias", torch.zeros(experts) if is_biased else None)
        self.load_E: Tensor | int = 0
        self.balance_loss: Tensor | None = None

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen_NK, the numbers of each token's experts in ascending order, and weights_NK."""
        score, weigh = SCORES[self.scores]
        # A difference in the last bits changes which experts are chosen, so bfloat16 would be too coarse.
        scores_NE = score(at_least_float32(self.gate(x_ND)))
        by = scores_NE.detach() if self.bias is None else scores_NE.detach() + self.bias
        chosen_NK = by.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        self.note_balance(normalised(scores_NE), chosen_NK)
        return chosen_NK, weigh(scores_NE.gather(-1, chosen_NK))

    def note_balance(self, shares_NE: Tensor, chosen_NK: Tensor) -> None:
        tokens, experts = shares_NE.shape
        load_E = count(chosen_NK.flatten(), experts)
        f_E, P_E = load_E / max(1, chosen_NK.numel()), shares_NE.sum(0) / max(1, tokens)
        self.load_E = self.load_E + load_E
        self.balance_loss = experts * (f_E * P_E).sum()

    def take_balance_loss(self) -> Tensor:
        """Return the balance loss of the latest forward (0-dim), and forget it, since it holds the forward's graph."""
        loss, self.balance_loss = self.balance_loss, None
        return loss


def count(expert_M: Tensor, experts: int) -> Tensor:
    """Return the number of rows of each expert; unlike `bincount`, it never waits for the device."""
    return expert_M.new_zeros(experts).index_add(0, expert_M, torch.ones_like(expert_M))


def balance_biases(model: nn.Module, rate: float, group: ProcessGroup | None = None) -> None:
    """Move every router's biases by `rate` against the load of its experts; call this function after each step.

    group: the ranks that read different tokens, all by default.  Their loads are added up, so that their biases stay
        equal; every one of them must call this function.
    """
    for router in [module for module in model.modules() if isinstance(module, Router) and module.bias is not None]:
        load_E = router.load_E + torch.zeros_like(router.bias, dtype=torch.int64)
        if dist.is_initialized():
            dist.all_reduce(load_E, group=group)
        router.bias += rate * (load_E.double().mean() - load_E).sign()
        router.load_E = 0
