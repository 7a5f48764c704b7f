"""Tests of the doctor in a job: what it says of hosts that are alike, and of hosts that differ."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from labs.kit.commands.doctor_in_a_job import AxisLink, GiB, Survey, assumed, axes_of, report

ROOT = Path(__file__).parents[3]
ONE = Survey("n1", "PyTorch 2.13.0, gloo", (), ("eth0",), (), 4096, -1, GiB, True, 0.0)


def statuses(*seen: Survey) -> dict[str, tuple[str, str]]:
    return {line.what: (line.status, line.found) for line in report(list(seen))}


def test_torchrun_starts_it_on_every_rank_and_one_prints():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "labs"]
    done = subprocess.run([*command, "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"(?m)^ok    versions ", done.stdout)) == 1
    link = r"ok    link       ranks, 2 ranks inside a host: [\d,]+ µs, \d+\.\d\d GB/s\n +labs.cost assumes "
    assert len(re.findall(link, done.stdout)) == 1
    assert not list(ROOT.glob(".doctor-*"))


def test_hosts_that_are_alike_are_fine():
    assert {status for status, _ in statuses(ONE, replace(ONE, host="n2")).values()} == {"ok"}


def test_hosts_that_differ_are_named():
    other = replace(ONE, host="n2", versions="PyTorch 2.12.0, gloo", unresolved=("n1",), files=256, shared=1, ahead=3.2)
    found = statuses(ONE, replace(other, folder=False))
    assert found["versions"] == ("FAIL", "PyTorch 2.13.0, gloo, on n1; PyTorch 2.12.0, gloo, on n2")
    assert found["folder"] == ("FAIL", "n2 does not see rank 0's folder")
    assert found["names"] == ("warn", "not resolved: {'n2': ('n1',)}")
    assert found["clock"] == ("warn", "seconds ahead of rank 0: {'n2': 3.2}")
    assert found["files"] == ("warn", "{'n2': 256}") and found["shared"] == ("warn", "{'n2': 1}")


def test_each_axis_has_the_links_that_it_may_have():
    assert axes_of("dp=2,tp=2", ["a", "a", "b", "b"]) == {"dp": 2, "tp": 2}
    assert axes_of("", ["a", "a", "b", "b"]) == {"hosts": 2, "ranks": 2}
    assert axes_of("", ["a", "a", "b"]) == {"ranks": 3}
    [line] = [line for line in report([ONE], [AxisLink("dp", 2, True, 1e-3, 1e9)]) if line.what == "link"]
    assert line.found == "dp, 2 ranks between hosts: 1,000 µs, 1.00 GB/s"
    said = "labs.cost assumes 9 µs, 50 GB/s by InfiniBand, 400 Gb/s; 17 µs, 1.25 GB/s by Ethernet, 10 Gb/s"
    assert line.remedy == said
    assert "NVLink" not in assumed(AxisLink("tp", 16, False, 1e-3, 1e9))  # more ranks than such links join
