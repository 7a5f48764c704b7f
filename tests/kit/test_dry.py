"""Tests of dry runs against labs.cost, for every row of the table, and against real runs, for one of a kind.

Every row runs on an odd shape, and in depth on two more.  Bytes sent and bytes held at rest are exact.  The peak is
within 5 %, and equals a real run's to the byte.  No row waits for the device.
"""

import resource
import time
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from labs import cost
from labs.kit import draw
from labs.kit.commands.tour import EXACT
from labs.kit.dry import DryPass, dry
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.record import PASSES, join_some
from labs.kit.simulated.as_rank import as_rank
from labs.kit.simulated.host import NeedsNumbers
from labs.kit.simulated.strategy_steps import rehearse
from labs.kit.training.strategies import ROWS, STRATEGIES
from labs.model import PRESETS, Config
from tests.depth import deepen

TINY = replace(PRESETS["tiny"], context=16, depth=1)
ODD = Config(vocab=129, dim=24, depth=1, heads=6, kv_heads=2, hidden=50, context=16)
WIDE = Config(vocab=1000, dim=96, depth=1, heads=6, kv_heads=2, hidden=200, context=8)
SHAPES = {"tiny": (TINY, 4), "odd": (ODD, 8), "wide": (WIDE, 64)}  # model, and the number of ranks asked for
REAL = {
    "tiny": ("ddp-overlapped", "zero-3", "torch-fsdp", "hsdp", "torch-fsdp-tp", "pp-1f1b", "torch-pp-gpipe"),
    "odd": ("torch-zero-1", "fsdp", "fsdp-tp"),
}
BATCH = 8
# PyTorch's DDP rebuilds its buckets in the second forward, in the order in which gradients came in the first.
READS = {name: [0, 2, 0] for name in ("torch-ddp", "torch-zero-1", "torch-cp")}  # reads of the host, in each step


def config_of(row, shape: str) -> Config:
    """Return the shape's config with a layer for each stage, two on a mesh and four along pp alone, or more tokens."""
    config, ranks = SHAPES[shape]
    if row.name.removeprefix("torch-").startswith("cp"):
        config = replace(config, context=max(config.context, 2 * ranks))  # two tokens for each rank
    return replace(config, depth=2 if len(row.axes(4)) > 1 else 4) if "pp-" in row.name else config


def rank_of(row, shape: str) -> int:
    """Return the last rank but one, which has padding, or a stage like others."""
    return row.ranks(SHAPES[shape][1]) - 2


def reads_of(name: str) -> list[int]:
    return READS.get(name, [0, 0])


def step_all(asked: list[tuple[str, str]]) -> dict[tuple[str, str], tuple]:
    """Return bytes sent in the last step, bytes held in a steady one, and each step's waits, by row and shape.

    Each process steps its share of `asked`.
    """
    mine, found = asked[dist.get_rank() :: dist.get_world_size()], {}
    dist.destroy_process_group()
    for name, shape in mine:
        row, ranks = ROWS[name], ROWS[name].ranks(SHAPES[shape][1])
        rank = rank_of(row, shape)
        steps = len(reads_of(name))
        with as_rank(rank, ranks) as pretend, DryPass() as watch:
            reads = [0, *(len(pretend.reads) for _ in rehearse(row, config_of(row, shape), BATCH, steps))]
        seen = {kind: join_some(kind, {rank: tape}, ranks) for kind, tape in watch.tapes().items()}
        sent, held = seen["communication"].sent(rank, steps - 1), seen["memory"].steady(rank)
        found[name, shape] = sent, held, [after - before for before, after in pairwise(reads)]
    return found


def rehearsed(asked: list[tuple[str, str]]) -> dict[tuple[str, str], tuple]:
    one, other = run(step_all, asked, ranks=2, device="cpu", timeout=1800)
    return one | other


def require_as_predicted(stepped: dict[tuple[str, str], tuple], name: str, shape: str) -> None:
    sent, held, reads = stepped[name, shape]
    row = ROWS[name]
    job = cost.Job(config_of(row, shape), BATCH, row.ranks(SHAPES[shape][1]), rank_of(row, shape))
    predicted = row.predict(job)
    assert sent == predicted.sent, shape
    assert {kind: held[kind] for kind in EXACT} == {kind: getattr(predicted.held, kind) for kind in EXACT}, shape
    if row.side == "ours":
        assert held["peak"] == pytest.approx(predicted.held.peak, rel=0.05), shape
    assert reads == reads_of(name), shape


@pytest.fixture(scope="module")
def stepped():
    """Step the rows where nothing divides evenly, and those that real ranks run."""
    real = [(name, shape) for shape, names in REAL.items() for name in names]
    return rehearsed([*dict.fromkeys([(row.name, "odd") for row in STRATEGIES] + real)])


@pytest.mark.parametrize("name", [row.name for row in STRATEGIES])
def test_a_row_sends_and_holds_what_cost_says_and_waits_for_nothing(stepped, name):
    require_as_predicted(stepped, name, "odd")


@pytest.mark.depth
def test_every_shape_sends_and_holds_what_cost_says():
    asked = [(row.name, shape) for row in STRATEGIES for shape in SHAPES]
    stepped = rehearsed(asked)
    for name, shape in asked:
        require_as_predicted(stepped, name, shape)


# ---- real runs -------------------------------------------------------------------------------------------


def really(names: tuple[str, ...], shape: str) -> dict[tuple[str, str], dict]:
    """Return the tape of each pass, by row and kind of pass."""
    tapes = {}
    for name in names:
        # memory runs first, in a new process, because PyTorch keeps some bytes
        for kind in ("memory", "communication"):
            with PASSES[kind]() as watch:
                for _ in rehearse(ROWS[name], config_of(ROWS[name], shape), BATCH, len(reads_of(name))):
                    pass
            tapes[name, kind] = watch.tape
    return tapes


@pytest.mark.parametrize("shape", ["odd", *deepen("tiny")])
def test_a_real_run_sends_and_holds_the_same_to_the_byte(stepped, shape):
    ranks, names = SHAPES[shape][1], REAL[shape]
    tapes = run(really, names, shape, ranks=ranks, device="cpu")
    for name in names:
        rank = rank_of(ROWS[name], shape)
        sent, held = (join_some(kind, {rank: tapes[rank][name, kind]}, ranks) for kind in ("communication", "memory"))
        last = len(reads_of(name)) - 1
        found, dried = (sent.sent(rank, last), held.steady(rank)), stepped[name, shape][:2]
        if name.startswith("torch-pp") and not hasattr(PipelineStage, "_warmup_backward_result"):
            # From PyTorch 2.15 on, a stage has other buffers for its messages if its neighbours are real.
            found, dried = ((bytes_sent, without_buffers(kinds)) for bytes_sent, kinds in (found, dried))
        assert found == dried, name


def without_buffers(kinds: dict[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if kind not in ("comm", "peak")}


# ---- dry() -----------------------------------------------------------------------------------------------


def train(name: str) -> int:
    for _ in rehearse(ROWS[name], TINY, BATCH):
        pass
    return dist.get_rank()


def test_several_ranks_come_back_side_by_side():
    results = dry(train, "fsdp", ranks=1024, rank=(17, 1023))
    assert results == [17, 1023] and results.reads == {17: [], 1023: []}
    assert results.memory.seen == results.communication.seen == (17, 1023) and results.memory.ranks == 1024
    assert results.memory.steps == 2
    sent = results.communication.sent(17, step=1)
    # Each part goes to one of 1,024 ranks; an all-gather's goes around a ring, to the next rank, on the same node.
    (exchange, *_) = [event for event in results.communication.select(17, 1) if event.op == "all_to_all"]
    assert 0 < results.communication.across(17, 1) < sent and len(exchange.ranks) == 1024
    assert draw.memory(results.memory) and draw.traffic(results.communication)
    with pytest.raises(ValueError, match="rank 0 is not in this recording, which has of 1024 ranks these: 17, 1023"):
        results.memory.held(0)


JOINED = "zero-3", "pp-1f1b", "torch-pp-1f1b", "pp-fsdp-tp"


def step_each() -> None:
    for name in JOINED:
        for _ in rehearse(ROWS[name], config_of(ROWS[name], "tiny"), BATCH, 1):
            pass


def test_dry_runs_of_all_ranks_are_one_job_to_the_checker():
    verdict = would_hang(dry(step_each, ranks=4, rank=range(4)).communication)
    assert verdict.name == SOUND, verdict


def reads_its_loss() -> float:
    return torch.ones(2).sum().item()


def test_impossible_dry_runs_are_refused_in_a_sentence():
    with pytest.raises(NeedsNumbers, match=r"test_dry.py line \d+: return torch.ones.* asks for numbers"):
        dry(reads_its_loss, ranks=1024, rank=17)
    with pytest.raises(ValueError, match="rank 1024 is not in the job: its 1,024 ranks are 0 to 1,023"):
        dry(reads_its_loss, ranks=1024, rank=1024)
    with pytest.raises(ValueError, match="give 1 to 1,048,576"):
        dry(reads_its_loss, ranks=10**9)
    with pytest.raises(ValueError, match="each rank is a process here, so give 1 to 64 ranks, each once"):
        dry(reads_its_loss, ranks=4, rank=(1, 1))


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    with pytest.raises(ValueError, match=r"a dry run needs PyTorch 2\.11 or newer, and this is 2\.10\.0\+cpu"):
        dry(reads_its_loss, ranks=4)


# ---- models that no laptop holds -------------------------------------------------------------------------


def measured(name: str, model: str, axes: dict[str, int]) -> tuple[float, float]:
    """Return the processor seconds of two steps from the start, and the peak GiB of this process."""
    begin = time.process_time()
    for _ in rehearse(ROWS[name], PRESETS[model], 1, axes=axes):
        pass
    return time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "model", "axes", "seconds"),
    [
        ("fsdp", "llama3-8b", {"dp": 1024}, 10),
        ("fsdp-tp", "llama3-8b", {"dp": 128, "tp": 8}, 10),
        ("torch-fsdp", "llama3-8b", {"dp": 1024}, 10),
        ("fsdp-tp", "llama3-405b", {"dp": 2048, "tp": 8}, 60),
        ("torch-fsdp", "llama3-405b", {"dp": 16384}, 60),
    ],
)
def test_a_large_model_on_many_ranks(name, model, axes, seconds):
    ((took, most),) = dry(measured, name, model, axes, ranks=prod(axes.values()), rank=17)
    assert took <= seconds and most <= 1
