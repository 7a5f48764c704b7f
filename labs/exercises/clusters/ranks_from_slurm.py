"""ranks_from_slurm: rank, local rank, number of ranks and first host, from the variables that Slurm sets.

A list of nodes is written as Slurm does: brackets hold numbers and ranges, leading zeros count, and text may follow.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, WrongSheet, on_paper, part_as_if, part_is, same

Environ = Mapping[str, str]
BRACKETS = re.compile(r"\[(\w+)[^\]]*\]")  # the first number of a list of numbers and ranges, and the rest of it
LISTS = (
    "login1", "n1,m2", "n1,m[2-3]", "gpu-a[9-11]", "n[01-03,7]", "gpu-a[09-11]", "rack[1-2]n5", "rack[1,3]n5",
    "rack[03-04]n[07,09],spare1",
)  # fmt: skip


@answered
def ranks_from_slurm(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(environ) -> {"rank": …, "local_rank": …, "world_size": …, "head": …}`; return the ✓ line.

    environ: the variables of a process that srun has started
    """
    draw = random.Random(seed)
    sheets = []
    for nodes in LISTS:
        # The nodes have different numbers of ranks, so that a division does not give the local rank.
        world, local = draw.randrange(20, 30), draw.randrange(1, 4)
        environ = {
            "SLURM_PROCID": str(local + draw.randrange(5, 15)),
            "SLURM_LOCALID": str(local),
            "SLURM_NTASKS": str(world),
            "SLURM_NNODES": str(draw.randrange(5, 9)),
            "SLURM_NODEID": "4",
            "SLURM_TASKS_PER_NODE": f"{draw.randrange(4, 8)}(x2),1",
            "SLURM_JOB_NODELIST": nodes,
            "SLURMD_NODENAME": "own5",
            "SLURM_SUBMIT_HOST": "login9",
            "SLURM_JOB_ID": str(draw.randrange(10**4, 10**6)),
        }
        words = f"rank {environ['SLURM_PROCID']} of a job on {nodes}"
        sheets.append(Sheet((environ,), from_environ(environ), words))
    return on_paper(fn, sheets, MISTAKES, "Which variable says this of a single process, and which of the whole job?")


def first_host(nodes: str) -> str:
    """Return the first name of a list of nodes, as `scontrol show hostnames` prints it."""
    return BRACKETS.sub(r"\1", nodes).split(",")[0]


def from_environ(environ: Environ) -> dict[str, int | str]:
    """Return what a process has to know to join its job."""
    return {
        "rank": int(environ["SLURM_PROCID"]),
        "local_rank": int(environ["SLURM_LOCALID"]),
        "world_size": int(environ["SLURM_NTASKS"]),
        "head": first_host(environ["SLURM_JOB_NODELIST"]),
    }


def instead(part: str, value: Callable[[Environ], Any]) -> Callable[..., Any]:
    """Return a row's test: whether this part of the answer is `value(environ)`."""
    return part_as_if(part, value)


def head(value: Callable[[str], str]) -> Callable[..., Any]:
    """Return a row's test: whether the first host is `value(list of nodes)`."""
    return instead("head", lambda environ: value(environ["SLURM_JOB_NODELIST"]))


def without_zeros(host: str) -> str:
    return re.sub(r"(?<=\D)0+(?=\d)", "", host)


def head_alone(seen: WrongSheet) -> str | None:
    """Return what is wrong with the first host if the rest of the answer is right."""
    wrong = part_is("head")(seen)
    return wrong if wrong and same(seen.received, seen.sheet.expected | {"head": seen.received["head"]}) else None


def of(name: str) -> Callable[[Environ], int]:
    return lambda environ: int(environ[name])


# fmt: off
MISTAKES = (
    *(Mistake("text, and not a number", "Of which type are the values of os.environ?",
              part_is(part, lambda found, expected: found == str(expected)))
      for part in ("rank", "local_rank", "world_size")),
    Mistake("the rank on its node, and not in the job", "How many processes of the job have this number?",
            instead("rank", of("SLURM_LOCALID"))),
    Mistake("the node's number, and not the rank", "How many processes does a node have?",
            instead("rank", of("SLURM_NODEID"))),
    Mistake("the rank in the job, and not on its node", "Which GPU does the first process of the second node take?",
            instead("local_rank", of("SLURM_PROCID")),
            symptom="invalid device ordinal, on all nodes but the first"),
    Mistake("a division, as if each node had as many ranks", "What if the last node has fewer ranks than the others?",
            instead("local_rank", lambda e: of("SLURM_PROCID")(e) % (of("SLURM_NTASKS")(e) // of("SLURM_NNODES")(e)))),
    Mistake("the number of nodes, and not of ranks", "How many processes have to meet?",
            instead("world_size", of("SLURM_NNODES"))),
    Mistake("each node names itself", "Do all ranks name the same host?",
            instead("head", lambda environ: environ["SLURMD_NODENAME"]),
            symptom="each node waits for the others until the timeout, without an error"),
    Mistake("the host on which the job was submitted", "Does a process of the job run there?",
            instead("head", lambda environ: environ["SLURM_SUBMIT_HOST"])),
    Mistake("the whole list", "How many hosts is this?",
            head(lambda nodes: nodes)),
    Mistake("a comma inside of brackets ends no name", "Which commas stand between two names?",
            head(lambda nodes: nodes.split(",")[0])),
    Mistake("leading zeros are lost", "Is n1 the same host as n01?",
            part_is("head", lambda found, expected: found == without_zeros(expected))),
    Mistake("the text after the brackets is lost", "What follows the closing bracket?",
            head(lambda nodes: BRACKETS.split(nodes)[0] + (BRACKETS.findall(nodes) or [""])[0] if "[" in nodes
                 else nodes.split(",")[0])),
    Mistake("only the first brackets are read", "How many pairs of brackets does a name have?",
            head(lambda nodes: BRACKETS.sub(r"\1", nodes, count=1).split(",")[0])),
    Mistake("the list of nodes is read wrongly", "Which name would `scontrol show hostnames` print first?", head_alone),
)
# fmt: on

ranks_from_slurm.expected = from_environ  # the notebook goes on with this function
