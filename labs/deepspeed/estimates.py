"""What DeepSpeed's own estimators say that a model will need, as closed forms.

    stage 2    on a device   2 Ψ + 18 Ψ / N; its optimizer offloaded: 2 Ψ
    stage 3    on a device   18 Ψ / N and 4 times the largest layer; optimizer offloaded: 2 Ψ / N in place of the first;
                             parameters, too: nothing in place of it

They are about the states of a model in 16 bits: 2 bytes a parameter for P, 2 and 4 for G, 12 for S.  Left out are
activations, temporaries, the buckets (`reduce_bucket_size`: by default 500 million elements, 2 GB in float32), and what
is gathered ahead; and a model in float32 has 4 bytes of P where these count 2.  `labs.cost.deepspeed` has all of that.

Source: estimate_zero2_ and estimate_zero3_model_states_mem_needs in DeepSpeed 0.19.8, deepspeed/runtime/zero, whose
variants print the answers for every kind of offload.
"""

from typing import NamedTuple

from torch import nn

BUFFERS = 1.5  # their factor for what a host needs besides


class Estimate(NamedTuple):
    """Bytes on each device, and on each host."""

    device: int
    host: int


def stage2(parameters: int, devices: int, nodes: int = 1, optimizer_offloaded: bool = False) -> Estimate:
    """devices: of each node.  They count on initialising the whole model on every rank's host."""
    ranks = devices * nodes
    if optimizer_offloaded:
        return Estimate(2 * parameters, int(parameters * max(4 * ranks, 16) * BUFFERS))
    return Estimate(2 * parameters + 18 * parameters // ranks, int(parameters * 4 * devices * BUFFERS))


def stage3(
    parameters: int,
    largest_layer: int,
    devices: int,
    nodes: int = 1,
    optimizer_offloaded: bool = False,
    parameters_offloaded: bool = False,
) -> Estimate:
    """The model is made shard by shard, within `deepspeed.zero.Init`.

    largest_layer: parameters of the module that has the most of its own.  Raises ValueError for parameters that are
    offloaded alone: the estimators know of no such thing.
    """
    if parameters_offloaded and not optimizer_offloaded:
        raise ValueError("parameters_offloaded without optimizer_offloaded: the estimators have no case for it")
    gathered = 4 * largest_layer
    if not optimizer_offloaded:
        return Estimate(gathered + 18 * parameters // (devices * nodes), int(gathered * devices * BUFFERS))
    if not parameters_offloaded:
        return Estimate(gathered + 2 * parameters // (devices * nodes), int(parameters * 16 * BUFFERS / nodes))
    return Estimate(gathered, int(parameters * 18 * BUFFERS / nodes))


def sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model, tied ones once, and of the module that has the most of its own."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), largest
