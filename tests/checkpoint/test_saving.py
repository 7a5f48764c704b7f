"""labs.checkpoint: every layout saves what every other one loads, bit for bit; and what is not right is told."""

import json
import os
import resource
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import fsdp, pp, tp
from labs.checkpoint import Held, HeldByZero, load, newest, save, saving
from labs.kit.launch import RankError, run
from labs.memory.disk import sealed
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.zero import Zero

CONFIG = Config(vocab=13, dim=12, depth=3, heads=2, kv_heads=2, hidden=10, context=6)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Extras(GPT):
    """With a frozen parameter, two kinds of buffer, and nothing else new."""

    def __init__(self, config, seed):
        super().__init__(config, seed=seed)
        self.norm.register_buffer("seen", torch.full((3,), float(seed)))
        self.norm.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.layers["0"].attention_norm.weight.requires_grad_(False)


def alone(model):
    optimizer = ADAMW(p for p in model.parameters() if p.requires_grad)
    return Held(model, optimizer=optimizer), model, optimizer


def in_vectors(stage, model):
    zero = Zero(model, stage, ADAMW)
    return HeldByZero(zero), model, zero


def sharded(model, mesh):
    for layer in model.layers.values():
        fsdp.fully_shard(layer, mesh=mesh)
    return alone(fsdp.fully_shard(model, mesh=mesh))


def split(model, mesh):
    return alone(tp.parallelize(model, mesh, tp.gpt_plan(model.config)))


def split_and_sharded(model):
    mesh = Mesh((2, 2), ("dp", "tp"))
    tp.parallelize(model, mesh["tp"], tp.gpt_plan(model.config))
    return sharded(model, mesh["dp"])


def in_stages(model):
    ranks = dist.get_world_size()
    pipeline = pp.Pipeline(pp.cut(model, ranks), pp.one_f_one_b(ranks, 2), model.loss)
    optimizer = ADAMW(p for p in pipeline.parameters() if p.requires_grad)

    return Held(*pipeline.stages.values(), optimizer=optimizer), pipeline.forward_backward, optimizer


LAYOUTS = {  # ranks, and how a model is laid out on them
    "one": (1, alone),
    "ddp": (4, alone),
    "zero-1": (3, partial(in_vectors, 1)),
    "zero-2": (2, partial(in_vectors, 2)),
    "zero-3": (4, partial(in_vectors, 3)),
    "fsdp": (3, lambda model: sharded(model, Mesh((3,), ("dp",)))),
    "hsdp": (4, lambda model: sharded(model, Mesh((2, 2), ("replicas", "shards")))),
    "tp": (2, lambda model: split(model, Mesh((2,), ("tp",)))),
    "fsdp-tp": (4, split_and_sharded),
    "pp": (3, in_stages),
}


def first_training(config, folder):
    """Three steps in one process, and saved."""
    held, model, optimizer = alone(Extras(config, seed=1))
    for step in range(3):
        torch.manual_seed(step)
        model(*torch.randint(0, config.vocab, (2, 2, config.context))).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder, 3, held, {"lr": 0.5})


def numbers(held):
    return {(key, block): x.clone() for key, part in held.parts().items() for block, x in part.blocks.items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[place], x) for place, x in expected.items())


def laid_out(config, layouts, seed):
    for layout in layouts:
        held, *_ = LAYOUTS[layout][1](Extras(config, seed))
        yield layout, held


def passed_on(config, folder, layouts):
    """Under each layout, load what one process has saved, and save it."""
    for layout, held in laid_out(config, layouts, seed=2):
        assert load(folder / "first" / "step-3", held) == {"lr": 0.5}
        save(folder / layout, 7, held)


def all_loaded(config, folder, layouts):
    """Under each layout, what others have saved: which of them is not what one process has saved."""
    wrong = []
    for layout, held in laid_out(config, layouts, seed=2):
        load(folder / "first" / "step-3", held)
        expected = numbers(held)
        for other in LAYOUTS:
            with torch.no_grad():
                for x in (x for part in held.parts().values() for x in part.blocks.values()):
                    x.zero_()
            load(folder / other / "step-7", held)
            if not same(numbers(held), expected):
                wrong.append((other, layout))
    return wrong


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, tied=True)], ids=["", "tied"])
def test_every_layout_loads_what_every_other_has_saved(config, tmp_path):
    run(first_training, config, tmp_path / "first", ranks=1)
    for do in (passed_on, all_loaded):
        for ranks in range(1, 5):
            mine = [layout for layout, (its, _) in LAYOUTS.items() if its == ranks]
            for wrong in run(do, config, tmp_path, mine, ranks=ranks):
                assert not wrong


def test_a_rank_reads_only_what_it_needs_and_writes_its_share(tmp_path):
    run(first_training, CONFIG, tmp_path / "first", ranks=1)
    run(passed_on, CONFIG, tmp_path, ["ddp"], ranks=4)

    def body():
        held, *_ = sharded(Extras(CONFIG, seed=2), Mesh((3,), ("dp",)))
        read, elements = saving.read, []

        def counted(*arguments):
            x = read(*arguments)
            elements.append(x.numel())
            return x

        saving.read = counted
        load(tmp_path / "ddp" / "step-7", held)
        return sum(elements), sum(x.numel() for part in held.parts().values() for x in part.blocks.values())

    for read, needed in run(body, ranks=3):
        assert read == needed
    written = [path.stat().st_size for path in (tmp_path / "ddp" / "step-7").glob("rank-*")]
    assert len(written) == 4 and max(written) < 1.5 * min(written)


def steps(forward, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        loss = forward(*torch.randint(0, CONFIG.vocab, (2, 4, CONFIG.context)))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(folder, layouts):
    """Which of them did not go on as if nothing had happened."""
    wrong = []
    for layout in layouts:
        held, *training = LAYOUTS[layout][1](Extras(CONFIG, 1))
        steps(*training, 0, 2)
        save(folder / layout, 2, held)
        steps(*training, 2, 4)
        expected = numbers(held)
        held, *training = LAYOUTS[layout][1](Extras(CONFIG, 9))
        load(newest(folder / layout), held)
        steps(*training, 2, 4)
        if not same(numbers(held), expected):
            wrong.append(layout)
    return wrong


def test_a_training_goes_on_bit_for_bit(tmp_path):
    for ranks in range(1, 5):
        mine = [layout for layout, (its, _) in LAYOUTS.items() if its == ranks]
        for wrong in run(resumed, tmp_path, mine, ranks=ranks):
            assert not wrong


# ---- what is not right -----------------------------------------------------------------------------------


def altered(path):
    numbers = bytearray(path.read_bytes())
    numbers[-1] ^= 1
    path.write_bytes(numbers)


def rewritten(change):
    """An index with that change, and a checksum that fits."""

    def damage(where):
        record = json.loads((where / "index.json").read_text())["record"]
        change(record)
        (where / "index.json").write_text(json.dumps(sealed(record)))

    return damage


def elsewhere(where):
    os.rename(where / FILE, where.parent / "moved")
    os.symlink(where.parent / "moved", where / FILE)


FILE = "rank-1-of-2.safetensors"
DAMAGES = [
    (lambda where: altered(where / FILE), f"{FILE} does not hold what was written there"),
    (lambda where: os.truncate(where / FILE, 100), f"{FILE} does not hold what was written there"),
    (lambda where: (where / FILE).unlink(), f"{FILE} is missing"),
    (elsewhere, f"{FILE} is missing, or no file of a checkpoint"),
    (lambda where: (where / "index.json").unlink(), "is no checkpoint, or not a whole one"),
    (lambda where: altered(where / "index.json"), "is no checkpoint, or not a whole one"),
    (shutil.rmtree, "is no checkpoint, or not a whole one"),
    (rewritten(lambda record: record.update(format=2)), "has format 2, and this course reads 1"),
    (
        rewritten(lambda record: record["files"].update({"../x": record["files"].pop(FILE)})),
        "is missing, or no file of a checkpoint",
    ),
]


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def words_of(do):
    try:
        do()
    except (ValueError, OSError) as error:
        return str(error)


def test_what_is_not_as_it_was_written_is_told_on_all_ranks_before_a_tensor_has_changed(tmp_path):
    def body():
        held, model, _ = alone(linear())
        save(tmp_path, 1, held)
        with torch.no_grad():
            model.weight.zero_()
        said = []
        for number, (damage, _) in enumerate(DAMAGES):
            where = tmp_path / str(number) / "step-1"
            if dist.get_rank() == 0:
                shutil.copytree(tmp_path / "step-1", where)
                damage(where)
            dist.barrier()
            said.append(words_of(lambda: load(where, held)))  # noqa: B023
        return said, model.weight.sum().item()

    for said, changed in run(body, ranks=2):
        assert changed == 0
        for words, (_, sentence) in zip(said, DAMAGES, strict=True):
            assert sentence in (words or ""), (words, sentence)


OTHERS = [  # models that are not the one that was saved
    (lambda: nn.Sequential(nn.Linear(3, 3)), "'model/0.bias' is not in it; 'model/0.weight' is not in it; nobody asks"),
    (lambda: nn.Linear(3, 4), "'model/bias' is torch.float32 of shape (3,) in it and torch.float32 of shape (4,) here"),
    (lambda: nn.Linear(3, 3).double(), "'model/bias' is torch.float32 of shape (3,) in it and torch.float64 of shape"),
    (lambda: nn.Linear(3, 3, bias=False), "is of another model: nobody asks for its 'model/bias'"),
]


def test_another_model_is_told_by_the_names_that_differ(tmp_path):
    def body():
        save(tmp_path, 1, Held(linear()))
        return [words_of(lambda: load(tmp_path / "step-1", Held(make()))) for make, _ in OTHERS]  # noqa: B023

    for said in run(body, ranks=2):
        for words, (_, sentence) in zip(said, OTHERS, strict=True):
            assert sentence in (words or ""), (words, sentence)


def test_what_cannot_be_saved_is_told_on_all_ranks_and_nothing_is_left(tmp_path):
    def body():
        model, rank, said = linear(), dist.get_rank(), []
        save(tmp_path, 1, Held(model))
        said.append(words_of(lambda: save(tmp_path, 1, Held(model))))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model), {"at": rank})))
        (tmp_path / "file").touch()
        said.append(words_of(lambda: save(tmp_path / "file", 2, Held(model))))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model))))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        with torch.no_grad():
            model.bias += rank
        said.append(words_of(lambda: save(tmp_path, 2, Held(model))))
        return said, sorted(path.name for path in tmp_path.iterdir()), newest(tmp_path).name

    for said, left, last in run(body, ranks=2):
        assert (left, last) == (["file", "step-1"], "step-1")
        for words, sentence in zip(
            said,
            [
                "step-1 is there already",
                'values= is {"at": 0} on rank 0 and {"at": 1} on rank 1',
                "Not a directory",
                "rank-1-of-2.safetensors cannot be written",
                "'model/bias' differs on ranks 0 and 1, which both have it",
            ],
            strict=True,
        ):
            assert sentence in (words or ""), words


def test_a_rank_that_dies_while_it_saves_leaves_the_last_checkpoint(tmp_path):
    def body(step, victim=None):
        if dist.get_rank() == victim:
            saving.flush = lambda path: os._exit(9)
        save(tmp_path, step, Held(linear()))

    run(body, 1, ranks=2)
    for victim in (1, 0):
        with pytest.raises(RankError):
            run(body, 2, victim, ranks=2)
        assert newest(tmp_path).name == "step-1" and len([*tmp_path.glob("step-2.*.draft")]) == (victim == 0)
        assert run(lambda: load(newest(tmp_path), Held(linear(1))), ranks=3)[0] is None
    run(body, 2, ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_an_optimizer_of_another_model_is_told():
    with pytest.raises(ValueError, match=r"the optimizer has a parameter of shape \(2, 2\) that is in no model given"):
        alone_with_another = ADAMW([nn.Parameter(torch.ones(2, 2))])
        Held(nn.Linear(2, 2), optimizer=alone_with_another)
