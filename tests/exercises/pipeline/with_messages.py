"""Answers to with_messages (10): lists with their messages."""

from labs import pp
from labs.pp.checker import stages_of
from labs.pp.instructions import needs, reader
from labs.pp.messages import Receive, Send, plan
from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("with_messages")
LINE = "11 schedules on 1 to 8 ranks come to their end, though each send waits for its receiver; 1F1B on 4 ranks, run "

# ---- right -----------------------------------------------------------------------------------------------

as_they_come_about = answers.right(from_notebook("with_messages"), line=LINE)


@answers.right
def as_the_executor_does(lists):
    return [[x for x in each if isinstance(x, pp.Instruction | Send | Receive)] for each in plan(lists)]


# ---- wrong -----------------------------------------------------------------------------------------------

slip = answers.slips(as_they_come_about)
BLOCK = "ranks wait for each other"
SENDS, TAKES = "plans[rank].append(Send(x, ranks[use.stage]))", "plans[ranks[use.stage]].append(Receive(x, rank))"
LOCAL = "if use and ranks[use.stage] != rank:"


@answers.wrong(BLOCK)
def one_by_one(lists):
    """Each takes what it needs, and gives what it has made."""
    stages, ranks, plans = stages_of(lists), pp.ranks_of(lists), [[] for _ in lists]
    for rank, order in enumerate(lists):
        for x in order:
            others = [need for need in needs(x, stages) if ranks[need.stage] != rank]
            plans[rank] += [Receive(need, ranks[need.stage]) for need in others] + [x]
            use = reader(x, stages)
            plans[rank] += [Send(x, ranks[use.stage])] if use and ranks[use.stage] != rank else []
    return plans


@answers.wrong("one message is taken for another")
def the_last_comes_first(lists):
    """All that comes from one rank before the next instruction, in reverse."""
    plans = as_they_come_about(lists)
    for each in plans:
        places = [at for at, x in enumerate(each[:-1]) if isinstance(x, Receive) and isinstance(each[at + 1], Receive)]
        for at in places:
            each[at], each[at + 1] = each[at + 1], each[at]
    return plans
slip("not a list for each rank", "return plans", "return plans[:-1]")
slip("neither an instruction nor a message", SENDS, "plans[rank].append(('send', x))")
slip("the instructions are not those that were given", "return plans", "return [each[1:] for each in plans]")
slip("a message that nobody needs", LOCAL, "if use:")
slip("not sent once", SENDS, "pass")
slip("not received once", TAKES, "pass")
slip("sent before it is made", SENDS, "plans[rank].insert(-1, Send(x, ranks[use.stage]))")
slip("received after it is needed", "return plans",
    "return [sorted(each, key=lambda x: isinstance(x, Receive)) for each in plans]")
