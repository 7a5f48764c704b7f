"""Answers to offloaded_step (07b): the next state comes, and the last one goes, beside an update."""

import itertools
import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

from labs.kit import exercises
from tests.answers import Exercise

# fmt: off
answers = Exercise("offloaded_step")
LINE = "each fetch, and each store, beside an update; the state of "
answers.right(exercises.offloaded_step, line=LINE)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def offloaded_step(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


STORED = "stored.append(thread.submit(store, i, update(i, values)))"
SUBMITTED = "thread.submit(store, i, update(i, values))"
INDENT = "\n            "
answers.vary(offloaded_step,
    {STORED: f"values = update(i, values){INDENT}stored.append(thread.submit(store, i, values)){INDENT}del values"},
    blind=True)


@answers.right(blind=True)
def os_early(due, fetch, update, store):
    due = list(due)
    if not due:
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        fetching, storing = thread.submit(fetch, due[0]), None
        for i, following in zip(due, [*due[1:], None], strict=True):
            values = fetching.result()
            fetching = None
            if following is not None:
                fetching = thread.submit(fetch, following)
            values = update(i, values)
            if storing is not None:
                storing.result()  # it has run beside the update
            storing = thread.submit(store, i, values)
            values = None
        storing.result()


@answers.right(blind=True)
def os_iterator(due, fetch, update, store):
    stores = deque()
    with ThreadPoolExecutor(1) as thread:

        def arriving():
            numbers = iter(due)
            pending = deque((i, thread.submit(fetch, i)) for i in itertools.islice(numbers, 1))
            while pending:
                i, future = pending.popleft()
                values = future.result()
                del future
                pending.extend((j, thread.submit(fetch, j)) for j in itertools.islice(numbers, 1))
                yield i, [values]
                del values

        for i, box in arriving():
            stores.append(thread.submit(store, i, update(i, box.pop())))
        while stores:
            stores.popleft().result()


class Worker:
    """A thread with a queue."""

    def __init__(self):
        self.queue = queue.Queue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while (task := self.queue.get()) is not None:
            future, f, args = task
            try:
                future.set_result(f(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, f, args

    def submit(self, f, *args):
        future = Future()
        self.queue.put((future, f, args))
        return future

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.queue.put(None)
        self.thread.join()


@answers.right(blind=True)
def os_own_thread(due, fetch, update, store):
    stored = []
    with Worker() as worker:
        coming = worker.submit(fetch, due[0]) if len(due) else None
        for n in range(len(due)):
            values = coming.result()
            coming = worker.submit(fetch, due[n + 1]) if n + 1 < len(due) else None
            new = update(due[n], values)
            stored.append(worker.submit(store, due[n], new))
            del values, new
        for future in stored:
            future.result()


@answers.right(blind=True)
def os_shutdown(due, fetch, update, store):
    thread, stored, coming = ThreadPoolExecutor(1), [], {}
    try:
        for n, i in enumerate(due):
            if n == 0:
                coming[0] = thread.submit(fetch, i)
            values = coming.pop(n).result()
            if n < len(due) - 1:
                coming[n + 1] = thread.submit(fetch, due[n + 1])
            stored.append(thread.submit(store, i, update(i, values)))
            values = None
    finally:
        thread.shutdown(wait=True)
    [future.result() for future in stored]


@answers.right(line=LINE)
def two_threads(due, fetch, update, store):
    """One that fetches and one that stores."""
    with ThreadPoolExecutor(1) as fetching, ThreadPoolExecutor(1) as storing:
        coming, going = None, None
        for i, following in pairwise([*due, None]):
            values = coming.result() if coming else fetch(i)
            coming = fetching.submit(fetch, following) if following is not None else None
            new = update(i, values)
            if going:
                going.result()
            going = storing.submit(store, i, new)
            del values, new
        if going:
            going.result()


@answers.right(line=LINE)
def updated_in_the_thread(due, fetch, update, store):
    """The caller fetches and stores."""
    with ThreadPoolExecutor(1) as thread:
        last, values = None, fetch(due[0]) if due else None
        for n, i in enumerate(due):
            updating = thread.submit(update, i, values)
            if last:
                store(*last)
            last, values = None, fetch(due[n + 1]) if n + 1 < len(due) else None
            last = i, updating.result()
            del updating
        if last:
            store(*last)


@answers.right(line=LINE)
def by_a_queue(due, fetch, update, store):
    """A thread that brings one after the other, as the caller has room; the first error is the caller's."""
    room, here, errors, todo = threading.Semaphore(2), queue.Queue(), [], queue.Queue()

    def bring():
        for i in due:
            room.acquire()
            try:
                here.put(fetch(i))
            except Exception as error:
                here.put(error)
                return

    def take():
        while (each := todo.get()) is not None:
            try:
                store(*each)
            except Exception as error:
                errors.append(error)
            del each

    threads = [threading.Thread(target=bring), threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    try:
        for i in due:
            values = here.get()
            if isinstance(values, Exception):
                raise values
            values = update(i, values)
            todo.put((i, values))
            del values
            room.release()
    finally:
        todo.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


# ---- wrong: nothing overlaps -----------------------------------------------------------------------------

ALONE = "nothing is fetched during an update"
WAITED = "the next update waits for a store"
FIRST, FOLLOWING = "coming = [thread.submit(fetch, i) for i in due[:1]]", "due[n + 1 : n + 2]"
TAKEN, NEXT = "values = coming[0].result()", f"coming = [thread.submit(fetch, j) for j in {FOLLOWING}]"

spoil = answers.slips(offloaded_step)


@answers.wrong(ALONE, blind=True)
def os_one_by_one(due, fetch, update, store):
    for i in due:
        store(i, update(i, fetch(i)))


@answers.wrong(ALONE, blind=True)
def os_updates_in_the_thread(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        for future in [thread.submit(lambda i=i: store(i, update(i, fetch(i)))) for i in due]:
            future.result()


spoil(ALONE, {FIRST: "", TAKEN: "values = thread.submit(fetch, i).result()", NEXT: f"{SUBMITTED}.result()", STORED: ""})
spoil(ALONE, {TAKEN: "values = update(i, coming[0].result())", "update(i, values)": "values"}, blind=True)
spoil(WAITED, {STORED: "store(i, update(i, values))"}, blind=True)
spoil(WAITED, {STORED: f"{SUBMITTED}.result()"}, blind=True)
spoil(WAITED, {"ThreadPoolExecutor(1)": "ThreadPoolExecutor(2)", STORED: f"{SUBMITTED}.result()"})

# ---- wrong: too much is here -----------------------------------------------------------------------------

MANY = "too much at once"

spoil(MANY, {"due[:1]": "due", TAKEN: "values = coming[n].result()", NEXT: ""}, blind=True)
spoil(MANY,
    {"stored = []": "new = {}",
     STORED: "new[i] = update(i, values)",
     "    for each in stored:": "        stored = [thread.submit(store, i, values) for i, values in new.items()]\n"
         "    for each in stored:"}, blind=True)
spoil(MANY,
    {"stored = []": "new = {}",
     STORED: "new[i] = update(i, values)",
     "in stored": "in new.items()",
     "each.result()": "store(*each)"})
spoil(MANY,
    {TAKEN: "values = coming[n].result()",
     "coming = [thread.submit(fetch, j)": "coming += [thread.submit(fetch, j)"}, blind=True)
spoil(MANY,
    {"due[:1]": "due[:4]",
     TAKEN: "values = coming.pop(0).result()",
     NEXT: "coming += [thread.submit(fetch, j) for j in due[n + 4 : n + 5]]"}, long=True)


@answers.wrong(MANY)
def all_that_it_has_seen_is_kept(due, fetch, update, store):
    seen = []
    offloaded_step(due, fetch, lambda i, values: seen.append(update(i, values)) or seen[-1], store)


# ---- wrong: errors, and the end --------------------------------------------------------------------------

LOST = "an error is lost"

spoil(LOST, {STORED: SUBMITTED}, blind=True)
spoil(LOST, {STORED: f"stored = [{SUBMITTED}]"}, blind=True)
spoil("",
    {TAKEN: f"failed = coming[0].exception() is not None{INDENT}values = None if failed else coming[0].result()",
     STORED: f"if not failed:{INDENT}    {STORED}"}, blind=True)
WITH, BARE = "    with ThreadPoolExecutor(1) as thread:", "    thread = ThreadPoolExecutor(1)"
spoil("returned too early",
    {WITH: f"{BARE}\n    if True:",
     STORED: SUBMITTED,
     "    for each": "    thread.shutdown(wait=False)\n    for each"}, blind=True)
KEPT = []
spoil("threads are left behind", {WITH: f"{BARE}\n    KEPT.append(thread)\n    if True:"}, alone=True)


@answers.wrong(LOST)
def every_error_is_caught(due, fetch, update, store):
    with suppress(OSError):
        offloaded_step(due, fetch, update, store)


OS_THREAD = []
spoil("",
    {"ThreadPoolExecutor(1)": "OS_THREAD[0]",
     "stored = []": "stored = []\n    OS_THREAD or OS_THREAD.append(ThreadPoolExecutor(1))"}, blind=True)

# ---- wrong: which one ------------------------------------------------------------------------------------

OTHERS, UPDATED = "called too often, or for others", "the wrong numbers are updated"


def due_instead(mistake, due, **options):
    spoil(mistake, {"stored = []": f"due, stored = {due}, []"}, **options)


due_instead("one is left out", "due[:-1]")
due_instead(OTHERS, "list(range(len(due)))")
due_instead("in another order", "sorted(due)", blind=True)
spoil(OTHERS, {"stored = []": "stored = [] if due and fetch(due[0]) else []"})
spoil(OTHERS, {FOLLOWING: "[due[(n + 1) % len(due)]]"}, blind=True)
spoil("", {FOLLOWING: "[i + 1][: i != due[-1]]"}, blind=True)
spoil("the wrong numbers are stored",
    {STORED: f"update(i, values){INDENT}stored.append(thread.submit(store, i, values))"}, blind=True)
spoil(UPDATED, {TAKEN: "values = coming[0]"})
spoil(UPDATED, {"due[:1]": "due", TAKEN: "values = coming[min(n + 1, len(due) - 1)].result()", NEXT: ""})
spoil("", {FIRST: "coming = [thread.submit(fetch, due[0])]"}, blind=True)
spoil("",
    {"stored = []": "stored, before = [], None",
     TAKEN: f"{TAKEN}{INDENT}if before:{INDENT}    stored.append(thread.submit(store, *before))",
     STORED: "before = i, update(i, values)"}, blind=True)


@answers.wrong()
def a_thread_for_each_fetch_that_nobody_joins(due, fetch, update, store):
    """As threads have no result, it is put where it may not be yet."""
    found = {}

    def bring(i):
        found[i] = fetch(i)

    for n, i in enumerate(due):
        for following in due[n : n + 2]:
            if following not in found:
                threading.Thread(target=bring, args=(following,)).start()
        store(i, update(i, found.get(i)))
