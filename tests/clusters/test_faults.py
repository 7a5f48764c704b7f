"""The fault drill: faults strike a training on two hosts, which ends with the numbers of an undisturbed one.

After each fault, the job has gone on, was restarted by torchrun, or has ended with a sentence that says what happened
on which host; then it is started again.  References: the files of the last checkpoint of a training without faults.
"""

import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from subprocess import CalledProcessError

import pytest

from labs.clusters.settings import Checkpoints, Settings
from labs.clusters.trainer import STOP, train
from labs.kit.launch import run
from tests.clusters.two_hosts import LINK, ROOM, Host, Torchrun, kill, missing, two_hosts, wait

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PATIENCE = 100.0  # seconds for what takes one or a few
RESTARTS = 20
JOIN = 20  # seconds that torchrun waits for the other host after a failure
STOPPED = 5.0  # seconds for which a process is stopped
TIMEOUT = 15.0  # seconds that a rank waits for the other host
FOR_EVER = 1_000_000  # steps


class Drill:
    """A training on two hosts that is started again until it is done."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, settings: Settings, ranks: int) -> None:
        self.hosts, self.folder, self.each = hosts, folder, ranks
        self.settings = settings
        self.saved = hosts[0].disk_from_outside / "saved"
        self.start()

    def start(self) -> None:
        own = self.settings
        flags = ["--strategy", own.strategy, "--steps", str(own.steps), "--sample", "0", "--timeout", f"{TIMEOUT:g}"]
        flags += ["--checkpoints.folder", str(self.hosts[0].disk / "saved"), "--checkpoints.every", "1"]
        program = ("-m", "labs", "train", *flags)
        self.job = Torchrun(self.hosts, self.folder, *program, ranks=self.each, restarts=RESTARTS, join=JOIN)

    def step(self) -> int:
        """Return the number of the newest checkpoint."""
        names = [path.name for path in self.saved.iterdir()] if self.saved.exists() else []
        return max(
            (int(name.removeprefix("step-")) for name in names if name.count(".") == 0 and "-" in name), default=0
        )

    def go_on(self, steps: int = 2) -> None:
        """Wait until so many more steps are saved."""
        until = self.step() + steps
        wait(lambda: self.step() >= until or self.over(), PATIENCE, f"step {until} is not saved")
        assert self.step() >= until, self.said()

    def over(self) -> bool:
        return all(agent.poll() is not None for agent in self.job.agents.values())

    def said(self) -> str:
        return "".join(f"--- {host.name}\n{self.job.said(host)}" for host in self.hosts)

    def restarted(self, before: dict[int, int]) -> None:
        """Wait until all ranks are other processes."""
        wait(
            lambda: len(now := self.job.ranks()) == len(before) and not {*now.values()} & {*before.values()},
            PATIENCE,
            "torchrun has not restarted the ranks",
        )


# ---- the faults: each happens, and returns once the job has dealt with it ----------------------------------


def a_rank_is_killed(drill: Drill, rank: int) -> None:
    ranks = drill.job.ranks()
    kill(ranks[rank])
    drill.restarted(ranks)
    host = drill.hosts[rank // drill.each]
    assert f"failed (exitcode: -9) local_rank: {rank % drill.each} (pid: {ranks[rank]})" in drill.job.said(host)


def an_agent_is_killed(drill: Drill, rank: int) -> None:
    host = drill.hosts[rank // drill.each]
    kill(drill.job.agents[host.name].pid)
    assert all(drill.job.finish(PATIENCE))
    wait(lambda: not any(each.processes() for each in drill.hosts), PATIENCE, "something is left running")
    assert f"RankError: on {host.name}, the launcher of " in drill.job.said(host)
    drill.start()


def the_link_is_down(drill: Drill, rank: int) -> None:
    ranks = drill.job.ranks()
    host = drill.hosts[rank // drill.each]
    host.link("down")
    wait(lambda: not {*ranks.values()} & {*drill.job.ranks().values()}, PATIENCE, "the ranks still wait")
    host.link("up")
    for each in drill.hosts:
        assert f"RankError: on {each.name}, " in drill.job.said(each)
        assert f"waited {TIMEOUT:g} s for " in drill.job.said(each)
    # The two torchruns meet again, unless one has given up before TCP has sent again what was lost.
    wait(lambda: drill.over() or len(drill.job.ranks()) == len(ranks), PATIENCE, "the job neither goes on nor ends")
    if drill.over():
        drill.start()


def the_link_is_slow(drill: Drill, rank: int) -> None:
    ranks, host = drill.job.ranks(), drill.hosts[rank // drill.each]
    shape = ["dev", LINK, "root", "tbf", "rate", "5mbit", "burst", "16kb", "latency", "100ms"]
    host.do("tc", "qdisc", "add", *shape)
    drill.go_on(1)
    host.do("tc", "qdisc", "del", "dev", LINK, "root")
    assert drill.job.ranks() == ranks


def the_disk_is_full(drill: Drill, rank: int) -> None:
    ranks, disk = drill.job.ranks(), str(drill.hosts[0].disk)
    wait(lambda: cut(drill), PATIENCE, "the disk has not become smaller")
    wait(lambda: {*drill.job.ranks().values()} != {*ranks.values()}, PATIENCE, "no save has failed")
    drill.hosts[0].do("mount", "-o", f"remount,size={ROOM}", disk)
    drill.restarted(ranks)
    assert re.search(r"OSError: .*No space left on device.*make room, or save to another folder", drill.said())


def cut(drill: Drill) -> bool:
    """Make the disk as small as what is on it; return whether this was possible: a save may have grown meanwhile."""
    used = shutil.disk_usage(drill.saved).used
    try:
        drill.hosts[0].do("mount", "-o", f"remount,size={used}", str(drill.hosts[0].disk))
    except CalledProcessError:
        return False
    return True


def a_process_is_stopped(drill: Drill, rank: int) -> None:
    ranks = drill.job.ranks()
    kill(ranks[rank], SIGSTOP)
    time.sleep(STOPPED)
    kill(ranks[rank], SIGCONT)
    drill.go_on(1)
    assert drill.job.ranks() == ranks


FAULTS: list[Callable[[Drill, int], None]] = [
    a_process_is_stopped, the_link_is_slow, a_rank_is_killed, the_disk_is_full, an_agent_is_killed, the_link_is_down,
]  # fmt: skip


def drilled(folder: Path, strategy: str, ranks: int, faults: list[tuple[Callable[[Drill, int], None], int]]) -> None:
    """Train with these faults, each of which strikes a rank or its host, and compare with a training without any."""
    settings = Settings(strategy=strategy, steps=FOR_EVER, sample=0)
    with two_hosts() as hosts:
        drill = Drill(hosts, folder, settings, ranks)
        for fault, rank in faults:
            drill.go_on()
            fault(drill, rank)
        (drill.saved / STOP).touch()
        assert drill.job.finish(PATIENCE) == [0, 0], drill.said()
        assert [host.processes() for host in hosts] == [[], []]
        steps = drill.step()
        calm = replace(settings, steps=steps, checkpoints=Checkpoints(folder, every=steps))
        run(train, calm, ranks=2 * ranks, timeout=PATIENCE)
        assert parameters(drill.saved / f"step-{steps}") == parameters(folder / f"step-{steps}")


def parameters(checkpoint: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    assert found
    return found


def test_a_training_lives_through_each_of_six_faults(tmp_path):
    drilled(tmp_path, "fsdp", 1, [(fault, number % 2) for number, fault in enumerate(FAULTS)])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_a_training_lives_through_ten_faults_drawn_at_random(seed, tmp_path):
    drawn = random.Random(seed)
    strategy = drawn.choice(["fsdp-tp", "hsdp", "pp-fsdp"])
    drilled(tmp_path, strategy, 2, [(drawn.choice(FAULTS), drawn.randrange(4)) for _ in range(10)])
