"""Training of a labs.moe.MoEGPT on a rank, with the rows that its routers send to each expert.

take_loads(model)                       returns the rows of each expert since the last call, [layer][expert]
with_experts(ways, build, batches)      trains with each strategy in turn; returns parameters, and the last step's loads
norms_by(average, build, batches)       trains on 2 × 2 ranks with gradients that a function averages
slow_experts(model, seconds)            lets each expert take so much longer for each of its rows
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.clip import global_norm
from labs.kit.record import mark
from labs.kit.training.strategies import Batch, Strategy, set_up, step
from labs.mesh import Mesh
from labs.moe import Experts, MoEGPT, split_experts

Loads = list[list[int]]  # [layer][expert]


def take_loads(model: MoEGPT) -> Loads:
    """Return the rows that each router has sent to each expert since the last call, and count anew."""
    found = []
    for layer in model.layers.values():
        router = layer.mlp.router
        found.append([int(n) for n in router.load_E] if isinstance(router.load_E, Tensor) else [])
        router.load_E = 0
    return found


def with_experts(
    ways: Mapping[str, Strategy], build: Callable[[], MoEGPT], batches: Sequence[Batch], keep: bool = True
) -> dict[str, tuple[dict[str, Tensor], Loads]]:
    """Train with each strategy in turn on a rank; return {strategy: (full parameters, loads of the last step)}.

    batches: whole batches, of which each rank reads its part
    keep: whether the parameters are returned, and not {}
    """
    found = {}
    for name, way in ways.items():
        model = build()
        training, part = set_up(way, model)
        for x, y in batches:
            take_loads(model)
            mark("step")
            step(training, *(each.chunk(dist.get_world_size())[part] for each in (x, y)))
            mark("end")
        full = {key: p.detach().cpu().clone() for key, p in training.full().items()} if keep else {}
        found[name] = full, take_loads(model)
        del training, model
        gc.collect()  # frees the cycles of this training
    return found


def norms_by(
    average: Callable[[Tensor, bool, Mesh], None], build: Callable[[], MoEGPT], batches: Sequence[Batch]
) -> list[tuple[float, float, float]]:
    """Train with AdamW on a mesh of edp 2 × ep 2; return for each step the norms of the gradients, and the loss.

    average: replaces a gradient by its mean: `average(gradient, is_expert, mesh)`
    Returns the norm of all gradients, that of those outside of experts, and this rank's loss.
    """
    mesh, model, found = Mesh((2, 2), ("edp", "ep")), build(), []
    experts = {p for each in split_experts(model, mesh) for p in each.parameters()}
    everything = list(model.parameters())
    others = [p for p in everything if p not in experts]
    optimizer = torch.optim.AdamW(everything, lr=2e-3)
    for x, y in batches:
        loss = model(x.chunk(4)[dist.get_rank()], y.chunk(4)[dist.get_rank()])
        loss.backward()
        for p in everything:
            average(p.grad, p in experts, mesh)
        norm = global_norm(everything, [mesh.get_group("ep")], dict.fromkeys(others, mesh.size("ep")))
        found.append((norm.item(), nn.utils.get_total_norm([p.grad for p in others]).item(), loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def slow_experts(model: nn.Module, seconds: float) -> None:
    """Let each expert of the model take `seconds` longer for each row, as a larger one would."""

    def wait(expert: nn.Module, rows: tuple[Tensor]) -> None:
        time.sleep(seconds * len(rows[0]))

    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for expert in experts.values():
            expert.register_forward_pre_hook(wait)
