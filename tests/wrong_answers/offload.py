"""Wrong answers to the exercises of notebook 07b, and the right ones that some of them spoil."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from tests.wrong_answers.answers import wrong

# ---- offloaded_step --------------------------------------------------------------------------------------


def offloaded_step(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


@wrong("offloaded_step", "nothing is fetched during an update")
def one_after_the_other(due, fetch, update, store):
    for i in due:
        store(i, update(i, fetch(i)))


@wrong("offloaded_step", "nothing is fetched during an update")
def waits_where_it_submits(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        for i in due:
            values = thread.submit(fetch, i).result()
            thread.submit(store, i, update(i, values)).result()


@wrong("offloaded_step", "nothing is fetched during an update")
def fetched_after_the_update(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            new = update(i, coming[0].result())
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, new))
        for each in stored:
            each.result()


@wrong("offloaded_step", "too much at once")
def everything_fetched_ahead(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due]
        stored = [thread.submit(store, i, update(i, each.result())) for i, each in zip(due, coming, strict=True)]
        for each in stored:
            each.result()


@wrong("offloaded_step", "too much at once")
def everything_stored_at_the_end(due, fetch, update, store):
    updated = {}
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            updated[i] = update(i, values)
    for i, values in updated.items():
        store(i, values)


@wrong("offloaded_step", "too much at once")
def all_that_it_has_seen_is_kept(due, fetch, update, store):
    seen = []
    offloaded_step(due, fetch, lambda i, values: seen.append(update(i, values)) or seen[-1], store)


@wrong("offloaded_step", "the next update waits for a store")
def the_caller_stores(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            store(i, update(i, values))


@wrong("offloaded_step", "the next update waits for a store")
def waits_for_its_store(due, fetch, update, store):
    with ThreadPoolExecutor(2) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values)).result()


@wrong("offloaded_step", "an error is lost")
def nobody_asks_the_stores(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values))


@wrong("offloaded_step", "an error is lost")
def only_the_last_store_is_asked(due, fetch, update, store):
    last = None
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            last = thread.submit(store, i, update(i, values))
    if last:
        last.result()


@wrong("offloaded_step", "an error is lost")
def every_error_is_caught(due, fetch, update, store):
    with suppress(OSError):
        offloaded_step(due, fetch, update, store)


@wrong("offloaded_step", "the wrong numbers are stored")
def what_was_fetched_is_stored(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            update(i, values)
            stored.append(thread.submit(store, i, values))
    for each in stored:
        each.result()


@wrong("offloaded_step", "the wrong numbers are updated")
def the_future_itself(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0]
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


@wrong("offloaded_step", "the wrong numbers are updated")
def the_next_ones_values(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due]
        for n, i in enumerate(due):
            values = coming[min(n + 1, len(due) - 1)].result()
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


@wrong("offloaded_step", "one is left out")
def without_the_last(due, fetch, update, store):
    offloaded_step(due[:-1], fetch, update, store)


@wrong("offloaded_step", "called too often, or for others")
def by_their_place(due, fetch, update, store):
    offloaded_step(list(range(len(due))), fetch, update, store)


@wrong("offloaded_step", "called too often, or for others")
def the_first_is_fetched_twice(due, fetch, update, store):
    if due:
        fetch(due[0])
    offloaded_step(due, fetch, update, store)


@wrong("offloaded_step", "called too often, or for others")
def from_behind_the_last_to_the_first(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, due[0]) if due else None
        for n, i in enumerate(due):
            values = coming.result()
            coming = thread.submit(fetch, due[(n + 1) % len(due)])
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


@wrong("offloaded_step", "in another order")
def in_the_order_of_their_numbers(due, fetch, update, store):
    offloaded_step(sorted(due), fetch, update, store)


@wrong("offloaded_step", "returned too early")
def does_not_wait_for_the_thread(due, fetch, update, store):
    thread = ThreadPoolExecutor(1)
    coming = [thread.submit(fetch, i) for i in due[:1]]
    for n, i in enumerate(due):
        values = coming[0].result()
        coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
        thread.submit(store, i, update(i, values))
    thread.shutdown(wait=False)


@wrong("offloaded_step", "threads are left behind", alone=True)
def the_thread_stays(due, fetch, update, store):
    thread, stored = ThreadPoolExecutor(1), []
    KEPT.append(thread)
    coming = [thread.submit(fetch, i) for i in due[:1]]
    for n, i in enumerate(due):
        values = coming[0].result()
        coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
        stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


KEPT = []


@wrong("offloaded_step")
def at_least_one_is_expected(due, fetch, update, store):
    with ThreadPoolExecutor(1) as thread:
        coming, stored = thread.submit(fetch, due[0]), []
        for i, following in zip(due, [*due[1:], None], strict=True):
            values = coming.result()
            coming = thread.submit(fetch, following) if following is not None else None
            stored.append(thread.submit(store, i, update(i, values)))
        for each in stored:
            each.result()


@wrong("offloaded_step")
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


# ---- step_seconds ----------------------------------------------------------------------------------------


def slots(fetch, update, store, slot=lambda update, coming, going: max(update, coming + going)):
    coming, going = [*fetch[1:], 0], [0, *store[:-1]]
    return [slot(*each) for each in zip(update, coming, going, strict=False)]


def step_seconds(fetch, update, store):
    if not update:
        return 0
    return fetch[0] + sum(slots(fetch, update, store)) + store[-1]


def with_slot(name, mistake, slot):
    """A wrong answer whose slots are of another length."""

    def fn(fetch, update, store):
        return fetch[0] + sum(slots(fetch, update, store, slot)) + store[-1] if update else 0

    fn.__name__ = name
    return wrong("step_seconds", mistake)(fn)


with_slot("without_stores", "the stores are left out", lambda update, coming, going: max(update, coming))
with_slot("without_fetches", "the fetches are left out", lambda update, coming, going: max(update, going))
with_slot("a_thread_for_each", "two threads, and not one", lambda update, coming, going: max(update, coming, going))
with_slot("the_shorter_counts", "", lambda update, coming, going: min(update, coming + going))
with_slot("beside_the_fetch_alone", "", lambda update, coming, going: max(update, coming) + going)
with_slot("beside_the_store_alone", "", lambda update, coming, going: max(update, going) + coming)
with_slot("the_updates_alone", "", lambda update, coming, going: update)
with_slot("the_thread_alone", "", lambda update, coming, going: coming + going)


@wrong("step_seconds", "one after the other")
def the_sum_of_all(fetch, update, store):
    return sum([*fetch, *update, *store])


@wrong("step_seconds", "all of it at the same time")
def the_longer_sum(fetch, update, store):
    return max(sum(update), sum(fetch) + sum(store))


@wrong("step_seconds", "the start and the end are left out")
def slots_alone(fetch, update, store):
    return sum(slots(fetch, update, store))


@wrong("step_seconds", "the first fetch is left out")
def fetched_before_the_step(fetch, update, store):
    return sum([*slots(fetch, update, store), *store[-1:]])


@wrong("step_seconds", "the last store is left out")
def over_with_the_last_update(fetch, update, store):
    return sum([*fetch[:1], *slots(fetch, update, store)])


@wrong("step_seconds", "the caller stores, and not the thread")
def stored_by_the_caller(fetch, update, store):
    return sum([*fetch[:1], *slots(fetch, update, [0 for _ in store]), *store])


@wrong("step_seconds", "its own fetch and its own store")
def three_lists_side_by_side(fetch, update, store):
    return sum(max(u, f + s) for f, u, s in zip(fetch, update, store, strict=True))


@wrong("step_seconds", "a store before the first update")
def minus_one(fetch, update, store):
    if not update:
        return 0
    beside = [store[n - 1] + (fetch[n + 1] if n + 1 < len(fetch) else 0) for n in range(len(update))]
    return fetch[0] + sum(map(max, update, beside)) + store[-1]


@wrong("step_seconds", "nothing is returned")
def printed(fetch, update, store):
    print(step_seconds(fetch, update, store))


@wrong("step_seconds")
def whole_seconds(fetch, update, store):
    return int(step_seconds(fetch, update, store))


@wrong("step_seconds", "a different kind of answer")
def slot_by_slot(fetch, update, store):
    return [*fetch[:1], *slots(fetch, update, store), *store[-1:]]


@wrong("step_seconds")
def not_for_none(fetch, update, store):
    return fetch[0] + sum(slots(fetch, update, store)) + store[-1]


@wrong("step_seconds")
def none_is_nothing(fetch, update, store):
    return step_seconds(fetch, update, store) or None


@wrong("step_seconds")
def the_lists_are_used_up(fetch, update, store):
    total = step_seconds(fetch, update, store)
    update.clear()
    return total


@wrong("step_seconds")
def all_as_the_first(fetch, update, store):
    if not update:
        return 0
    count = len(update)
    return step_seconds(fetch[:1] * count, update[:1] * count, store[:1] * count)


@wrong("step_seconds")
def all_as_the_mean(fetch, update, store):
    count = len(update)
    return step_seconds(*([sum(each) / count] * count for each in (fetch, update, store))) if count else 0


# ---- more of them, that no list had ----------------------------------------------------------------------

wrong = partial(wrong, listed=False)  # tried in the long tests


@wrong("offloaded_step", "too much at once")
def three_ahead(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:4]]
        for n, i in enumerate(due):
            values = coming.pop(0).result()
            coming += [thread.submit(fetch, following) for following in due[n + 4 : n + 5]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


@wrong("step_seconds")
def rounded_up_to_ten(fetch, update, store):
    return -(-step_seconds(fetch, update, store) // 10) * 10
