"""Tests of the checker: it says about the jobs of cases.py what published threads report of NCCL, and what mended it.

All of them run in one job, a step for each; the claim includes that gloo's cases run to their end.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labs.kit.drawing.deadlock_circle import circle
from labs.kit.dry import dry
from labs.kit.launch import run
from labs.kit.nccl.would_hang import HANGS, SOUND, WRONG, would_hang
from labs.kit.record import Recording
from tests.kit.nccl.cases import CASES, pretended, run_all


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recording]:
    """Return the recordings by case."""
    real, unreal = ([case for case in CASES if case.backend == backend] for backend in ("gloo", "fake"))
    job = run(run_all, real, ranks=4, device="cpu", record="order")
    return split(job.recording, real) | split(pretended(unreal), unreal)


def split(whole: Recording, cases) -> dict[str, Recording]:
    return {
        case.name: replace(whole, events=[event for event in whole.events if event.step == step])
        for step, case in enumerate(cases)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_published_cases(case, recorded):
    verdict = would_hang(recorded[case.name])
    assert verdict.name == case.verdict, (case.thread, verdict)
    assert case.told in repr(verdict), case.thread


def test_a_dry_run_gives_the_same_verdicts_on_memory():
    """Check all cases of memory except coalesced ones, for which PyTorch's fake tensors have no kernel."""
    cases = [case for case in CASES if case.thread.startswith("rule 7") and "coalesced" not in case.name]
    found = split(dry(run_all, cases, ranks=4, rank=range(4)).communication, cases)
    assert {case.name: would_hang(found[case.name]).name for case in cases} == {
        case.name: case.verdict for case in cases
    }


# ---- input and output ------------------------------------------------------------------------------------


def asked(job, ranks=None):
    recording = pretended([SimpleNamespace(job=job)])
    return would_hang(recording if ranks is None else of_ranks(recording, ranks), ranks)


def of_ranks(recording: Recording, ranks) -> Recording:
    return replace(recording, events=[event for event in recording.events if event.rank in ranks])


def test_ranks_that_were_not_recorded_do_what_they_are_asked_for():
    def job(rank, g):
        dist.all_reduce(torch.ones(4), group=g.world)
        if rank < 2:
            dist.recv(torch.ones(4), 2)
            dist.recv(torch.ones(4), 1 - rank)

    assert asked(job).name == asked(job, ranks=[0, 1]).name == HANGS
    assert asked(job, ranks=[0]).name == asked(job, ranks=[1, 3]).name == SOUND


def test_what_nccl_refuses_at_once_is_an_error():
    with pytest.raises(ValueError, match=r"rank 0 has a recv of 4 bytes from anyone \(.*\): .* name the sender"):
        asked(lambda rank, g: dist.irecv(torch.ones(1)))
    with pytest.raises(ValueError, match=r'record="communication"'):
        would_hang(Recording("time", 2))
    with pytest.raises(ValueError, match=r"ranks=\[0, 9\]: \[9\] are not in the recording, which has \[0, 1\]"):
        would_hang(Recording("communication", 2), [0, 9])


def test_the_gravest_finding_is_the_verdict():
    def job(rank, g):
        dist.all_reduce(torch.ones(4 + rank))
        if rank:
            dist.all_reduce(torch.ones(4))

    verdict = asked(job)
    assert verdict.name == HANGS
    assert [finding.verdict for finding in verdict.findings] == [HANGS, WRONG]
    assert repr(verdict).startswith("hangs for certain: rank 1 stands at all_reduce of 16 bytes (test_would_hang.py:")


def test_a_circle_is_drawn_and_reported():
    def job(rank, g):
        if rank < 3:
            dist.recv(torch.ones(4), (rank + 1) % 3)

    picture = asked(job)._repr_mimebundle_()
    assert picture["text/plain"].startswith("hangs for certain: rank 0 stands at recv of 16 bytes from 1")
    drawing = circle(asked(job).standstill)
    assert drawing.alt.startswith("3 ranks wait for each other. rank 0 stands at recv of 16 bytes from 1")
    assert picture["text/html"] == drawing.html and drawing.svg.count("<circle") == 3
    assert asked(lambda rank, g: dist.barrier())._repr_mimebundle_() == {"text/plain": "sound: 4 calls of 4 ranks"}


def test_a_call_that_never_comes_is_drawn_and_reported():
    def job(rank, g):
        if rank < 3:
            dist.all_reduce(torch.ones(4))

    drawing = circle(asked(job).standstill)
    assert drawing.alt.startswith("rank 3 never comes. rank 0 stands at all_reduce of 16 bytes")
