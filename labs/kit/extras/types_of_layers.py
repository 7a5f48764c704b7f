"""The course's split layers under spmd_types, the checker of types over ranks by Meta, in a process of its own.

    rows = on_pretended_ranks(accepted_layers, ranks=8192)

spmd_types follows one forward of one rank.  The other ranks are those of PyTorch's fake process group, which sends
nothing.  While spmd_types checks, it patches torch.  So it runs in a job of one rank, which ends with the call: import
it within `fn`, and never at the top of a cell.

An autograd function that communicates needs a rule, which says the types that it takes and returns.  RULES has those of
the course; a border's types follow from its placements, those of its gradient included.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.dtensor import Partial, Replicate, Shard
from labs.kit.ranks.run import run
from labs.kit.simulated.without_other_ranks import alone
from labs.mesh import Mesh
from labs.model import CrossEntropy
from labs.tp import ColwiseParallel, LossParallel, RowwiseParallel, SequenceParallel, parallelize
from labs.tp.conjugate import Border
from labs.tp.parallel_layers import unwatch
from labs.tp.vocabulary import SplitCrossEntropy

T = TypeVar("T")
LETTERS = {(Replicate, Partial): "R", (Replicate, Replicate): "I", (Shard, Shard): "V", (Partial, Replicate): "P"}


def spmd_types_missing() -> str:
    """Return a sentence that says why spmd_types cannot be used, and what to do; "" if it can be used."""
    if importlib.util.find_spec("spmd_types") is None:
        return "spmd_types is not installed: `make learn EXTRA=types` adds it"
    return ""


def on_pretended_ranks(fn: Callable[..., T], *args: Any, ranks: int = 8192, timeout: float = 120.0) -> T:
    """Return the value of `fn(*args)` in a process that is rank 0 of a pretended job with this many ranks.

    Raises ImportError if spmd_types is missing, and RankError if `fn` fails.
    """
    if reason := spmd_types_missing():
        raise ImportError(reason)
    return run(as_rank_0, fn, args, ranks, ranks=1, device="cpu", timeout=timeout)[0]


def as_rank_0(fn: Callable[..., T], args: Any, ranks: int) -> T:
    dist.destroy_process_group()
    with alone(0, ranks):
        return fn(*args)


# ---- the rules of the course's autograd functions --------------------------------------------------------


def border(out: Tensor, *, x: Tensor, line: Any, forward: Any, backward: Any) -> None:
    """Check the type of a border's x, and set that of its result."""
    import spmd_types as spmd

    takes, gives = (
        getattr(spmd, LETTERS[type(tensor), type(gradient)])
        for tensor, gradient in zip(forward, reversed(backward), strict=True)
    )
    if takes is spmd.P and spmd.get_axis_local_type(x, line.group) is spmd.V:
        spmd.rules.ignore(x)  # a product's type is V: only the border says that the ranks have summands
    else:
        spmd.assert_type(x, {line.group: takes})
    spmd.assert_type_like(out, x, {line.group: gives})


def split_cross_entropy(out: Tensor, *, logits_Mv: Tensor, targets_M: Tensor, mesh: Mesh) -> None:
    import spmd_types as spmd

    spmd.assert_type(logits_Mv, {mesh.get_group(): spmd.V})
    spmd.rules.ignore(targets_M)
    spmd.assert_type_like(out, logits_Mv, {mesh.get_group(): spmd.I})


RULES: dict[type, Callable[..., None]] = {Border: border, SplitCrossEntropy: split_cross_entropy}


# ---- the layers ------------------------------------------------------------------------------------------


def accepted_layers() -> list[dict[str, str]]:
    """Return a row for each split layer, with its types, or "refused": unchanged, with RULES, without its borders."""
    ranks, shards = dist.get_world_size(), Shard(1)
    layers = {  # a module, its style, and the types of its input and its output
        "column-parallel linear": (nn.Linear(8, 8 * ranks), ColwiseParallel(), "IV"),
        "row-parallel linear": (nn.Linear(8 * ranks, 8), RowwiseParallel(), "VI"),
        "vocab-parallel embedding": (nn.Embedding(8 * ranks, 8), RowwiseParallel(), "RI"),
        "split cross-entropy": (CrossEntropy(), LossParallel(8 * ranks), "VI"),
        "columns, sequence parallel": (nn.Linear(8, 8 * ranks), ColwiseParallel(input_layouts=shards), "VV"),
        "rows, sequence parallel": (nn.Linear(8 * ranks, 8), RowwiseParallel(output_layouts=shards), "VV"),
        "norm, sequence parallel": (nn.RMSNorm(8), SequenceParallel(), "VV"),
    }
    rows = []
    for name, (module, style, types) in layers.items():
        parallelize(module, Mesh((ranks,), ("tp",)), style)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.clear()  # the comparisons of the first step, which need numbers from the other ranks
        unwatch(module)
        unchanged = verdict(module, types)
        with ExitStack() as stack:
            for function, rule in RULES.items():
                stack.enter_context(patch.object(function, "spmd_typecheck", staticmethod(rule), create=True))
            with_rules = verdict(module, types)
            stack.enter_context(patch.object(Border, "apply", lambda x, *others: x.view_as(x)))
            rows.append(
                {
                    "": name,
                    "unchanged": unchanged,
                    "with a rule": with_rules,
                    "without its borders": verdict(module, types),
                }
            )
    return rows


def verdict(module: nn.Module, types: str) -> str:
    """Return the types of a split layer's input and output, or "refused" if spmd_types does not derive them."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    tp, ranks = dist.group.WORLD, dist.get_world_size()
    takes, gives = (getattr(spmd, letter) for letter in types)
    tokens = torch.zeros(2, ranks, dtype=torch.long)
    x = tokens if isinstance(module, nn.Embedding) else torch.randn(2, ranks, 8, requires_grad=True)
    with spmd.set_current_mesh(frozenset([spmd.MeshAxis.of(tp)])), typecheck():
        spmd.assert_type(x, {tp: takes})
        spmd.assert_type(tokens, {tp: takes if x is tokens else spmd.R})
        for name, p in module.named_parameters():
            spmd.assert_type(p, {tp: spmd.V if name in module.tensor_parallel.cuts else spmd.I})
        try:
            spmd.assert_type(module(x, tokens) if isinstance(module, CrossEntropy) else module(x), {tp: gives})
        except spmd.SpmdTypeError:
            return "refused"
    return " → ".join(types)
