"""The checks of notebook 06 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (sends and receives by hand, PyTorch's own
reduce-scatter).  Wrong: tests/wrong_answers/fsdp.py.  Those to its other exercises: tests/answers.
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
from tests.answers.unshard_and_reshard import reshard, unshard
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.fsdp import averaged

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {"hsdp_gradient": 1}  # and of how many functions

# ---- right answers ---------------------------------------------------------------------------------------


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
    "hsdp_gradient": (
        "✓ hsdp_gradient: on 2 × 2 ranks you sent 1.00 × the gradient, of that 0.50 × between replicas; the least "
        "possible is 1.00 × and 0.50 ×"
    ),
}
RIGHT = [
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
