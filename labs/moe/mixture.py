"""A mixture of experts: each token passes through a few of many MLPs, and gets their weighted sum.

    x_ND --router--> chosen_NK, weights_NK
    x_ND --sort--> rows_MD --experts--> rows_MD --unsort--> y_NKD --weigh, add--> y_ND

The loop is over experts, not over tokens: rows are sorted by expert, so that each expert's rows lie side by side, and
each expert is called once with all of its rows.  An expert without rows is called, too, since its parameters need a
gradient, zeros, on every rank.  On GPUs one kernel can compute the products of all experts: PyTorch 2.13 has one, but
not for float64.

**Dropless** mixtures let each expert have all rows that the router gives it.  With a **capacity**, an expert has
ceil(factor N K / E) rows at most, and later tokens' rows are dropped: these experts add nothing to the token, which
passes the layer on the residual path.

A token's k results are added in the order of the experts' numbers, so that any layout of the experts rounds alike.

Sources: Shazeer et al. 2017, arXiv 1701.06538, section 2; Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1, for
capacity; Gale et al. 2022, arXiv 2211.15841, for dropless; Dai et al. 2024, arXiv 2401.06066, section 3.2, for shared
experts.
"""

import math
from functools import reduce

import torch
from torch import Tensor, nn

from labs import agree
from labs.moe.router import Router, count


class Experts(nn.ModuleDict):
    """Experts by their numbers, each a module from rows to rows."""

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return each row's result; the rows are sorted by expert, and expert e has counts_E[e] of them."""
        counts = read_counts(counts_E, len(rows_MD))
        require_numbers(counts, "")
        return self.apply_each(rows_MD, counts)

    def apply_each(self, rows_MD: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([expert(rows) for expert, rows in zip(self.values(), rows_MD.split(counts), strict=True)])


class Mixture(nn.Module):
    """A feed-forward of experts, of which each token uses those that the router chooses, and all shared ones.

    router: the router
    experts: the modules among which it chooses
    shared: a module that all tokens pass, beside their experts
    capacity: the factor by which an expert may have more rows than the mean; None for a dropless mixture

    After a forward, `dropped` is the number of its dropped rows (0-dim).
    """

    def __init__(
        self, router: Router, experts: Experts, shared: nn.Module | None = None, capacity: float | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared, self.capacity = router, experts, shared, capacity
        self.dropped: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        chosen_NK, weights_NK = self.router(x_ND)
        order_M, counts_E = self.sort(chosen_NK)
        self.dropped = chosen_NK.numel() - counts_E.sum()
        # NaN would choose any experts: -1 lets `experts` raise an error, on all ranks.
        counts_E = torch.where(weights_NK.isnan().any(), -1, counts_E)
        x_NKD = x_ND.unsqueeze(1).expand(-1, chosen_NK.shape[1], -1)
        y_MD = self.experts(x_NKD.flatten(0, 1)[order_M], counts_E)
        y_NKD = y_MD.new_zeros(x_NKD.shape).flatten(0, 1).index_copy(0, order_M, y_MD).view(x_NKD.shape)
        y_ND = reduce(torch.add, (weights_NK.to(y_NKD.dtype).unsqueeze(-1) * y_NKD).unbind(1))
        y_BTD = y_ND.view(x_BTD.shape)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def sort(self, chosen_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the rows, sorted by expert and then by token, without dropped ones; and counts_E."""
        expert_M, experts = chosen_NK.flatten(), self.router.gate.out_features
        order_M, counts_E = expert_M.argsort(stable=True), count(expert_M, experts)
        if self.capacity is None:
            return order_M, counts_E
        most = math.ceil(self.capacity * len(expert_M) / experts)
        first_E = counts_E.cumsum(0) - counts_E
        place_M = torch.arange(len(order_M), device=order_M.device) - first_E[expert_M[order_M]]
        return order_M[place_M < most], counts_E.clamp(max=most)


def read_counts(counts_E: Tensor, rows: int) -> list[int]:
    """Return the counts on the host; in a dry run, whose tensors have no numbers, those of even loads."""
    if agree.alone:
        return [rows // len(counts_E) + (expert < rows % len(counts_E)) for expert in range(len(counts_E))]
    return counts_E.tolist()


def require_numbers(counts: list[int], where: str) -> None:
    """Raise ValueError if a router marked its counts with -1."""
    if min(counts) < 0:
        raise ValueError(
            f"the router's weights are NaN{where}, and NaN chooses no experts: end the training before the step whose "
            "gradients are no numbers (the norm that clip_gradients returns is not finite), and take a lower "
            "learning rate"
        )
