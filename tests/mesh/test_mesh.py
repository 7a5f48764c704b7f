"""Tests of labs.mesh against torch's DeviceMesh, on torch's fake process group: each rank in turn, in one process.

Arithmetic is compared for every rank and every shape of 8 ranks with up to four axes, and some of 12 and 16.  On 8
ranks, a job's groups are compared by their members, and by a message through each.
"""

import io
import pickle
from itertools import combinations
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from labs.fsdp import fully_shard
from labs.kit.launch import RankError, run
from labs.mesh import Mesh

NAMES = ("pp", "dp", "cp", "tp")


def shapes(ranks, axes):
    """Return all ways to write `ranks` as a product of that many sizes, ones among them."""
    if axes == 1:
        return [(ranks,)]
    return [(n, *rest) for n in range(1, ranks + 1) if ranks % n == 0 for rest in shapes(ranks // n, axes - 1)]


OF_8 = [shape for axes in range(1, 5) for shape in shapes(8, axes)]
OTHERS = [(3, 4), (2, 3, 2), (3, 2, 2), (4, 4), (2, 2, 2, 2), (1, 12)]


def parts(names):
    return [some for k in range(1, len(names) + 1) for some in combinations(names, k)]


@pytest.fixture
def as_rank():
    """Return a function that becomes a rank of a world that does not exist."""

    def become(rank, ranks):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield become
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [8, 12, 16])
def test_the_same_grid_as_torchs(as_rank, ranks):
    for rank in range(ranks):
        as_rank(rank, ranks)
        for shape in (shape for shape in [*OF_8, *OTHERS] if prod(shape) == ranks):
            names = NAMES[: len(shape)]
            same(Mesh(shape, names, rank=rank), init_device_mesh("cpu", shape, mesh_dim_names=names))


def same(ours, torchs):
    assert (ours.shape, ours.ndim, ours.size()) == (torchs.shape, torchs.ndim, torchs.size())
    assert ours.mesh.tolist() == torchs.mesh.tolist() and ours.mesh_dim_names == torchs.mesh_dim_names
    assert ours.get_coordinate() == tuple(torchs.get_coordinate())
    for number, name in enumerate(ours.mesh_dim_names):
        assert ours.size(number) == ours.size(name) == torchs.size(number)
        assert ours.get_local_rank(name) == ours.get_local_rank(number) == torchs.get_local_rank(name)
        mine = [group for group in ours.groups_of(name) if ours.rank in group]
        assert mine == [dist.get_process_group_ranks(torchs.get_group(name))]
        assert sorted(rank for group in ours.groups_of(name) for rank in group) == sorted(ours.mesh.flatten().tolist())
    for names in parts(ours.mesh_dim_names):
        part, torch_part = ours[names], torchs[names]
        assert part.mesh.tolist() == torch_part.mesh.tolist() and part.mesh_dim_names == names
        assert part.get_coordinate() == tuple(torch_part.get_coordinate())
        flat, torch_flat = part._flatten(), torch_part._flatten() if len(names) > 1 else torch_part
        assert flat.mesh.tolist() == torch_flat.mesh.tolist() and flat.mesh_dim_names == torch_flat.mesh_dim_names
        assert flat.get_local_rank() == torch_flat.get_local_rank()
        for inner in parts(names):
            assert part[inner] == ours[inner]


def test_the_groups_of_a_job_are_those_of_the_grid():
    def body():
        for shape in (8,), (2, 4), (2, 2, 2), (2, 1, 2, 2):
            mesh = Mesh(shape, NAMES[: len(shape)])
            for names in parts(mesh.mesh_dim_names):
                part = mesh[names]
                flat = part._flatten("all of it") if len(names) > 1 else part
                assert dist.get_process_group_ranks(flat.get_group()) == flat.mesh.tolist()
                assert [dist.get_process_group_ranks(group) for group in part.get_all_groups()] == [
                    part[name].mesh.tolist() for name in names
                ]
                assert part.get_group(0) is mesh.get_group(names[0]) and part._flatten("x").groups is mesh.groups
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=mesh["cp"].get_group())
        return total.item(), mesh["cp"].mesh.tolist(), len(mesh.groups)

    for total, members, groups in run(body, ranks=8):
        assert total == sum(members) and groups <= 15  # four axes need no more


def test_one_rank_alone_is_a_mesh():
    assert run(lambda: Mesh((1, 1), ("dp", "tp"))["tp"].get_coordinate(), ranks=1) == [(0,)]


def test_a_picture():
    assert repr(Mesh((2, 4), ("dp", "tp"), rank=5)).splitlines() == [
        "Mesh(dp=2, tp=4)",
        "",
        "           tp 0   1   2   3",
        "    dp 0      0   1   2   3",
        "    dp 1      4  [5]  6   7",
        "",
        "    dp   0 4 · 1 5 · 2 6 · 3 7",
        "    tp   0 1 2 3 · 4 5 6 7",
    ]
    assert repr(Mesh((3,), ("dp",))).splitlines()[2:] == [
        "       dp 0   1   2",
        "          0   1   2",
        "",
        "    dp   0 1 2",
    ]


@pytest.mark.parametrize("shape", [*OF_8, (64, 1024), (2, 2, 2, 512)])
def test_every_picture_fits(shape):
    lines = repr(Mesh(shape, NAMES[: len(shape)], rank=3)).splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 300


# ---- bad input -------------------------------------------------------------------------------------------


REFUSED = [  # refusals in a world of 4
    ((2, 3), ("dp", "tp"), "world size 4 is not dp 2 × tp 3: start 6 ranks, or change a size"),
    ((2,), ("dp",), "world size 4 is not dp 2: start 2 ranks, or change a size"),
    ((2, 2), ("dp", "dp"), "axis 'dp' appears twice in ('dp', 'dp')"),
    ((4, 0), ("dp", "tp"), "axis 'tp' of size 0: give it 1 rank or more"),
    ((-2, -2), ("dp", "tp"), "axis 'dp' of size -2"),
    ((2, 2.0), ("dp", "tp"), "axis 'tp' of size 2.0"),
    ((2, True), ("dp", "tp"), "axis 'tp' of size True"),
    ((2, 2), ("dp",), "2 sizes and 1 names"),
    ((), (), "0 sizes and 0 names"),
    ((2, 2), "ab", "give sizes and names as tuples"),
    (4, ("dp",), "give sizes and names as tuples"),
    ((4,), (7,), "axis 7: give it a name of one word, such as dp"),
    ((2, 2), ("a,b", "c"), "axis 'a,b': give it a name of one word"),
    ((2, 2), ("a", ""), "axis '': give it a name of one word"),
]


def test_a_mesh_that_cannot_be_is_refused_on_every_rank():
    def body():
        words = []
        for shape, names, _ in REFUSED:
            with pytest.raises(ValueError) as refused:
                Mesh(shape, names)
            words.append(str(refused.value))
        return words

    for words in run(body, ranks=4):
        for said, (*_, sentence) in zip(words, REFUSED, strict=True):
            assert sentence in said


def test_ranks_that_make_different_meshes_are_reported():
    def body():
        try:
            Mesh((2, 1) if dist.get_rank() else (1, 2), ("dp", "tp"))
        except ValueError as error:
            return str(error)

    assert run(body, ranks=2) == ["ranks make different meshes: dp 1 × tp 2 on rank 0, dp 2 × tp 1 on rank 1"] * 2


def test_an_unknown_axis_is_refused():
    mesh = Mesh((2, 4), ("dp", "tp"), rank=5)
    for ask in (
        lambda: mesh["pp"],
        lambda: mesh["dp", "pp"],
        lambda: mesh.size("pp"),
        lambda: mesh.get_local_rank("pp"),
        lambda: mesh.groups_of("pp"),
        lambda: mesh.get_group("pp"),
    ):
        with pytest.raises(KeyError, match="axis 'pp': the axes of this mesh are 'dp', 'tp'"):
            ask()
    with pytest.raises(KeyError, match="axis 2: the axes of this mesh are"):
        mesh.size(2)
    with pytest.raises(KeyError, match="which axis of"):
        mesh.get_local_rank()
    for names in (("tp", "dp"), ("dp", "dp"), ()):
        with pytest.raises(KeyError, match="name each once, in the order of the mesh"):
            mesh[names]
    for names in (None, 0, ("dp", None)):
        with pytest.raises(KeyError, match=r"axes \(.*\) are not all names: choose from 'dp', 'tp'"):
            mesh[names]


def test_what_needs_a_job_or_a_rank_says_so():
    with pytest.raises(RuntimeError, match=r"Mesh\(dp=2, tp=4\) has no process groups: make it in a job"):
        Mesh((2, 4), ("dp", "tp"), rank=5).get_group("dp")
    with pytest.raises(RuntimeError, match="say as which rank to look"):
        Mesh((2, 4), ("dp", "tp")).get_coordinate()
    with pytest.raises(ValueError, match=r"rank 8 is not on the mesh dp 2 × tp 4: give 0 to 7"):
        Mesh((2, 4), ("dp", "tp"), rank=8)
    for rank in (True, 1.0, "1"):
        with pytest.raises(ValueError, match=f"rank {rank!r} is not on the mesh dp 2 × tp 4: give 0 to 7"):
            Mesh((2, 4), ("dp", "tp"), rank=rank)
    with pytest.raises(ValueError, match="axis 'dp' exists in"):
        Mesh((2, 4), ("dp", "tp"), rank=5)._flatten("dp")


def test_neither_a_mesh_of_a_job_nor_a_dtensor_on_it_is_pickled_and_full_tensor_is_named():
    def body():
        model = fully_shard(nn.Linear(2, 2, bias=False).requires_grad_(False))
        for refused in (Mesh((2,), ("dp",)), model.weight, model.state_dict()):
            with pytest.raises(
                TypeError, match=r"Mesh\(dp=2\) has process groups.* return or save the .*full_tensor\(\)"
            ):
                torch.save(refused, io.BytesIO())
        return model.weight.full_tensor(), model.weight.to_local()

    assert pickle.loads(pickle.dumps(Mesh((2, 4), ("dp", "tp"), rank=5))) == Mesh((2, 4), ("dp", "tp"), rank=5)
    assert [part.shape for part in sum(run(seeded, body, ranks=2), ())] == [(2, 2), (1, 2)] * 2
    with pytest.raises(RankError, match=r"\(Mesh\) cannot be sent to the caller: Mesh\(dp=2\) has process groups"):
        run(lambda: Mesh((2,), ("dp",)), ranks=2)


def seeded(body):
    torch.manual_seed(0)
    return body()


def test_a_job_whose_mesh_does_not_fit_ends_with_the_sentence():
    with pytest.raises(RankError, match="world size 2 is not dp 3"):
        run(lambda: Mesh((3,), ("dp",)), ranks=2)


def test_meshes_are_equal_as_grids_are():
    a, b = (Mesh((2, 2), ("dp", "tp"), rank=1) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a["tp"] == b["tp"] != a["dp"]
    assert a != Mesh((2, 2), ("dp", "cp"), rank=1)
