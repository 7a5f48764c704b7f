"""Tests of trainings by torchrun on two hosts: the numbers of one process, and the bytes that `cost` says on the link.

References: a training by one process; `labs.cost`; the counters of the link's interface.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from labs import cost, pp
from labs.clusters.settings import Checkpoints
from labs.clusters.trainer import train
from labs.cost import Job
from labs.kit.launch import run
from labs.kit.training.strategies import ROWS
from tests.clusters.hosts_job import SHORT
from tests.clusters.two_hosts import Torchrun, missing, two_hosts

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PAIRS = ["fsdp-tp", "hsdp", "pp-fsdp"]  # the outermost axis of each crosses: dp, replicate, pp


def told(logs: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (logs / "steps.jsonl").read_text().splitlines()]


def across(name: str, rank: int) -> int:
    """Return the bytes that a rank sends along the outermost axis: all, without those along the inner axis."""
    config, batch = SHORT.config, SHORT.batch

    def job(batch: int, ranks: int, rank: int, accumulation: int = 1) -> Job:
        return Job(config, batch, ranks, rank, accumulation=accumulation, context=SHORT.context)

    outer, inner = divmod(rank, 2)
    if name == "fsdp-tp":
        of_all, of_inner = job(batch // 2, 4, rank), cost.tp(job(batch // 2, 2, inner))
    elif name == "hsdp":
        of_all, of_inner = job(batch // 4, 4, rank), cost.fsdp(job(batch // 4, 2, inner))
    else:  # each rank of the pipeline has two micro-batches
        return cost.pp(job(batch // 4, 2, outer, accumulation=2), pp.plan(pp.one_f_one_b(2, 2))).sent
    return ROWS[name].predict(of_all).sent - of_inner.sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Train by one process, and by each strategy in one job on two hosts; return the folder with the reports."""
    folder = tmp_path_factory.mktemp("two-hosts")
    with two_hosts() as hosts:
        job = Torchrun(hosts, folder, "-m", "tests.clusters.hosts_job", str(folder), *PAIRS)
        alone = folder / "alone"
        own = replace(SHORT, strategy="one device", report=alone, checkpoints=Checkpoints(alone / "saved"))
        run(train, own, ranks=1, timeout=200)
        assert job.finish(200) == [0, 0], job.said(hosts[0]) + job.said(hosts[1])
        assert [host.processes() for host in hosts] == [[], []]
    return folder


@pytest.mark.parametrize("name", PAIRS)
def test_numbers_are_those_of_one_process_and_bytes_on_the_link_those_of_cost(name, folder):
    alone, found = told(folder / "alone"), told(folder / name)
    for key in ("loss", "norm"):
        assert [step[key] for step in found] == pytest.approx([step[key] for step in alone], rel=1e-4)
    first, last = found[1], found[-1]
    for way, ranks in (("out", (0, 1)), ("in", (2, 3))):
        steady = (last[way] - first[way]) / (last["step"] - first["step"])
        assert steady == pytest.approx(sum(across(name, rank) for rank in ranks), rel=0.03), way
