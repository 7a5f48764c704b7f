"""Tests of the launcher's GPU paths without a GPU: its ranks find a pretended device in CUDA's place.

The reference is what a rank on a GPU should find, by labs/kit/ranks/devices.py.
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import RankError, run
from labs.kit.ranks.devices import LOOPBACK, devices_for
from labs.kit.simulated.host import Pretend


def pretended_cuda():
    """Return a name whose arrival on a rank registers a pretended device, before that rank looks for CUDA."""

    def arrive(name: str) -> str:
        import torch.testing._internal.distributed.fake_pg

        from labs.kit.simulated.device import NAME, register

        register()
        use, begin = torch.set_default_device, dist.init_process_group
        dist.Backend.backend_capability["fake"].append(NAME)
        torch.cuda.set_device = lambda device: os.environ.update(SET_TO=str(device))
        torch.set_default_device = lambda device: use(NAME)
        dist.init_process_group = lambda backend, **how: begin(backend.replace("cuda:nccl", f"{NAME}:fake"), **how)
        return name

    class Name(str):
        def __reduce__(self):
            return arrive, (str(self),)

    return Name


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets how many GPUs there seem to be."""

    def there_are(number: int) -> None:
        monkeypatch.delenv("LABS_DEVICE", raising=False)
        monkeypatch.setattr("torch.cuda.device_count", lambda: number)

    def devices(device: str, ranks: int):
        found = devices_for(device, ranks)
        return replace(found, names=[*map(pretended_cuda(), found.names)]) if "nccl" in found.backend else found

    monkeypatch.setattr("labs.kit.ranks.run.devices_for", devices)
    return there_are


def a_step():
    on_the_host = torch.ones(3, device="cpu")
    dist.all_reduce(on_the_host)  # uses gloo
    with torch.autograd.set_multithreading_enabled(False), Pretend().on_this_host():
        model = nn.Linear(2, 2)
        assert model.weight.device.type == "gpu"
        model(torch.ones(2)).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
    return on_the_host.tolist(), os.environ["SET_TO"], os.environ.get("NCCL_HOSTID"), os.environ["GLOO_SOCKET_IFNAME"]


def test_a_gpu_for_each_rank(gpus):
    gpus(2)
    results = run(a_step, ranks=2, record="order")
    assert results == [([2.0] * 3, f"cuda:{rank}", None, LOOPBACK) for rank in range(2)]
    assert [event.bytes_in for event in results.recording.select(1)] == [12, 16, 8]


def test_ranks_that_share_a_gpu(gpus, capsys):
    gpus(1)
    results = run(a_step, ranks=2, device="cuda")
    assert results == [([2.0] * 3, "cuda:0", f"labs-rank-{rank}", LOOPBACK) for rank in range(2)]
    assert "2 ranks share 1 GPU: NCCL, over sockets" in capsys.readouterr().out


def test_a_rank_on_a_gpu_that_fails(gpus):
    def fails():
        raise KeyError("on a GPU")

    gpus(1)
    with pytest.raises(RankError, match="rank 0 of 1 failed: KeyError: 'on a GPU'"):
        run(fails, ranks=1)
