"""Tests of labs.fsdp.parameter_group: gathered values equal the shards', and gradients have the requested dtype.

The reference is the same layers in one process, with the same numbers.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.checkpoint import Held, load, newest, save
from labs.fsdp import MixedPrecisionPolicy, fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))


def doubled():
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model


def sharded(mesh, **options):
    model = net()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def blocks(model):
    return [p.to_local() for p in model.parameters()]


WRITERS = {  # writers, by the memory that each of them writes to
    "the parameters": lambda model: [p.mul_(2) for p in model.parameters()],
    "their blocks": lambda model: [block.mul_(2) for block in blocks(model)],
    "blocks, all at once": lambda model: torch._foreach_mul_(blocks(model), 2),
    "blocks of detached parameters": lambda model: [p.detach().to_local().mul_(2) for p in model.parameters()],
    "a state dict": lambda model: [x.mul_(2) for x in model.state_dict().values()],
    "blocks of a state dict": lambda model: [x.to_local().mul_(2) for x in model.state_dict().values()],
    "blocks' .data": lambda model: [block.data.mul_(2) for block in blocks(model)],
    "blocks by NumPy": lambda model: [block.numpy().__imul__(2) for block in blocks(model)],
    "new .data": lambda model: [setattr(p, "data", p.data * 2) for p in model.parameters()],
    "another model's": lambda model: model.load_state_dict({k: x * 2 for k, x in model.state_dict().items()}),
}
UNSEEN = "blocks' .data", "blocks by NumPy"  # no version counts these writes
WAYS = {
    "each layer": ((2,), {}),
    "not resharded": ((2,), {"reshard_after_forward": False}),
    "hybrid": ((2, 2), {"reshard_after_forward": False}),
    "resharded to two": ((4,), {"reshard_after_forward": 2}),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forward_sees_what_was_written_since_the_last_one(ranks, tmp_path):
    def body():
        x, found, refused = torch.ones(1, 4), {}, []
        save(tmp_path, 1, Held(doubled()))
        for way, (sizes, options) in WAYS.items():
            if torch.Size(sizes).numel() != ranks:
                continue
            mesh = Mesh(sizes, ("replicate", "shard")[-len(sizes) :])
            loading = {"a checkpoint": lambda model: load(newest(tmp_path), Held(model))}
            for name, write in (WRITERS | loading).items():
                for before in (torch.no_grad, torch.enable_grad):  # no backward follows either of them
                    model = sharded(mesh, **options)
                    with before():
                        model(x)
                    with torch.no_grad():
                        write(model)
                        try:
                            found[way, name, before.__name__] = model(x).item()
                        except RuntimeError as error:
                            assert "was written to in a forward, or between unshard() and reshard()" in str(error)
                            refused.append((name, before.__name__))
        expected = doubled()(x).item()
        return {case: y for case, y in found.items() if abs(y - expected) > 1e-6}, refused, len(found)

    for wrong, refused, right in run(body, ranks=ranks):
        assert not wrong
        assert refused == [(name, "enable_grad") for name in UNSEEN], "where a backward may be due"
        assert right == 2 * 2 * (len(WRITERS) + 1) - len(refused)


def test_what_is_written_to_the_whole_is_refused():
    def body():
        said, mesh = {}, Mesh((2,), ("dp",))
        ways = {"whole": lambda p: p.zero_(), "its .data": lambda p: p.data.zero_()}
        for name, write in ways.items():
            for then in ("reshard", "forward"):
                model = sharded(mesh)
                model[0].unshard()
                with torch.no_grad():
                    write(model[0].weight)
                try:
                    model[0].reshard() if then == "reshard" else model(torch.ones(1, 4))
                except RuntimeError as error:
                    said[name, then] = str(error)
        return said

    for said in run(body, ranks=2):
        assert len(said) == 4
        assert all("was written to in a forward, or between unshard() and reshard()" in text for text in said.values())


def test_micro_batches_are_added_up_in_the_dtype_that_gradients_are_reduced_in():
    """Compare with the sum of eight in bfloat16, the dtype of the parameters, which would differ."""

    def inputs(rank, number):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(8 * rank + number))

    def layer():
        torch.manual_seed(0)
        return nn.Linear(4, 2, bias=False)

    def body():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(layer(), mp_policy=policy)
        for number in range(8):
            model.set_requires_gradient_sync(number == 7)
            model(inputs(dist.get_rank(), number)).square().sum().backward()
        return model.weight.grad.full_tensor()

    def gradients(rank):
        one = layer().bfloat16()
        for number in range(8):
            yield torch.autograd.grad(one(inputs(rank, number).bfloat16()).square().sum(), one.weight)[0]

    expected = sum(sum(g.float() for g in gradients(rank)) for rank in range(2)) / 2
    in_bfloat16 = sum(sum(gradients(rank)).float() for rank in range(2)) / 2
    for found in run(body, ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert (found - in_bfloat16).abs().max() > 1e-3


def test_float16_gradients_are_divided_on_both_sides_of_their_sum():
    """Check overflow and underflow: 40,000 + 40,000 exceeds float16's range, and half of 6e-8 is below it."""

    def gradient(value, dtype):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        model(torch.full((1, 1), value)).sum().backward()
        return model.weight.grad.full_tensor().item()

    def body():
        return [gradient(value, dtype) for dtype in (torch.float16, torch.bfloat16) for value in (40000.0, 6e-8)]

    for large, small, large_bf16, small_bf16 in run(body, ranks=2):
        assert large == 40000.0 and small == 0.0
        assert large_bf16 == pytest.approx(40000.0, rel=1e-2) and small_bf16 == pytest.approx(6e-8, rel=1e-2)
