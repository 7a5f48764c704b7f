"""Right and wrong answers, written without sight of the checks."""

import copy
import itertools
import os
import tempfile
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
