"""A stand-in for one of the programs that a batch script calls:  python _stand_in.py NAME ARGUMENT ...

srun starts its command once per task, one after the other, and if this starts a training, it ends when the rehearsal
says so.  scontrol and hostname know the hosts of the job, and all others, such as torchrun, only note how they were
called.  The variables REHEARSAL_… come from `_rehearsal.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

# Options of srun without a value; any other option has one, after "=" or in the next word.
FLAGS = {
    "-K", "-O", "-l", "-u", "-v", "-Q", "--kill-on-bad-exit", "--overcommit", "--label", "--unbuffered", "--verbose",
    "--quiet", "--exclusive", "--overlap",
}  # fmt: skip
SHORT = {"-n": "--ntasks", "-N": "--nodes", "--tasks-per-node": "--ntasks-per-node"}


def main(name: str, *words: str) -> int:
    hosts, here = os.environ["REHEARSAL_HOSTS"].split(), os.environ["REHEARSAL_HOST"]
    if name == "srun":
        return srun(hosts, [*words])
    if name == "scontrol":
        print(*hosts if words[:1] == ("show",) and words[1].startswith("hostname") else (), sep="\n")
    elif name == "hostname":
        print(f"10.0.0.{hosts.index(here) + 1}" if words[:1] in (("-i",), ("-I",)) else here)
    elif name.startswith("python") and words[:1] == ("-c",):
        os.execv(sys.executable, [sys.executable, *words])
    else:
        variables = {key: os.environ.get(key) for key in ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")}
        with open(os.environ["REHEARSAL_LOG"], "a") as log:
            log.write(json.dumps({"program": name, "words": words, "host": here} | variables) + "\n")
    return 0


def srun(hosts: list[str], words: list[str]) -> int:
    options = {}
    while words and words[0].startswith("-"):
        word, equals, value = words.pop(0).partition("=")
        if attached := re.fullmatch(r"(-[a-zA-Z])(\w+)", word):
            word, value = attached.groups()
        elif not equals and word not in FLAGS and words:
            value = words.pop(0)
        options[SHORT.get(word, word)] = value
    hosts = hosts[: int(options.get("--nodes", len(hosts)))]
    tasks = int(options.get("--ntasks", len(hosts) * int(os.environ["REHEARSAL_TASKS"])))
    each = int(options.get("--ntasks-per-node", -(-tasks // len(hosts))))
    tasks = each * len(hosts) if "--ntasks-per-node" in options else tasks
    signal.signal(signal.SIGUSR1, lambda *_: None)  # the real srun passes it on to its tasks
    log, notes = (Path(os.environ[f"REHEARSAL_{name}"]) for name in ("LOG", "NOTES"))
    codes, before = [], log.stat().st_size
    for rank in range(tasks):
        node, local = divmod(rank, each)
        numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_NTASKS": tasks}
        own = {key: str(number) for key, number in numbers.items()}
        own |= {"SLURMD_NODENAME": hosts[node], "REHEARSAL_HOST": hosts[node]}
        codes.append(subprocess.run(words, env=os.environ | own).returncode)
    if log.stat().st_size > before:
        (notes / "runs").touch()
        while notes.exists() and not (notes / "go on").exists():
            time.sleep(0.01)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
