"""Tests of labs.kit.watch.c10d_tap against the operators that torch has."""

import torch
import torch.distributed as dist

from labs.kit.launch import run
from labs.kit.record import PASSES, mark
from labs.kit.watch import c10d_tap


def test_the_tap_knows_every_operator_that_torch_has():
    """Check that no collective of a new version passes unseen: each belongs in one of the two tables."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    collectives = {name.removeprefix("c10d::") for name in names if name.startswith("c10d::")}
    assert collectives - c10d_tap.OPERATORS.keys() - c10d_tap.NO_COMMUNICATION == set()
    assert not c10d_tap.OPERATORS.keys() & c10d_tap.NO_COMMUNICATION
    assert len(collectives & c10d_tap.OPERATORS.keys()) >= 20
    waits = {name.split("::")[1] for name in names if name.startswith("_c10d_functional::wait")}
    assert waits <= set(c10d_tap.WAITS)


def test_the_tap_knows_where_each_operator_has_its_tensors_and_its_group():
    for raw, (_, inputs, outputs, group) in c10d_tap.OPERATORS.items():
        if torch._C._dispatch_has_kernel(f"c10d::{raw}"):
            arguments = getattr(torch.ops.c10d, raw).default._schema.arguments
            assert "ProcessGroup" in str(arguments[group].type), raw
            assert all("Tensor" in str(arguments[n].type) for n in (inputs, outputs) if n is not None), raw
            assert raw not in c10d_tap.ROOT or "root" in arguments[c10d_tap.ROOT[raw]].name, raw


def functional(pairs):
    """Call every functional collective of this torch, each in a step of its own, and return their names."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    calls = {
        "all_gather_into_tensor": lambda x: ops.all_gather_into_tensor(x, 2, name),
        "all_gather_into_tensor_coalesced": lambda x: ops.all_gather_into_tensor_coalesced([x], 2, name),
        "all_gather_into_tensor_out": lambda x: ops.all_gather_into_tensor_out(x, 2, name, out=torch.empty(8)),
        "all_reduce": lambda x: ops.all_reduce(x, "sum", name),
        "all_reduce_": lambda x: ops.all_reduce_(x, "sum", name),
        "all_reduce_coalesced": lambda x: ops.all_reduce_coalesced([x], "sum", name),
        "all_reduce_coalesced_": lambda x: ops.all_reduce_coalesced_([x], "sum", name),
        "all_to_all_single": lambda x: ops.all_to_all_single(x, [2, 2], [2, 2], name),
        "broadcast": lambda x: ops.broadcast(x, 0, name),
        "broadcast_": lambda x: ops.broadcast_(x, 0, name),
        "reduce_scatter_tensor": lambda x: ops.reduce_scatter_tensor(x, "sum", 2, name),
        "reduce_scatter_tensor_coalesced": lambda x: ops.reduce_scatter_tensor_coalesced([x], "sum", 2, name),
        "reduce_scatter_tensor_out": lambda x: ops.reduce_scatter_tensor_out(x, "sum", 2, name, out=torch.empty(2)),
        "isend": lambda x: ops.isend(x, 1, 0, name) if rank == 0 else ops.irecv(x, 0, 0, name),
        "irecv": lambda x: ops.isend(x, 0, 0, name) if rank == 1 else ops.irecv(x, 1, 0, name),
        "batch_p2p_ops": lambda x: ops.batch_p2p_ops(["isend"] if rank else ["irecv"], [1 - rank], [0], [x], name),
    }
    # the two excluded ones send nothing
    there = [each for each in pairs if not each.startswith(("wait", "_wrap_tensor"))]
    for each in there:
        mark("step")
        waited = calls[each](torch.ones(4))
        for tensor in waited if isinstance(waited, list) else [waited]:
            ops.wait_tensor(tensor)
    return there


def test_every_functional_collective_passes_the_tap():
    """Check the ones that torch.compile and DTensor issue; each ends in an operator of c10d."""
    prefix = "_c10d_functional::"
    names = sorted(
        {n.split(".")[0][len(prefix) :] for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)}
    )
    results = run(functional, names, ranks=2, device="cpu", record="communication")
    missed = [name for step, name in enumerate(results[0]) if len(results.recording.select(0, step)) != 1]
    assert not missed


def kept_by_the_tap():
    others, c10d_tap.listeners[:] = list(c10d_tap.listeners), []
    x = torch.ones(2**10)
    with PASSES["communication"]():
        work = dist.all_reduce(x, async_op=True)
        functional = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        kept = [call for _, call, _ in c10d_tap._outstanding.values()] + list(c10d_tap._by_storage.values())
        groups = [call.group for call in kept]
    work.wait()
    torch.ops._c10d_functional.wait_tensor(functional)
    left = len(c10d_tap._outstanding) + len(c10d_tap._by_storage)
    c10d_tap.listeners[:] = others
    return groups, left


def test_the_tap_keeps_no_group_and_after_the_pass_nothing():
    """Check that groups are freed: one that lives until the interpreter ends aborts it there, now and then."""
    for groups, left in run(kept_by_the_tap, ranks=2, device="cpu"):
        assert len(groups) >= 2 and set(groups) == {None} and left == 0


class Counts(c10d_tap.Listener):
    count = 0

    def issued(self, call):
        self.count += 1


def test_uninstall_removes_what_was_installed():
    """Uninstall before the course is imported anew in a rank; otherwise each collective would be shown twice."""

    def body():
        with Counts() as counts:
            dist.barrier()
            c10d_tap.uninstall()
            dist.barrier()
            c10d_tap.install()
            dist.barrier()
        return counts.count, hasattr(dist.Work.wait.__wrapped__, "__wrapped__")

    assert run(body, ranks=1) == [(2, False)]
