"""The checks of notebook 06 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (lists of tensors, sends and receives by hand,
PyTorch's own reduce-scatter, gathers before the wait or after it).  Wrong: tests/wrong_answers/fsdp.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labs import collectives
from labs.data import Batches, corpus
from labs.fsdp import fully_shard
from labs.group import all_gather, reduce_scatter, reduce_scatter_single
from labs.kit import check
from labs.kit.checks.launching import failed
from labs.kit.exercises import unshard_with
from labs.kit.launch import RankError, run
from labs.model import GPT, PRESETS
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.fsdp import averaged, fill, pieces_of, reshard, side_by_side, unshard

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {"unshard_and_reshard": 2, "hsdp_gradient": 1}  # and of how many functions

# ---- right answers ---------------------------------------------------------------------------------------


def unshard_with_lists(shards, fulls):
    ranks = dist.get_world_size()
    row = side_by_side(shards, pieces_of(fulls, ranks), fulls[0].dtype)
    rows = [torch.empty_like(row) for _ in range(ranks)]
    dist.all_gather(rows, row, async_op=True).wait()
    for number, full in enumerate(fulls):
        fill(full, torch.cat([row.split(pieces_of(fulls, ranks))[number] for row in rows]))


def unshard_row_for_row(shards, fulls):
    """Each rank's rows to their places, without the padding."""
    ranks = dist.get_world_size()
    sizes = pieces_of(fulls, ranks)
    padded = [torch.nn.functional.pad(s.flatten(), (0, n - s.numel())) for s, n in zip(shards, sizes, strict=True)]
    row = torch.cat(padded).to(fulls[0].dtype)
    table = row.new_empty(ranks * len(row))
    all_gather(table, row)
    for full, pieces in zip(fulls, table.view(ranks, -1).split(sizes, 1), strict=True):
        full.untyped_storage().resize_(full.numel() * full.element_size())
        rows = -(-len(full) // ranks)
        for place, piece in zip(full.split(rows), pieces, strict=False):
            place.copy_(piece[: place.numel()].view(place.shape))


def unshard_by_a_ring(shards, fulls):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = pieces_of(fulls, ranks)
    table = torch.zeros(ranks, sum(sizes), dtype=fulls[0].dtype)
    table[rank] = side_by_side(shards, sizes, table.dtype)
    collectives.all_gather(table.view(-1))
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


def unshard_without_padding(shards, fulls):
    """The rows alone, to everybody: a rank that has none sends nothing."""
    ranks, sizes = dist.get_world_size(), rows_of_ranks(fulls)
    row = torch.cat([shard.flatten() for shard in shards]).to(fulls[0].dtype)
    lengths = [sum(of_rank) for of_rank in sizes]
    rows = row.new_empty(sum(lengths))
    dist.all_to_all_single(rows, row.repeat(ranks), lengths, [len(row)] * ranks)
    fill_from_ranks(fulls, rows.split(lengths))


def unshard_by_sends_and_receives(shards, fulls):
    rank, sizes = dist.get_rank(), rows_of_ranks(fulls)
    row = torch.cat([shard.flatten() for shard in shards]).to(fulls[0].dtype)
    rows = [row if other == rank else row.new_empty(sum(of_rank)) for other, of_rank in enumerate(sizes)]
    others = [other for other in range(len(rows)) if other != rank]
    works = [dist.isend(row, other) for other in others if len(row)]
    works += [dist.irecv(rows[other], other) for other in others if len(rows[other])]
    for work in works:
        work.wait()
    fill_from_ranks(fulls, rows)


def rows_of_ranks(fulls):
    """Elements of each parameter, by rank: the last ones have fewer, or none."""
    ranks = dist.get_world_size()
    ends = [range(0, size * (ranks + 1), size) for size in pieces_of(fulls, ranks)]
    return [
        [min(end[rank + 1], full.numel()) - min(end[rank], full.numel()) for full, end in zip(fulls, ends, strict=True)]
        for rank in range(ranks)
    ]


def fill_from_ranks(fulls, rows):
    by_rank = [row.split(of_rank) for row, of_rank in zip(rows, rows_of_ranks(fulls), strict=True)]
    for full, pieces in zip(fulls, zip(*by_rank, strict=True), strict=True):
        fill(full, torch.cat(pieces))


def reshard_by_its_data(fulls):
    for full in reversed(fulls):
        full.data.untyped_storage().resize_(0)


def averaged_by_torch(gradient, mesh):
    piece = gradient.new_empty(len(gradient) // mesh.size("shard"))
    parts = torch.empty_like(gradient)
    dist.all_to_all_single(parts, gradient, group=mesh.get_group("shard"))
    torch.sum(parts.view(mesh.size("shard"), -1), 0, out=piece)
    dist.all_reduce(piece, group=mesh.get_group("replicate"), async_op=True).wait()
    return piece.div_(mesh.size())


def averaged_axis_by_axis(gradient, mesh):
    shards = mesh["shard"]
    piece = gradient.new_empty(len(gradient) // shards.size())
    reduce_scatter_single(piece, gradient, group=shards.get_group())
    piece /= shards.size()
    dist.all_reduce(piece, group=mesh["replicate"].get_group())
    return piece / mesh.size("replicate")


def averaged_by_sends_and_receives(gradient, mesh):
    piece = gradient.clone()
    if mesh.size("shard") > 1:
        piece = collectives.reduce_scatter(piece, group=mesh.get_group("shard")).clone()
    if mesh.size("replicate") > 1:
        dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()


def averaged_in_two_steps_along_each_axis(gradient, mesh):
    """A reduce-scatter and an all-gather in the place of the all-reduce between replicas."""
    piece, replicas = reduce_scatter(gradient, mesh.get_group("shard")), mesh.get_group("replicate")
    part = reduce_scatter(torch.nn.functional.pad(piece, (0, -len(piece) % mesh.size("replicate"))), replicas)
    parts = part.new_empty(mesh.size("replicate") * len(part))
    all_gather(parts, part, group=replicas)
    return parts[: len(piece)] / mesh.size()


LINES = {
    "unshard_and_reshard": (
        "✓ unshard_and_reshard: you sent 0.75 × the group in {}; the least possible is 0.75 × in 1. You held {} × "
        "it meanwhile, where the table and the full tensors make 2.00 ×, and 0.00 × afterwards"
    ),
    "hsdp_gradient": (
        "✓ hsdp_gradient: on 2 × 2 ranks you sent 1.00 × the gradient, of that 0.50 × between replicas; the least "
        "possible is 1.00 × and 0.50 ×"
    ),
}
RIGHT = [
    ("unshard_and_reshard", ("1 collective", "2.06"), [unshard, reshard]),
    ("unshard_and_reshard", ("1 collective", "2.31"), [unshard_with_lists, reshard]),
    ("unshard_and_reshard", ("1 collective", "2.75"), [unshard_row_for_row, reshard_by_its_data]),
    ("unshard_and_reshard", ("6 messages", "2.06"), [unshard_by_a_ring, reshard]),
    ("unshard_and_reshard", ("1 collective", "2.31"), [unshard_without_padding, reshard]),
    ("unshard_and_reshard", ("6 messages", "2.06"), [unshard_by_sends_and_receives, reshard]),
    ("hsdp_gradient", (), [averaged]),
    ("hsdp_gradient", (), [averaged_by_torch]),
    ("hsdp_gradient", (), [averaged_axis_by_axis]),
    ("hsdp_gradient", (), [averaged_by_sends_and_receives]),
    ("hsdp_gradient", (), [averaged_in_two_steps_along_each_axis]),
]


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    answers = [(figures, fns) for check_of, figures, fns in RIGHT if check_of == name]
    said = together([(name, tuple(fns), False) for _, fns in answers])
    for (figures, fns), answer in zip(answers, said, strict=True):
        assert answer.ok is True and answer, f"{fns[0].__name__}: {answer}"
        assert str(answer) == LINES[name].format(*figures)


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(*[stub] * CHECKS[name])
    assert answer.ok is None and not answer
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


# ---- wrong answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name for answer in ANSWERS) >= 8
    assert let_past(name) == ""


def test_what_it_raises_is_told_with_its_line():
    def fn(layers, compute):
        layers[len(layers)].gather()

    answer = check.prefetch(fn)
    assert answer.ok is False
    assert "IndexError" in answer.text and "layers[len(layers)].gather()" in answer.text


def test_a_hang_is_told():
    def fn(gradient, mesh):
        if mesh.get_local_rank("replicate") == 0:
            return averaged(gradient, mesh)
        return gradient

    answer = check.hsdp_gradient(fn)
    assert "returned without joining" in answer.text and answer.question


@pytest.mark.parametrize(
    ("called", "about"),
    [
        ("rank 0 called all_gather float64[23], rank 1 called all_gather float64[7]", "How large"),
        ("rank 0 called all_gather float64[23], rank 1 called all_reduce float64[23]", "Which ranks take this line"),
        ("rank 0 called all_gather float64[23], rank 1 called barrier", "Which ranks take this line"),
    ],
)
def test_one_collective_of_two_sizes_is_no_matter_of_branches(called, about):
    error = RankError("mismatch", (1,), f"the ranks do not agree on collective number 1 of all ranks: {called}", [])
    assert failed(error, "on 2 ranks").answer.question.startswith(about)


# ---- an exercise in the course's place -------------------------------------------------------------------


def losses_of(by_hand, steps=3):
    """Of a model whose parameters leave some ranks without a row; gathered by hand, or by the course."""
    calls = []
    if by_hand:
        unshard_with(lambda *given: (calls.append(given), unshard(*given)), reshard)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    for layer in model:
        fully_shard(layer) if list(layer.parameters()) else None
    fully_shard(model)
    optimizer, x, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 5) * dist.get_rank(), []
    for _ in range(steps):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, len(calls)


def test_an_exercise_carries_a_training_bit_for_bit():
    by_hand, by_course = (run(losses_of, by_hand, ranks=3, device="cpu") for by_hand in (True, False))
    assert [losses for losses, _ in by_hand] == [losses for losses, _ in by_course]
    assert len(set(by_course[1][0])) == 3, "it learns"
    assert {calls for _, calls in by_hand} == {3 * 2 * 2}, "in each step each layer, forward and backward"


# ---- the script at the notebook's end --------------------------------------------------------------------


def one_process(steps=10):
    config = PRESETS["small"]
    model, batches = GPT(config), Batches(corpus().tokens, 16, config.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        loss = model(*batches[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.soak
def test_the_script_under_torchrun_prints_the_curve_of_one_process(tmp_path):
    source = (ROOT / "solutions/06_fsdp.py").read_text(encoding="utf-8")
    block = re.search(r"^# ```python\n(.*?)^# ```$", source, re.DOTALL | re.MULTILINE)[1]
    script = tmp_path / "train.py"
    script.write_text(re.sub("^# ?", "", block, flags=re.MULTILINE), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", told.stdout)]
    assert losses == pytest.approx(list(one_process()), abs=2e-4)
