"""mesh_sizes: the sizes of tp, pp and dp with which a model can be laid out on a cluster.

Some clusters and models divide evenly, and some do not.
"""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, WrongSheet, as_if, on_paper

Sizes = list[tuple[int, int, int]]
JOBS = (  # gpus, node, heads, layers, batch
    (32, 8, 64, 80, 512),
    (8, 8, 32, 32, 8),
    (1, 8, 16, 24, 4),
    (24, 8, 12, 10, 36),
    (16, 4, 6, 3, 30),
    (64, 8, 20, 5, 48),
    (6, 6, 6, 2, 4),
)
WORDS = "{} GPUs in nodes of {}, {} heads, {} layers, {} sequences"


@answered
def mesh_sizes(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(gpus, node, heads, layers, batch) -> [(tp, pp, dp), ...]`, all that can be run, sorted.

    Returns the ✓ line.
    """
    sheets = [Sheet(job, meshes(*job), WORDS.format(*job)) for job in JOBS]
    return on_paper(fn, sheets, MISTAKES, "Which sizes of tp, pp and dp have all GPUs as their product?")


def meshes(gpus: int, node: int, heads: int, layers: int, batch: int, but: str = "") -> Sizes:
    """Return the sizes that can be run; with `but`, those of a mistake.

    but: the condition that is left out, or one that is added
    """
    found = []
    for tp in range(1, gpus + 1):
        for pp in range(1, gpus // tp + 1):
            dp = gpus // (tp * pp)
            conditions = {
                "gpus": tp * pp * dp == gpus,
                "node": tp <= node,
                "heads": heads % tp == 0,
                "layers": pp <= layers,
                "batch": batch % dp == 0,
                "micro": pp <= batch / dp,
            }
            extra = {"powers": not any(n & (n - 1) for n in (tp, pp, dp)), "two": tp & (tp - 1) == 0}
            extra |= {"less tp": tp < node, "less pp": pp < layers}
            if all(holds for name, holds in conditions.items() if name != but) and extra.get(but, True):
                found.append((tp, pp, dp))
    return found


def otherwise_sorted(seen: WrongSheet) -> str | None:
    """Return the sentence if the sizes are the expected ones in another order, or if some are there twice."""
    try:
        return seen.description if sorted({*map(tuple, seen.received)}) == seen.sheet.expected else None
    except TypeError:
        return None


# fmt: off
MISTAKES = (
    Mistake("not sorted, or not each once", "In which order does sorted() bring tuples?", otherwise_sorted),
    Mistake("sizes that do not multiply out", "24 GPUs, tp 5: how many are left over?", as_if(meshes, but="gpus"),
            symptom="a job that starts on fewer GPUs than were paid for, or not at all"),
    Mistake("tensor parallelism leaves the node", "Over which wire would each layer's all-reduces go?",
            as_if(meshes, but="node")),
    Mistake("heads are cut", "How many heads of attention has each rank along tp?", as_if(meshes, but="heads")),
    Mistake("stages without layers", "How many layers has each stage, if there are more stages than layers?",
            as_if(meshes, but="layers")),
    Mistake("the batch is not dealt out evenly", "30 sequences for 4 ranks along dp: how many has each?",
            as_if(meshes, but="batch")),
    Mistake("fewer micro-batches than stages", "A rank along dp has batch / dp sequences. Who works meanwhile?",
            as_if(meshes, but="micro")),
    Mistake("powers of two only", "24 GPUs are 3 nodes: which size would a pipeline of one stage a node have?",
            as_if(*(partial(meshes, but=but) for but in ("powers", "two")))),
    Mistake("the largest is left out", "At most so many: is that one among them?",
            as_if(*(partial(meshes, but=but) for but in ("less tp", "less pp")))),
    Mistake("tp, pp and dp in another order", "In which order does the docstring name the three sizes?",
            as_if(*(lambda *job, order=order: sorted(tuple(sizes[i] for i in order) for sizes in meshes(*job))
                    for order in permutations(range(3)) if order != (0, 1, 2)))),
)
# fmt: on

mesh_sizes.expected = meshes  # the notebook goes on with this function, if the learner's is not right yet
