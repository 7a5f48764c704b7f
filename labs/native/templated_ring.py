"""Ring attention as PyTorch runs it, also on a CPU.

`torch.distributed.tensor.experimental.context_parallel` patches scaled_dot_product_attention: its inputs become
DTensors, sharded along the sequence, and a template of a ring runs the kernel of one device in each step.  The CPU's
kernel has no sharding strategy, so that the patched function raises NotImplementedError there.  This file calls the
template itself, with that kernel.

The template cuts a sequence into a head and a tail for each rank, as `labs.cp.zigzag` does; all pieces must have the
same size.  In forward it all-gathers keys and values at once, which is its default, or passes them on by all_to_all; in
backward it passes their gradients on N times.

Source: PyTorch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as template

from labs.cp import Pieces, zigzag

aten = torch.ops.aten


def templated_ring(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None = None
) -> Tensor:
    """Return what `labs.cp.ring_attention` does; keys and values are repeated for each head of queries before.

    Raises ValueError for documents, for another cut than zigzag, and for pieces of different sizes.
    """
    tokens, ranks = len(pieces.whole.places), len(pieces.places)
    if pieces.documents is not None or [*pieces.places] != zigzag(tokens, ranks) or tokens % (2 * ranks):
        raise ValueError(
            f"PyTorch's ring has no documents, and cuts {tokens} tokens into two equal chunks for each of {ranks} "
            f"ranks: pad them to a multiple of {2 * ranks}, with cut=zigzag, or use labs.cp.ring_attention"
        )
    k, v = (x.repeat_interleave(q_BHTE.shape[1] // k_BKTE.shape[1], dim=1) for x in (k_BKTE, v_BKTE))
    return TemplatedRing.apply(q_BHTE, k, v, group)


class TemplatedRing(torch.autograd.Function):
    """PyTorch's template for forward and for backward, with the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        template._cp_options.convert_to_f32 = q.dtype != torch.float64
        output, logsumexp, *_ = template._templated_ring_attention(group, 2, forward_kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.group = group
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        found = template._templated_ring_attention_backward(
            ctx.group, 2, backward_kernel, gradient.contiguous(), "grad_out", q, k, v, output, logsumexp, is_causal=True
        )
        return *found[:3], None


def forward_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def backward_kernel(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )
