"""A check's job: the learner's function on some ranks, and the sentence for a job that fails.

The launcher reports what a rank raises and where ranks hang; a check passes its report on, with the learner's own line.
"""

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.exercises.engine.answer import LUCK, NOT_DONE, Mistake, Wrong
from labs.kit.launch import RankError, Results, run
from labs.kit.record import Event
from labs.kit.watch.stack_frames import EXERCISES, KIT, TORCH

SECONDS = 10.0  # processor time of a rank in one job; a certain deadlock is reported after a second or two
PATIENCE = 6  # × that in wall-clock time, if every rank has a core
ROOM = 2 << 30  # bytes that a rank may allocate, on systems that enforce such a limit (Linux)
FRAME = re.compile(
    r'^\s*(?:File "(?P<file>.+)"|(?P<cell>Cell)), line (?P<line>\d+), in (?P<name>.+)\n\s*(?P<source>.*)', re.M
)
UNTOUCHED = re.compile(r"failed: NotImplementedError(: your turn.*)?$", re.M)


def because(kind: str, pattern: str = "") -> Callable[[RankError], bool]:
    """Return a row's test: whether a failed job's error is of this kind, and its text contains the pattern."""
    return lambda error: error.kind == kind and bool(re.search(pattern, str(error)))


def of_other_sizes(error: RankError) -> bool:
    """Return whether the ranks call one collective with several sizes, or a message does not fit its receiver."""
    headline = str(error).splitlines()[0]
    calls = re.findall(r" called (\w+)(?: \w+(\[.*?\]))?", headline)
    same = len({op for op, _ in calls}) == 1 and len({shape for _, shape in calls}) > 1
    return error.kind == "mismatch" and (same or "the sizes of a message" in headline)


def of_other_dtypes(error: RankError) -> bool:
    """Return whether the ranks agree on the call and on the number of elements, but not on the dtype."""
    headline = str(error).splitlines()[0]
    calls = re.findall(r" called (\w+) (\w+)(\[.*?\])", headline)
    same = len({(op, shape) for op, _, shape in calls}) == 1 < len({dtype for _, dtype, _ in calls})
    return error.kind == "mismatch" and (same or "the dtype of a message" in headline)


NEVER_ENDS = "it does not come to an end"


class NoEnd(BaseException):
    """An error that a rank raises after too much processor time: wall-clock time does not show which rank loops."""

    __module__ = "builtins"  # tracebacks then show the name alone


# fmt: off
FAILURES = (
    Mistake(NEVER_ENDS, "Which loop has no end on this rank?", because("raised", " failed: NoEnd: ")),
    Mistake("far too much memory", "How many bytes does this line allocate, and how many was the function given?",
            because("raised", "can't allocate memory|MemoryError")),
    Mistake("", "This name is not known in this notebook: is it spelt right, and is it imported, or defined in a cell?",
            because("raised", " failed: NameError: name")),
    Mistake("", "Which arguments does this function take, and which is it given?",
            because("raised", r" failed: TypeError: .*\(\) (missing|takes|got) ")),
    Mistake("", "What type does each thing on this line have?",
            because("raised", " failed: (TypeError|AttributeError): ")),
    Mistake("", "What does this line assume that does not hold for this input?", because("raised")),
    Mistake("a rank died", "What do you write to, here or before, and how many bytes does it have at that moment?",
            because("died", "SIG(SEGV|ABRT|BUS)")),
    Mistake("a rank died", "What could end a process from outside of Python?", because("died")),
    Mistake("not the same dtype on every rank",
            "The elements are as many on both sides, the bytes are not. What dtype has the tensor on each rank?",
            of_other_dtypes),
    Mistake("the ranks make different calls", "How large is what each rank hands over here, and may the sizes differ?",
            of_other_sizes),
    Mistake("the ranks make different calls",
            "Which ranks take this line, and does each of them take it as often as the others?", because("mismatch"),
            symptom="a job that hangs, and the diagnosis names two lines"),
    Mistake("one side of a message or a collective is missing",
            "Which ranks come to this line, and which leave the function before it?",
            because("returned", "without joining collective")),
    Mistake("one side of a message or a collective is missing",
            "How often does each rank send, and how often does its neighbour receive?", because("returned"),
            symptom="a job that hangs, and one rank has returned"),
    Mistake("there is no such rank", "What is the number of the last rank?", because("nobody")),
    Mistake("the ranks wait for each other", "Which rank could go first, if each waits for another?",
            because("deadlock"), symptom="a hang in a ring of blocking calls"),
    Mistake(NOT_DONE, "Is the machine busy with something else? If it is not, what does this line wait for?",
            because("timeout")),
)
# fmt: on


def job(
    body: Callable[..., Any],
    *args: Any,
    ranks: int,
    record: str | None = "communication",
    seconds: float | None = None,
) -> Results:
    """Run `body` on CPU ranks and return the results; raise Wrong if the job fails or the stub is untouched.

    seconds: processor time after which a rank counts as endless; SECONDS if it is left out.
    """
    seconds = seconds or SECONDS
    when = "on one rank" if ranks == 1 else f"on {ranks} ranks"
    try:
        limit = patience(seconds)
        return run(in_a_room, seconds, body, *args, ranks=ranks, record=record, timeout=limit, device="cpu")
    except RankError as error:
        raise failed(error, when) from None


def patience(seconds: float) -> float:
    """Return the wall-clock seconds in which a rank gets so many seconds of processor time on this machine."""
    return PATIENCE * seconds * max(1.0, load() / cores())


def load() -> float:
    """Return how many processes wanted a core in the last minute, on average."""
    return os.getloadavg()[0]


def cores() -> int:
    return os.cpu_count() or 1


def in_a_room(seconds: float, body: Callable[..., Any], *args: Any) -> Any:
    """Return `body(*args)` on a rank, within limits of memory and time, so that other programs do not suffer."""
    status = Path("/proc/self/status")
    if status.exists():
        held = 1024 * int(re.search(r"VmData:\s+(\d+)", status.read_text())[1])
        resource.setrlimit(resource.RLIMIT_DATA, (held + ROOM, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    signal.signal(signal.SIGPROF, no_end)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again every second, if the function catches the error
    try:
        return body(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def no_end(*_: Any) -> None:
    """Raise NoEnd, as the handler of the signal SIGPROF."""
    raise NoEnd("its processor has computed for much longer than any answer takes")


def failed(error: RankError, when: str) -> Wrong:
    """Return the verdict on a failed job: the launcher's report, shortened to the learner's own lines."""
    headline, *rest = str(error).split("\n\n")[0].splitlines()
    if UNTOUCHED.search("\n".join([headline, *rest])):
        return Wrong("untouched")
    mistake = next(mistake for mistake in FAILURES if mistake.matches(error))
    if error.kind == "raised":
        report = [f"{when}, {headline}", *rest, *own_lines(str(error))]
    else:
        report = [f"{when}: {headline}", *str(error).splitlines()[1:]]
    if mistake.name == NOT_DONE:
        report.insert(0, f"{NOT_DONE}; this machine has a load of {load():.1f}, and {cores()} cores")
    return Wrong("\n".join(report), mistake.question, mistake.name, raised=error.kind == "raised")


def own_lines(trace: str) -> list[str]:
    """Return a list with the innermost line of a traceback that is the learner's own, or an empty list."""
    frames = [
        m for m in FRAME.finditer(trace) if m["cell"] or not m["file"].startswith((KIT, EXERCISES, TORCH, "<frozen"))
    ]
    if not frames:
        return []
    last = frames[-1]
    place = "cell" if last["cell"] else last["file"].rsplit("/", 1)[-1]
    return [f"{place}, line {last['line']}, in {last['name']}:   {last['source'].strip()}"]


def noted(case: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return `fn(*args, **options)`; add to any error that it raises a note with the case that was tried."""
    try:
        return fn(*args, **options)
    except Exception as error:
        error.add_note(f"(with {case})")
        raise


def blame_luck(wrong: Wrong, events: list[Event]) -> Wrong:
    """Return the verdict that nobody waited for a call, if that is so; otherwise return the given verdict.

    Calls of C++ code are left out, because its waits are not recorded.
    """
    hasty = [event for event in events if not event.waited and event.op != "barrier" and "C++" not in event.issuer]
    if not hasty or wrong.answer.mistake in (*LUCK, "not a wrapper"):
        return wrong
    text = f"{wrong.answer.text}\nNobody waited for the {hasty[0].op} of {hasty[0].issuer} on rank {hasty[0].rank}."
    return Wrong(text, NOBODY_WAITED.question, NOBODY_WAITED.name)


NOBODY_WAITED = Mistake("nobody waited", "When is the result of a call with async_op=True available?", lambda _: True)
