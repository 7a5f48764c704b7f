"""Lowering: the way in which each operation is computed, and its redistributions, once each value's layout is known.

Of all ways to compute an operation (labs.dtensor.algebra), the one that sends the fewest bytes is chosen, counting the
bytes to redistribute its inputs and the bytes to redistribute its outputs into their layouts.  labs.dtensor counts only
the inputs' bytes, since it does not know yet which layout of an output will be needed.  Take x @ w, 4096 × 64 and
64 × 128, on 4 ranks, with x as Shard(1), w as Shard(0), and the result needed as Shard(0):

    labs.dtensor    reduce-scatters the summands          1,572,864 bytes per rank, all of them after the product
    labs.gspmd      all-to-all of x, all-gather of w        221,184 bytes: the result has its layout at once
    XLA             all-reduces the summands              3,145,728 bytes: on CPUs it makes no reduce-scatter

A redistributed value is held for later operations that need the same layout: a weight that was gathered in forward is
still whole in backward.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from labs.dtensor.algebra import Way, reachable, ways
from labs.dtensor.placement import Placement, Spec
from labs.dtensor.redistribute import plan, sent
from labs.gspmd.propagation import Layouts
from labs.gspmd.tracing import Graph, Operation, Value


@dataclass(frozen=True)
class PlacedMove:
    """The redistribution of a value from one layout to another."""

    value: Value
    source: Spec
    target: Spec

    @property
    def collectives(self) -> list[str]:
        steps = plan(self.source, self.target.placements)
        return [step.move.collective for step in steps if step.move.collective]

    @property
    def sent(self) -> int:
        """Return the bytes that the first rank sends in the move."""
        origin = (0,) * len(self.source.mesh)
        return self.value.itemsize * sent(self.source, self.target.placements, origin)

    def __repr__(self) -> str:
        return f"{' + '.join(self.collectives) or 'cut'} of {self.value.shape}, {self.sent:,} bytes"


@dataclass(frozen=True)
class LoweredOperation:
    """An operation, with the layouts of its inputs and outputs, and the redistributions before and after it."""

    operation: Operation
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    before: tuple[PlacedMove, ...]
    after: tuple[PlacedMove, ...]


@dataclass(frozen=True)
class Program:
    graph: Graph
    layouts: Layouts
    steps: tuple[LoweredOperation, ...]

    @property
    def moves(self) -> list[PlacedMove]:
        return [move for step in self.steps for move in (*step.before, *step.after) if move.collectives]

    @property
    def sent(self) -> int:
        """Return the bytes that the first rank sends in the whole program."""
        return sum(move.sent for move in self.moves)

    @property
    def counts(self) -> dict[str, int]:
        """Return how often each collective is called, as {name: calls}."""
        return dict(Counter(name for move in self.moves for name in move.collectives))

    def __repr__(self) -> str:
        lines = [f"{'operation':14} {'letters':24} {'result':12} {'as':34} moved"]
        for step in self.steps:
            moved = "; ".join(map(repr, (move for move in (*step.before, *step.after) if move.collectives)))
            value = step.operation.outputs[0]
            layout = ", ".join(map(repr, self.layouts[value].placements))
            name = step.operation.name.rpartition("flash_")[2]
            lines.append(f"{name:14.14} {step.operation.letters:24.24} {value.shape!s:12} {layout:34} {moved}".rstrip())
        return "\n".join(lines)


def lower(graph: Graph, layouts: Layouts) -> Program:
    copies = {value: {spec.placements} for value, spec in layouts.items()}
    steps = []
    for operation in graph.operations:
        axes = range(len(layouts[operation.outputs[0]].mesh))
        chosen = [cheapest(operation, layouts, copies, axis) for axis in axes]
        inputs = tuple(layouts[value].but(way.inputs[i] for way in chosen) for i, value in enumerate(operation.inputs))
        outputs = tuple(
            layouts[value].but(way.outputs[i] for way in chosen) for i, value in enumerate(operation.outputs)
        )
        before = tuple(
            PlacedMove(value, layouts[value], spec)
            for value, spec in dict.fromkeys(zip(operation.inputs, inputs, strict=True))
            if spec.placements not in copies[value]
        )
        for value, spec in zip(operation.inputs, inputs, strict=True):
            copies[value].add(spec.placements)
        pairs = zip(operation.outputs, outputs, strict=True)
        after = tuple(PlacedMove(value, spec, layouts[value]) for value, spec in pairs if spec != layouts[value])
        steps.append(LoweredOperation(operation, inputs, outputs, before, after))
    return Program(graph, layouts, tuple(steps))


def cheapest(
    operation: Operation, layouts: Layouts, copies: Mapping[Value, set[tuple[Placement, ...]]], axis: int
) -> Way:
    """Return the way to compute an operation that sends the fewest bytes along an axis; of several, the first."""

    def moves(way: Way) -> list[tuple[Value, Spec, Spec]]:
        pairs = zip(operation.inputs, way.inputs, strict=True)
        found = [(value, layouts[value], replaced(layouts[value], axis, placement)) for value, placement in pairs]
        found = [move for move in found if move[2].placements not in copies[move[0]]]
        pairs = zip(operation.outputs, way.outputs, strict=True)
        return found + [
            (value, replaced(layouts[value], axis, placement), layouts[value]) for value, placement in pairs
        ]

    def possible(way: Way) -> bool:
        placed = zip(operation.values, (*way.inputs, *way.outputs), strict=True)
        specs = ((value, replaced(layouts[value], axis, placement), placement) for value, placement in placed)
        fits = all(not p.is_shard() or value.shape[p.dim] % spec.pieces(p.dim) == 0 for value, spec, p in specs)
        return fits and all(reachable(a.placements[axis], b.placements[axis]) for _, a, b in moves(way))

    def cost(way: Way) -> tuple[int, int]:
        found = [PlacedMove(*move) for move in moves(way) if move[1] != move[2]]
        return sum(move.sent for move in found), len(found)

    return min(filter(possible, ways(operation.letters, operation.linear)), key=cost)


def replaced(spec: Spec, axis: int, placement: Placement) -> Spec:
    return spec.but((*spec.placements[:axis], placement, *spec.placements[axis + 1 :]))
