"""Tests of labs.memory.disk with damaged files: a training continues bit for bit, or every rank says why not.

Two ranks train to step 3 and leave their folder, which then suffers a random damage.  The training is resumed, and
taken to step 5.  The reference is the same training with its state in memory.
"""

import json
import random
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import run
from labs.memory.offload import Offloaded

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
TEXT = "somebody's notes"


def trained(last, where=None, data=0):
    """Return the parameters after step `last`; every other step uses the second layer, and each rank has its
    own data.
    """
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4, bias=False)])
    optimizer = Offloaded(model.parameters(), ADAMW, where) if where else ADAMW(model.parameters())
    for step in range(getattr(optimizer, "steps", 0), last):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(data + 10 * step + dist.get_rank()))
        h = model[0](x)
        (model[1](h) if step % 2 else h).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


# ---- damages to a folder ---------------------------------------------------------------------------------


def files_of(where):
    return sorted(path for path in where.glob("rank-*/*") if path.is_file())


def records_of(where):
    return [path for path in files_of(where) if path.suffix == ".json"]


def flip(draw, where, older):
    path = draw.choice(files_of(where))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(draw, where, older):
    path = draw.choice(files_of(where))
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def lengthen(draw, where, older):
    with open(draw.choice(files_of(where)), "ab") as file:
        file.write(draw.randbytes(draw.randint(1, 100)))


def delete(draw, where, older):
    draw.choice(files_of(where)).unlink()


def delete_the_records(draw, where, older):
    for path in records_of(where):
        if path.parent.name == "rank-0-of-2":
            path.unlink()


def delete_a_rank(draw, where, older):
    shutil.rmtree(draw.choice([*where.iterdir()]))


def exchange(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def exchange_in_a_rank(draw, where, older):
    rank = draw.choice([*where.iterdir()])
    exchange(*draw.sample(files_of(where)[: len([*rank.iterdir()])], 2))


def exchange_between_ranks(draw, where, older):
    name = draw.choice([path.name for path in (where / "rank-0-of-2").iterdir()])
    exchange(*(where / f"rank-{rank}-of-2" / name for rank in (0, 1)))


def exchange_ranks(draw, where, older):
    one, other = (where / f"rank-{rank}-of-2" for rank in (0, 1))
    one.rename(where / "away")
    other.rename(one)
    (where / "away").rename(other)


def restore_a_file(draw, where, older):
    shutil.copyfile(draw.choice(files_of(older)), draw.choice(files_of(where)))


def restore_a_rank(draw, where, older):
    shutil.copytree(older / "rank-1-of-2", where / "rank-1-of-2", dirs_exist_ok=draw.random() < 0.5 or empty(where))


def empty(where):
    shutil.rmtree(where / "rank-1-of-2")
    return False


def another_training(draw, where, older):
    """Put in another training's files, with as many steps, and the same shapes."""
    rank = f"rank-{draw.randrange(2)}-of-2"
    shutil.rmtree(where / rank)
    shutil.copytree(older.parent / "other" / rank, where / rank)


def garble(draw, where, older):
    path = draw.choice(records_of(where))
    text = json.dumps(draw.choice([[], {}, None, 3, {"steps": 3}, {"record": {}, "checksum": 0}, [[]]]))
    path.write_text(draw.choice([text, "", "{", "\x00", path.read_text().replace("3", "4")]))


def a_folder_in_place(draw, where, older):
    path = draw.choice(files_of(where))
    path.unlink()
    path.mkdir()


def a_file_in_place(draw, where, older):
    path = draw.choice([where, *where.iterdir()])
    shutil.rmtree(path)
    path.write_text(TEXT)


def notes(draw, where, older):
    """Put other files beside the training's, or alone into a folder that has no record yet."""
    if draw.random() < 0.5:
        for rank in where.iterdir():
            shutil.rmtree(rank)
            rank.mkdir()
    for name in ("notes.txt", "0.3", "3.14", "generation-2.json.bak", "generation-last.json"):
        (where / "rank-1-of-2" / name).write_text(TEXT)


DAMAGE = [
    flip,
    truncate,
    lengthen,
    delete,
    delete_the_records,
    delete_a_rank,
    exchange_in_a_rank,
    exchange_between_ranks,
    exchange_ranks,
    restore_a_file,
    restore_a_rank,
    another_training,
    garble,
    a_folder_in_place,
    a_file_in_place,
    notes,
]


# ---- right bit for bit, or refused -----------------------------------------------------------------------


def taken_up(last, folders):
    """Return the parameters in the end, or the sentence, for each folder."""
    found = []
    for where in folders:
        try:
            found.append(trained(last, where))
        except ValueError as error:
            found.append(str(error))
    return found


def require_right_or_told(tmp_path, seeds):
    """Draw a damage from each seed; the first seeds draw one of each kind."""
    begun, older, other = (tmp_path / name for name in ("begun", "older", "other"))
    run(trained, 2, older, ranks=2)
    shutil.copytree(older, begun)
    run(trained, 3, begun, ranks=2)
    run(trained, 3, other, data=100, ranks=2)
    expected = [*run(trained, 5, ranks=2)]
    damages = {tmp_path / str(seed): DAMAGE[seed % len(DAMAGE)] for seed in seeds}
    for where, damage in damages.items():
        shutil.copytree(begun, where)
        damage(random.Random(int(where.name)), where, older)
    texts = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == TEXT.encode()]
    found = zip(*run(taken_up, 5, [*damages], ranks=2), strict=True)
    for (where, damage), by_rank in zip(damages.items(), found, strict=True):
        if isinstance(by_rank[0], str):
            assert by_rank[0] == by_rank[1] and "\n" not in by_rank[0] and damage is not notes, where
        else:
            assert equal([*by_rank], expected), (where, damage.__name__)
    assert all(path.read_text() == TEXT for path in texts)


def equal(one, other):
    return all(torch.equal(x, y) for pair in zip(one, other, strict=True) for x, y in zip(*pair, strict=True))


def test_damage_of_each_kind(tmp_path):
    require_right_or_told(tmp_path, range(len(DAMAGE)))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_damage_at_random(first, tmp_path):
    require_right_or_told(tmp_path, range(first, first + 20))
