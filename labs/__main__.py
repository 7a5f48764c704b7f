"""The course's commands.

python -m labs tour                         train with every strategy, and compare with one process
python -m labs doctor                       can this machine run the course?
python -m labs progress [FOLDER ...]        list the exercises passed, with dates; with learners' folders, count them
python -m labs challenges [FOLDER ...]      list the challenges, your best scores and the bounds; --no-names for a class
python -m labs dryrun --model llama3-8b --mesh dp=128,tp=8 --rank 17
                                            predict what one rank of a large job would hold and send
python -m labs plan MODEL --gpus 32         list every layout that fits in memory, the fastest first, and say why
"""

import sys


def main(arguments: list[str]) -> int:
    match arguments:
        case ["tour", *rest]:
            from labs.kit.commands.tour import main as tour

            return tour(rest)
        case ["doctor"]:
            from labs.kit.commands.doctor import main as doctor

            return doctor()
        case ["progress", *rest]:
            from labs.kit.learners.progress_commands import progress_main as progress

            return progress(rest)
        case ["challenges", *rest]:
            from labs.kit.learners.progress_commands import challenges_main as challenges

            return challenges(rest)
        case ["dryrun", *rest]:
            from labs.kit.commands.dryrun import main as dryrun

            return dryrun(rest)
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
