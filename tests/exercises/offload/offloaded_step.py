"""Answers to offloaded_step (07b): the next state comes, and the last one goes, beside an update."""

from concurrent.futures import ThreadPoolExecutor  # noqa: F401 (the notebook's answer calls it)

from labs.memory.offload import one_ahead
from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("offloaded_step")
LINE = "each fetch, and each store, beside an update; the state of "
answers.right(one_ahead, line=LINE)


# ---- right -----------------------------------------------------------------------------------------------

offloaded_step = answers.right(from_notebook("offloaded_step"), line=LINE)


STORED = "stored.append(thread.submit(store, i, update(i, values)))"
SUBMITTED = "thread.submit(store, i, update(i, values))"
INDENT = "\n            "


# ---- wrong: nothing overlaps -----------------------------------------------------------------------------

ALONE = "nothing is fetched during an update"
WAITED = "the next update waits for a store"
FOLLOWING = "due[n + 1 : n + 2]"
TAKEN, NEXT = "values = coming[0].result()", f"coming = [thread.submit(fetch, following) for following in {FOLLOWING}]"

spoil = answers.slips(offloaded_step)


@answers.wrong(ALONE)
def os_one_by_one(due, fetch, update, store):
    for i in due:
        store(i, update(i, fetch(i)))
spoil(WAITED, {STORED: "store(i, update(i, values))"})

# ---- wrong: too much is here -----------------------------------------------------------------------------

MANY = "too much at once"

spoil(MANY, {"due[:1]": "due", TAKEN: "values = coming[n].result()", NEXT: ""})


# ---- wrong: errors, and the end --------------------------------------------------------------------------

LOST = "an error is lost"

spoil(LOST, {STORED: SUBMITTED})
WITH, BARE = "    with ThreadPoolExecutor(1) as thread:", "    thread = ThreadPoolExecutor(1)"
spoil("returned too early",
    {WITH: f"{BARE}\n    if True:",
     STORED: SUBMITTED,
     "    for each": "    thread.shutdown(wait=False)\n    for each"})
KEPT = []
spoil("threads are left behind", {WITH: f"{BARE}\n    KEPT.append(thread)\n    if True:"}, alone=True)

# ---- wrong: which one ------------------------------------------------------------------------------------

OTHERS, UPDATED = "called too often, or for others", "the wrong numbers are updated"


def due_instead(mistake, due, **options):
    spoil(mistake, {WITH: f"    due = {due}\n{WITH}"}, **options)


due_instead("one is left out", "due[:-1]")
due_instead(OTHERS, "list(range(len(due)))")
due_instead("in another order", "sorted(due)")
spoil("the wrong numbers are stored",
    {STORED: f"update(i, values){INDENT}stored.append(thread.submit(store, i, values))"})
spoil(UPDATED, {TAKEN: "values = coming[0]"})
