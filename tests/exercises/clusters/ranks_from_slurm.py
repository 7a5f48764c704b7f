"""Answers to ranks_from_slurm (11b): rank, local rank, number of ranks and first host, from Slurm's variables."""

import re

from labs.exercises.clusters.ranks_from_slurm import MISTAKES
from tests.answers import Exercise, from_notebook

answers = Exercise("ranks_from_slurm")
by_pattern = answers.right(from_notebook("ranks_from_slurm"), line="right on all 9 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def letter_by_letter(environ):
    name, inside, skipped = "", False, False
    for letter in environ["SLURM_JOB_NODELIST"]:
        if letter == "[":
            inside = True
        elif letter == "]":
            inside = skipped = False
        elif inside and letter in ",-":
            skipped = True
        elif letter == ",":
            break
        elif not skipped:
            name += letter
    numbers = [int(environ["SLURM_" + key]) for key in ("PROCID", "LOCALID", "NTASKS")]
    return dict(zip(("rank", "local_rank", "world_size"), numbers, strict=True), head=name)


# ---- wrong -----------------------------------------------------------------------------------------------


answers.instead(MISTAKES)


@answers.wrong("text, and not a number")
def as_text(environ):
    return letter_by_letter(environ) | {"rank": environ["SLURM_PROCID"]}


@answers.wrong("leading zeros are lost")
def through_a_number(environ):
    before, bracket, rest = environ["SLURM_JOB_NODELIST"].partition("[")
    if not bracket or "," in before:
        return letter_by_letter(environ)
    number = int(rest.split("]")[0].replace("-", ",").split(",")[0])
    return letter_by_letter(environ) | {"head": f"{before}{number}"}


@answers.wrong("the list of nodes is read wrongly")
def with_a_bracket_left_open(environ):
    head = re.sub(r"\[(\w+)[^\]]*\]?", r"\1", environ["SLURM_JOB_NODELIST"].split(",")[0])
    return letter_by_letter(environ) | {"head": head}


@answers.wrong("the list of nodes is read wrongly")
def the_first_name_with_brackets(environ):
    nodes = environ["SLURM_JOB_NODELIST"]
    entry = re.search(r"[^,\[]+(\[[^\]]*\][^,\[]*)+", nodes)
    return letter_by_letter(environ | {"SLURM_JOB_NODELIST": entry[0] if entry else nodes})


@answers.wrong()
def another_environment(environ):
    return dict.fromkeys(("rank", "local_rank", "world_size"), 0) | {"head": "localhost"}


@answers.wrong()
def changes_the_environment(environ):
    environ["RANK"] = environ["SLURM_PROCID"]
    return letter_by_letter(environ)
