"""Tests of a GPT under context parallelism, alone, with data and tensor parallelism and FSDP, against one process.

The reference never cuts a sequence.  It computes packed documents one after the other, each as a row of its own.
"""

from functools import cache, partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import pp, tp
from labs.cp import (
    context_parallel,
    contiguous,
    gathered_attention,
    ring_attention,
    striped,
    ulysses_attention,
    zigzag,
)
from labs.ddp import Overlapped
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.memory.recompute import recompute
from labs.mesh import Mesh
from labs.model import GPT, IGNORED, Config, counted
from labs.rope import RopeScaling
from labs.zero import Zero
from tests.cp.test_attention import packed
from tests.depth import deepen

TIME, BATCH, STEPS = 19, 4, 2
CONFIG = Config(vocab=13, dim=32, depth=2, heads=8, kv_heads=4, hidden=10, context=TIME)
LLAMA = Config(
    vocab=13, dim=24, depth=2, heads=4, kv_heads=4, hidden=10, context=TIME, tied=True, rope_base=500.0,
    rope_scaling=RopeScaling(factor=4.0, low=1.0, high=4.0, context=8),
)  # fmt: skip
CASES = {  # attention, cut, config, and what is odd about the training
    "ring": (ring_attention, zigzag, CONFIG, ""),
    "ring, striped, documents": (ring_attention, striped, LLAMA, "documents"),
    "ring, contiguous, ignored targets": (ring_attention, contiguous, CONFIG, "ignored"),
    "ring, documents, recomputed": (ring_attention, zigzag, CONFIG, "documents, recomputed"),
    "gathered, ignored targets": (gathered_attention, zigzag, LLAMA, "ignored"),
    "gathered, striped, documents": (gathered_attention, striped, CONFIG, "documents, ignored"),
    "gathered, frozen": (gathered_attention, zigzag, CONFIG, "frozen"),
    "ring, shards": (ring_attention, zigzag, CONFIG, "shards, ignored"),
    "ulysses, contiguous": (ulysses_attention, contiguous, LLAMA, ""),
    "ulysses, documents": (ulysses_attention, zigzag, CONFIG, "documents, ignored"),
}


def built(config, kind):
    model = GPT(config).double()
    if "frozen" in kind:
        model.layers["0"].attention.requires_grad_(False)
    return model


def data(step, kind):
    """Return tokens, targets and documents of a whole batch."""
    time = 16 if "shards" in kind else TIME  # sequence parallelism cuts into equal shards
    x, y = torch.randint(13, (2, BATCH, time), generator=torch.Generator().manual_seed(step))
    if "ignored" in kind:
        y[1:, step::3] = IGNORED  # the parts of a batch have different numbers of targets, and so have their pieces
        y[:, -4:] = IGNORED
    return x, y, packed(TIME, BATCH) if "documents" in kind else None


def alone(case):
    """Train in one process; documents are cut out of their rows."""
    _, _, config, kind = CASES[case]
    model = built(config, kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for step in range(STEPS):
        x, y, documents = data(step, kind)
        for row in range(BATCH):
            sizes = (
                [x.shape[1]] if documents is None else documents[row].unique_consecutive(return_counts=True)[1].tolist()
            )
            for own_x, own_y in zip(x[row].split(sizes), y[row].split(sizes), strict=True):
                model(own_x[None], own_y[None], counted(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@cache
def expected():
    return run(lambda: {case: alone(case) for case in CASES}, ranks=1)[0]


def together(case, sizes, sharded):
    """Train on dp × cp × tp ranks, in two micro-batches, and return the whole parameters."""
    attention, cut, config, kind = CASES[case]
    model, mesh = built(config, kind), Mesh(sizes, ("dp", "cp", "tp"))
    steps = [partial(context_parallel, model, mesh.get_group("cp"), attention, cut)]
    if sizes[2] > 1:  # before or after
        steps.insert(sharded, partial(tp.parallelize, model, mesh["tp"], tp.gpt_plan(config, "shards" in kind)))
    for apply in steps:
        apply()
    data_mesh = mesh["dp", "cp"]._flatten()
    if "recomputed" in kind:
        recompute(model.layers.values())
    if sharded:
        for layer in (*model.layers.values(), model):
            fully_shard(layer, mesh=data_mesh)
        wrapped, sync = model, lambda: None
    else:
        wrapped = Overlapped(model, group=data_mesh.get_group())
        sync = wrapped.sync
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    part, parts = mesh.get_local_rank("dp"), sizes[0]
    for step in range(STEPS):
        whole = data(step, kind)
        micro_batches = [[x if x is None else x.chunk(parts)[part].chunk(2)[i] for x in whole] for i in range(2)]
        for last, (x, y, documents) in enumerate(micro_batches):
            packs = {} if documents is None else {"documents": documents}
            loss = wrapped(x, y, over=counted(whole[1]) / parts, **packs)
            if last or sharded:
                loss.backward()
            else:
                with wrapped.no_sync():
                    loss.backward()
        sync()
        optimizer.step()
        optimizer.zero_grad()
    if sizes[2] > 1:
        return {name: p.detach() for name, p in tp.full_parameters(model).items()}
    return {name: (p.full_tensor() if sharded else p).detach() for name, p in model.named_parameters()}


SIZES = (1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 3, 1), (2, 4, 1), (2, 2, 2)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), *deepen(*SIZES)])
def test_equals_one_process(sizes):
    def body():
        found = {}
        for sharded in (False, True):
            for case in CASES:
                trained = together(case, sizes, sharded)
                off = {name: (p - whole[case][name]).abs().max().item() for name, p in trained.items()}
                if not max(off.values()) <= 1e-12:
                    found[case, sharded] = max(off, key=off.get), max(off.values())
        return found

    whole = expected()
    assert run(body, ranks=prod(sizes)) == [{}] * prod(sizes)


def test_losses_and_logits_are_those_of_one_process_and_zero_may_come_after():
    x, y, _ = data(0, "")

    def body(whole, logits, after):
        model = GPT(CONFIG).double()
        context_parallel(model)
        with torch.no_grad():
            loss, own = model(x, y), model(x)
        dist.all_reduce(loss)
        assert abs(loss / 3 - whole) < 1e-12
        assert torch.allclose(own, logits[:, [*zigzag(TIME, 3)[dist.get_rank()]]], rtol=0, atol=1e-12)
        zero = Zero(model, 3, partial(torch.optim.SGD, lr=0.3))  # which drops parameters between their uses
        model(x, y).backward()
        zero.sync()
        zero.step()
        assert all((p - after[name]).abs().max() < 1e-12 for name, p in zero.full_state_dict().items())

    model = GPT(CONFIG).double()
    loss, logits, optimizer = model(x, y), model(x).detach(), torch.optim.SGD(model.parameters(), lr=0.3)
    loss.backward()
    optimizer.step()
    run(body, loss.item(), logits, {name: p.detach() for name, p in model.named_parameters()}, ranks=3)


# ---- refusals --------------------------------------------------------------------------------------------


def refusals():
    """Yield a sentence, and a function that is refused with it on every rank."""
    x, y, _ = data(0, "")
    rank = dist.get_rank()

    def ready(**options):
        model = GPT(CONFIG)
        context_parallel(model, **options)
        return model

    def twice():
        context_parallel(ready())

    def other_batch():
        ready()(x[rank:], y[rank:])

    def other_tokens():
        ready()((x + rank) % 13, y)

    def unaveraged(wrap=lambda model: model):
        model = ready()
        optimizer = torch.optim.SGD(wrap(model).parameters(), lr=0.1)
        model(x, y).backward()
        optimizer.step()

    def along_tp(first):
        model = GPT(CONFIG)
        steps = [
            partial(tp.parallelize, model, Mesh((2,), ("tp",)), tp.gpt_plan(CONFIG)),
            partial(context_parallel, model),
        ]
        for apply in steps if first == "tp" else reversed(steps):
            apply()
        model(x, y)

    def shards():
        model, mesh = GPT(CONFIG), Mesh((1, 2), ("cp", "tp"))
        tp.parallelize(model, mesh["tp"], tp.gpt_plan(CONFIG, True))
        context_parallel(model, mesh.get_group("cp"))
        model(x, y)

    yield "PiecedGPT has a forward of its own, which no stage would call", lambda: pp.cut(ready(), 2)
    yield "place along tp is 0 on rank 0, but 1 on rank 1: all ranks of one group of context", partial(along_tp, "tp")
    yield "place along tp is 0 on rank 0, but 1 on rank 1: all ranks of one group of context", partial(along_tp, "cp")
    yield r"pieces of \[19\] tokens are not all divisible by the 2 ranks of sequence parallelism", shards
    yield "Linear is not a GPT of labs.model", partial(context_parallel, nn.Linear(2, 2))
    yield "GPT is not a GPT of labs.model with its own attention", twice
    yield "cut is 'zigzag' on rank 0, but 'striped' on rank 1", partial(ready, cut=striped if rank else zigzag)
    yield "tokens is .* on rank 0, but .* on rank 1: all ranks of one group of context", other_batch
    yield "tokens is .* on rank 0, but .* on rank 1: all ranks of one group of context", other_tokens
    yield "over is 1 on rank 0, but 2 on rank 1", lambda: ready()(x, y, 1 + rank)
    yield "20 tokens are more than the context of 19", lambda: ready()(x[:, [0, *range(TIME)]])
    yield "a sequence of 1 tokens leaves one of 2 ranks without any", lambda: ready()(x[:, :1])
    yield r"documents have the shape \(4,\), and tokens \(4, 19\)", lambda: ready()(x, y, documents=x[:, 0])
    yield "parameter 'embed.weight' has another gradient on rank 1 than on rank 0", unaveraged
    yield "a target is -100", lambda: Overlapped(ready())(x, torch.where(y == y[0, 0], IGNORED, y))


def test_refused_on_every_rank():
    def body():
        for sentence, act in refusals():
            with pytest.raises((ValueError, RuntimeError), match=sentence):
                act()

    run(body, ranks=2)
