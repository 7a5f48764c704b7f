"""Diagnosis of a failed job: which ranks caused the failure, and what every other rank was doing.

    Watch.poll()   compares the ranks' flight records while the job runs, and finds a certain failure:
                   - a group's nth collective differs between ranks in op, root, dtype or shape;
                   - a send and its receive differ in size;
                   - a rank has returned without joining a collective that the other ranks called;
                   - ranks wait for each other in a circle (deadlock).
    stacks()       finds, at the timeout, the learner's line on which each rank stands

gloo completes some mismatched collectives, so a wrong program may run to its end; its flight records show the mismatch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field

import psutil

from labs.kit.ranks.flight_recorder import ANY_SOURCE, NEW_GROUP, Entry, Reader
from labs.kit.watch.stack_frames import is_machinery, show_line

STOPPED = "is stopped"
IN_A_THREAD = "waits, in a thread, in"
FUNCTION_RUNS = re.compile(r'worker\.py", line \d+ in (watched|main)\n')  # in the stack of the function's thread
SETTLED = 10  # a deadlock is reported after so many polls in a row in which the same ranks wait for the same calls
PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|closed by peer|pair closure|remote process exited"
    r"|NCCL.*(unhandled system error|remote|abort)|Timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Where:
    """The state of one rank when its job was stopped; `op` is "" if the rank was in no collective."""

    rank: int
    state: str
    what: str = ""
    site: str = ""

    @property
    def op(self) -> str:
        return self.what.split()[0] if self.what else ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.state} {self.what}".rstrip() + (f"   {self.site}" if self.site else "")


@dataclass(frozen=True)
class Problem:
    """A certain failure of a job: its kind, one sentence, the ranks that caused it, and the state of every rank."""

    kind: str
    sentence: str
    ranks: tuple[int, ...]
    where: list[Where] = field(default_factory=list)


class RankError(RuntimeError):
    """The failure of a job, which `run` raises in the caller.

    kind   "raised", "interrupted", "died", "mismatch", "nobody", "returned", "deadlock" or "timeout"
    ranks  the ranks that caused the failure
    where  the state of each rank (`labs.kit.ranks.diagnosis.Where`), in order of rank
    """

    __module__ = "labs.kit.launch"  # the module from which users import RankError

    def __init__(self, kind: str, ranks: tuple[int, ...], text: str, where: list[Where]) -> None:
        super().__init__(text)
        self.kind, self.ranks, self.where = kind, ranks, where

    def _render_traceback_(self) -> list[str]:
        """Return the lines of a traceback that IPython shows, without the frames of the launcher."""
        return f"RankError: {self}".splitlines()


def make_error(problem: Problem) -> RankError:
    lines = "".join(f"\n  {where}" for where in problem.where)
    return RankError(problem.kind, problem.ranks, f"{problem.sentence}{lines}", problem.where)


class Watch:
    """A comparison of the collectives, sends and receives that the ranks of one job issue.

    readers   the flight records of this machine's ranks, as {rank: reader}
    ranks     number of ranks of the whole job; ranks on other machines are not compared
    """

    def __init__(self, readers: dict[int, Reader], ranks: int) -> None:
        self.readers, self.ranks = readers, ranks
        self.returned: set[int] = set()
        self.open: dict[tuple[str, int], dict[int, Entry]] = {}  # collectives that some members have yet to call
        self.messages: dict[tuple[str, int, int, int, int], dict[int, Entry]] = {}  # sends or recvs alone
        self.reached: dict[tuple[int, object], int] = {}  # {(rank, key of `order`): number of its newest call}
        self.unequal: dict[int, Entry] = {}  # the first calls that differ, but should be equal, one per rank
        self.any_source: set[tuple[str, int]] = set()
        self.to_nobody: tuple[int, Entry] | None = None  # the first send or recv whose peer is no rank
        self.last_waits: dict[int, int] = {}
        self.settled = 0
        self.last_calls: dict[int, object] = {}
        self.since = 0.0

    def poll(self) -> Problem | None:
        """Read the new records of every flight recorder; return the first certain failure, or None."""
        waits = {rank: index for rank, reader in self.readers.items() if (index := reader.header()[1]) is not None}
        for rank, reader in self.readers.items():
            for entry in reader.new():
                self.reached[rank, self.order(rank, entry)] = entry.place
                (self.add_message if entry.is_p2p else self.add_collective)(rank, entry)
        self.settled = self.settled + 1 if waits and waits == self.last_waits else 0
        self.last_waits = waits
        if self.unequal:
            return self.disagreement(self.unequal)
        if self.to_nobody:
            return self.no_such_rank(*self.to_nobody)
        return self.someone_returned() or (self.circle() if self.settled >= SETTLED else None)

    def add_collective(self, rank: int, entry: Entry) -> None:
        key = entry.group, entry.place
        calls = self.open.setdefault(key, {})
        calls[rank] = entry
        if len({call.match for call in calls.values()}) > 1 or misfit(rank, calls):
            self.unequal = self.unequal or calls
        elif len(calls) == len(self.readers.keys() & set(entry.members)):
            del self.open[key]

    def add_message(self, rank: int, entry: Entry) -> None:
        if entry.peer == ANY_SOURCE:
            self.any_source.add((entry.group, rank))
            return
        if entry.peer not in range(len(entry.members)):
            self.to_nobody = self.to_nobody or (rank, entry)
            return
        source, target = self.ends(rank, entry)
        if not {source, target} <= self.readers.keys():
            return
        key = (entry.group, source, target, entry.match, entry.place)
        both = self.messages.setdefault(key, {})
        both[rank] = entry
        if len(both) == 2:
            del self.messages[key]
            # An earlier receive from any source may have taken the message that was meant for this receive.
            if not arrives(both[source], both[target]) and (entry.group, target) not in self.any_source:
                self.unequal = self.unequal or both

    def disagreement(self, calls: dict[int, Entry]) -> Problem:
        entry = next(iter(calls.values()))
        sides: dict[str, list[int]] = {}
        for rank, call in sorted(calls.items()):
            sides.setdefault(call.what, []).append(rank)
        odd = min(sides.values(), key=lambda ranks: (len(ranks), 0 in ranks))  # the minority is more likely to be wrong
        called = ", ".join(f"{name(ranks)} called {what}" for what, ranks in sides.items())
        where = [Where(rank, "called", call.what, call.site) for rank, call in calls.items()]
        about = of_message(list(calls.values())) if entry.is_p2p else nth_of(entry, self.ranks)
        sizes = next(filter(None, (misfit(rank, calls) for rank in sorted(calls))), "")
        sentence = f"the ranks do not agree on {about}: {called}{sizes}"
        return Problem("mismatch", sentence, tuple(odd), self.complete(where))

    def no_such_rank(self, rank: int, entry: Entry) -> Problem:
        last = len(entry.members) - 1
        sentence = f"rank {rank} called {entry.what}: the last rank of the group is {last}"
        return Problem("nobody", sentence, (rank,), self.complete([Where(rank, "called", entry.what, entry.site)]))

    @staticmethod
    def order(rank: int, entry: Entry) -> tuple[object, ...]:
        """Return a key that is equal for all calls that `entry.place` numbers in one sequence.

        A sequence has all collectives of a group, or all messages in one direction between two ranks.
        """
        return (entry.group, entry.op, entry.peer, entry.match) if entry.is_p2p else (entry.group,)

    def joined(self, rank: int, order: tuple[object, ...], place: int) -> bool:
        """Return whether a rank has made call number `place` of the calls `order`, or may have, if records are lost."""
        reader = self.readers.get(rank)
        return reader is None or reader.lost or self.reached.get((rank, order), -1) >= place

    @staticmethod
    def ends(rank: int, entry: Entry) -> tuple[int, int]:
        """Return the global ranks of the sender and the receiver of a message."""
        peer = entry.members[entry.peer]
        return (rank, peer) if entry.op == "send" else (peer, rank)

    def someone_returned(self) -> Problem | None:
        for calls in self.open.values():
            entry = next(iter(calls.values()))
            order = self.order(0, entry)
            gone = [r for r in entry.members if r in self.returned and not self.joined(r, order, entry.place)]
            if gone:
                missed = f"{nth_of(entry, self.ranks)}, {entry.what}, which {name(sorted(calls))} called"
                if entry.op == NEW_GROUP:
                    missed += ": all ranks have to, or its members alone with use_local_synchronization=True"
                waiting = entry.awaited if set(gone) & set(entry.awaited) else ()
                where = [Where(r, "waits in", c.what, c.site) for r, c in calls.items() if r in waiting]
                return Problem(
                    "returned",
                    f"{name(gone)} returned without joining {missed}",
                    tuple(gone),
                    self.complete(where),
                )
        for rank, entry in self.waited_for().items():
            missing = [r for r in self.needs(rank, entry) if r in self.returned]
            if entry.is_p2p and missing:
                sentence = f"{name(missing)} returned and will never answer {entry.what}, in which rank {rank} waits"
                return Problem("returned", sentence, tuple(missing), self.complete([]))
        return None

    def circle(self) -> Problem | None:
        """Return a Problem with the ranks that wait for each other, or None.

        A rank can continue once every rank that it waits for can continue.  Ranks that can never continue are in a
        deadlock.
        """
        waits = self.waited_for()
        needs = {rank: self.needs(rank, entry) for rank, entry in waits.items()}
        free = self.readers.keys() - waits.keys()
        while resolved := {rank for rank in waits.keys() - free if free.issuperset(needs[rank])}:
            free |= resolved
        stuck = sorted(waits.keys() - free)
        if not stuck or {rank: entry.index for rank, entry in self.waited_for().items()} != self.last_waits:
            return None  # a rank has continued since its records were read, and may have made the missing call
        for rank in stuck:
            if waits[rank].op == NEW_GROUP:  # other ranks wait since some rank never made this group
                sentence = f"{name(needs[rank])} did not call {waits[rank].what}, in which rank {rank} waits"
                return Problem("deadlock", sentence, tuple(needs[rank]), self.complete([]))
        circle = "; ".join(f"rank {r} in {waits[r].what} for {name(needs[r])}" for r in stuck)
        return Problem("deadlock", f"{name(stuck)} wait for each other: {circle}", tuple(stuck), self.complete([]))

    def waited_for(self) -> dict[int, Entry]:
        """Return {rank: the call in which it waits} for each rank that cannot continue, from the flight records."""
        waits = {rank: reader.header()[1] for rank, reader in self.readers.items()}
        return {
            rank: self.readers[rank].entry(index)
            for rank, index in waits.items()
            if index is not None and rank not in self.returned
        }

    def in_threads(self) -> dict[int, Entry]:
        """Return {rank: a call in which one of its threads waits}.

        `waited_for` reports only waits that keep a rank from continuing; `in_threads` reports waits in any thread.
        """
        waits = {rank: reader.waiting_anywhere() for rank, reader in self.readers.items()}
        return {
            rank: self.readers[rank].entry(index)
            for rank, index in waits.items()
            if index is not None and rank not in self.returned
        }

    def needs(self, rank: int, entry: Entry) -> list[int]:
        """Return the ranks that `rank` waits for in the call `entry`: those without the matching call."""
        if not entry.is_p2p:
            return [r for r in entry.awaited if not self.joined(r, self.order(r, entry), entry.place)]
        if entry.peer not in range(len(entry.members)):  # ANY_SOURCE, or a peer that is no rank
            return []
        peer, me = entry.members[entry.peer], entry.members.index(rank)
        there = (entry.group, "recv" if entry.op == "send" else "send", me, entry.match)
        answered = self.joined(peer, there, entry.place) or (entry.group, peer) in self.any_source
        return [] if answered else [peer]

    def complete(self, where: list[Where]) -> list[Where]:
        """Add the state of each rank that `where` lacks; return the states of all ranks, sorted by rank."""
        known, waits, threads = {w.rank for w in where}, self.waited_for(), self.in_threads()
        for rank, reader in self.readers.items():
            if rank not in known and rank in waits:
                where.append(Where(rank, "waits in", waits[rank].what, waits[rank].site))
            elif rank not in known and rank in threads:
                where.append(Where(rank, IN_A_THREAD, threads[rank].what, threads[rank].site))
            elif rank not in known:
                count, _ = reader.header()
                last = reader.entry(count - 1) if count else None
                state = "has returned" if rank in self.returned else "runs"
                after = f"{state} after {last.what}" if last else f"{state}, having called no collective"
                where.append(Where(rank, after, "", last.site if last else ""))
        return sorted(where, key=lambda w: w.rank)

    def standing(self, pids: dict[int, int], stack_files: dict[int, int]) -> list[Where]:
        """Return the state of each rank that has not returned yet; pids: the processes of these ranks."""
        lines = stacks(pids, stack_files)
        waits, threads = self.waited_for(), self.in_threads()
        where = []
        for rank, line in lines.items():
            call = waits.get(rank) or threads.get(rank)
            if is_stopped(pids[rank]):
                where.append(Where(rank, f"{STOPPED} in", call.what, call.site) if call else Where(rank, STOPPED))
            elif call is None:
                where.append(Where(rank, "is at" if line else "is at work", "", line))
            else:
                where.append(Where(rank, "waits in" if rank in waits else IN_A_THREAD, call.what, call.site))
        return where

    def stranded(self, longest: float, host: str) -> Problem | None:
        """Return a Problem if ranks of this host wait and none has made a call for `longest` seconds, or None."""
        calls = {rank: (reader.header(), reader.waiting_anywhere()) for rank, reader in self.readers.items()}
        if calls != self.last_calls:
            self.last_calls, self.since = calls, time.monotonic()
        if time.monotonic() - self.since < longest or not (waits := self.in_threads()):
            return None
        away = sorted({rank for entry in waits.values() for rank in entry.members} - self.readers.keys())
        whom = f"{name(away)} of another host" if away else "a rank of this host"
        sentence = f"on {host}, {name(sorted(waits))} waited {longest:g} s for {whom}: is it stopped, or the link down?"
        return Problem("timeout", sentence, tuple(waits), self.complete([]))

    def overdue(self, timeout: float, pids: dict[int, int], stack_files: dict[int, int]) -> Problem:
        """Return the Problem of a job of which the ranks in `pids` have not returned within `timeout` seconds."""
        where = self.standing(pids, stack_files)
        stopped = tuple(w.rank for w in where if w.state.startswith(STOPPED))
        busy = tuple(w.rank for w in where if not w.op)
        doing = "stopped, by SIGSTOP or a debugger" if stopped else "still at work" if busy else "still waiting"
        late = stopped or busy or tuple(pids)
        who = f"{name(late)} {'is' if len(late) == 1 else 'are'} {doing}"
        sentence = f"the job was not done after {timeout:g} s: {who}"
        return Problem("timeout", sentence, late, self.complete(where))


def arrives(sent: Entry, received: Entry) -> bool:
    """Return whether a send and its receive agree in bytes and dtype.

    A flight record has no dtype if there was no room left for its text; then only the bytes are compared.
    """
    same = sent.dtype == received.dtype or not (sent.dtype and received.dtype)
    return same and sent.bytes == received.bytes


def of_message(ends: list[Entry]) -> str:
    """Return whether a send and its receive differ in dtype or in size: in dtype if their elements or bytes agree."""
    same_bytes = len({end.bytes for end in ends}) == 1
    same_elements = all(end.dtype for end in ends) and len({end.elements for end in ends}) == 1
    return "the dtype of a message" if same_bytes or same_elements else "the sizes of a message"


def misfit(rank: int, calls: dict[int, Entry]) -> str:
    """Return a text about two ranks whose splits in an all_to_all differ, one of them `rank`; "" if all agree."""
    for other in sorted(calls):
        for source, target in ((rank, other), (other, rank)):
            (sent, _), (_, taken) = calls[source].pieces, calls[target].pieces
            if sent and taken and sent[target] != taken[source]:
                return f"; rank {source} sends {sent[target]} elements to rank {target}, which takes {taken[source]}"
    return ""


def stacks(pids: dict[int, int], files: dict[int, int]) -> dict[int, str]:
    """Ask each rank for its stack; return {rank: the learner's innermost line}, with "" for a rank without an answer.

    A signal handler in C writes the stack, so the stack arrives even while the rank holds the interpreter lock.
    """
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):  # the rank has ended just now
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    return {rank: innermost(read_all(files[rank])) for rank in pids}


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped a process, which then cannot even write its stack."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended just now
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def read_all(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")


def innermost(dump: str) -> str:
    """Return the learner's innermost line in a stack that faulthandler wrote, or ""."""
    threads = re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)
    for thread in threads:
        frames = re.findall(r'File "(.+)", line (\d+) in', thread)
        if FUNCTION_RUNS.search(thread):
            for file, line in frames:
                if not is_machinery(file):
                    return show_line(file, int(line))
    return ""


def name(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ranks in words: "rank 1", or "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def in_the_past(doing: str, ranks: int) -> str:
    """Put the state of one or more ranks into the past: "waits in barrier" becomes "was in barrier"."""
    was = "was" if ranks == 1 else "were"
    then = {"waits": was, "is ": f"{was} ", "has returned": "had returned", "runs": f"{was} at work"}
    for now, before in then.items():
        if doing.startswith(now):
            return before + doing.removeprefix(now)
    return doing


def nth_of(entry: Entry, world: int) -> str:
    if entry.op == NEW_GROUP:
        return f"{NEW_GROUP} number {entry.place + 1}"
    _, _, description = entry.group.split("|", 2)
    everyone = len(entry.members) == world
    group = "of all ranks" if everyone else f"of the group of {name(entry.members)}"
    label = f" ({description})" if description not in ("", "undefined", "default_pg") else ""
    return f"collective number {entry.place + 1} {group}{label}"
