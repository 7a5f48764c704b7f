"""A lowered program on the blocks of a mesh: each rank calls it, with its own."""

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from labs.dtensor.algebra import Doing
from labs.dtensor.placement import Placement
from labs.dtensor.redistribute import redistribute
from labs.gspmd.lowering import Program
from labs.gspmd.tracing import Value
from labs.mesh import Mesh


def execute(program: Program, mesh: Mesh, *blocks: Tensor) -> list[Tensor]:
    """This rank's blocks of the results, from those of the arguments, in the layouts that the program has for them.

    Raises ValueError for a block that has not the shape that follows.
    """
    graph, layouts = program.graph, program.layouts
    for value, block in zip(graph.arguments, blocks, strict=True):
        due = layouts[value].block(mesh.get_coordinate()).shape
        if tuple(block.shape) != due:
            raise ValueError(f"a block of shape {tuple(block.shape)}: of {value.shape} this rank holds {due}")
    held: dict[Value, dict[tuple[Placement, ...], Tensor]] = {
        value: {layouts[value].placements: block}
        for value, block in (*zip(graph.arguments, blocks, strict=True), *graph.constants.items())
    }
    for step in program.steps:
        operation = step.operation
        for move in step.before:
            block = held[move.value][move.source.placements]
            held[move.value][move.target.placements] = redistribute(block, move.source, move.target.placements, mesh)
        placed = dict(zip(operation.inputs, step.inputs, strict=True))
        args = tree_map_only(Value, lambda value, placed=placed: held[value][placed[value].placements], operation.args)
        options = operation.options
        if operation.rule.local:
            doing = Doing(operation.op, list(step.inputs), list(step.outputs), mesh)
            result = operation.rule.local(doing, *args, **options)
        else:
            result = operation.op(*args, **options)
        produced = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for value, block, spec in zip(operation.outputs, produced, step.outputs, strict=True):
            held[value] = {layouts[value].placements: redistribute(block, spec, layouts[value].placements, mesh)}
    return [held[value][layouts[value].placements] for value in graph.results]
