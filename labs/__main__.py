"""The course's command line: `python -m labs NAME`, and `python -m labs NAME --help` for a command's flags.

A command is a module whose `main(arguments)` reads them by tyro, does the work and returns the exit status.  It is
imported only when it is called, so that `python -m labs --help` does not wait for PyTorch.
"""

import os
import sys
from importlib import import_module

from labs.kit.commands.names import known

COMMANDS = {
    "tour": ("labs.kit.commands.tour", "train with every strategy, and compare with one process"),
    "doctor": ("labs.kit.commands.doctor", "can this machine run the course?"),
    "progress": (
        "labs.kit.commands.progress_command",
        "list the exercises passed, with dates and tries; count those of learners",
    ),
    "challenges": ("labs.kit.commands.challenges", "list the challenges, your best scores and the bounds"),
    "dryrun": ("labs.kit.commands.dryrun", "predict what one rank of a large job would hold and send"),
    "train": ("labs.clusters.command", "train a model, here, under torchrun, Slurm or Kubernetes"),
    "plan": ("labs.kit.commands.plan", "list every layout that fits in memory, the fastest first, and say why"),
}

IN_A_JOB = {"doctor": "labs.kit.commands.doctor_in_a_job"}  # what a command is on the ranks that torchrun has started


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m labs COMMAND [--help]\n")
        print(*(f"{name:<12}{line}" for name, (_, line) in COMMANDS.items()), sep="\n")
        return 0
    try:
        module, _ = COMMANDS[known("command", arguments[0], COMMANDS)]
        if "TORCHELASTIC_RUN_ID" in os.environ:
            module = IN_A_JOB.get(arguments[0], module)
        command = import_module(module)
    except (ValueError, ImportError) as error:  # also a PyTorch that is too old, or a package that is missing
        print(error, file=sys.stderr)
        return 2
    return command.main(arguments[1:])


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without Δ in its encoding shows a question mark
    sys.exit(main(sys.argv[1:]))
