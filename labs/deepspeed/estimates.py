"""Closed forms of DeepSpeed's own estimates of a model's memory.

    stage 2    on a device   2 Ψ + 18 Ψ / N; with the optimizer offloaded 2 Ψ
    stage 3    on a device   18 Ψ / N and 4 times the largest layer; with the optimizer offloaded, 2 Ψ / N replaces
                             the first term; with the parameters offloaded, too, the first term is 0

The estimates count the states of a model in 16 bits: per parameter 2 bytes for P, 2 and 4 for G, 12 for S.  The
estimates leave out activations, temporaries, the buckets (`reduce_bucket_size`: by default 500 million elements, 2 GB
in float32), and prefetched parameters.  A model in float32 has 4 bytes of P, where the estimates count 2.
`labs.cost.deepspeed` counts all that the estimates leave out.

Source: estimate_zero2_ and estimate_zero3_model_states_mem_needs in DeepSpeed 0.19.8, deepspeed/runtime/zero; variants
of them print the estimates for every kind of offload.
"""

from typing import NamedTuple

from torch import nn

BUFFERS = 1.5  # the estimators' factor for buffers on a host


class Estimate(NamedTuple):
    """DeepSpeed's estimate of a model's memory: the bytes on each device, and on each host."""

    device: int
    host: int


def stage2(parameters: int, devices: int, nodes: int = 1, optimizer_offloaded: bool = False) -> Estimate:
    """Return DeepSpeed's estimate for stage 2, in which each rank initialises the whole model on its host.

    devices: number of devices of each node
    """
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
    """Return DeepSpeed's estimate for stage 3, in which the model is made shard by shard, within `deepspeed.zero.Init`.

    largest_layer: number of parameters of the module that has the most of its own

    Raises ValueError if parameters are offloaded without the optimizer, since the estimators have no case for it.
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
    """Return how many parameters a model has, tied ones once, and how many the module with the most has of its own."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), largest
