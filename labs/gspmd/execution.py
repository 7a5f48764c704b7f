"""Execution of a lowered program on a mesh: each rank calls it with its own blocks."""

from functools import partial

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from labs.dtensor.algebra import Doing
from labs.dtensor.placement import Placement
from labs.dtensor.redistribute import redistribute
from labs.gspmd.lowering import LoweredOperation, Program
from labs.gspmd.tracing import Value
from labs.mesh import Mesh

Held = dict[Value, dict[tuple[Placement, ...], Tensor]]  # a rank's block of each value, in each of its layouts


def execute(program: Program, mesh: Mesh, *blocks: Tensor) -> list[Tensor]:
    """Compute this rank's blocks of the results from its blocks of the arguments, in the program's layouts.

    Raises ValueError for a block whose shape is not that of this rank's block in the argument's layout.
    """
    graph, layouts = program.graph, program.layouts
    for value, block in zip(graph.arguments, blocks, strict=True):
        expected = layouts[value].block(mesh.get_coordinate()).shape
        if tuple(block.shape) != expected:
            raise ValueError(
                f"a block of shape {tuple(block.shape)}: of {value.shape} this rank holds {expected}, so give that part"
            )
    held: Held = {
        value: {layouts[value].placements: block}
        for value, block in (*zip(graph.arguments, blocks, strict=True), *graph.constants.items())
    }
    for step in program.steps:
        for move in step.before:
            block = held[move.value][move.source.placements]
            held[move.value][move.target.placements] = redistribute(block, move.source, move.target.placements, mesh)
        for value, block, spec in zip(step.operation.outputs, carry_out(step, held, mesh), step.outputs, strict=True):
            held[value] = {layouts[value].placements: redistribute(block, spec, layouts[value].placements, mesh)}
    return [held[value][layouts[value].placements] for value in graph.results]


def carry_out(step: LoweredOperation, held: Held, mesh: Mesh) -> list[Tensor]:
    """Compute this rank's blocks of one operation's outputs."""
    operation, placed = step.operation, iter(step.inputs)  # a layout per argument: a value may be used twice
    args = tree_map_only(Value, lambda value: held[value][next(placed).placements], operation.args)
    do = operation.op
    if operation.rule.local:
        do = partial(operation.rule.local, Doing(operation.op, list(step.inputs), list(step.outputs), mesh))
    return [x for x in tree_leaves(do(*args, **operation.options)) if isinstance(x, Tensor)]
