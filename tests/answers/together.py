"""Many answers in one job: a check takes most of its time to start the ranks, and one job shows most wrong answers.

Each check runs in a thread of its own.  Instead of starting a job, it asks a desk for one, and waits.  When all checks
wait, those that ask for the same number of ranks and the same recording get one job: each rank runs one answer after
the other, and each check gets its own part of the recording.

The first worlds of the first job show most wrong answers, so that only answers that pass these are tried on all worlds.
Answers that are known to be right are tried on all worlds at once.

An answer's error comes back in the launcher's own words.  An answer that raises on some ranks only, or in the middle of
messages, is tried again alone; the former ends the job for the answers behind it, which get another job.  An answer
that hangs or kills its ranks would end the others, too: it is marked `alone`.  Jobs that measure the bytes held also
run alone, since each answer would see what the one before it left.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist

from labs.exercises.engine import by_script, learner_job, scripts
from labs.exercises.engine import on_ranks as ranks
from labs.kit import check
from labs.kit.launch import RankError, Results, run
from labs.kit.ranks import worker
from labs.kit.ranks.team import Failure, caused
from labs.kit.record import Recording, TimePass, mark

AT_ONCE = 32  # answers in one job
SEED = 1  # the same numbers in every run of the tests; `make soak` tries others


@dataclass
class Request:
    """A job that a check asks for, and its results or its error."""

    body: Any
    args: tuple
    options: dict[str, Any]
    alone: bool
    results: Results | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def kind(self) -> tuple:
        return self.options["ranks"], self.options["record"]


class Desk:
    """A desk at which checks ask for jobs."""

    def __init__(self, checks: int) -> None:
        self.at_work, self.requests, self.launches = checks, [], 0
        self.changed = threading.Condition()
        self.mine = threading.local()

    def run(self, body, *args, **options) -> Results:
        """Ask for a job, wait for it, and return its results: the `run` of the checks' threads."""
        request = Request(body, args, options, alone=self.mine.alone or options["record"] == "memory")
        with self.changed:
            self.requests.append(request)
            self.at_work -= 1
            self.changed.notify()
        request.done.wait()
        if request.error:
            raise request.error
        return request.results

    def play_worlds(self, script: Any, functions: tuple, worlds: Sequence[Any], judge: Any) -> tuple:
        """Play the worlds, and in a check's first job a quarter of them before all: the engines' `play_worlds`."""
        if self.mine.begins and len(worlds) > 1:
            scripts.play_worlds(script, functions, worlds[: max(1, len(worlds) // 4)], judge)
        self.mine.begins = False
        return scripts.play_worlds(script, functions, worlds, judge)

    def leave(self) -> None:
        with self.changed:
            self.at_work -= 1
            self.changed.notify()

    def serve(self) -> None:
        """Launch the jobs that checks ask for, until no check is left."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.at_work == 0)
                requests, self.requests = self.requests, []
                self.at_work = len(requests)
            if not requests:
                return
            kinds = defaultdict(list)
            for number, request in enumerate(requests):
                kinds[number if request.alone else request.kind].append(request)
            for alike in kinds.values():
                for first in range(0, len(alike), AT_ONCE):
                    self.launch(alike[first : first + AT_ONCE])
            for request in requests:
                request.done.set()

    def launch(self, requests: list[Request]) -> None:
        while len(requests) > 1:
            requests = self.launch_together(requests)
        for request in requests:
            self.launch_alone(request)

    def launch_alone(self, request: Request) -> None:
        self.launches += 1
        try:
            request.results = run(request.body, *request.args, **patient(request.options))
        except BaseException as error:
            request.error = error

    def split(self, requests: list[Request], error: RankError) -> None:
        """Launch the halves of a job that failed: one of its answers should be marked `alone`, but which?"""
        names = ", ".join(getattr(request.args[-2], "__name__", "?") for request in requests)
        print(f"one of {names} is to be marked `alone`: {str(error).splitlines()[0]}")
        half = len(requests) // 2
        self.launch(requests[:half])
        self.launch(requests[half:])

    def launch_together(self, requests: list[Request]) -> list[Request]:
        """Launch one job; return the requests that are left: those behind an answer that raised on some ranks only."""
        self.launches += 1
        options = patient(requests[0].options, len(requests))
        try:
            results = run(one_after_the_other, [(r.body, r.args) for r in requests], **options)
        except RankError as error:
            self.split(requests, error)
            return []
        for request, values in zip(requests, zip(*results, strict=True), strict=False):
            if any(isinstance(value, bytes) for value in values):
                self.raised(request, values)
                continue
            request.results = Results(value for value, _ in values)
            if results.recording:
                request.results.recording = part(results.recording, [steps for _, steps in values])
        return requests[len(results[0]) :]

    def raised(self, request: Request, values: tuple) -> None:
        if not all(isinstance(value, bytes) for value in values):
            return self.launch_alone(request)
        failures = {rank: Failure(*cloudpickle.loads(value)[1]) for rank, value in enumerate(values)}
        if any("gloo" in failure.sentence.lower() for failure in failures.values()):  # the launcher may know better
            return self.launch_alone(request)
        request.error = caused(failures, len(values))


def patient(options: dict[str, Any], answers: int = 1) -> dict[str, Any]:
    """Return options with more time: other tests run beside these, and what is certain to hang is found at once."""
    return options | {"timeout": options["timeout"] * (3 + answers)}


def one_after_the_other(jobs: list[tuple[Any, tuple]]) -> list[tuple[Any, range] | bytes]:
    """Run the jobs on a rank; return what each returned and the steps that it marked, or its failure if it raised.

    The last one is the first that raised on some ranks only, since the other ranks may wait for these.
    """
    guard, done = dist.new_group(), []
    for body, args in jobs:
        first, failure = steps(), b""
        try:
            value = body(*args)
        except Exception as error:
            failure = worker.failure(error, error.with_traceback(error.__traceback__.tb_next))
        mark("end")
        failed = torch.tensor(float(bool(failure)))
        dist.all_reduce(failed, group=guard)
        done.append(failure or (value, range(first, steps())))
        if 0 < failed < dist.get_world_size():
            break
    return done


def steps() -> int:
    return sum(name == "step" for name, _ in TimePass.active.marks) if TimePass.active else 0


def part(recording: Recording, steps: list[range]) -> Recording:
    """Return the part of a recording that has these steps, a range for each rank."""
    events = [event for event in recording.events if event.step is not None and event.step in steps[event.rank]]
    spans = [span for rank, own in enumerate(steps) for span in recording.step_spans(rank)[own.start : own.stop]]
    return replace(
        recording, events=[replace(event, step=event.step - steps[event.rank].start) for event in events], spans=spans
    )


def together(asked: list[tuple], seed: int | None = SEED) -> list[Any]:
    """Return what each check says of its functions, in this order.

    asked: (check, functions, whether they need a job alone, whether they are right) for each
    """
    desk, said = Desk(len(asked)), {}

    def ask(number: int, name: str, functions: tuple, alone: bool, right: bool = False) -> None:
        desk.mine.alone, desk.mine.begins = alone, not right
        try:
            said[number] = getattr(check, name)(*functions, seed=seed)
        finally:
            desk.leave()

    threads = [threading.Thread(target=ask, args=(number, *one), daemon=True) for number, one in enumerate(asked)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(learner_job, "run", desk.run))
        for engine in (by_script, ranks):
            stack.enter_context(mock.patch.object(engine, "play_worlds", desk.play_worlds))
        for thread in threads:
            thread.start()
        desk.serve()
        for thread in threads:
            thread.join()
    return [said[number] for number in range(len(asked))]
