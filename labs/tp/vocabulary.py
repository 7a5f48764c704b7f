"""A vocabulary split over the ranks: an embedding, and a cross-entropy that never gathers the logits.

Each rank has consecutive rows of the embedding and of the head, cut as torch.chunk cuts them.  Any size of vocabulary
is possible; the last ranks' parts may be shorter, or empty.

    look_up          returns a summand of the embedding: the rows that this rank has, and zeros for other tokens
    cross_entropy    computes the loss from this rank's columns of the logits; three numbers per token are sent:

        loss = log(sum of exp(logit - highest)) - (target's logit - highest)
                   |                  |               |
                   all_reduce SUM     all_reduce MAX  all_reduce SUM: one rank has it, the others add zero

Each rank computes the gradient of its own columns of the logits, softmax - 1 at the target, so nothing is sent in
backward.

v: this rank's part of the vocabulary V.  Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from labs.dtensor.placement import piece
from labs.mesh import Mesh
from labs.model import IGNORED, at_least_float32


def look_up(tokens: Tensor, weight_vD: Tensor, vocabulary: int, mesh: Mesh) -> Tensor:
    """Return this rank's summand of the embedding, [*tokens.shape, D]; weight_vD: this rank's rows.

    Raises IndexError for a token that is not in the vocabulary.
    """
    require_tokens(tokens, vocabulary)
    here, row = of_this_rank(tokens, vocabulary, mesh)
    if not len(weight_vD):
        return weight_vD.sum(0).expand(*tokens.shape, -1)  # zeros with a graph, so that backward runs here, too
    return F.embedding(row, weight_vD).masked_fill(~here[..., None], 0)


def cross_entropy(logits_v: Tensor, targets: Tensor, vocabulary: int, mesh: Mesh, over: float | None = None) -> Tensor:
    """Return the mean loss over all targets except those of -100 (0-dim), in float32 or float64.

    logits_v: [*targets.shape, v], this rank's columns.
    over: the number by which the sum of the losses is divided, instead of the number of targets that count
        (labs.model.CrossEntropy).

    Raises IndexError for a target that is not in the vocabulary, and ValueError for logits of another width.
    """
    if targets.is_floating_point() or targets.numel() != logits_v.shape[:-1].numel():
        raise ValueError(
            f"targets of {targets.dtype} {tuple(targets.shape)} do not fit logits of shape {tuple(logits_v.shape)}: "
            "give one token's number for each"
        )
    require_tokens(targets, vocabulary, IGNORED)
    width = piece(vocabulary, mesh.size(), mesh.get_local_rank())[1]
    if logits_v.shape[-1] != width:
        raise ValueError(
            f"cross_entropy got {logits_v.shape[-1]} logits per token, but this rank's part of {vocabulary} tokens is "
            f"{width}: give the head ColwiseParallel() without output_layouts, and LossParallel its number of outputs"
        )
    losses = SplitCrossEntropy.apply(at_least_float32(logits_v).flatten(0, -2), targets.flatten(), vocabulary, mesh)
    counted = targets.flatten() != IGNORED
    return losses.masked_fill(~counted, 0).sum() / (counted.sum() if over is None else over)


class SplitCrossEntropy(torch.autograd.Function):
    """The autograd function of the cross-entropy of a split vocabulary: the loss of each of M tokens, [M]."""

    @staticmethod
    def forward(ctx: Any, logits_Mv: Tensor, targets_M: Tensor, vocabulary: int, mesh: Mesh) -> Tensor:
        group = mesh.get_group()
        highest_M = logits_Mv.amax(-1) if logits_Mv.shape[-1] else logits_Mv.new_full(targets_M.shape, -torch.inf)
        dist.all_reduce(highest_M, ReduceOp.MAX, group=group)
        shifted_Mv = logits_Mv - highest_M[:, None]  # exp then stays finite for large logits
        here_M, column_M = of_this_rank(targets_M, vocabulary, mesh)
        both = shifted_Mv.new_zeros(2, len(targets_M))
        if logits_Mv.shape[-1]:  # gather instead of a mask: the host would wait for the GPU to count a mask
            both[1] = shifted_Mv.gather(1, column_M[:, None])[:, 0].masked_fill_(~here_M, 0)
        exp_Mv = shifted_Mv.exp_()
        both[0] = exp_Mv.sum(-1)
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(exp_Mv.div_(both[0][:, None]), here_M, column_M)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of a split vocabulary (LossParallel) has no second derivative, for which create_graph=True "
                "asks: let the head make whole logits (output_layouts=Replicate()), and leave LossParallel out"
            )
        softmax_Mv, here_M, column_M = ctx.saved_tensors
        gradient_Mv = softmax_Mv * gradient_M[:, None]
        if gradient_Mv.shape[-1]:
            gradient_Mv.scatter_add_(1, column_M[:, None], -(gradient_M * here_M)[:, None])
        return gradient_Mv, None, None, None


def of_this_rank(tokens: Tensor, vocabulary: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return whether each token is in this rank's part of the vocabulary, and its row there; row 0 for other tokens."""
    start, size = piece(vocabulary, mesh.size(), mesh.get_local_rank())
    here = (tokens >= start) & (tokens < start + size)
    return here, (tokens - start).where(here, 0)


def require_tokens(tokens: Tensor, vocabulary: int, besides: int = 0) -> None:
    """Raise IndexError for a token that is neither in the vocabulary nor equal to `besides`.

    Without this check, all ranks would return zeros for such a token.  An accelerator checks a token as in PyTorch's
    own embedding: the host does not wait, and the error does not name the token.
    """
    here = (tokens >= 0) & (tokens < vocabulary) | (tokens == besides)
    if tokens.device.type != "cpu":
        torch._assert_async(here.all(), f"a token is not in the vocabulary, 0 to {vocabulary - 1}")
    elif len(wrong := tokens[~here]):
        raise IndexError(f"token {wrong[0].item()} is not in the vocabulary, 0 to {vocabulary - 1}")
