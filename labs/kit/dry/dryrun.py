"""python -m labs dryrun: two steps of a row of the table as some ranks of many, and what they would hold and send."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from math import prod

from labs.kit import draw
from labs.kit.drawing.tables import short
from labs.kit.dry.dry import dry
from labs.kit.dry.host import NeedsNumbers
from labs.kit.dry.rehearsal import rehearse
from labs.kit.launch import RankError
from labs.kit.strategies import ROWS, STRATEGIES
from labs.kit.watch.ledger import KINDS
from labs.model import PRESETS

STEPS = 2  # the second is a step of a training under way


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs dryrun", description=__doc__)
    parser.add_argument("--model", required=True, help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--mesh", required=True, help="its axes, outermost first, like dp=128,tp=8")
    parser.add_argument("--ranks", type=int, help="the mesh's, if given")
    parser.add_argument("--rank", type=int, nargs="+", default=[0], help="one or several (%(default)s)")
    parser.add_argument("--strategy", help="a row of the table; by default the one that the axes name")
    parser.add_argument("--batch", type=int, default=1, help="sequences for each part of the batch (%(default)s)")
    parser.add_argument("--node", type=int, default=8, help="ranks on a node (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        model, axes = known("model", chosen.model, PRESETS), mesh_of(chosen.mesh, chosen.ranks)
        name = known("strategy", chosen.strategy or row_of(axes), ROWS)
        require_fitting(name, axes, chosen.batch)
        if chosen.node < 1:
            raise ValueError(f"node is {chosen.node}: a node has 1 rank or more, such as --node 8")
        ranks = prod(axes.values())
        found = dry(train, name, model, axes, chosen.batch, ranks=ranks, rank=chosen.rank, node=chosen.node)
    except (ValueError, NeedsNumbers, RankError) as error:
        print(error, file=sys.stderr)
        return 1
    last = STEPS - 1
    print(f"{name}, {model}, {chosen.batch} × {PRESETS[model].context} tokens, of {ranks:,} ranks in a steady step:\n")
    for rank in chosen.rank:
        held = found.memory.steady(rank)
        sent, across = found.communication.sent(rank, last), found.communication.across(rank, last)
        kinds = ", ".join(f"{kind} {short(held[kind])}" for kind in KINDS if held[kind])
        print(f"rank {rank} holds at its peak {short(held['peak'])} (the most of each kind: {kinds})")
        print(f"    and sends {short(sent)}, {short(across)} of it to other nodes")
    print(f"\n{draw.traffic(found.communication, last)!r}")
    return 0


def train(name: str, model: str, axes: Mapping[str, int], batch: int) -> None:
    for _ in rehearse(ROWS[name], PRESETS[model], batch, STEPS, axes=axes):
        pass


def known(what: str, name: str, names: Mapping[str, object]) -> str:
    if name in names:
        return name
    nearest = get_close_matches(name, names, 1, 0)
    raise ValueError(f"{what} {name!r} is not known: the nearest is {nearest[0]!r}, of {', '.join(names)}")


def mesh_of(text: str, ranks: int | None) -> dict[str, int]:
    axes = {}
    for word in text.split(","):
        axis, equals, size = word.partition("=")
        if not (axis and equals and size.isdecimal() and int(size)) or axis in axes:
            raise ValueError(f"mesh {text!r}: write each axis once, with its size, like dp=128,tp=8")
        axes[axis] = int(size)
    if ranks not in (None, prod(axes.values())):
        raise ValueError(f"mesh {text} has {prod(axes.values()):,} ranks, not {ranks:,}: change a size, or --ranks")
    return axes


def row_of(axes: Mapping[str, int]) -> str:
    rows = {("dp",): "fsdp", ("replicate", "shard"): "hsdp", ("tp",): "tp-sp", ("dp", "tp"): "fsdp-tp"}
    rows["pp",] = "pp-1f1b"
    if tuple(axes) not in rows:
        meshes = " or ".join(",".join(names) for names in rows)
        raise ValueError(f"no row of the table has the axes {','.join(axes)}: they are {meshes}")
    return rows[tuple(axes)]


def require_fitting(name: str, axes: Mapping[str, int], batch: int) -> None:
    if batch < 1 or batch % axes.get("pp", 1):
        raise ValueError(
            f"batch {batch}: a pipeline cuts it into a micro-batch for each stage: give a multiple of them"
        )
    if tuple(ROWS[name].axes(4)) != tuple(axes):
        its = [row.name for row in STRATEGIES if tuple(row.axes(4)) == tuple(axes)]
        raise ValueError(
            f"{name} has the axes {','.join(ROWS[name].axes(4))}, not {','.join(axes)}"
            + (f": these have {', '.join(its)}" if its else "")
        )
