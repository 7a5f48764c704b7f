"""Strategies of context parallelism, whose ranks each compute a piece of every sequence, and average gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from labs import cost, ddp, native
from labs.cp import context_parallel, gathered_attention, ring_attention, ulysses_attention
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import Training, backward, replicated
from labs.mesh import Mesh
from labs.model import GPT
from labs.tp import clip_gradients, full_parameters, gpt_plan, parallelize

WAYS = {"ring": ring_attention, "gather": gathered_attention, "ulysses": ulysses_attention}


def our_cp(way: str, model: GPT, mesh: Mesh) -> Training:
    group = mesh.get_group("cp")
    context_parallel(model, group, WAYS[way])
    module = ddp.Overlapped(model, group=group)
    return replicated(model, partial(backward, module, no_sync=module.no_sync), finish=module.sync)


def our_cp_tp(model: GPT, mesh: Mesh) -> Training:
    parallelize(model, mesh["tp"], gpt_plan(model.config))
    clip = partial(clip_gradients, model)
    return replace(our_cp("ring", model, mesh), full=partial(full_parameters, model), clip=clip)


def torch_cp(model: GPT, mesh: Mesh) -> Training:
    group = mesh.get_group("cp")
    context_parallel(model, group, native.templated_ring)
    module = native.ddp(model, group)
    return replicated(model, partial(backward, module, no_sync=module.no_sync))


def all_ranks(asked: int) -> dict[str, int]:
    if asked < 2:
        raise ValueError(f"context parallelism takes 2 ranks or more: not {asked}")
    return {"cp": asked}


# In all sizes of the GPT, two ranks can share the heads of keys and values; small GPTs have too few for more ranks.
def pair(asked: int) -> dict[str, int]:
    return {"cp": all_ranks(asked) and 2}


def cut(way: str, axes: Callable[[int], Mapping[str, int]] = all_ranks) -> Strategy:
    """Return the row of a way to attend to the keys of other ranks."""
    predict = partial(cost.cp, way=way)
    return Strategy(f"cp-{way}", "ours", partial(our_cp, way), predict, None, axes, (), (), GPT)


def powers_of_two(asked: int) -> dict[str, int]:
    if asked < 2 or asked & (asked - 1):
        raise ValueError(f"PyTorch's ring cuts sequences into equal pieces, for 2, 4, 8, ... ranks: not {asked}")
    return {"cp": asked}


def rows_of_two(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(
            f"context parallelism with tensor parallelism over 2 ranks takes 4, 6, 8, ... ranks: not {asked}"
        )
    return {"cp": asked // 2, "tp": 2}


CP = (
    cut("ring"),
    cut("gather"),
    cut("ulysses", pair),
    Strategy("cp-tp", "ours", our_cp_tp, cost.cp_tp, None, rows_of_two, (), (), GPT),
    Strategy(
        "torch-cp",
        "native",
        torch_cp,
        cost.templated_ring,
        None,
        powers_of_two,
        (),
        (),
        GPT,
        note="sends each head of keys and values once for every head of queries, all-gathers them, and passes their "
        "gradients on N times",
    ),
)
