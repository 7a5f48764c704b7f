"""The command `python -m labs dryrun`: print what some ranks of a large job would hold and send in a steady step."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
import tyro
from tyro.conf import DisallowNone, arg

from labs.cost import RECOMPUTE
from labs.kit import draw
from labs.kit.commands.names import known
from labs.kit.drawing.tables import short
from labs.kit.dry import dry
from labs.kit.launch import RankError
from labs.kit.simulated.device import TooLarge
from labs.kit.simulated.host import NeedsNumbers
from labs.kit.simulated.strategy_steps import rehearse
from labs.kit.training.strategies import ROWS
from labs.kit.watch.storage_ledger import KINDS
from labs.model import PRESETS
from labs.moe import MOE_PRESETS

MODELS = PRESETS | MOE_PRESETS
STEPS = 2  # the second one is a steady step
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class DryRun:
    """Predict what some ranks of a large job would hold and send in a steady step, without running the job."""

    model: Annotated[str, arg(help=f"one of {', '.join(MODELS)}")]
    mesh: str  # its axes with their sizes, outermost first, like dp=128,tp=8 or pp=16,dp=8,tp=8
    ranks: int | None = None  # number of ranks of the mesh, which is compared with this if it is given
    rank: tuple[int, ...] = (0,)  # one rank or several
    strategy: str | None = None  # a row of the table of strategies; by default the one that the axes name
    batch: int | None = None  # sequences for each part of the batch; by default 1, or one per stage
    node: int = 8  # ranks on a node
    dtype: Annotated[str, arg(help=f"dtype of the computation: {' or '.join(DTYPES)}")] = "float32"
    recompute: Annotated[str, arg(help=f"recomputed in each layer: {', '.join(RECOMPUTE)}")] = "none"


def main(arguments: Sequence[str]) -> int:
    """Print what the ranks would hold and send; return 0, or 2 if the job is refused."""
    chosen = tyro.cli(DryRun, prog="python -m labs dryrun", args=arguments, config=(DisallowNone,))
    try:
        model, axes = known("model", chosen.model, MODELS), mesh_of(chosen.mesh, chosen.ranks)
        name = known("strategy", chosen.strategy or row_of(axes), ROWS)
        batch = axes.get("pp", 1) if chosen.batch is None else chosen.batch
        require_fitting(name, axes, batch)
        if chosen.node < 1:
            raise ValueError(f"node is {chosen.node}: a node has 1 rank or more, such as --node 8")
        ranks = prod(axes.values())
        name, dtype = in_dtype(name, DTYPES[known("dtype", chosen.dtype, DTYPES)])
        recompute = known("recompute", chosen.recompute, RECOMPUTE)
        asked = (name, model, axes, batch, dtype, recompute)
        tell = f"{model} as {len(chosen.rank)} of {ranks:,} ranks"
        found = dry(train, *asked, ranks=ranks, rank=chosen.rank, node=chosen.node, tell=tell)
        if refused := next(filter(None, found), None):
            raise ValueError(refused)
    except (ValueError, NeedsNumbers, RankError) as error:
        print(error, file=sys.stderr)
        return 2
    last = STEPS - 1
    print(f"{name}, {model}, {batch} × {MODELS[model].context} tokens, of {ranks:,} ranks in a steady step")
    print(f"assumed: {assumed(name, dtype, recompute)}\n")
    for rank in chosen.rank:
        held = found.memory.steady(rank)
        sent, across = found.communication.sent(rank, last), found.communication.across(rank, last)
        kinds = ", ".join(f"{kind} {short(held[kind])}" for kind in KINDS if held[kind])
        print(f"rank {rank} holds at its peak {short(held['peak'])} (the most of each kind: {kinds})")
        where = f", {short(across)} of it to other nodes" if across else at_home(axes, chosen.node)
        print(f"    and sends {short(sent)}{where}")
    print(f"\n{draw.traffic(found.communication, last)!r}")
    return 0


def in_dtype(name: str, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return a strategy's row that computes in this dtype, and the dtype of its model.

    The row has mixed precision if the table of strategies has such a row.
    """
    mixed = f"{name}-bf16"
    return (mixed, torch.float32) if dtype == torch.bfloat16 and mixed in ROWS else (name, dtype)


def assumed(name: str, dtype: torch.dtype, recompute: str) -> str:
    """Return in words the assumptions on which the bytes of a dry run depend."""
    state, computes = dtype_name(dtype), dtype_name(dtype if dtype != torch.float32 else ROWS[name].computes)
    again = "nothing is recomputed" if recompute == "none" else f"recompute {recompute} in each layer"
    words = f"AdamW; parameters, gradients and optimizer state in {state}; it computes in {computes}"
    return f"{words}; attention is one kernel, norms are not; {again}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def at_home(axes: Mapping[str, int], node: int) -> str:
    """Return in words which ranks may send to other nodes, for the line of a rank that sends nothing to other nodes.

    These ranks may send, since not every rank sends in every collective, and a pipeline's last stage sends nothing on.
    """
    ranks, strides, stride = prod(axes.values()), [], 1
    for size in reversed(axes.values()):
        strides.append((size, stride))
        stride *= size
    edges = [
        rank
        for rank in range(min(ranks, 4 * node))
        if any(
            (rank + (((rank // step + 1) % size) - rank // step % size) * step) // node != rank // node
            for size, step in strides
            if size > 1
        )
    ]
    if not edges:
        return ", none of it to other nodes: the next rank along each axis is on its own"
    some = ", ".join(map(str, edges[:3]))
    may = f"ranks {some}, … have the next one along an axis on another node, and may send to it"
    return f", none of it to other nodes; {may}"


def train(name: str, model: str, axes: Mapping[str, int], batch: int, dtype: torch.dtype, recompute: str) -> str | None:
    """Run the steps of a strategy in a dry run; return the text of the error if the strategy refuses, or None."""
    try:
        for _ in rehearse(ROWS[name], MODELS[model], batch, STEPS, axes=axes, dtype=dtype, recompute=recompute):
            pass
    except TooLarge:
        raise
    except ValueError as error:
        return str(error)
    return None


def mesh_of(text: str, ranks: int | None) -> dict[str, int]:
    axes = {}
    for word in text.split(","):
        axis, equals, size = word.partition("=")
        if not (axis and equals and size.isdecimal() and int(size)) or axis in axes:
            raise ValueError(f"mesh {text!r}: write each axis once, with its size, like dp=128,tp=8")
        axes[axis] = int(size)
    if "pp" in axes and len(axes) > 1:  # the table's rows of several axes have all of them
        axes = {
            "pp": axes["pp"],
            "replicate": axes.get("replicate", 1),
            "shard": axes.get("dp", axes.get("shard", 1)),
            "tp": axes.get("tp", 1),
            **{axis: size for axis, size in axes.items() if axis not in ("pp", "replicate", "dp", "shard", "tp")},
        }
    if ranks not in (None, prod(axes.values())):
        raise ValueError(f"mesh {text} has {prod(axes.values()):,} ranks, not {ranks:,}: change a size, or --ranks")
    return axes


def row_of(axes: Mapping[str, int]) -> str:
    rows = {("dp",): "fsdp", ("replicate", "shard"): "hsdp", ("tp",): "tp-sp", ("dp", "tp"): "fsdp-tp"}
    rows |= {("cp",): "cp-ring", ("cp", "tp"): "cp-tp", ("pp",): "pp-1f1b", ("edp", "ep"): "ep"}
    rows["pp", "replicate", "shard", "tp"] = "pp-fsdp-tp" if axes.get("tp", 1) > 1 else "pp-fsdp"
    if tuple(axes) not in rows:
        meshes = " or ".join(",".join(names) for names in rows)
        raise ValueError(f"no strategy has the mesh axes {','.join(axes)}: give the axes {meshes}")
    return rows[tuple(axes)]


def require_fitting(name: str, axes: Mapping[str, int], batch: int) -> None:
    if batch < 1 or batch % axes.get("pp", 1):
        raise ValueError(
            f"batch {batch} is not divisible by pp={axes.get('pp', 1)}, the number of stages: give a multiple of that"
        )
    if tuple(ROWS[name].axes(4)) != tuple(axes):
        its = [row.name for row in ROWS.values() if tuple(row.axes(4)) == tuple(axes)]
        raise ValueError(
            f"{name} has the axes {','.join(ROWS[name].axes(4))}, not {','.join(axes)}"
            + (f": choose a strategy with these axes, {', '.join(its)}" if its else "")
        )
