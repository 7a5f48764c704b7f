"""batch_script: the text of a batch script, whose head asks for a job, and which starts ranks on all of its nodes.

A script may be written in many ways, so it is run here, with stand-ins for srun, torchrun and python, and judged by
what it starts where, and by what it does when USR1 comes while srun runs.  On a machine with Slurm, sbatch is also
asked whether it would take the script.
"""

import random
import re
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import Any

from torch.distributed.run import get_args_parser

from labs.exercises.clusters._rehearsal import FIRST, Rehearsal, rehearsed, slurms_own_word
from labs.exercises.engine.answer import Mistake, Wrong, answered, first, refuse
from labs.exercises.engine.on_paper import Sheet, each_judged

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
SIGNAL = re.compile(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@(\d+))?")
TORCHRUN = ("-m", "torch.distributed.run")
QUESTION = "What must be true of every rank before it can meet the others?"


@dataclass(frozen=True)
class JobSheet(Sheet):
    """A sheet with the hosts that the job will get, which only the script can find out.

    nodelist: the hosts as Slurm writes them.
    """

    hosts: tuple[str, ...] = ()
    nodelist: str = ""


@answered
def batch_script(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(account, partition, nodes, ranks, minutes, warning) -> text` of a batch script; return the ✓ line.

    account, partition: whose budget pays, and the queue
    nodes, ranks: the number of nodes, and of ranks on each node
    minutes: the time limit
    warning: the seconds before the limit at which the script itself gets the signal USR1
    The script runs train.py on all nodes, by torchrun or by srun alone, and its job may be put back into the queue.
    """
    draw = random.Random(seed)
    sheets = []
    for nodes, ranks in draw.sample([(2, 4), (2, 3), (3, 2), (3, 4)], 2):
        minutes, warning = draw.choice([45, 90, 150]), draw.choice([90, 120, 300])
        at, name = draw.randrange(3, 97), draw.choice(["n", "gpu-a", "node"])
        hosts = tuple(f"{name}{number:02}" for number in range(at, at + nodes))
        nodelist = f"{name}[{at:02}-{at + nodes - 1:02}]"
        arguments = (
            f"lab{draw.randrange(10, 99)}",
            draw.choice(["gpu", "batch", "a100"]),
            nodes,
            ranks,
            minutes,
            warning,
        )
        words = f"{nodes} nodes of {ranks} ranks for {minutes} minutes"
        sheets.append(JobSheet(arguments, None, words, hosts=hosts, nodelist=nodelist))
    texts = each_judged(fn, sheets, judged)
    said = slurms_own_word(texts[0])
    if said:
        raise Wrong(f"the sbatch of this machine says {said!r}", "Which line does it mean?", "sbatch does not take it")
    return "right for both jobs" if said is None else "right for both jobs, and sbatch would take it"


def judged(sheet: JobSheet, text: Any) -> str:
    """Return the text of a script that does what the sheet asks for, and raise Wrong for any other."""
    seen = Seen(sheet, text)
    refuse(MISTAKES, seen, f"{sheet}: ", QUESTION)
    return text


class Seen:
    """A script, what the sheet asks for, and what became of it."""

    def __init__(self, sheet: JobSheet, text: Any) -> None:
        self.sheet, self.text, self.hosts = sheet, text, sheet.hosts
        self.account, self.partition, self.nodes, self.ranks, self.minutes, self.warning = sheet.arguments

    @cached_property
    def became(self) -> Rehearsal:
        return rehearsed(self.text, [*self.hosts], self.sheet.nodelist)

    @property
    def head(self) -> dict[str, str]:
        return self.became.head

    @cached_property
    def signal(self) -> tuple[str, str, int | None]:
        """Return to whom the signal goes, its name, and the seconds before the limit, 60 unless they are given."""
        found = SIGNAL.fullmatch(self.head["signal"])
        to, name, seconds = found.groups() if found else ("", self.head["signal"], None)
        return to or "", "USR1" if name == "10" else name, int(seconds or 60)

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """Return the processes that the script has started by srun; those of torchrun have its parsed arguments."""
        found = []
        for start in self.became.starts:
            words, is_module = start["words"], tuple(start["words"][:2]) == TORCHRUN
            if start["program"] == "torchrun" or is_module:
                start |= understood(words[2:] if is_module else words)
            found.append(start)
        return found

    @cached_property
    def torchruns(self) -> list[dict[str, Any]]:
        return [start for start in self.starts if "error" in start]

    def address(self, start: dict[str, Any]) -> str:
        """Return the host at which a process will meet the others."""
        if "error" not in start:
            return start["MASTER_ADDR"] or ""
        its = start["its"]
        if its.rdzv_backend == "static" and not its.rdzv_endpoint:
            return its.master_addr
        return its.rdzv_endpoint.rpartition(":")[0] or its.rdzv_endpoint

    def meeting(self, start: dict[str, Any]) -> str:
        """Return the port, and the id of torchrun's rendezvous, by which a process will meet the others."""
        if "error" not in start:
            return f"port {start['MASTER_PORT']}"
        its = start["its"]
        if its.rdzv_backend == "static" and not its.rdzv_endpoint:
            return f"port {its.master_port}"
        return f"port {its.rdzv_endpoint.rpartition(':')[2]}, id {its.rdzv_id}"


def understood(words: list[str]) -> dict[str, Any]:
    """Return torchrun's arguments as its own parser reads them, and its error, if there is one."""
    said = StringIO()
    with redirect_stderr(said), suppress(SystemExit):
        return {"its": get_args_parser().parse_args(words), "error": ""}
    return {"its": None, "error": said.getvalue().strip().rpartition("error: ")[2]}


def seconds(text: str) -> int | None:
    """Return the seconds of a time limit as sbatch reads it, or None if it cannot."""
    if not (found := TIME.fullmatch(text)):
        return None
    days, *rest = found.groups()
    numbers = [int(each or 0) for each in rest]
    if days is None and rest[2] is None:  # minutes, or minutes:seconds
        numbers = [0, *numbers[:2]]
    return 86400 * int(days or 0) + 3600 * numbers[0] + 60 * numbers[1] + numbers[2]


# ---- what is wrong with the head? ------------------------------------------------------------------------

ASKED = ("account", "partition", "nodes", "time", "signal", "requeue")


def unread(seen: Seen) -> str | None:
    lost = [name for name in ASKED if name in seen.became.unread and name not in seen.head]
    return first(f"sbatch does not read --{name}" for name in lost)


def missing(seen: Seen) -> str | None:
    return first(f"its head has no --{name}" for name in ASKED if name not in seen.head)


def another_limit(seen: Seen) -> str | None:
    found, due = seconds(seen.head["time"]), 60 * seen.minutes
    says = "no time" if found is None else f"{found} s"
    return f"--time={seen.head['time']} is {says}, and not {due} s" if found != due else None


def another_value(seen: Seen) -> str | None:
    asked = {"account": seen.account, "partition": seen.partition, "nodes": str(seen.nodes)}
    differ = (f"--{name}={seen.head[name]}, and not {due}" for name, due in asked.items() if seen.head[name] != due)
    return first(differ)


def another_signal(seen: Seen) -> str | None:
    _, name, at = seen.signal
    if (name, at) == ("USR1", seen.warning):
        return None
    return (
        f"--signal={seen.head['signal']} is {name}, {at} s before the limit, and not USR1, {seen.warning} s before it"
    )


# ---- what is wrong with what it starts? ------------------------------------------------------------------


def on_one_node(seen: Seen) -> str | None:
    where = {start["host"] for start in seen.starts}
    if where != {seen.hosts[0]} and seen.starts:
        return None
    return f"it starts something on {seen.hosts[0]} alone, of {seen.nodes} nodes" if where else "it starts nothing"


def several(seen: Seen) -> str | None:
    found = [start["host"] for start in seen.torchruns]
    return first(f"{found.count(host)} torchruns run on {host}" for host in found if found.count(host) > 1)


def not_understood(seen: Seen) -> str | None:
    return first(f"torchrun says {start['error']!r}" for start in seen.torchruns if start["error"])


def each_alone(seen: Seen) -> str | None:
    for start in seen.torchruns:
        its = start["its"]
        if its.standalone or its.nnodes != str(seen.nodes):
            nodes = 1 if its.standalone else its.nnodes
            return f"the torchrun on {start['host']} waits for {nodes} of {seen.nodes} nodes"
    return None


def other_ranks(seen: Seen) -> str | None:
    for host in seen.hosts:
        here = [start for start in seen.starts if start["host"] == host]
        found = [start["its"].nproc_per_node if "error" in start else 1 for start in here]
        total = sum(map(int, found)) if all(str(each).isdecimal() for each in found) else found[0]
        if total != seen.ranks:
            return f"{total} ranks start on {host}, and not {seen.ranks}"
    return None


def other_program(seen: Seen) -> str | None:
    for start in seen.starts:
        script = start["its"].training_script if "error" in start else first(w for w in start["words"] if w[0] != "-")
        if not script or script.rpartition("/")[2] != "train.py":
            return f"it runs {script or start['program']!r}, and not train.py"
    return None


def no_address(seen: Seen) -> str | None:
    for start in seen.starts:
        if not seen.address(start):
            return f"nothing tells the process on {start['host']} which host is the first"
        if "error" not in start and not (start["MASTER_PORT"] or "").isdecimal():
            return f"MASTER_PORT is {start['MASTER_PORT']!r} on {start['host']}"
    return None


def own_names(seen: Seen) -> str | None:
    found = {start["host"]: seen.address(start) for start in seen.starts}
    if len({*found.values()}) == 1:
        return None
    return "; ".join(f"{host} looks for rank 0 at {address}" for host, address in found.items())


def not_the_first(seen: Seen) -> str | bool:
    found = seen.address(seen.starts[0])
    return (
        None
        if found in (seen.hosts[0], FIRST)
        else f"all look for rank 0 at {found!r}, and the first host is {seen.hosts[0]}"
    )


def other_meetings(seen: Seen) -> str | None:
    found = {start["host"]: seen.meeting(start) for start in seen.starts}
    if len({*map(seen.meeting, seen.starts)}) == 1:
        return None
    return "; ".join(f"a process on {host} looks for {meeting}" for host, meeting in found.items())


def all_first(seen: Seen) -> str | None:
    static = [start["its"].node_rank for start in seen.torchruns if start["its"].rdzv_backend == "static"]
    if not static or len({*static}) == seen.nodes:
        return None
    return f"without --rdzv-backend=c10d, the nodes need --node-rank, and all have {static[0]}"


# fmt: off
MEET = "At which host does rank 0 run, and which words of the script say so on each node?"
MISTAKES = (
    Mistake("not the text of a script", "What does sbatch read?",
            lambda seen: not isinstance(seen.text, str) and f"it returned {seen.sheet.read(seen.text)!r}"),
    Mistake("sbatch does not take it", "Which program shall run the script?",
            lambda seen: not seen.text.startswith("#!")
            and f"its first line is {seen.text.partition(chr(10))[0]!r}, and begins not with #!"),
    Mistake("a line for sbatch that is a comment", "How does such a line begin, and where does sbatch stop reading?",
            unread, symptom="a job in the default queue, with the default limit, and no error"),
    Mistake("a line of the head is missing", "What does Slurm take if nobody says it?", missing),
    Mistake("another time limit", "In which units does sbatch read one number, and two, and three?", another_limit),
    Mistake("the signal does not reach the script", "To whom does a signal go without B: before its name?",
            lambda seen: seen.signal[0] != "B" and f"--signal={seen.head['signal']}",
            symptom="a job that ends at its limit without a save, although it asked for a signal"),
    Mistake("another signal, or at another time", "What stands behind the @?", another_signal),
    Mistake("another value than was asked for", "Which argument belongs into this line?", another_value),
    Mistake("the script fails", "What does the shell say?",
            lambda seen: seen.became.status and not seen.became.flaw
            and f"it ends with status {seen.became.status}: {seen.became.said[-200:]}"),
    Mistake("the script ends before its training", "What does Slurm do with a job whose script has ended?",
            lambda seen: seen.became.flaw == "early" and "it ends, and srun still runs in the background",
            symptom="a job that ends after a second, without an error"),
    Mistake("only the first node works", "Who starts the command on the other nodes?", on_one_node,
            symptom="half of the nodes are idle, or the first one waits for them until its timeout"),
    Mistake("several torchruns on a node", "How many tasks does srun start on a node?", several,
            symptom="the port is in use, or each GPU has several ranks"),
    Mistake("torchrun does not understand it", "What does torchrun --help call it?", not_understood),
    Mistake("each node trains alone", "For how many nodes does each torchrun wait?", each_alone,
            symptom="two trainings of half the size, whose logs have each step twice"),
    Mistake("another number of ranks", "Who starts the ranks of a node, and how many?", other_ranks),
    Mistake("another program", "What shall run on each rank?", other_program),
    Mistake("nobody knows where to meet", MEET, no_address),
    Mistake("each node names itself", MEET, own_names,
            symptom="each node waits for the others until the timeout, without an error"),
    Mistake("not the first host", MEET, not_the_first),
    Mistake("another meeting on each node", "Which words must be the same on all nodes?", other_meetings),
    Mistake("every node says that it is the first", "How does a torchrun learn its node's number?", all_first),
    Mistake("the signal ends the script", "What does bash do at a signal for which it has no trap?",
            lambda seen: seen.became.flaw == "killed" and "USR1 ends it while srun still runs",
            symptom="a job that ends before its limit, without a save"),
    Mistake("the handler runs too late", "When does bash run a handler, if a command runs in the foreground?",
            lambda seen: seen.became.flaw == "late" and "no handler of USR1 runs while srun runs",
            symptom="a job that ends at its limit without a save, although it has a handler"),
    Mistake("the signal ends the wait, and then the script", "What ends `wait`, besides the end of the training?",
            lambda seen: seen.became.flaw == "once" and "after the handler of USR1 it ends, and srun still runs"),
)
# fmt: on
