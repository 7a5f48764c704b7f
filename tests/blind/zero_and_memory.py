"""Right and wrong answers, written without sight of the checks."""

import copy
import itertools
import math
import os
import queue
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labs.memory import recompute
from labs.memory.selective import ATTENTION, MATMULS

RIGHT, WRONG = {}, {}


def right(exercise):
    def add(fn):
        RIGHT.setdefault(exercise, []).append((fn.__name__, fn))
        return fn

    return add


def wrong(exercise):
    def add(fn):
        WRONG.setdefault(exercise, []).append((fn.__name__, fn))
        return fn

    return add


def pair(table, exercise, name, *fns):
    table.setdefault(exercise, []).append((name, fns))


def world():
    return dist.get_rank(), dist.get_world_size()




# ======== 07: checkpoint ===================================================================================

CK = "checkpoint"


def itself(tensor):
    return tensor


@right(CK)
def ck_skeleton(layer, x_BTD):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def keep(tensor):
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
                torch.set_rng_state(random)
                layer(x_BTD)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@right(CK)
def ck_torch(layer, x_BTD):
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    with set_checkpoint_early_stop(False):
        return checkpoint(layer, x_BTD, use_reentrant=False)


@right(CK)
def ck_course(layer, x_BTD):
    return recompute.checkpoint(layer, x_BTD)


class Frame:
    def __init__(self, layer, x):
        self.layer, self.x, self.state = layer, x, torch.get_rng_state()
        self.count, self.tensors = 0, None

    def pack(self, tensor):
        self.count += 1
        return self.count - 1

    def unpack(self, number):
        if self.tensors is None:
            self.run()
        return self.tensors[number]

    def run(self):
        tensors, now = {}, torch.get_rng_state()

        def keep(tensor):
            tensors[len(tensors)] = tensor.detach()

        try:
            torch.set_rng_state(self.state)
            with torch.enable_grad(), saved_tensors_hooks(keep, itself):
                self.layer(self.x)
        finally:
            torch.set_rng_state(now)
        self.tensors = tensors


@right(CK)
def ck_frame(layer, x_BTD):
    frame = Frame(layer, x_BTD)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return layer(x_BTD)


@right(CK)
def ck_own_leaf(layer, x_BTD):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            x = x_BTD.detach().requires_grad_(x_BTD.requires_grad)
            with torch.random.fork_rng(devices=[]):
                torch.random.set_rng_state(random)
                with torch.enable_grad():
                    with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                        layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


def ck(layer, x_BTD, run):
    """The skeleton; `run(again, keep, random)` fills `again`."""
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def keep(tensor):
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            run(again, keep, random)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_fresh_numbers(layer, x_BTD):  # the second run draws other random numbers
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_no_fork(layer, x_BTD):  # random numbers do not go on afterwards: they are repeated
    def run(again, keep, random):
        torch.set_rng_state(random)
        with torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_no_graph(layer, x_BTD):  # without gradient mode nothing is kept, and `again` stays empty
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_state_too_late(layer, x_BTD):  # takes the random state in backward, not the one before forward
    def run(again, keep, random):
        random = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_each_time(layer, x_BTD):  # runs the layer again for every tensor
    random, numbers = torch.get_rng_state(), itertools.count()

    def unpack(number):
        again = []
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                torch.set_rng_state(random)
                layer(x_BTD)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_none(layer, x_BTD):  # no checkpoint at all: all memory
    return layer(x_BTD)


@wrong(CK)
def ck_reentrant(layer, x_BTD):  # where x needs no gradient, the layer's parameters get none
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x_BTD, use_reentrant=True)


@wrong(CK)
def ck_torch_forgetful(layer, x_BTD):  # random numbers of the second run are fresh
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x_BTD, use_reentrant=False, preserve_rng_state=False)


@wrong(CK)
def ck_int8(layer, x_BTD):  # keeps everything in 8 bits: a quarter of the memory, other gradients, no second run
    def pack(t):
        if not t.is_floating_point():
            return t
        scale = t.detach().abs().amax().clamp(min=1e-12) / 127 if t.numel() else torch.ones(())
        return (t.detach() / scale).round().to(torch.int8), scale, t.dtype

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else (packed[0] * packed[1]).to(packed[2])

    with saved_tensors_hooks(pack, unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_files(layer, x_BTD):  # writes all to files, which count as kept
    folder = tempfile.TemporaryDirectory()
    numbers = itertools.count()

    def pack(t):
        path = os.path.join(folder.name, str(next(numbers)))
        torch.save(t.detach().clone(), path)
        return path

    def unpack(path):
        return torch.load(os.path.join(folder.name, os.path.basename(path)))

    with saved_tensors_hooks(pack, unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_at_once(layer, x_BTD):  # the second run follows the first at once: everything is there from forward on
    random, again, numbers = torch.get_rng_state(), [], itertools.count()
    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: again[number]):
        y = layer(x_BTD)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
            torch.set_rng_state(random)
            layer(x_BTD)
    return y


@wrong(CK)
def ck_no_gradient(layer, x_BTD):  # nothing is kept, and nothing gets a gradient
    with torch.no_grad():
        y = layer(x_BTD)
    return y.requires_grad_()


@wrong(CK)
def ck_seed(layer, x_BTD):  # a seed of its own: the output is not layer(x_BTD)'s, and the program's numbers begin anew
    torch.manual_seed(0)

    def run(again, keep, random):
        torch.manual_seed(0)
        with torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_last_first(layer, x_BTD):  # trusts that backward asks in the reverse order
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                    torch.set_rng_state(random)
                    layer(x_BTD)
        return again.pop()

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_dry_run(layer, x_BTD):  # the layer runs twice more, not once
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(random)
            with torch.no_grad():
                layer(x_BTD)
            torch.set_rng_state(random)
            with saved_tensors_hooks(keep, itself):
                layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_forward_forked(layer, x_BTD):  # forward's draws are taken back: what follows draws the same numbers again
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    with torch.random.fork_rng(devices=[]):
        return ck(layer, x_BTD, run)


@wrong(CK)
def ck_detached(layer, x_BTD):  # x needs no gradient in the second run, so less is kept, and the numbers do not fit
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD.detach())

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_only_with_gradient(layer, x_BTD):  # where x needs no gradient, everything is kept
    return ck_skeleton(layer, x_BTD) if x_BTD.requires_grad else layer(x_BTD)


KEPT_AGAIN = []


@wrong(CK)
def ck_never_freed(layer, x_BTD):  # a list holds the activations of all layers after their backward
    def run(again, keep, random):
        KEPT_AGAIN.append(again)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_off_by_one(layer, x_BTD):  # numbers begin at 1: each tensor is its neighbour
    random, again, numbers = torch.get_rng_state(), [], itertools.count(1)

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                    torch.set_rng_state(random)
                    layer(x_BTD)
        return again[number % len(again)]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


# ======== 07: place_checkpoints ============================================================================

PC = "place_checkpoints"
CHEAP = MATMULS | ATTENTION


@right(PC)
def pc_halves(model):
    layers = list(model.layers.values())
    for n, layer in enumerate(layers):
        if n < len(layers) // 2:
            recompute.recompute([layer])
        else:
            recompute.recompute([layer], keep=CHEAP)


@right(PC)
def pc_every_second(model):
    for n, layer in enumerate(reversed(model.layers.values())):  # from the top: selective, full, selective, ...
        recompute.recompute([layer], () if n % 2 else CHEAP)


@right(PC)
def pc_middle(model):
    layers = list(model.layers.values())
    full = len(layers) // 2
    first = (len(layers) - full) // 2
    for n, layer in enumerate(layers):
        recompute.recompute([layer], keep=() if first <= n < first + full else CHEAP)


@right(PC)
def pc_torch(model):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = str(op.overloadpacket) in CHEAP
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    half = len(model.layers) // 2
    for n, layer in enumerate(model.layers.values()):
        options = {} if n < half else selective
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


@right(PC)
def pc_own_checkpoint(model):
    layers = list(model.layers.values())
    half = len(layers) // 2
    for layer in layers[:half]:
        layer.forward = partial(ck_skeleton, layer.forward)
    recompute.recompute(layers[half:], keep=CHEAP)


def pc_by(model, keep_of):
    """keep_of(n, depth): what layer n keeps; None: it is left alone."""
    for n, layer in enumerate(model.layers.values()):
        keep = keep_of(n, len(model.layers))
        if keep is not None:
            recompute.recompute([layer], keep=keep)


@wrong(PC)
def pc_exchanged(model):  # the upper half in full: the tooth on top is a whole layer
    pc_by(model, lambda n, depth: () if n >= depth - depth // 2 else CHEAP)


@wrong(PC)
def pc_full(model):  # too slow
    pc_by(model, lambda n, depth: ())


@wrong(PC)
def pc_selective(model):  # too large
    pc_by(model, lambda n, depth: CHEAP)


@wrong(PC)
def pc_nothing_put_in(model):  # wraps, and does not put the wrappers in
    [partial(recompute.checkpoint, layer) for layer in model.layers.values()]


@wrong(PC)
def pc_ceil(model):  # one layer too many where the depth is odd
    pc_by(model, lambda n, depth: () if n < (depth + 1) // 2 else CHEAP)


@wrong(PC)
def pc_four(model):  # four in full, whatever the depth: too slow for fewer than 8
    pc_by(model, lambda n, depth: () if n < 4 else CHEAP)


@wrong(PC)
def pc_half_left_alone(model):  # the upper half keeps everything
    pc_by(model, lambda n, depth: () if n < depth // 2 else None)


@wrong(PC)
def pc_matmuls_only(model):  # attention is computed again in the upper half, too: more than half of the multiplications
    pc_by(model, lambda n, depth: () if n < depth // 2 else MATMULS)


@wrong(PC)
def pc_attention_only(model):  # the matrix products are computed again in all layers
    pc_by(model, lambda n, depth: () if n < depth // 2 else ATTENTION)


@wrong(PC)
def pc_gpu_attention(model):  # keeps attention by the name that it has on a GPU: here it is computed again
    pc_by(model, lambda n, depth: () if n < depth // 2 else MATMULS | {"aten._scaled_dot_product_flash_attention"})


class Again(nn.Module):
    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x_BTD):
        return recompute.checkpoint(self.inner, x_BTD, keep=self.keep)


@wrong(PC)
def pc_new_names(model):  # the names in state_dict() change
    half = len(model.layers) // 2
    for n, (name, layer) in enumerate(list(model.layers.items())):
        model.layers[name] = Again(layer, frozenset() if n < half else CHEAP)


@wrong(PC)
def pc_three_of_eight(model):  # too few in full: too large
    pc_by(model, lambda n, depth: () if n < 3 * depth // 8 else CHEAP)


@wrong(PC)
def pc_last_full(model):  # every second layer in full, the last of them on top
    pc_by(model, lambda n, depth: () if n % 2 else CHEAP)


@wrong(PC)
def pc_even_full(model):  # every second from the first: at odd depth more than half
    pc_by(model, lambda n, depth: CHEAP if n % 2 else ())


@wrong(PC)
def pc_mlps(model):  # the MLPs of all layers: more than half of the multiplications
    recompute.recompute([layer.mlp for layer in model.layers.values()])


@wrong(PC)
def pc_copy(model):  # changes a copy
    pc_halves(copy.deepcopy(model))


def pc_without_graph(forward, x_BTD):
    with torch.no_grad():
        return forward(x_BTD)


@wrong(PC)
def pc_no_gradient(model):  # the lower half keeps nothing and learns nothing
    layers = list(model.layers.values())
    for layer in layers[: len(layers) // 2]:
        layer.forward = partial(pc_without_graph, layer.forward)
    recompute.recompute(layers[len(layers) // 2 :], keep=CHEAP)


@wrong(PC)
def pc_nested(model):  # a checkpoint in a checkpoint: the lower half is computed three times
    layers = list(model.layers.values())
    for n, layer in enumerate(layers):
        if n < len(layers) // 2:
            recompute.recompute([layer.attention, layer.mlp])
            recompute.recompute([layer])
        else:
            recompute.recompute([layer], keep=CHEAP)


@wrong(PC)
def pc_twice(model):  # all selectively, then half of them again in full: recompute() refuses
    layers = list(model.layers.values())
    recompute.recompute(layers, keep=CHEAP)
    recompute.recompute(layers[: len(layers) // 2])


# ======== 07b: offloaded_step ==============================================================================

OS = "offloaded_step"


@right(OS)
def os_lists(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            values = update(i, values)
            stored.append(thread.submit(store, i, values))
            del values
    for future in stored:
        future.result()


@right(OS)
def os_early(due, fetch, update, store):
    due = list(due)
    if not due:
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        fetching, storing = thread.submit(fetch, due[0]), None
        for i, following in zip(due, [*due[1:], None]):
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


@right(OS)
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
        while True:
            task = self.queue.get()
            if task is None:
                return
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


@right(OS)
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


@right(OS)
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


@wrong(OS)
def os_one_by_one(due, fetch, update, store):  # no overlap, and all of it is the caller's work
    for i in due:
        store(i, update(i, fetch(i)))


@wrong(OS)
def os_fetches_all(due, fetch, update, store):  # all of the state in memory
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due]
        stored = [thread.submit(store, i, update(i, future.result())) for i, future in zip(due, coming)]
    for future in stored:
        future.result()


@wrong(OS)
def os_deaf(due, fetch, update, store):  # nobody hears of what store raises
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values))


@wrong(OS)
def os_last_only(due, fetch, update, store):  # hears of the last store only
    future = None
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            future = thread.submit(store, i, update(i, values))
    if future:
        future.result()


@wrong(OS)
def os_not_empty(due, fetch, update, store):  # fails where nothing is due
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, due[0])
        for n, i in enumerate(due):
            values = coming.result()
            coming = thread.submit(fetch, due[n + 1]) if n + 1 < len(due) else None
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_fetches_first_again(due, fetch, update, store):  # after the last comes the first again: one fetch too many
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, due[0]) if due else None
        for n, i in enumerate(due):
            values = coming.result()
            coming = thread.submit(fetch, due[(n + 1) % len(due)])
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_next_number(due, fetch, update, store):  # fetches i + 1, not the next that is due
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for i in due:
            values = coming[0].result()
            coming = [thread.submit(fetch, i + 1)] if i != due[-1] else []
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_old_values(due, fetch, update, store):  # stores what it has fetched
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            update(i, values)
            stored.append(thread.submit(store, i, values))
    for future in stored:
        future.result()


@wrong(OS)
def os_submits_late(due, fetch, update, store):  # the next is fetched after the update, not during it
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            new = update(i, coming[0].result())
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, new))
    for future in stored:
        future.result()


@wrong(OS)
def os_returns_early(due, fetch, update, store):  # returns before everything is stored
    thread = ThreadPoolExecutor(1)
    coming = [thread.submit(fetch, i) for i in due[:1]]
    for n, i in enumerate(due):
        values = coming[0].result()
        coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
        thread.submit(store, i, update(i, values))
    thread.shutdown(wait=False)


@wrong(OS)
def os_caller_stores(due, fetch, update, store):  # the caller stores
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            store(i, update(i, values))


@wrong(OS)
def os_waits_for_store(due, fetch, update, store):  # waits for each store at once: none runs during an update
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values)).result()


@wrong(OS)
def os_stores_at_the_end(due, fetch, update, store):  # keeps all new values until the end
    new = {}
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            new[i] = update(i, values)
        stored = [thread.submit(store, i, values) for i, values in new.items()]
    for future in stored:
        future.result()


@wrong(OS)
def os_keeps_futures(due, fetch, update, store):  # a list of futures holds everything that was fetched
    coming, stored = [], []
    with ThreadPoolExecutor(1) as thread:
        if due:
            coming.append(thread.submit(fetch, due[0]))
        for n, i in enumerate(due):
            values = coming[n].result()
            if n + 1 < len(due):
                coming.append(thread.submit(fetch, due[n + 1]))
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_sorted(due, fetch, update, store):  # takes the parameters in the order of their numbers, not in the one given
    os_lists(sorted(due), fetch, update, store)


@wrong(OS)
def os_swallows(due, fetch, update, store):  # what cannot be fetched is left out, without a word
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            failed = coming[0].exception() is not None
            values = None if failed else coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            if not failed:
                stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_last_not_stored(due, fetch, update, store):  # stores the one before; the last is never stored
    stored, before = [], None
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            if before:
                stored.append(thread.submit(store, *before))
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            before = i, update(i, values)
    for future in stored:
        future.result()


@wrong(OS)
def os_updates_in_the_thread(due, fetch, update, store):  # all in the thread, one after the other: no overlap
    with ThreadPoolExecutor(1) as thread:
        for future in [thread.submit(lambda i=i: store(i, update(i, fetch(i)))) for i in due]:
            future.result()


OS_THREAD = []


@wrong(OS)
def os_once(due, fetch, update, store):  # its thread is shut down after the first call: the second fails
    if not OS_THREAD:
        OS_THREAD.append(ThreadPoolExecutor(1))
    stored = []
    with OS_THREAD[0] as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


# ======== 07b: step_seconds ================================================================================

SS = "step_seconds"


@right(SS)
def ss_slots(fetch, update, store):
    n = len(update)
    if n == 0:
        return 0.0
    total = fetch[0]
    for i in range(n):
        beside = (store[i - 1] if i > 0 else 0) + (fetch[i + 1] if i + 1 < n else 0)
        total += max(update[i], beside)
    return total + store[-1]


@right(SS)
def ss_padded(fetch, update, store):
    before, after = [0, *store], [*fetch[1:], 0]
    return sum(fetch[:1]) + sum(max(u, s + f) for u, s, f in zip(update, before, after)) + sum(store[-1:])


@right(SS)
def ss_two_clocks(fetch, update, store):
    caller = thread = 0.0
    fetched = {}
    if fetch:
        thread = fetched[0] = fetch[0]
    for i in range(len(update)):
        caller = max(caller, fetched[i])
        if i + 1 < len(fetch):
            thread = fetched[i + 1] = max(thread, caller) + fetch[i + 1]
        caller += update[i]
        thread = max(thread, caller) + store[i]
    return max(caller, thread)


@right(SS)
def ss_longest_path(fetch, update, store):
    n = len(update)
    from functools import cache

    @cache
    def updated(i):  # when update i is done
        return begins(i) + update[i]

    @cache
    def begins(i):
        return fetch[0] if i == 0 else max(updated(i - 1), begins(i - 1) + (store[i - 2] if i > 1 else 0) + fetch[i])

    if n == 0:
        return 0
    for i in range(n):  # from the front, so that nothing is deep
        begins(i)
    free = begins(n - 1) + (store[n - 2] if n > 1 else 0)
    return max(updated(n - 1), free) + store[n - 1]


@right(SS)
def ss_tensor(fetch, update, store):
    if not update:
        return 0.0
    f, u, s = (torch.tensor(seconds, dtype=torch.float64) for seconds in (fetch, update, store))
    zero = torch.zeros(1, dtype=torch.float64)
    slots = torch.maximum(u, torch.cat([zero, s[:-1]]) + torch.cat([f[1:], zero]))
    return (f[0] + slots.sum() + s[-1]).item()


@wrong(SS)
def ss_no_overlap(fetch, update, store):  # one after the other
    return sum(fetch) + sum(update) + sum(store)


@wrong(SS)
def ss_largest_sum(fetch, update, store):  # as if everything could overlap
    return max(sum(update), sum(fetch) + sum(store))


@wrong(SS)
def ss_no_first_fetch(fetch, update, store):  # what comes before the first slot is forgotten
    return ss_padded(fetch, update, store) - sum(fetch[:1])


@wrong(SS)
def ss_no_last_store(fetch, update, store):  # what comes after the last slot is forgotten
    return ss_padded(fetch, update, store) - sum(store[-1:])


@wrong(SS)
def ss_own_store(fetch, update, store):  # its own store in its slot, not the one before
    if not update:
        return 0
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, store, [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_own_fetch(fetch, update, store):  # its own fetch in its slot, not the next
    if not update:
        return 0
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, [0, *store], fetch)) + store[-1]


@wrong(SS)
def ss_two_threads(fetch, update, store):  # fetch and store beside each other
    if not update:
        return 0
    return fetch[0] + sum(map(max, update, [0, *store], [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_negative_index(fetch, update, store):  # in the first slot, store[-1] is the last one's
    if not update:
        return 0
    total = fetch[0]
    for i in range(len(update)):
        total += max(update[i], store[i - 1] + (fetch[i + 1] if i + 1 < len(fetch) else 0))
    return total + store[-1]


@wrong(SS)
def ss_not_empty(fetch, update, store):  # fails where nothing is due
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, [0, *store], [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_all_alike(fetch, update, store):  # as if all were like the first
    if not update:
        return 0
    n, f, u, s = len(update), fetch[0], update[0], store[0]
    if n == 1:
        return f + u + s
    return f + max(u, f) + (n - 2) * max(u, f + s) + max(u, s) + s


@wrong(SS)
def ss_n_slots(fetch, update, store):  # a full slot for each, also the first and the last
    if not update:
        return 0
    return fetch[0] + sum(max(u, f + s) for f, u, s in zip(fetch, update, store)) + store[-1]


@wrong(SS)
def ss_last_slot_alone(fetch, update, store):  # in the last slot nothing is stored beside the update
    if not update:
        return 0
    slots = [max(u, s + f) for u, s, f in zip(update[:-1], [0, *store], fetch[1:])]
    return fetch[0] + sum(slots) + update[-1] + store[-1]


@wrong(SS)
def ss_store_waits(fetch, update, store):  # the store is not beside the update, only the next fetch
    if not update:
        return 0
    return fetch[0] + sum(max(u, f) + s for u, f, s in zip(update, [*fetch[1:], 0], store))


@wrong(SS)
def ss_whole_seconds(fetch, update, store):  # rounded to whole seconds
    return int(ss_padded(fetch, update, store))


@wrong(SS)
def ss_one_parameter(fetch, update, store):  # of one parameter: its store is counted beside its update, too
    if not update:
        return 0
    slots = [max(u, s + f) for u, s, f in zip(update[1:-1], store, fetch[2:])]
    first = max(update[0], fetch[min(1, len(fetch) - 1)])
    return fetch[0] + first + sum(slots) + max(update[-1], store[max(len(store) - 2, 0)]) + store[-1]


@wrong(SS)
def ss_update_first(fetch, update, store):  # the slots of the updates are added to the thread's work
    if not update:
        return 0
    return fetch[0] + max(sum(update), sum(fetch[1:]) + sum(store[:-1])) + store[-1]


@wrong(SS)
def ss_smaller(fetch, update, store):  # the slot lasts until one of both is done
    if not update:
        return 0
    return fetch[0] + sum(min(u, s + f) for u, s, f in zip(update, [0, *store], [*fetch[1:], 0])) + store[-1]
