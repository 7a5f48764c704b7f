"""Tests of labs.checkpoint.loading: damaged files and other models are refused before a tensor has changed."""

import json
import os
import shutil

import torch
import torch.distributed as dist
from torch import nn

from labs.checkpoint import Held, load, save
from labs.kit.launch import run
from labs.memory.disk import sealed
from labs.memory.mapped_files import checksum
from tests.checkpoint.common import ADAMW, alone, linear, words_of


def altered(path):
    numbers = bytearray(path.read_bytes())
    numbers[-1] ^= 1
    path.write_bytes(numbers)


def rewritten(change):
    """Return a function that changes the index, and gives it a checksum that matches."""

    def damage(where):
        record = json.loads((where / "index.json").read_text())["record"]
        change(record)
        (where / "index.json").write_text(json.dumps(sealed(record)))

    return damage


def of_another_step(where):
    index = where / "index.json"
    index.write_text(index.read_text().replace('"step": 1', '"step": 2'))


def elsewhere(where):
    os.rename(where / FILE, where.parent / "moved")
    os.symlink(where.parent / "moved", where / FILE)


def elsewhere_index(where):
    os.rename(where / "index.json", where.parent / "moved")
    os.symlink(where.parent / "moved", where / "index.json")


def weight(**change):
    return rewritten(lambda record: record["tensors"]["model/weight"].update(change))


def no_tensors(where):
    (where / FILE).write_bytes(b"none")
    rewritten(lambda record: record["files"].update({FILE: checksum(where / FILE)}))(where)


FILE = "rank-1-of-2.safetensors"
DAMAGES = [
    (lambda where: altered(where / FILE), f"{FILE} does not hold what was written there"),
    (lambda where: os.truncate(where / FILE, 100), f"{FILE} does not hold what was written there"),
    (lambda where: (where / FILE).unlink(), f"{FILE} is missing"),
    (elsewhere, f"{FILE} is missing, or no file of a checkpoint"),
    (lambda where: (where / "index.json").unlink(), "is no checkpoint, or not a whole one"),
    (lambda where: altered(where / "index.json"), "is no checkpoint, or not a whole one"),
    (of_another_step, "is no checkpoint, or not a whole one (its checksum does not match)"),
    (shutil.rmtree, "is no checkpoint, or not a whole one"),
    (rewritten(lambda record: record.update(format=2)), "has format 2, and this course reads 1"),
    (
        rewritten(lambda record: record["files"].update({"../x": record["files"].pop(FILE)})),
        "'../x' is no file of a checkpoint",
    ),
    (elsewhere_index, "(its index is a link to another file)"),
    (lambda where: (where / "index.json").write_text("[" * 100_000), "is no checkpoint, or not a whole one"),
    (weight(pieces=[]), "(9 of the 9 elements of 'model/weight' are on no rank"),
    (weight(pieces=[[[0, 0], [2, 3], FILE]]), "(3 of the 9 elements of 'model/weight' are on no rank"),
    (weight(pieces=[[[0, 0], [2, 3], FILE], [[1, 0], [2, 3], FILE]]), "('model/weight' is cut in two ways: [1:2, 0:3]"),
    (weight(pieces=[[[1, 0], [3, 3], FILE]]), "([1:4, 0:3] is no part of 'model/weight', of shape (3, 3))"),
    (weight(pieces=[[[-1, 0], [4, 3], FILE]]), "([-1, 0] is neither a shape nor an offset)"),
    (weight(pieces=[[[0, 0], [3, 3], "rank-9-of-9.safetensors"]]), "('rank-9-of-9.safetensors' is no file of a"),
    (weight(pieces=[[[0, 0], [3, 3], f"../{FILE}"]]), f"('../{FILE}' is no file of a checkpoint"),
    (weight(pieces=[[[n, 0], [1, 3], FILE] for n in range(3)]), f"{FILE} is not what the index says (it has no model/"),
    (weight(key="model/bias"), "is not what the index says (it has no model/bias[0:3, 0:3] of shape (3, 3))"),
    (weight(dtype="int32"), "is not what the index says (its model/weight[0:3, 0:3] is not torch.int32)"),
    (weight(dtype="load"), "('load' is no dtype of torch's)"),
    (weight(dtype="float33"), "('float33' is no dtype of torch's)"),
    (rewritten(lambda record: record["tensors"]["model/weight"].pop("shape")), "(it has no 'shape')"),
    *[
        (rewritten(lambda record, name=name: record.pop(name)), f"(it has no {name!r})")
        for name in ("format", "step", "files", "tensors", "options", "values", "own")
    ],
    (rewritten(lambda record: record.update(step="3")), "(step= is '3': give an integer, 0 or more)"),
    (rewritten(lambda record: record["options"]["bias"].pop("optimizer")), "(it has no 'optimizer')"),
    (no_tensors, "is not what the index says (Error while deserializing header"),
]


def test_damaged_files_are_reported_on_all_ranks_before_a_tensor_has_changed(tmp_path):
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
        save(tmp_path, 2, held)
        two = words_of(lambda: load(tmp_path / f"step-{1 + dist.get_rank()}", held))
        none = words_of(lambda: load(None if dist.get_rank() else tmp_path / "step-1", held))
        return said, model.weight.sum().item(), two, none

    for said, changed, two, none in run(body, ranks=2):
        assert changed == 0
        assert "ranks 0 and 1 found two different checkpoints" in two
        assert "there is no checkpoint: newest(folder) returns None" in none
        for words, (_, sentence) in zip(said, DAMAGES, strict=True):
            assert sentence in (words or ""), (words, sentence)


OTHERS = [  # models that are not the one that was saved
    (lambda: nn.Sequential(nn.Linear(3, 3)), "'model/0.bias' is not in it; 'model/0.weight' is not in it; nobody asks"),
    (lambda: nn.Linear(3, 4), "'model/bias' is torch.float32 of shape (3,) in it and torch.float32 of shape (4,) here"),
    (lambda: nn.Linear(3, 3).double(), "'model/bias' is torch.float32 of shape (3,) in it and torch.float64 of shape"),
    (lambda: nn.Linear(3, 3, bias=False), "is of another model: nobody asks for its 'model/bias'"),
]


def test_another_model_is_reported_by_the_names_that_differ(tmp_path):
    def body():
        save(tmp_path, 1, Held(linear()))
        return [words_of(lambda: load(tmp_path / "step-1", Held(make()))) for make, _ in OTHERS]  # noqa: B023

    for said in run(body, ranks=2):
        for words, (_, sentence) in zip(said, OTHERS, strict=True):
            assert sentence in (words or ""), (words, sentence)


def test_an_optimizer_begins_with_what_was_kept_and_nothing_else(tmp_path):
    def body():
        held, model, optimizer = alone(linear())
        save(tmp_path, 0, held)  # saved before the first step
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        save(tmp_path, 1, held)
        load(tmp_path / "step-0", held)
        frozen = linear(1)
        frozen.bias.requires_grad_(False)
        words = words_of(lambda: load(tmp_path / "step-1", Held(frozen, optimizer=ADAMW([frozen.weight]))))
        without = Held(model)
        load(tmp_path / "step-1", without)
        return len(optimizer.state), words

    for entries, words in run(body, ranks=2):
        assert entries == 0 and "is of another training: no optimizer has its 'bias'" in words
