"""Training steps with clipped gradients, for one process and for a mesh, ours or PyTorch's, and predictions per axis.

clipped(parameters, backward, clip, batches)      train, and return the norm of the gradients in each step
my_sequences(mesh, batch)                         the sequences of a batch that a rank reads
one_process(model, batches)                       train in one process; return the norms and the parameters
dry_step(config, sizes, microbatches)             pretend to be rank 0 of a mesh, and record two steps
largest_difference(results, expected)             compare the norms and parameters of all ranks with one process's
predicted(config, sizes, rank, microbatches)      the bytes that a rank sends along each axis, and holds
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from labs import cost, pp, tp
from labs.cost.on_a_mesh import along_data, along_pp, along_tp, on_mesh
from labs.kit.dry import dry, our_neighbours
from labs.kit.record import mark
from labs.kit.training.training_step import ADAMW, Batch
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.parallel import AXES, Parallel

Trained = tuple[Sequence[float], Mapping[str, Tensor]]  # the norms, and {name: full parameter}


def clipped(
    parameters: Iterable[nn.Parameter],
    backward: Callable[[Tensor, Tensor], Any],
    clip: Callable[[float], Tensor],
    batches: Iterable[Batch],
) -> list[float]:
    """Train with AdamW, one step per batch, with gradients clipped to the norm 1; return each norm before clipping.

    backward: a function (x, y) that computes the gradients.
    clip: a function (largest norm) that clips the gradients, and returns their norm.
    """
    optimizer, norms = torch.optim.AdamW(parameters, **ADAMW), []
    for x, y in batches:
        mark("step")
        backward(x, y)
        norms.append(clip(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    return norms


def one_process(model: nn.Module, batches: Iterable[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """Train the whole model with clipped gradients; return the norms, and {name: parameter}."""

    def backward(x: Tensor, y: Tensor) -> None:
        model(x, y).backward()

    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    norms = clipped(model.parameters(), backward, clip, batches)
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def dry_step(config: Config, sizes: Sequence[int], microbatches: int) -> Any:
    """Pretend to be rank 0 of labs.parallel on a mesh; return the dry run of two steps.

    sizes: the sizes of labs.parallel.AXES.
    microbatches: the number of micro-batches, of one sequence each, with sequence parallelism.
    """
    return dry(pretend, config, sizes, microbatches, ranks=prod(sizes), rank=0)


def pretend(config: Config, sizes: Sequence[int], microbatches: int) -> None:
    lists, plan = pp.one_f_one_b(sizes[0], microbatches), tp.gpt_plan(config, True)
    parallel = Parallel(pp.cut(GPT(config), sizes[0]), lists, Mesh(sizes, AXES), plan)
    x = torch.zeros(microbatches, config.context, dtype=torch.long)
    with our_neighbours(torch.empty(1, config.context, config.dim, device="meta")):
        clip = partial(torch.zeros, (), device="cpu")
        clipped(parallel.parameters(), parallel.forward_backward, lambda most: clip(), [(x, x)] * 2)


def my_sequences(mesh: Mesh, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return this rank's part of x and y: every n-th sequence, if the data's axes have n ranks."""
    number = mesh.get_local_rank("replicate") * mesh.size("shard") + mesh.get_local_rank("shard")
    x, y = (part[number :: mesh.size("replicate") * mesh.size("shard")] for part in batch)
    return x, y


def largest_difference(results: Iterable[Trained], expected: Trained) -> dict[str, float]:
    """Return the largest difference of a norm, and of a parameter, as {"norm": …, "parameter": …}.

    Raises ValueError unless the ranks together have each parameter.
    """
    norms, full = expected
    results = list(results)
    if missing := full.keys() - {name for _, parameters in results for name in parameters}:
        raise ValueError(f"no rank has the parameters {sorted(missing)}")
    found = [(p - full[name]).abs().max().item() for _, own in results for name, p in own.items()]
    return {
        "norm": max(abs(a - b) for own, _ in results for a, b in zip(own, norms, strict=True)),
        "parameter": max(found),
    }


def predicted(
    config: Config, sizes: Sequence[int], rank: int, microbatches: int, batch: int, sequence_parallel: bool = False
) -> dict[str, int]:
    """Return the bytes that a rank sends in a step along pp, shard and tp, and those of P, G, S and the peak.

    sizes: the sizes of labs.parallel.AXES; "shard" has the bytes of both axes of the data.
    batch: the sequences of a step, of all ranks.
    """
    axes, plans = dict(zip(AXES, sizes, strict=True)), pp.plan(pp.one_f_one_b(sizes[0], microbatches))
    each = batch // axes["replicate"] // axes["shard"] // microbatches
    job = cost.Job(config, each, prod(sizes), rank, accumulation=microbatches)
    own, held = on_mesh(job, plans, axes, sequence_parallel), cost.parallel(job, plans, axes, sequence_parallel).held
    steps = {"pp": along_pp(own, plans), "shard": along_data(own), "tp": along_tp(own, sequence_parallel)}
    sent = {axis: step[0] for axis, step in steps.items()}
    return sent | {"P": held.P, "G": held.G, "S": held.S, "peak": held.peak}
