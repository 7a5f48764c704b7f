"""Tests of labs.checkpoint: every layout loads what every other one saved, bit for bit, and a training continues."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labs.checkpoint import Remembered, load, loading, newest, save
from labs.kit.launch import run
from labs.mesh import Mesh
from tests.checkpoint.common import CONFIG, LAYOUTS, Extras, alone, blocks, numbers, same, sharded, steps
from tests.depth import deepen


def first_training(make, folder):
    """Train for three steps in one process, and save."""
    held, model, optimizer = alone(make(1))
    for step in range(3):
        torch.manual_seed(step)
        model(*torch.randint(0, CONFIG.vocab, (2, 2, CONFIG.context))).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder, 3, held, {"lr": 0.5})


def laid_out(make, layouts):
    for layout in layouts:
        held, *_ = LAYOUTS[layout][1](make(2))
        yield layout, held


def passed_on(make, folder, layouts):
    """Load the first checkpoint, which one process saved, under each layout, and save it again."""
    for layout, held in laid_out(make, layouts):
        assert load(folder / "first" / "step-3", held) == Remembered(3, {"lr": 0.5}, [None])
        save(folder / layout, 7, held)


def all_loaded(make, folder, layouts, least=1, every=1):
    """Load others' checkpoints under each layout, and return those that differ from the first one.

    least: the fewest ranks of a layout that is loaded
    every: load one layout in this many
    """
    wrong, others = [], [name for name in MODELS[make] if LAYOUTS[name][0] >= least]
    for number, (layout, held) in enumerate(laid_out(make, layouts)):
        load(folder / "first" / "step-3", held)
        there = blocks(held)
        expected = {place: x.clone() for place, x in there.items()}
        for other in others[number % every :: every]:
            with torch.no_grad():
                for x in there.values():
                    x.zero_()
            load(folder / other / "step-7", held)
            there = blocks(held)
            if not same(there, expected):
                wrong.append((other, layout))
    return wrong


def plain(seed):
    return Extras(CONFIG, seed)


def tied(seed):
    return Extras(replace(CONFIG, tied=True), seed)


def low(seed):
    """Return a model in bfloat16, which is trained with float32 masters."""
    return Extras(CONFIG, seed).bfloat16()


MODELS = {
    plain: [*LAYOUTS],
    tied: ["zero-3", "fsdp", "tp", "pp", "pp-fsdp"],
    low: ["one", "zero-2", "zero-3", "fsdp", "fsdp-tp", "pp", "pp-fsdp"],
}


def of_each_model(do, folder, models=(*MODELS,)):
    """Apply `do` to each model, with the layouts that take as many ranks as this job has."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = {make: [name for name in MODELS[make] if LAYOUTS[name][0] == ranks] for make in models}
    return {make.__name__: do(make, folder / make.__name__, layouts) for make, layouts in mine.items()}


def passed_on_and_loaded(make, folder, layouts):
    passed_on(make, folder, layouts)
    return all_loaded(make, folder, layouts, least=dist.get_world_size(), every=6)


@pytest.mark.parametrize("in_turn", [[passed_on_and_loaded], *deepen([passed_on, all_loaded])], ids=["some", "all"])
def test_every_layout_loads_what_every_other_has_saved(in_turn, tmp_path):
    """Load from all layouts in depth, otherwise from a sixth of those with at least as many ranks."""
    for make in MODELS:
        run(first_training, make, tmp_path / make.__name__ / "first", ranks=1)
    for do in in_turn:
        for ranks in (8, 4, 3, 2, 1):
            for found in run(of_each_model, do, tmp_path, ranks=ranks):
                assert not any(found.values()), found


def test_a_rank_reads_only_what_it_needs_and_writes_its_share(tmp_path):
    run(first_training, plain, tmp_path / "first", ranks=1)
    run(passed_on, plain, tmp_path, ["ddp"], ranks=4)

    def body():
        held, *_ = sharded(plain(2), Mesh((3,), ("dp",)))
        read, elements = loading.read, []

        def counted(*arguments):
            x = read(*arguments)
            elements.append(x.numel())
            return x

        loading.read = counted
        load(tmp_path / "ddp" / "step-7", held)
        return sum(elements), sum(x.numel() for part in held.parts().values() for x in part.blocks.values())

    for read, needed in run(body, ranks=3):
        assert read == needed
    written = [path.stat().st_size for path in (tmp_path / "ddp" / "step-7").glob("rank-*")]
    assert len(written) == 4 and max(written) < 1.5 * min(written)


def resumed(make, folder, layouts):
    """Return the layouts whose training did not continue as if nothing had happened."""
    wrong = []
    for layout in layouts:
        held, *training = LAYOUTS[layout][1](make(1))
        steps(*training, 0, 1)
        save(folder / layout, 1, held)
        steps(*training, 1, 2)
        expected = numbers(held)
        held, *training = LAYOUTS[layout][1](make(9))
        load(newest(folder / layout), held)
        steps(*training, 1, 2)
        if not same(numbers(held), expected):
            wrong.append(layout)
    return wrong


@pytest.mark.parametrize("make", [plain, *deepen(low)])
def test_a_training_continues_bit_for_bit(make, tmp_path):
    for ranks in (1, 2, 3, 4):
        for found in run(of_each_model, resumed, tmp_path, [make], ranks=ranks):
            assert not any(found.values()), found
