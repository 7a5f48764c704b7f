"""The devices of a job: which device each rank gets, and which backend carries the ranks' messages.

auto   CUDA and NCCL if there is a GPU for each rank, otherwise CPU and gloo
cpu    gloo over loopback
cuda   NCCL for tensors on the GPU, and gloo for tensors on the host.  If there are fewer GPUs than ranks, the ranks
       share GPUs.  NCCL refuses two ranks on one GPU of one host, so each rank then claims to be a host of its own
       (NCCL_HOSTID), and NCCL uses sockets between the ranks.

The environment variable LABS_DEVICE, if it is cpu or cuda, decides what auto means: the tests run on CPUs on every
machine, and `make gpu` runs the tests on GPUs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# NCCL recognises two ranks on one GPU by host and bus number.  These settings turn off every transport between GPUs of
# one host, so that NCCL uses sockets.
SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Devices:
    """The backend of a job, each rank's device, and a note for the user, which is "" if no GPU is shared."""

    backend: str
    names: list[str]  # "cpu" or "cuda:3", one name per rank
    note: str = ""

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables that the process of `rank` needs."""
        shared = {**SHARED_GPU, "NCCL_HOSTID": f"labs-rank-{rank}"} if self.note else {}
        return {"GLOO_SOCKET_IFNAME": LOOPBACK, **shared}


def devices_for(device: str, ranks: int) -> Devices:
    """Choose the devices and the backend of a job.

    device: "auto", "cpu" or "cuda".
    ranks: the number of ranks on this machine.

    Raises ValueError for another `device`, or for "cuda" on a machine without a GPU.
    """
    if device == "auto":
        device = os.environ.get("LABS_DEVICE", device)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device={device!r}: give "auto", "cpu" or "cuda"')
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus < ranks):
        return Devices("gloo", ["cpu"] * ranks)
    if gpus == 0:
        raise ValueError(
            'device="cuda", but PyTorch sees no NVIDIA GPU here: leave device out to run on the CPU, or see what '
            "`python -m labs doctor` says about the driver and this build of PyTorch"
        )
    note = "" if gpus >= ranks else f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}: NCCL, over sockets"
    return Devices("cpu:gloo,cuda:nccl", [f"cuda:{rank % gpus}" for rank in range(ranks)], note)
