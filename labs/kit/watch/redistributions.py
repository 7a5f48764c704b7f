"""A table of the DTensor redistributions while a module runs, operation by operation, with the reason for each.

    run(redistributed, model, {"up.weight": [Shard(0)], "x": [Shard(0)]}, x, ranks=4)[0]      # rows of a table

An operation on DTensors redistributes its inputs as the operation's rule requires (labs.dtensor.operation); the table
shows this rule.  A redistribution that the module's code or a gradient asks for stands in the table as the operation
"redistribute".
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.dtensor import Placement, Replicate, distribute_tensor, dtensor, operation
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import sent
from labs.mesh import Mesh

ASKED, SENT = "asked for by itself", "rank 0 sends, bytes"


def redistributed(
    module: nn.Module, layouts: Mapping[str, Sequence[Placement]], x: Tensor, mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """Run module(x) and its backward; return a row for each operation whose inputs were redistributed.

    layouts: {name of a parameter, or "x" for the input: placements}; every other parameter is replicated.
    mesh: device mesh; by default all ranks along one axis.
    """
    x = laid_out(module, layouts, x, mesh or Mesh((dist.get_world_size(),), ("ranks",)))
    with watched() as moves:
        module(x).sum().backward()
    return [dict(move) | {"times": times, SENT: times * dict(move)[SENT]} for move, times in moves.items()]


def laid_out(module: nn.Module, layouts: Mapping[str, Sequence[Placement]], x: Tensor, mesh: Mesh) -> Tensor:
    """Distribute the module's parameters in place, and return x distributed.

    Raises ValueError if `layouts` names a parameter that the module does not have.
    """
    names = [name for name, _ in module.named_parameters()] + ["x"]
    if unknown := [name for name in layouts if name not in names]:
        raise ValueError(f"layouts names {unknown[0]!r}, which is no parameter: choose from {', '.join(names)}")
    whole = [Replicate()] * mesh.ndim
    for path, part in module.named_modules():
        for name, p in list(part.named_parameters(recurse=False)):
            placed = distribute_tensor(p.detach(), mesh, layouts.get(f"{path}.{name}".lstrip("."), whole))
            part.register_parameter(name, nn.Parameter(placed, p.requires_grad))
    return distribute_tensor(x, mesh, layouts.get("x", whole))


@contextmanager
def watched() -> Iterator[Counter]:
    """Count the redistributions in the body of a with statement, as {items of a row: times} in order of occurrence."""
    moves: Counter = Counter()
    prepare, by_rule, by_itself, now = operation.prepare, operation.redistribute, dtensor.redistribute, ("", "")

    def prepared(op: Any, *key: Any) -> operation.Prepared:
        nonlocal now
        letters, linear, _ = operation.written_out(op, *key)
        now = operation.name_of(op), f"{letters}, linear in {linear or 'nothing'}"
        return prepare(op, *key)

    def noting(move: Callable[..., Tensor], what: Callable[[], tuple[str, str]]) -> Callable[..., Tensor]:
        def moved(local: Tensor, spec: Spec, target: Sequence[Placement], mesh: Mesh) -> Tensor:
            if spec.placements != tuple(target):
                nbytes = local.itemsize * sent(spec, target, (0,) * mesh.ndim)
                name, why = what()
                row = {"operation": name, "in": phase(), "from": worded(spec.placements), "to": worded(target)}
                moves[tuple((row | {"why": why, SENT: nbytes}).items())] += 1
            return move(local, spec, target, mesh)

        return moved

    operation.prepare = prepared
    operation.redistribute = noting(by_rule, lambda: now)
    dtensor.redistribute = noting(by_itself, lambda: ("redistribute", ASKED))
    try:
        yield moves
    finally:
        operation.prepare, operation.redistribute, dtensor.redistribute = prepare, by_rule, by_itself


def phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def worded(placements: Sequence[Placement]) -> str:
    return ", ".join(map(repr, placements))
