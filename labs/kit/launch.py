"""Jobs: a function runs on several ranks, and the caller gets the value that each rank returns.

    run             losses = run(train, steps=20, ranks=4); losses[2] is what rank 2 returned
    Results         the list that `run` returns: one value per rank, and the job's recording if one was asked for
    RankError       the error that `run` raises: which rank failed first, or on which line each rank stands
    MOST_RANKS      the most ranks that a job can have
    Link            slow links between nodes, emulated: run(train, link=Link(2, "200 Mbit/s"))
    Slurm           nodes of a cluster with a queue: run(train, ranks=16, on=Slurm(nodes=2, folder="~/jobs"))
    on_devices      run a function in a process in which JAX has any number of devices
    on_processes    run a function in several processes, in which JAX has the devices of all processes
    jax_missing     the reason why JAX cannot be used, or ""
    or_skip         or_skip(reason) turns a notebook's later cells into empty ones

`run` is in ranks/run.py, whose docstring says what happens if a rank fails, dies or hangs.
"""

from labs.kit.extras.jax_devices import jax_missing, on_devices, on_processes
from labs.kit.extras.missing_extra import or_skip
from labs.kit.ranks.diagnosis import RankError
from labs.kit.ranks.link import Link
from labs.kit.ranks.run import MOST_RANKS, Results, run
from labs.kit.ranks.slurm import Slurm

__all__ = ["MOST_RANKS", "Link", "RankError", "Results", "Slurm", "run"]
__all__ += ["jax_missing", "on_devices", "on_processes", "or_skip"]
