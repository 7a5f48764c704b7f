"""Tests of labs.fsdp against one process, and against PyTorch's fully_shard.

Many cases share a job: each returns what it saw, and the test judges.
"""

import gc
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchsPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.utils.checkpoint import checkpoint

from labs.clip import clip_gradients
from labs.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from tests.depth import deepen
from tests.fsdp.common import ADAMW, awkward, full, sharded
from tests.models import batch
from tests.recordings import held

CONFIG = PRESETS["tiny"]
SHORT = replace(CONFIG, depth=3, context=16)  # a first layer, one between, a last one
BFLOAT16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

# ---- numbers ---------------------------------------------------------------------------------------------

TRAININGS = {  # micro-batches, norm to clip at, options of fully_shard
    "plain": (1, None, {}),
    "kept": (1, None, {"reshard_after_forward": False}),
    "micro-batches": (3, None, {}),
    "one sync": (3, None, {"reshard_after_forward": False}),
    "clipped": (1, 0.05, {}),
    "checkpointed": (1, None, {}),
    "offloaded": (1, None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def one_process(ranks, micro_batches, norm, steps=4):
    model = awkward()
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        for number in range(ranks * micro_batches):
            (model(batch(step, number), branch=step == 2) / micro_batches / ranks).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(name, mesh, steps=4):
    micro_batches, norm, options = TRAININGS[name]
    model = sharded(awkward(), mesh, **options)
    if name == "checkpointed":
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        for i in range(micro_batches):
            if name == "one sync":
                model.set_requires_gradient_sync(i == micro_batches - 1)
            tokens = batch(step, dist.get_rank() * micro_batches + i)
            (model(tokens, branch=step == 2) / micro_batches).backward()
        if norm is not None:
            clip_gradients(model.parameters(), norm, groups=(mesh.get_group(-1),))
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


@pytest.mark.parametrize("sizes", [(3,), (2, 2), *deepen((1,), (2,), (4,), (1, 3))], ids=str)
def test_equals_one_process(sizes):
    """Train with frozen, tied and unused parameters, one of 1 element, and empty shards on some ranks."""
    names = ("replicate", "shard")[-len(sizes) :]
    ranks = torch.Size(sizes).numel()
    results = run(lambda: {name: train(name, Mesh(sizes, names)) for name in TRAININGS}, ranks=ranks)
    for name, (micro_batches, norm, _) in TRAININGS.items():
        one = one_process(ranks, micro_batches, norm)
        for ours in results:
            assert ours[name].keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(ours[name][key], value, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")


# ---- comparison with PyTorch's ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to shard a GPT, with ours or with PyTorch's."""

    sizes: tuple[int, ...] = (4,)
    reshard: bool | int = True
    precision: bool = False
    micro_batches: int = 1
    one_sync: bool = False
    layers: str = "layers"
    config: object = CONFIG

    @property
    def dtype(self):
        """Return the dtype.

        In float32, AdamW turns rounding errors, which differ between CPUs, into full-size steps.
        """
        return torch.float32 if self.precision else torch.float64


WAYS = {
    "each layer": Way((3,)),
    "not resharded": Way((3,), reshard=False),
    "resharded to two": Way(reshard=2),
    "hybrid": Way((2, 2)),
    "bfloat16": Way((3,), precision=True),
    "bfloat16, hybrid": Way((2, 2), precision=True),
    "micro-batches": Way(micro_batches=3),
    "one sync": Way(micro_batches=3, one_sync=True),
    "the root only": Way(layers="none"),
}


def build(way, ours):
    torch.manual_seed(0)
    model = GPT(way.config).to(way.dtype)
    names = ("replicate", "shard")[-len(way.sizes) :]
    if ours:
        shard, mesh = fully_shard, Mesh(way.sizes, names)
        policy = MixedPrecisionPolicy(**BFLOAT16) if way.precision else MixedPrecisionPolicy()
    else:
        shard, mesh = torchs, init_device_mesh("cpu", way.sizes, mesh_dim_names=names)
        policy = TorchsPolicy(**BFLOAT16) if way.precision else TorchsPolicy()
    for layer in model.layers.values() if way.layers == "layers" else ():
        shard(layer, mesh=mesh, reshard_after_forward=way.reshard, mp_policy=policy)
    return shard(model, mesh=mesh, mp_policy=policy)


def steps(way, ours, number):
    model = build(way, ours)
    optimizer = ADAMW(model.parameters())
    for step in range(number):
        mark("step")
        for i in range(way.micro_batches):
            if way.one_sync:
                model.set_requires_gradient_sync(i == way.micro_batches - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + i)
            x, y = torch.randint(0, way.config.vocab, (2, 1, way.config.context), generator=generator)
            mark("forward")
            loss = model(x, y) / way.micro_batches
            mark("backward")
            loss.backward()
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


NAMES = {"all_to_all": "reduce_scatter"}  # the operation that replaces it on gloo


def sent(recording, rank, step):
    """Return, by group and phase, the count of each collective, and the bytes."""
    start, end = recording.window(rank, step)
    phases = [s for s in recording.spans if s.rank == rank and s.name != "step" and start <= s.start < end]
    counts, nbytes = Counter(), Counter()
    for event in recording.select(rank, step):
        (phase,) = (span.name for span in phases if span.start <= event.start < span.end)
        key = NAMES.get(event.op, event.op), event.ranks, phase
        counts[key] += 1
        nbytes[key] += event.sent
    return counts, nbytes


@pytest.mark.parametrize("ranks", [3, 4])
def test_sends_what_pytorchs_sends_and_learns_the_same(ranks):
    ways = {name: replace(way, config=SHORT) for name, way in WAYS.items() if prod(way.sizes) == ranks}
    job = run(
        lambda: [[steps(way, ours, 2) for ours in (True, False)] for way in ways.values()],
        ranks=ranks,
        record="communication",
    )
    for number, (name, way) in enumerate(ways.items()):
        last = 4 * number + 1, 4 * number + 3  # the last of two steps, ours and PyTorch's
        mine, theirs = (sent(job.recording, 0, step) for step in last)
        assert mine == theirs, name
        tolerance = 2e-2 if way.precision else 1e-10
        (ours, pytorchs), *others = (results[number] for results in job)
        for key, p in pytorchs.items():
            torch.testing.assert_close(ours[key], p, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")
            assert all(torch.equal(ours[key], other[key]) for other, _ in others), (name, key)


@pytest.mark.parametrize("ranks", [3, *deepen(4)])
def test_holds_what_pytorchs_holds(ranks):
    """Check that ours holds no more at the peak, though its gathers overlap computation, or at rest.

    At rest a rank holds the model and padding.  tests/test_contract.py checks more ways against the prediction.
    """
    ways = [way for way in (WAYS["each layer"], WAYS["hybrid"]) if prod(way.sizes) == ranks]

    def body():
        for way in ways:
            for ours in (True, False):
                steps(way, ours, 3)
                gc.collect()

    recording = run(body, ranks=ranks, record="memory").recording
    for number, way in enumerate(ways):
        mine, theirs = ([held(recording, rank, 2 * number + i, 3) for rank in range(ranks)] for i in (0, 1))
        for ours, other in zip(mine, theirs, strict=True):
            assert {kind: ours[kind] for kind in "GSA"} == {kind: other[kind] for kind in "GSA"}, way
            assert ours["P"] <= other["P"]
            assert ours["peak"] <= 1.05 * other["peak"]
        replicas = ranks // way.sizes[-1]
        whole = sum(p.nbytes for p in GPT(way.config).to(way.dtype).parameters())
        assert sum(ours["P"] for ours in mine) == replicas * whole, "ours are without padding"
