"""A batch script that is run on this machine as in a job, with stand-ins for srun, torchrun and other programs.

rehearsed(text, hosts)     the options at the head of a script, and what it has started on which of these hosts
slurms_own_word(text)      what the Slurm that is here, if there is one, would say of the script
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("_stand_in.py")
PROGRAMS = ("srun", "scontrol", "hostname", "torchrun", "python", "python3")
SHORT = {"-A": "account", "-p": "partition", "-N": "nodes", "-t": "time", "-n": "ntasks"}
SAME = {"tasks-per-node": "ntasks-per-node"}  # other long names
FIRST = "10.0.0.1"  # the address that `hostname -i` says on the first host
PATIENCE = 30.0  # s, for the whole script
REACTION = 5.0  # s, for what it does at a signal

# Bash reads this before the script, and notes by empty files what the script does about the signal.
NOTES = r"""
unset BASH_ENV
trap() {
    if [ "${1-}" = -- ]; then shift; fi
    case "${1-}:${*:2} " in
        :* | -*) ;;
        *USR1\ * | *[:\ ]"$(kill -l USR1)"\ *)
            set -- ": > '$REHEARSAL_NOTES/handled'; $1" "${@:2}"
            : > "$REHEARSAL_NOTES/trapped" ;;
    esac
    builtin trap "$@"
}
wait() {
    if [ -e "$REHEARSAL_NOTES/handled" ]; then : > "$REHEARSAL_NOTES/waits on"; fi
    builtin wait "$@"
}
"""


@dataclass(frozen=True)
class Rehearsal:
    """A script that has been run, and what became of it.

    head, unread: the options that sbatch reads, and those in lines that it takes for comments
    status, said: how the script ended, and what it has printed
    flaw: "early" if it ended before its training; "killed" if the signal ended it; "once" if it ended after its
        handler, before its training; "late" if no handler ran during the training; otherwise ""
    starts: for each process that it started, {"program": …, "words": …, "host": …} and some variables
    """

    head: dict[str, str]
    unread: dict[str, str]
    status: int
    said: str
    flaw: str
    starts: list[dict[str, Any]]


def rehearsed(text: str, hosts: list[str], nodelist: str) -> Rehearsal:
    """Run a script as the first of these hosts would, and return what became of it.

    nodelist: the hosts as Slurm writes them
    """
    head, unread = options(text)
    tasks = number(head.get("ntasks")) or len(hosts)
    each = number(head.get("ntasks-per-node")) or -(-tasks // len(hosts))
    with tempfile.TemporaryDirectory() as folder:
        programs, script, log, notes = (Path(folder, name) for name in ("bin", "job", "log", "notes"))
        programs.mkdir()
        notes.mkdir()
        for name in PROGRAMS:
            words = shlex.join([sys.executable, "-S", "-I", str(STAND_IN), name])
            (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (programs / name).chmod(0o755)
        script.write_text(text)
        log.touch()
        Path(folder, "before").write_text(NOTES)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "REHEARSAL_HOSTS": " ".join(hosts), "REHEARSAL_HOST": hosts[0],
            "REHEARSAL_TASKS": str(each), "REHEARSAL_LOG": str(log), "REHEARSAL_NOTES": str(notes),
            "BASH_ENV": f"{folder}/before",
            "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_SUBMIT_HOST": "login9", "SLURM_SUBMIT_DIR": folder,
            "SLURM_JOB_NODELIST": nodelist, "SLURM_NODELIST": nodelist, "SLURMD_NODENAME": hosts[0],
            "SLURM_JOB_NUM_NODES": str(len(hosts)), "SLURM_NNODES": str(len(hosts)),
            "SLURM_NTASKS": str(each * len(hosts)), "SLURM_NTASKS_PER_NODE": str(each),
        }  # fmt: skip
        status, said, flaw = signalled(["bash", str(script)], notes, cwd=folder, env=os.environ | variables)
        starts = [json.loads(line) for line in log.read_text().splitlines()]
    return Rehearsal(head, unread, status, said, flaw, starts)


def signalled(command: list[str], notes: Path, **others: Any) -> tuple[int, str, str]:
    """Run a script, and send it USR1 while srun runs; return its exit status, what it prints, and its flaw.

    notes: a folder in which srun and bash note what happens; srun ends when there is a note `go on`
    """
    with tempfile.TemporaryFile("w+") as said:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **quiet, **others)

        def ended(note: str, seconds: float) -> bool:
            """Wait for the note, or for the end of the script; return whether the script has ended."""
            limit = time.monotonic() + seconds
            while process.poll() is None and not (notes / note).exists() and time.monotonic() < limit:
                time.sleep(0.01)
            return process.poll() is not None

        flaw, limit = "", time.monotonic() + PATIENCE
        if ended("runs", PATIENCE):
            while not (notes / "runs").exists() and has_processes(process.pid) and time.monotonic() < limit:
                time.sleep(0.01)  # srun may be on its way in the background
            flaw = "early" if (notes / "runs").exists() else ""
        elif (notes / "runs").exists() and not ended("trapped", 0.5):
            process.send_signal(signal.SIGUSR1)
            if ended("handled", REACTION):
                flaw = "once" if (notes / "handled").exists() else "killed"
            elif not (notes / "handled").exists():
                flaw = "late"
            elif ended("waits on", REACTION):
                flaw = "once"
        (notes / "go on").touch()
        in_time = ended("the end", PATIENCE)
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
        said.seek(0)
        return (
            (process.returncode, said.read().strip(), flaw) if in_time else (124, f"it takes over {PATIENCE:g} s", "")
        )


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def ran(command: list[str], seconds: float, **others: Any) -> tuple[int, str]:
    """Run a command; return its exit status and what it prints, or 124 if it takes longer and was killed."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **quiet, **others)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.communicate()
        return 124, f"it is not done after {seconds:g} s"
    return process.returncode, said.strip()


def options(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return {long name: value} of the options that sbatch reads, and of those that it takes for comments."""
    read: dict[str, str] = {}
    unread: dict[str, str] = {}
    into = read
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            into = unread  # sbatch reads no further than the first command
        if found := re.match(r"(\s*#+\s*SBATCH)\s+(.*)", line):
            words = shlex.split(found[2], comments=True)
            (into if found[1] == "#SBATCH" else unread).update(pairs(words))
    return read, unread


def pairs(words: list[str]) -> dict[str, str]:
    found = {}
    while words:
        word, equals, value = words.pop(0).partition("=")
        if short := re.fullmatch(r"(-[a-zA-Z])(.+)", word):
            word, value = short.groups()
        elif not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        name = SHORT.get(word, word.lstrip("-"))
        found[SAME.get(name, name)] = value
    return found


def number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def slurms_own_word(text: str) -> str | None:
    """Return what sbatch says of the script if it would refuse it, "" if it would take it; None without Slurm here.

    Nothing is submitted.  The script's partition need not exist here, so it is tried in the first one that does.
    """
    if not shutil.which("sbatch") or not shutil.which("sinfo"):
        return None
    status, partitions = ran(["sinfo", "--noheader", "--format=%R"], 10.0)
    if status or not partitions:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(text)
        script.flush()
        status, said = ran(["sbatch", "--test-only", f"--partition={partitions.split()[0]}", script.name], 10.0)
    # A site may know no such account, or have no such nodes free; this is no mistake of the script's.
    return said if status and not re.search(r"account|partition|node|limit", said, re.IGNORECASE) else ""
