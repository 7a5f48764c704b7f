"""The course's commands.

python -m labs tour                         train with every strategy, and compare with one process
python -m labs doctor                       can this machine run the course?
python -m labs progress [FOLDER ...]        which exercises are passed, and when; for learners' courses, how many
python -m labs challenges [FOLDER ...]      what is open, your best, and what is possible; --no-names for a class
python -m labs dryrun --model llama3-8b --mesh dp=128,tp=8 --rank 17
                                            what a rank of many would hold and send
python -m labs run FILE:FUNCTION --ranks 4  call a function of a file as a job; print what each returned
python -m labs plan MODEL --gpus 32         every layout that fits, the quickest first, and why; --check FILE.csv
"""

import argparse
import runpy
import sys
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Run FILE:FUNCTION as a job of --ranks ranks."""
    from labs.kit.launch import RankError
    from labs.kit.launch import run as launch

    parser = argparse.ArgumentParser(prog="python -m labs run", description=run.__doc__)
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a function without arguments, like ring.py:main")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    chosen = parser.parse_args(arguments)
    file, colon, name = chosen.target.rpartition(":")
    if not colon:
        parser.error(f"{name!r} names no function: write it like ring.py:main")
    if not Path(file).is_file():
        parser.error(f"{chosen.target!r} names no file that exists: write it like ring.py:main")
    # No module has this name, so the function is pickled by value, together with all that it uses.
    function = runpy.run_path(file, run_name="__labs__").get(name)
    if not callable(function):
        parser.error(f"{file} defines no function {name!r}")
    try:
        results = launch(function, ranks=chosen.ranks, device=chosen.device)
    except (RankError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    for rank, value in enumerate(results):
        print(f"rank {rank} returned {value!r}")
    return 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["tour", *rest]:
            from labs.kit.tour import main as tour

            return tour(rest)
        case ["doctor"]:
            from labs.kit.doctor import main as doctor

            return doctor()
        case ["progress", *rest]:
            from labs.kit.standings import progress_main as progress

            return progress(rest)
        case ["challenges", *rest]:
            from labs.kit.standings import challenges_main as challenges

            return challenges(rest)
        case ["dryrun", *rest]:
            from labs.kit.dry.dryrun import main as dryrun

            return dryrun(rest)
        case ["run", *rest]:
            return run(rest)
        case ["plan", *rest]:
            from labs.plan.command import main as plan

            return plan(rest)
        case [] | ["-h" | "--help"]:
            print(__doc__.strip())
            return 0
    print(f"{' '.join(arguments)!r} is not one of the course's commands.\n\n{__doc__.strip()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without Δ in its encoding shows a question mark
    sys.exit(main(sys.argv[1:]))
