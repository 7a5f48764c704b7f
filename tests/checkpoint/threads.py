"""Threads in which torch.distributed.checkpoint loses or mixes up data, mostly silently, and labs.checkpoint beside it.

    python -m tests.checkpoint.threads      as a table, for the PyTorch that is installed

Each case replays a thread from an issue tracker on four ranks, once with PyTorch and once with ours.  It returns the
outcome on both sides: a value, or the sentence of an error.  The table has PyTorch 2.13's outcomes; what is mended
there is left out.
"""

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from labs import native
from labs.checkpoint import Held, load, save
from labs.kit import draw
from labs.kit.launch import run
from tests.checkpoint.common import ADAMW, alone, linear, words_of

RANKS = 4


def theirs(do):
    """Return the value of `do`, or its error in a line.  A CheckpointException is no Exception."""
    try:
        return do()
    except (Exception, checkpoint.CheckpointException) as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


def passed_on(where, kept, template, group=None):
    """Save `kept`, load it into the template, and return that."""
    checkpoint.save(kept, checkpoint_id=where / "theirs", process_group=group)
    checkpoint.load(template, checkpoint_id=where / "theirs", process_group=group)
    return template


def filled(value):
    model = linear()
    with torch.no_grad():
        model.bias.fill_(value)
    return model


# ---- values ----------------------------------------------------------------------------------------------


def a_dtype_is_cast(where):
    x = torch.tensor([1 + 2**-12])
    found = theirs(lambda: passed_on(where, {"x": x}, {"x": torch.zeros(1, dtype=torch.bfloat16)})["x"].item())
    return found, words_of(lambda: load(save(where, 1, Held(filled(x.item()))), Held(linear().bfloat16())))


def another_shape(where):
    found = theirs(lambda: passed_on(where, {"x": torch.ones(4)}, {"x": torch.zeros(3)})["x"].tolist())
    return found, words_of(lambda: load(save(where, 1, Held(nn.Linear(4, 3))), Held(linear())))


def a_plain_tensor_differs_by_rank(where):
    rank = float(dist.get_rank())
    found = theirs(lambda: passed_on(where, {"x": torch.tensor([rank])}, {"x": torch.zeros(1)})["x"].item())
    return found, words_of(lambda: save(where, 1, Held(filled(rank))))


def random_state_and_place_by_rank(where):
    """Return how many streams of random numbers, and how many places in the data, exist afterwards."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    kept = {"random": torch.get_rng_state(), "place": 100 * rank}
    found = passed_on(where, kept, {"random": torch.zeros_like(kept["random"]), "place": -1})
    torch.set_rng_state(found["random"])
    everyones = [None] * RANKS
    dist.all_gather_object(everyones, (torch.rand(()).item(), found["place"]))
    return len(set(everyones)), words_of(lambda: save(where, 1, Held(linear()), {"place": 100 * rank}))


def nobody_asks_for_it(where):
    kept = {"a": torch.ones(1), "b": torch.ones(1)}
    found = theirs(lambda: sorted(passed_on(where, kept, {"a": torch.zeros(1)})))
    return found, words_of(lambda: load(save(where, 1, Held(linear())), Held(nn.Linear(3, 3, bias=False))))


# ---- optimizers ------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.a, self.b = linear(seed), linear(seed + 1)


def stepped(model, optimizer, *used):
    """Take a step in which each used layer has a gradient of its own."""
    for factor, name in enumerate(used, 1):
        (factor * getattr(model, name)(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(model, optimizer):
    return {
        name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if "exp_avg" in optimizer.state[p]
    }


def resumed(where, held, others):
    """Save and load with ours, and return the names of the parameters that have moments."""
    load(save(where, 1, held), others[0])
    return sorted(moments(*others[1:]))


def a_parameter_without_state_yet(where):
    held, model, optimizer = alone(Two())
    stepped(model, optimizer, "a")
    _, other, its = alone(Two(5))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def by_name():
        native.save_checkpoint(where / "theirs", model, optimizer)
        native.load_checkpoint(where / "theirs", other, its)

    def flattened():
        state = get_optimizer_state_dict(model, optimizer, options=flat)
        set_optimizer_state_dict(other, its, state, options=flat)

    return [theirs(by_name), theirs(flattened)], resumed(where, held, alone(Two(5)))


def a_parameter_frozen_since(where):
    def frozen(seed):
        held, model, optimizer = alone(Two(seed))
        stepped(model, optimizer, "a", "b")
        model.b.requires_grad_(False)
        return held, model, optimizer

    held, model, optimizer = frozen(0)
    _, other, its = frozen(5)

    def do():
        native.save_checkpoint(where / "theirs", model, optimizer)
        native.load_checkpoint(where / "theirs", other, its)
        return sorted(moments(other, its))

    return theirs(do), resumed(where, held, frozen(7))


def saved_before_the_first_step(where):
    """Return how many steps an optimizer has counted that has not stepped."""

    def steps(optimizer):
        return sum({state["step"].item() for state in optimizer.state.values()})

    held, model, optimizer = alone(linear())
    save(where, 1, held)
    ours = steps(optimizer)
    theirs(lambda: native.save_checkpoint(where / "theirs", model, optimizer))
    return steps(optimizer), ours


def state_by_number(where):
    """Return whether moments stay with their parameter if an optimizer orders its groups differently: by number, by
    name.
    """

    def reversed_groups():
        model = Two(5)
        optimizer = ADAMW([*model.b.parameters(), *model.a.parameters()])
        stepped(model, optimizer, "a", "b")
        return Held(model, optimizer=optimizer), model, optimizer

    held, model, optimizer = alone(Two())
    stepped(model, optimizer, "a", "b")
    expected = deepcopy(moments(model, optimizer))

    def same(model, optimizer):
        return all(torch.equal(x, expected[name]) for name, x in moments(model, optimizer).items())

    def by_number():
        _, model, its = reversed_groups()
        its.load_state_dict(passed_on(where, optimizer.state_dict(), its.state_dict()))
        return same(model, its)

    def by_name():
        _, other, its = reversed_groups()
        native.save_checkpoint(where / "named", model, optimizer)
        native.load_checkpoint(where / "named", other, its)
        return same(other, its)

    mine, *other = reversed_groups()
    load(save(where, 1, held), mine)
    return [theirs(by_number), theirs(by_name)], same(*other)


def integers_for_hugging_face(where):
    def make(n):
        model = linear(n)
        model.register_buffer("counts", torch.full((3,), n))
        return model

    def same(model, other):
        return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))

    def do():
        model, other = make(1), make(0)
        native.save_hugging_face(where / "theirs", model)
        native.load_hugging_face(where / "theirs", other)
        return same(model, other)

    model, other = make(1), make(0)
    load(save(where, 1, Held(model)), Held(other))
    return theirs(do), same(model, other)


# ---- files -------------------------------------------------------------------------------------------------


def a_full_state_is_live(where):
    """Return the entries of an optimizer's full state that change with the next step, which only rank 0 has."""
    model = native.fsdp(linear(), [])
    optimizer = ADAMW(model.parameters())

    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    def do():
        step()
        state = native.states(model, optimizer, full=True)["optimizer"].get("state", {})
        before = deepcopy(state)
        step()
        return {key for name, entries in state.items() for key, x in entries.items() if not x.equal(before[name][key])}

    def ours():
        held, model, optimizer = alone(linear())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        before = deepcopy({key: part.blocks for key, part in held.parts().items()})
        final = save(where, 1, held)
        optimizer.step()
        load(final, held)
        return {
            key for key, part in held.parts().items() for at, x in part.blocks.items() if not x.equal(before[key][at])
        }

    everyones = [None] * RANKS
    dist.all_gather_object(everyones, theirs(do))
    return everyones[0], ours()


def one_bit_is_altered(where):
    """Return whether the loaded number is the one that was saved."""
    x = torch.tensor([0.7390851])

    def alter(folder):
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.iterdir():
                numbers = bytearray(path.read_bytes())
                if (at := numbers.find(x.numpy().tobytes())) >= 0:
                    numbers[at] ^= 1
                    path.write_bytes(numbers)
        dist.barrier()

    def do():
        checkpoint.save({"x": x}, checkpoint_id=where / "theirs")
        alter(where / "theirs")
        found = {"x": torch.zeros(1)}
        checkpoint.load(found, checkpoint_id=where / "theirs")
        return torch.equal(found["x"], x)

    found = theirs(do)
    final = save(where, 1, Held(filled(x.item())))
    alter(final)
    return found, words_of(lambda: load(final, Held(linear())))


def saved_twice_to_one_place(where):
    def do():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [passed_on(where, {"x": torch.tensor([n])}, {"x": torch.zeros(1)})["x"].item() for n in (1.0, 2.0)]
        return [*found, *(str(each.message) for each in said)]

    save(where, 1, Held(linear()))
    return theirs(do), words_of(lambda: save(where, 1, Held(linear())))


class Runs:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.makedirs, (self.path, 0o777, True)


def a_file_that_runs(where):
    """Return whether loading somebody else's checkpoint ran the code in it."""
    for folder, name in (("theirs", ".metadata"), ("step-1", "index.json")):
        if dist.get_rank() == 0:
            (where / folder).mkdir()
            index = checkpoint.Metadata({}, planner_data=Runs(where / f"ran-{folder}"), storage_data={})
            (where / folder / name).write_bytes(pickle.dumps(index))
    dist.barrier()
    theirs(lambda: checkpoint.load({}, checkpoint_id=where / "theirs"))
    words_of(lambda: load(where / "step-1", Held(linear())))
    return (where / "ran-theirs").exists(), (where / "ran-step-1").exists()


# ---- all of them -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Thread:
    """A case of the table. theirs (PyTorch 2.13's) and ours: the expected outcome, or a part of the sentence."""

    where: str
    play: Callable[[Path], tuple[Any, Any]]
    theirs: Any
    ours: Any

    @property
    def name(self) -> str:
        return self.play.__name__


BOTH = ["a.bias", "a.weight", "b.bias", "b.weight"]
THREADS = [
    Thread("pytorch#187138", a_dtype_is_cast, 1.0, "is torch.float32 of shape (3,) in it and torch.bfloat16"),
    Thread("pytorch#126604", another_shape, "Size mismatch between saved torch.Size([4])", "of shape (3, 4) in it and"),
    Thread("pytorch#120356", a_plain_tensor_differs_by_rank, 0.0, "'model/bias' differs on ranks 0 and 1, which both"),
    Thread("miles#3187", random_state_and_place_by_rank, 1, 'values= is {"place": 0} on rank 0 and {"place": 100}'),
    Thread("pytorch#123869", nobody_asks_for_it, ["a"], "nobody asks for its 'model/bias'"),
    Thread(
        "pytorch#192202, #192224",
        a_parameter_without_state_yet,
        ["Missing key in checkpoint state_dict: optimizer.state.b.weight.step", "TypeError: float() argument must be"],
        ["a.bias", "a.weight"],
    ),
    Thread("pytorch#192202", a_parameter_frozen_since, ["a.bias", "a.weight"], BOTH),
    Thread("pytorch#192202", saved_before_the_first_step, 1.0, 0),
    Thread("pytorch#124546", state_by_number, [False, True], True),
    Thread("pytorch#192485", integers_for_hugging_face, "finfo() requires a floating point input type", True),
    Thread("pytorch#144657", a_full_state_is_live, {"step"}, set()),
    Thread("", one_bit_is_altered, False, "does not hold what was written there"),
    Thread("", saved_twice_to_one_place, [1.0, 2.0, "existing checkpoint"], "step-1 is there already"),
    Thread("docs.python.org/3/library/pickle", a_file_that_runs, True, False),
]


def all_of_them(folder):
    found = []
    for thread in THREADS:
        where = folder / thread.name
        where.mkdir(exist_ok=True)
        dist.barrier()
        found.append(thread.play(where))
    return found


def matches(found, expected):
    """Return whether the outcome matches the table."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(matches, found, expected))
    return expected in found if isinstance(found, str) and isinstance(expected, str) else found == expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = run(all_of_them, Path(folder), ranks=RANKS)[0]
    rows = [
        {"": each.name.replace("_", " "), "thread": each.where, f"torch {torch.__version__}": str(a), "ours": str(b)}
        for each, (a, b) in zip(THREADS, found, strict=True)
    ]
    print(draw.table(rows))
