"""The call that runs a function on several ranks, `run`: a job is a function call with a value.

    losses = run(train, steps=20, ranks=4)     # losses[2] is what rank 2 returned

Every rank is a process with a process group.  The same call works in a notebook cell, a script and a test, under
torchrun, where each process already is a rank, and in a cluster's queue, with on=Slurm(...) (slurm.py).  The output of
the ranks appears live, each line after its rank's number.

    a rank raises        RankError with that rank's traceback, naming the rank that failed first
    a rank dies          RankError with the signal
    ranks hang           RankError that says, per rank, the collective, the group and the line (diagnosis.py)
    an interrupt         KeyboardInterrupt that says on which line each rank was; every rank is stopped

With restarts=3, all ranks are started again after a rank has raised or died, at most three times, as torchrun's elastic
agent does: `fn` is called anew, and continues from its last checkpoint (see labs.checkpoint).

The course has its own launcher, since each of ten other launchers that were measured names the wrong rank after a
failure, leaves processes behind when the kernel is killed, or takes seconds to start a job, which takes 0.1 s here.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from labs.kit.ranks import slurm, torchrun
from labs.kit.ranks.devices import devices_for
from labs.kit.ranks.diagnosis import RankError
from labs.kit.ranks.link import Link
from labs.kit.ranks.output import say
from labs.kit.ranks.payload import pickled
from labs.kit.ranks.team import FORKSERVER, RESTARTED, Team
from labs.kit.ranks.torch_settings import settings

MOST_RANKS = 64
RECORDS = ("time", "communication", "order", "memory")
MOST_TEXT = 300  # characters of a rank's error that are printed before a restart
T = TypeVar("T")


class Results(list[T]):
    """The values that the ranks of a job returned, in order of rank.

    recording: the recording of the job, if one was asked for; after restarts, it begins at the last restart.
    restarts: the number of times that all ranks were started again.
    """

    recording: Any = None
    restarts: int = 0


def run(
    fn: Callable[..., T],  # not typed with a ParamSpec, which does not allow run's own keywords beside those of fn
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    longest_wait: float = math.inf,
    record: str | None = None,
    link: Link | None = None,
    tell: str = "",
    restarts: int = 0,
    on: slurm.Slurm | None = None,
    **kwargs: Any,
) -> Results[T]:
    """Call `fn(*args, **kwargs)` on every rank, each a process in one process group, and return the ranks' values.

    `fn`, its arguments and its value may be anything that cloudpickle can send, such as a function from a cell.  The
    ranks have the same PyTorch settings as this process; ranks/torch_settings.py has the list.

    ranks: the number of ranks, 1 to 64; if left out, 4, or under torchrun as many as torchrun has started.
    device: "cpu" (gloo), "cuda" (NCCL), or "auto": CUDA when there is a GPU for each rank.  On CUDA, new tensors are on
        the rank's GPU by default, so that the body of `fn` is the same everywhere.
    timeout: the seconds after which an unfinished job is stopped, with a report of the line on which each rank stands;
        a restart begins the count anew.
    longest_wait: under torchrun, the seconds after which the job fails if ranks of a host wait for others, and none of
        them has made a call: the link is down, or another host has stopped.
    record: "time", "communication", "order" or "memory", the kind of recording to make (record.py); the result's
        `.recording` has the recording.
    link: slow links between nodes, such as Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3).  The job then runs on
        the CPU (ranks/link.py, ranks/link_delay.py).
    tell: the words to print while a job of some seconds runs: "stage 2" becomes "stage 2, 4 ranks … 6 s".
    restarts: the number of times to start all ranks again after a rank has raised or died; each restart prints a line.
        `fn` is called with the same arguments, and os.environ["TORCHELASTIC_RESTART_COUNT"] is "0", "1", ...  A job is
        not restarted after an interrupt or a timeout, or if ranks disagree, since they would disagree again.  Under
        torchrun, torchrun itself restarts in all of these cases: give the number of its --max-restarts, or leave
        `restarts` out, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun.
    on: the nodes of a cluster on which the ranks run, such as Slurm(nodes=2, folder="~/jobs").  The job waits in the
        cluster's queue, and an interrupt cancels it.
    Raises ValueError for arguments that cannot work, TypeError if `fn` cannot be sent, and RankError if the job fails.
    """
    world = torchrun.world()
    check_on(on, link, restarts, world)
    check_arguments(fn, ranks, timeout, record, restarts, world, on.nodes if on else 1)
    check_link(link, ranks or 4, device, world)
    if world:
        values = torchrun.join(fn, args, kwargs, device, timeout, longest_wait, record)
        return to_results(values, record, restarts=int(os.environ[RESTARTED]))
    ranks = 4 if ranks is None else ranks
    what_is_set = settings()
    if on:
        say(f"{tell}:\n" if tell else "")
        values = slurm.run_on(on, pickled(fn, args, kwargs), ranks, device, timeout, record, what_is_set)
        return to_results(values, record)
    devices = devices_for("cpu" if link and device == "auto" else device, ranks)
    payload = pickled(fn, args, kwargs)
    restarted = 0
    while True:
        try:
            team = Team(devices, payload, ranks, timeout, record, link, restarted, what_is_set)
            with telling(tell, ranks), team:
                values = team.finish()
            return to_results(values, record, link, restarted)
        except KeyboardInterrupt as interrupt:  # its message has the ranks' lines; hide our frames
            raise interrupt.with_traceback(None) from None
        except RankError as error:
            if error.kind not in ("raised", "died") or restarted == restarts:
                raise
            restarted += 1
            what = str(error).partition("\n")[0]
            say(f"{what:.{MOST_TEXT}}; all ranks are started again ({restarted} of {restarts})\n")


@contextmanager
def telling(what: str, ranks: int) -> Iterator[None]:
    if not what:
        yield
        return
    began = time.monotonic()
    say(f"{what}, {ranks} rank{'s' * (ranks > 1)} … ")
    try:
        yield
    finally:
        say(f"{time.monotonic() - began:.0f} s\n")


def check_arguments(
    fn: Any, ranks: Any, timeout: Any, record: Any, restarts: Any, world: int | None, nodes: int
) -> None:
    if not callable(fn):
        raise TypeError(f"run() calls its first argument on every rank; {fn!r:.80} is not a function (is it a value?)")
    if inspect.iscoroutinefunction(fn):
        name = fn.__name__
        raise TypeError(f"{name} is a coroutine function, whose call has no value yet: lambda: asyncio.run({name}())")
    most = MOST_RANKS * nodes
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= most):
        raise ValueError(f"ranks={ranks!r}: a job has 1 to {most} ranks; more than that takes several machines")
    if world and ranks not in (None, world):
        raise ValueError(f"ranks={ranks}, but torchrun started {world}: leave ranks out, or start that many")
    if not isinstance(timeout, numbers.Real) or math.isnan(timeout) or timeout <= 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0")
    if record is not None and record not in RECORDS:
        raise ValueError(f"record={record!r}: give one of {', '.join(map(repr, RECORDS))}, or None")
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts={restarts!r}: give the number of times to start all ranks again, 0 or more")
    if world and restarts not in (0, its := int(os.environ["TORCHELASTIC_MAX_RESTARTS"])):
        raise ValueError(
            f"restarts={restarts}, but it is torchrun that restarts, at most {its} times: leave restarts out, or start "
            f"it with --max-restarts {restarts}"
        )
    if "LABS_RANK" in os.environ:
        raise RuntimeError("run() was called inside a rank: a job cannot start another job")


def check_on(on: Any, link: Any, restarts: Any, world: int | None) -> None:
    if on is None:
        return
    if not isinstance(on, slurm.Slurm):
        raise TypeError(f'on={on!r:.80} is not a Slurm: Slurm(nodes=2, folder="~/jobs") is one')
    if world:
        raise ValueError("on= is for ranks that run() starts: under torchrun they have started, leave `on` out")
    if link:
        raise ValueError("link= with on=: only links on this machine are emulated; leave one of them out")
    if restarts:
        raise ValueError(f"restarts={restarts} with on=: a job in a queue is not started again; leave restarts out")


def check_link(link: Any, ranks: int, device: str, world: int | None) -> None:
    if link is None:
        return
    if not isinstance(link, Link):
        raise TypeError(f'link={link!r:.80} is not a Link: Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3) is one')
    if world:
        raise ValueError("link= is for ranks that run() starts itself: under torchrun links are real, leave link out")
    link.node(0, ranks)  # raises if the number of nodes does not divide the number of ranks
    if device == "cuda":
        raise ValueError('device="cuda" with link=: only gloo can be slowed here, on the CPU; leave one of them out')


def to_results(
    values: list[tuple[T, Any]], record: str | None, link: Link | None = None, restarts: int = 0
) -> Results[T]:
    results = Results(value for value, _ in values)
    results.restarts = restarts
    if record:
        from labs.kit.record import join as join_tapes

        results.recording = join_tapes(record, [tape for _, tape in values], link)
    return results


if "LABS_RANK" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
    FORKSERVER.start()  # at import, since the fork server's own imports take a second or two in the background
