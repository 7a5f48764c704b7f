"""A training of 112 MB of parameters with AdamW, saved and loaded again: ours against torch.distributed.checkpoint.

sharded     over 4 ranks, ours by labs.fsdp, PyTorch's by its own FSDP
replicated  on 4 ranks, as with DDP

Both run in one job.  They save and load in turns, and which of them comes first alternates.  Both flush the files that
they write, and read files that were written just before.  Each rank writes a quarter of the replicas.  PyTorch assumes
that replicas are equal; ours compares all 4 of them, to the last bit, so 1.10 is out of reach for a replicated save.

Separate jobs, sharded, measure three more things: the bytes written, the bytes read, and the peak memory of a rank
beyond its training.  Ours reads every file once more for the checksums.  It also maps the files that it loads, and
mapped pages count as memory.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from bench.figure import Figure, figure, ratios
from bench.step import RANKS, Stepper, Steps, rounds
from labs import fsdp, native
from labs.checkpoint import Held, load, loading, save
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.rows.fsdp_rows import layers_of
from labs.mesh import Mesh
from labs.model import GPT, Config

CONFIG = Config(vocab=4096, dim=512, depth=7, heads=8, kv_heads=8, hidden=1536, context=64)
SIDES = ("torch", "ours")
Verb = Callable[[Path], object]
Layout = Callable[[str], nn.Module]  # the model, for a side
Weighed = dict[str, list[float]]  # bytes per rank, by the name of the quantity
STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # only Linux has these files


def figures(quick: bool) -> list[Figure]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for how, layout in LAYOUTS.items():
            ranks = rounds(SIDES, 6 if quick else 24, build=partial(saver, Path(folder), layout), warm_up=1)
            for phase in ("save", "load"):
                theirs, ours = (slowest(ranks[side], phase) for side in SIDES)
                name, pairs = f"checkpoint: {phase}, {how}, ours", zip(theirs, ours, strict=True)
                found.append(figure(f"{name} / torch", ratios(pairs), target="at most 1.10"))
                found.append(figure(name, [1000 * seconds for seconds in ours], "ms"))
        weighed = {side: weigh(side, Path(folder) / f"weighed-{side}") for side in SIDES}
    return [*found, *beside(weighed)]


def beside(weighed: dict[str, Weighed]) -> list[Figure]:
    """Compare each quantity in `weighed`, ours / PyTorch's rank by rank, with the total over all ranks in the note."""
    found = []
    for what, theirs in weighed["torch"].items():
        ours = weighed["ours"][what]
        note = f"{sum(ours) / 1e6:.0f} MB and {sum(theirs) / 1e6:.0f} MB on {len(ours)} ranks"
        found.append(figure(f"checkpoint: {what}, ours / torch", ratios(zip(theirs, ours, strict=True)), note=note))
    return found


def slowest(ranks: list[Steps], phase: str) -> list[float]:
    """Return the seconds of a phase in each turn, on the rank that took longest."""
    return [max(taken[phase] for taken in turn) for turn in zip(*ranks, strict=True)]


# ---- work of a rank --------------------------------------------------------------------------------------


def sharded(side: str) -> nn.Module:
    model = GPT(CONFIG)
    if side == "torch":
        return native.fsdp(model, layers_of(model))
    mesh = Mesh((dist.get_world_size(),), ("dp",))
    for layer in layers_of(model):
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def replicated(side: str) -> nn.Module:
    return native.ddp(GPT(CONFIG)) if side == "torch" else GPT(CONFIG)


LAYOUTS = {"sharded": sharded, "replicated": replicated}


def verbs(side: str, layout: Layout = sharded) -> tuple[Verb, Verb]:
    """Return two functions: one saves to a folder, the other loads from it."""
    model = layout(side)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    if side == "ours":
        held = Held(model, optimizer=optimizer)
        return lambda where: save(where, 1, held), lambda where: load(where / "step-1", held)
    training = model, optimizer
    return lambda where: native.save_checkpoint(where, *training), lambda where: native.load_checkpoint(
        where, *training
    )


def saver(folder: Path, layout: Layout, side: str) -> Stepper:
    saves, loads = verbs(side, layout)

    def step() -> None:
        mark("save")
        saves(folder / side)
        mark("load")
        loads(folder / side)
        mark("tidy up")
        removed(folder / side)

    return step


def removed(where: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where)
    dist.barrier()


def weigh(side: str, where: Path) -> Weighed:
    saved = run(weighed_save, side, where, ranks=RANKS, timeout=600)
    loaded = run(weighed_load, side, where, ranks=RANKS, timeout=600)
    fewer = run(weighed_load, side, where, ranks=RANKS - 1, timeout=600)
    found = {"bytes written": [written for written, _ in saved], "bytes read": [read for read, _ in loaded]}
    found[f"bytes read by {RANKS - 1} ranks"] = [read for read, _ in fewer]
    if PEAK.exists():
        found |= {"peak of a save": [peak for _, peak in saved], "peak of a load": [peak for _, peak in loaded]}
    return found


def weighed_save(side: str, where: Path) -> tuple[float, int]:
    saves, _ = verbs(side)
    peak = peak_of(lambda: saves(where))
    dist.barrier()
    return sum(path.stat().st_size for path in where.rglob("*") if path.is_file()) / RANKS, peak


def weighed_load(side: str, where: Path) -> tuple[int, int]:
    _, loads = verbs(side)
    with Reads() as reads:
        peak = peak_of(lambda: loads(where))
    return reads.bytes, peak


class Reads:
    """A counter of the bytes that are read from files while it is entered."""

    def __enter__(self) -> "Reads":
        self.bytes = 0
        read, looked_at, read_data = loading.read, loading.require_as_written, checkpoint.FileSystemReader.read_data

        def counted_read(*arguments):
            x = read(*arguments)
            self.bytes += x.nbytes
            return x

        def counted_look(path, written):
            self.bytes += path.stat().st_size
            looked_at(path, written)

        def counted_read_data(reader, plan, planner):
            self.bytes += sum(reader.storage_data[item.storage_index].length for item in plan.items)
            return read_data(reader, plan, planner)

        self.patches = [
            mock.patch.object(loading, "read", counted_read),
            mock.patch.object(loading, "require_as_written", counted_look),
            mock.patch.object(checkpoint.FileSystemReader, "read_data", counted_read_data),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self.patches:
            patch.stop()


def peak_of(do: Callable[[], object]) -> int:
    """Return the bytes that the process holds at its peak beyond those at the start; 0 where the system does not
    report them.
    """
    if not PEAK.exists():
        do()
        return 0
    PEAK.write_text("5")  # resets the peak
    before = resident("VmRSS")
    do()
    return resident("VmHWM") - before


def resident(what: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])
