"""Wrong answers to the exercises of notebook 07, and the right ones that some of them spoil."""

import copy
import itertools
import tempfile
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as torchs

from labs.memory import recompute
from labs.memory.selective import ATTENTION, MATMULS
from tests.wrong_answers.answers import wrong

# ---- right ones, which those below spoil -----------------------------------------------------------------


def itself(tensor):
    return tensor


def into(values):
    """Notes what a second run saves, in order, and without its graph."""
    return saved_tensors_hooks(lambda tensor: values.append(tensor.detach()), itself)


def checkpoint(layer, x):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                torch.set_rng_state(random)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


def halves(model):
    layers = list(model.layers.values())
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


def place(model):
    first, last = halves(model)
    around(recompute.checkpoint, first)
    recompute.recompute(last, keep=MATMULS | ATTENTION)


def around(fn, layers):
    for layer in layers:
        layer.forward = partial(fn, layer.forward)


def selective(model, first=checkpoint):
    """As `place`, with another function around the first half."""
    layers, last = halves(model)
    around(first, layers)
    recompute.recompute(last, keep=MATMULS | ATTENTION)


# ---- checkpoint ------------------------------------------------------------------------------------------


@wrong("checkpoint", "nothing is recomputed")
def just_the_layer(layer, x):
    return layer(x)


@wrong("checkpoint", "the second run builds no graph")
def again_without_a_graph(layer, x):
    again, numbers = [], itertools.count()

    def unpack(number):
        if not again:
            with into(again):
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "gradients are missing")
def under_no_grad(layer, x):
    with torch.no_grad():
        return layer(x)


@wrong("checkpoint", "the random numbers are not kept")
def without_random_numbers(layer, x):
    again, numbers = [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "the random numbers are not kept", listed=False)
def seeded_anew(layer, x):
    again, numbers = [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                torch.manual_seed(0)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "the second run disturbs the random numbers")
def leaves_the_random_numbers_there(layer, x):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), into(again):
                torch.set_rng_state(random)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "computed more than twice")
def for_every_tensor(layer, x):
    random, numbers = torch.get_rng_state(), itertools.count()

    def unpack(number):
        again = []
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
            torch.set_rng_state(random)
            layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


KEPT = []


@wrong("checkpoint", "not freed after use")
def with_its_graph(layer, x):
    """The second run's hooks know the list, the list has the tensors, their graph the hooks."""
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), saved_tensors_hooks(again.append, itself):
                torch.set_rng_state(random)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "not freed after use", listed=False)
def kept_in_a_list_of_all(layer, x):
    random, numbers, again = torch.get_rng_state(), itertools.count(), []
    KEPT.append(again)

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                torch.set_rng_state(random)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint")
def under_no_grad_the_second_time(layer, x):
    again, numbers = [], itertools.count()

    def unpack(number):
        if not again:
            with into(again):
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint")
def from_the_last_to_the_first(layer, x):
    again, numbers = [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), into(again):
                layer(x)
        return again[-1 - number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "no gradient where the input needs none")
def as_a_function(layer, x):
    """As in many tutorials: the parameters are not among the inputs of the node."""
    return Recomputed.apply(layer, torch.get_rng_state(), x)


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, random, x):
        ctx.layer, ctx.random = layer, random
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random)
            y = ctx.layer(x)
        y.backward(gradient)
        return None, None, x.grad


@wrong("checkpoint", "gradients are missing")
def the_input_cut_off(layer, x):
    return checkpoint(layer, x.detach())


@wrong("checkpoint", "different gradients")
def the_gradient_of_the_input_twice(layer, x):
    class Twice(Recomputed):
        @staticmethod
        def backward(ctx, gradient):
            *others, grad = Recomputed.backward(ctx, gradient)
            return *others, 2 * grad

    return Twice.apply(layer, torch.get_rng_state(), x)


LAST = {}


@wrong("checkpoint", "one forward overwrites another's state")
def the_last_input_of_each_layer(layer, x):
    random, numbers = torch.get_rng_state(), itertools.count()
    LAST[layer] = x
    again = []

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                torch.set_rng_state(random)
                layer(LAST[layer])
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


@wrong("checkpoint", "kept out of torch's sight")
def as_numpy(layer, x):
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return layer(x)


@wrong("checkpoint", "nothing is recomputed", listed=False)
def in_another_list(layer, x):
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, kept.__getitem__):
        return layer(x)


@wrong("checkpoint", "nothing is recomputed where the input needs no gradient")
def only_where_the_input_needs_a_gradient(layer, x):
    return checkpoint(layer, x) if x.requires_grad else layer(x)


@wrong("checkpoint", "nothing is recomputed")
def in_files(layer, x):
    def pack(tensor):
        file = tempfile.TemporaryFile()  # noqa: SIM115
        torch.save(tensor.detach().clone(), file)
        return file

    def unpack(file):
        file.seek(0)
        return torch.load(file)

    with saved_tensors_hooks(pack, unpack):
        return layer(x)


@wrong("checkpoint")
def in_fewer_digits(layer, x):
    with saved_tensors_hooks(lambda t: (t.dtype, t.bfloat16()), lambda kept: kept[1].to(kept[0])):
        return layer(x)


@wrong("checkpoint", "different outputs", listed=False)
def computed_in_fewer_digits(layer, x):
    return checkpoint(lambda x: layer(x).bfloat16().to(x.dtype), x)


@wrong("checkpoint")
def nothing_returned(layer, x):
    checkpoint(layer, x)


@wrong("checkpoint", "computed more than twice")
def forward_once_for_nothing(layer, x):
    random = torch.get_rng_state()
    with torch.no_grad():
        layer(x)
    torch.set_rng_state(random)
    return checkpoint(layer, x)


# ---- place_checkpoints -----------------------------------------------------------------------------------


@wrong("place_checkpoints", "nothing is recomputed")
def nowhere(model):
    pass


@wrong("place_checkpoints", "nothing is recomputed", listed=False)
def wrapper_thrown_away(model):
    for layer in model.layers.values():
        layer = checkpoint_wrapper(layer)


@wrong("place_checkpoints", "nothing is recomputed")
def another_model_is_returned(model):
    changed = copy.deepcopy(model)
    place(changed)
    return changed


@wrong("place_checkpoints", "nothing is recomputed", listed=False)
def called_once_and_for_all(model):
    """Recomputes a forward of its own, and leaves the model's as it is."""
    for layer in model.layers.values():
        torchs(layer, torch.zeros(1, 1, model.config.dim, dtype=model.norm.weight.dtype), use_reentrant=False)


@wrong("place_checkpoints", "too much at once in backward", listed=False)
def around_everything(model):
    model.forward = partial(recompute.checkpoint, model.forward)


@wrong("place_checkpoints", "too much at once in backward")
def around_all_layers_at_once(model):
    layers = list(model.layers.values())
    forwards = [layer.forward for layer in layers]

    def chain(x):
        for forward in forwards:
            x = forward(x)
        return x

    layers[0].forward = partial(recompute.checkpoint, chain)
    for layer in layers[1:]:
        layer.forward = itself


@wrong("place_checkpoints", "computed more than twice")
def one_within_another(model):
    recompute.recompute(model.layers.values())
    model.forward = partial(recompute.checkpoint, model.forward)


@wrong("place_checkpoints", "computed more than twice", listed=False)
def each_part_within_each_layer(model):
    for layer in model.layers.values():
        recompute.recompute([layer.attention, layer.mlp])
    recompute.recompute(model.layers.values())


@wrong("place_checkpoints", "the random numbers are not kept")
def torchs_without_random_numbers(model):
    around(partial(torchs, use_reentrant=False, preserve_rng_state=False), model.layers.values())


@wrong("place_checkpoints", "the second run disturbs the random numbers")
def random_numbers_go_on_from_there(model):
    selective(model, first=leaves_the_random_numbers_there)


@wrong("place_checkpoints", "too much is computed again")
def every_layer_in_full(model):
    recompute.recompute(model.layers.values())


@wrong("place_checkpoints", "too much is computed again", listed=False)
def all_but_attention(model):
    recompute.recompute(model.layers.values(), keep=ATTENTION)


@wrong("place_checkpoints", "too much is computed again", listed=False)
def all_but_the_last_layer(model):
    recompute.recompute(list(model.layers.values())[:-1])


@wrong("place_checkpoints", "too much is kept", listed=False)
def every_second_layer(model):
    recompute.recompute(list(model.layers.values())[::2])


@wrong("place_checkpoints", "too much is kept")
def selective_everywhere(model):
    recompute.recompute(model.layers.values(), keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "too much is kept", listed=False)
def the_attention_alone(model):
    recompute.recompute(layer.attention for layer in model.layers.values())


@wrong("place_checkpoints", "too much at once in backward")
def the_other_half_in_full(model):
    """The last layers, so that all of one comes back where everything else still waits."""
    first, last = halves(model)
    recompute.recompute(first, keep=MATMULS | ATTENTION)
    recompute.recompute(last)


@wrong("place_checkpoints", "too much at once in backward", listed=False)
def every_second_in_full_the_last_among_them(model):
    layers = list(model.layers.values())
    recompute.recompute(layers[1::2])
    recompute.recompute(layers[::2], keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "no gradient where the input needs none")
def torchs_old_way(model):
    import warnings

    warnings.simplefilter("ignore")
    around(partial(torchs, use_reentrant=True), halves(model)[0])
    recompute.recompute(halves(model)[1], keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "gradients are missing")
def half_of_the_model_is_cut_off(model):
    first = halves(model)[0]
    around(under_no_grad, first)


@wrong("place_checkpoints", "requires_grad has changed")
def half_of_the_model_is_frozen(model):
    for layer in halves(model)[0]:
        layer.requires_grad_(False)


@wrong("place_checkpoints", "no longer in training mode")
def in_evaluation_mode(model):
    place(model.eval())


@wrong("place_checkpoints", "parameters are renamed")
def wrapped(model):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.module = layer

        def forward(self, x):
            return recompute.checkpoint(self.module, x)

    for name, layer in model.layers.items():
        model.layers[name] = Wrapper(layer)


@wrong("place_checkpoints", "right only with more than one layer")
def recompute_of_no_layer(model):
    first, last = halves(model)
    recompute.recompute(first)
    recompute.recompute(last, keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "too much is computed again at another depth")
def half_of_them_rounded_up(model):
    layers = list(model.layers.values())
    half = (len(layers) + 1) // 2
    recompute.recompute(layers[:half])
    recompute.recompute(layers[half:], keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "different outputs")
def half_of_the_layers_left_out(model):
    place(model)
    for layer in halves(model)[1]:
        layer.forward = itself


@wrong("place_checkpoints", "the parameters have changed")
def in_fewer_bytes(model):
    model.bfloat16()


@wrong("place_checkpoints", "freed too late")
def freed_just_before_backward(model):
    """All is kept through forward; when the loss is there, everything is dropped, to be computed again."""
    slots = []

    def hold(layer, x):
        kept, random, numbers = [], torch.get_rng_state(), itertools.count()
        slots.append(kept)

        def pack(tensor):
            kept.append(tensor)
            return next(numbers)

        def unpack(number):
            if not kept:
                with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(kept):
                    torch.set_rng_state(random)
                    layer(x)
            return kept[number]

        with saved_tensors_hooks(pack, unpack):
            return layer(x)

    around(hold, model.layers.values())

    def drop(*_):
        for kept in slots:
            kept.clear()
        slots.clear()

    model.register_forward_hook(drop)


@wrong("place_checkpoints", "too much is kept")
def kept_besides(model):
    place(model)
    kept = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: kept.append((args, output)))


@wrong("place_checkpoints", "kept out of torch's sight")
def in_bytes_of_python(model):
    around(as_numpy, model.layers.values())


@wrong("place_checkpoints", "nothing is recomputed", listed=False)
def offloaded_to_where_it_was(model):
    """On a device that is a move; with the model on the CPU it is a copy."""

    def moved(layer, x):
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    around(moved, model.layers.values())


@wrong("place_checkpoints", "one forward overwrites another's state")
def one_slot_for_a_layer(model):
    first, last = halves(model)
    around(the_last_input_of_each_layer, first)
    recompute.recompute(last, keep=MATMULS | ATTENTION)


@wrong("place_checkpoints")
def layers_by_number(model):
    recompute.recompute([model.layers[str(n)] for n in range(8)])


# ---- more of them, that no list had ----------------------------------------------------------------------

wrong = partial(wrong, listed=False)  # tried in the long tests


@wrong("checkpoint", "the random numbers are not kept")
def random_state_taken_after_the_forward(layer, x):
    random, again, numbers = [], [], itertools.count()

    def unpack(number):
        if not again:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(again):
                torch.set_rng_state(random[0])
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        y = layer(x)
    random.append(torch.get_rng_state())
    return y


@wrong("checkpoint", "gradients are missing")
def input_is_a_leaf(layer, x):
    return checkpoint(layer, x.clone().detach().requires_grad_())


@wrong("checkpoint", "different outputs")
def nearly_the_same_input(layer, x):
    return checkpoint(layer, x + 1e-6)


REMEMBERED = {}


@wrong("checkpoint")
def output_is_remembered(layer, x):
    key = id(layer), x.shape
    if key not in REMEMBERED:
        REMEMBERED[key] = checkpoint(layer, x)
    return REMEMBERED[key]


@wrong("place_checkpoints", "too much at once in backward")
def two_segments(model):
    for half in halves(model):

        def chain(x, forwards=[layer.forward for layer in half]):  # noqa: B006
            for forward in forwards:
                x = forward(x)
            return x

        half[0].forward = partial(recompute.checkpoint, chain)
        for layer in half[1:]:
            layer.forward = itself


@wrong("place_checkpoints", "too much is computed again")
def half_of_them_nested(model):
    first, last = halves(model)
    recompute.recompute([layer.mlp for layer in first])
    recompute.recompute(first)
    recompute.recompute(last, keep=MATMULS | ATTENTION)


@wrong("place_checkpoints", "nothing is recomputed")
def only_small_batches(model):
    for layer in model.layers.values():

        def forward(x, plain=layer.forward):
            return plain(x) if len(x) > 4 else recompute.checkpoint(plain, x)

        layer.forward = forward


@wrong("place_checkpoints", "gradients are missing")
def weights_are_cut_off(model):
    def of(mlp, x):
        return nn.functional.linear(nn.functional.silu(mlp.gate(x)) * mlp.up(x), mlp.down.weight.detach())

    for layer in halves(model)[0]:
        layer.mlp.forward = partial(of, layer.mlp)
    place(model)


@wrong("place_checkpoints", "the parameters have changed")
def first_and_last_swapped(model):
    layers = list(model.layers.values())
    layers[0], layers[-1] = layers[-1], layers[0]
    model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})
    place(model)


@wrong("place_checkpoints", "other parameters")
def half_of_the_layers_dropped(model):
    model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(halves(model)[0])})


@wrong("place_checkpoints", "different outputs")
def dropout_is_removed(model):
    for module in model.modules():
        if hasattr(module, "rate"):
            module.rate = 0.0
    place(model)


@wrong("place_checkpoints")
def under_autocast(model):
    def forward(plain, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args)

    place(model)
    model.forward = partial(forward, model.forward)


@wrong("place_checkpoints", "nothing is recomputed")
def called_parameters(model):
    def pack(tensor):
        return nn.Parameter(tensor.detach().clone(), requires_grad=False) if tensor.is_floating_point() else tensor

    def fn(layer, x):
        with saved_tensors_hooks(pack, itself):
            return layer(x)

    around(fn, model.layers.values())


@wrong("place_checkpoints", "nothing is recomputed")
def in_shared_memory(model):
    def fn(layer, x):
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone().share_memory_(), itself):
            return layer(x)

    around(fn, model.layers.values())
