"""ZeRO: data parallelism without the spare copies.

Under data parallelism each of N ranks holds all parameters P, all gradients G and all optimizer state S.  ZeRO
cuts them into N shards, one kind more with each stage, and puts a collective wherever a rank needs what it no
longer holds.  A stage is a column of this table; an event is a line of it, and a method of `Zero`:

                        stage 1                 stage 2                 stage 3
    at rest             P    G    S/N           P    G/N  S/N           P/N  G/N  S/N
    before_forward      -                       -                       all_gather P
    after_forward       -                       -                       drop P
    before_backward     -                       -                       all_gather P
    after_backward      -                       -                       drop P
    gradient_ready      -                       reduce_scatter G        reduce_scatter G
    sync                reduce_scatter G        -                       -
    step                update, all_gather P    update, all_gather P    update

The first five happen to one layer at a time, so that no rank ever holds more than a layer of what is sharded.
Stages 1 and 2 send what an all-reduce sends, since that is a reduce-scatter and an all-gather; stage 3 sends
P once more.  Stages 2 and 3 reduce the gradients of each micro-batch, having no room to add them up; stage 1 once
a step (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7).

    zero = Zero(model, stage=2, optimizer=partial(AdamW, lr=1e-3))      # where the optimizer stood
    model(x, y).backward()
    zero.sync()                                                         # if the shards' gradients are to be clipped
    zero.step()

The parameters of a layer lie in one vector, `full`, padded to a multiple of N; its N-th part is this rank's
`shard`.  The modules' own parameters are views of `full`, so the optimizer must treat all elements of a layer
alike, as SGD and AdamW do.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map

from labs.ddp import require_equal_replicas

# PyTorch 2.13 gave both a new name, and warns of the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class Zero:
    """Shards the training of `model` over the ranks of `group`, and stands where its optimizer stood.

    optimizer: makes the optimizer of a list of 1-D parameters, this rank's `shards`.  layers: the modules whose
    parameters come and go together; by default the model's children, containers opened, and the model itself for
    the rest.  initial: (name, shape) -> the numbers of a parameter that is on the meta device, asked for one layer
    at a time: under stage 3 no rank ever holds the model.

    Raises ValueError for another stage, a model without trainable parameters, layers that miss some parameters, and
    replicas that do not start equal.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        optimizer: Callable[[list[nn.Parameter]], Any],
        layers: Iterable[nn.Module] | None = None,
        group: ProcessGroup | None = None,
        initial: Callable[[str, torch.Size], Tensor] | None = None,
    ):
        if stage not in (1, 2, 3):
            raise ValueError(f"stage {stage}: ZeRO has the stages 1, 2 and 3")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no trainable parameters: there is nothing to shard")
        if initial is None:
            require_equal_replicas(model, group)
        self.model, self.stage, self.keys = model, stage, keys(model)
        self.layers = in_layers(model, layers, partial(Unit, stage=stage, group=group, initial=initial))
        self.units = list(dict.fromkeys(unit for layer in self.layers for unit in layer.places))
        self.trained = [unit for unit in self.units if unit.full.requires_grad]
        self.shards = [unit.shard for unit in self.trained]
        self.optimizer = optimizer(self.shards)
        for layer in self.layers:
            layer.show() if stage < 3 else layer.drop()
            layer.module.register_forward_pre_hook(partial(self.before_forward, layer), with_kwargs=True)
            layer.module.register_forward_hook(partial(self.after_forward, layer))
        for unit in self.trained:
            unit.full.register_post_accumulate_grad_hook(partial(self.gradient_ready, unit))

    # ---- the events of a training step -------------------------------------------------------------------

    def before_forward(self, layer: "Layer", module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.stage == 3:
            layer.gather("forward")
        args, kwargs = tree_map(alias, (args, kwargs))
        if torch.is_grad_enabled():
            uses = differentiable([*layer.show(), args, kwargs])
            when_all_have_gradients(uses, partial(self.after_backward, layer))
        return args, kwargs

    def after_forward(self, layer: "Layer", module: nn.Module, args: Any, output: Any) -> None:
        if self.stage == 3:
            layer.drop("forward")
        for x in differentiable(output):
            x.register_hook(lambda gradient: self.before_backward(layer))

    def before_backward(self, layer: "Layer") -> None:
        """Called when the gradient of the layer's output is there."""
        if self.stage == 3:
            layer.gather("backward")

    def after_backward(self, layer: "Layer") -> None:
        """Called when the gradients of the layer's parameters, and of its input, are there."""
        if self.stage == 3:
            layer.drop("forward", "backward")

    def gradient_ready(self, unit: "Unit", full: nn.Parameter) -> None:
        """Called when all uses of a layer's parameters have been added up in `full.grad`."""
        if self.stage > 1:
            unit.reduce()

    def sync(self) -> None:
        """Make every shard's gradient its mean over the ranks: between `backward()` and `step()`, which calls it."""
        for unit in self.trained:
            if unit.full.grad is not None:
                unit.reduce()

    def step(self) -> None:
        """Update the shards, and every copy of them.  Raises RuntimeError where no gradient is there to step with."""
        self.sync()
        if all(shard.grad is None for shard in self.shards):
            raise RuntimeError("step() found no gradient: each step() needs a backward() before it, and uses it up")
        self.optimizer.step()
        self.zero_grad()
        for unit in self.trained if self.stage < 3 else ():
            unit.gather()

    def zero_grad(self) -> None:
        for unit in self.trained:
            unit.full.grad = unit.shard.grad = None

    # ---- in and out --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it on every rank, without a trace of stage or ranks: any stage on any number of ranks loads it.

        "model": what `model.state_dict()` was before it was sharded.  "optimizer": by parameter, its entries in the
        parameter's own shape.  "groups": the optimizer's hyperparameters.
        """
        whole, moments, inner = dict(self.model.named_buffers()), {}, self.optimizer.state_dict()
        for unit in self.units:
            whole |= unit.whole(unit.shard.data)
        for index, entries in inner["state"].items():
            unit = self.trained[index]
            for key, value in entries.items():
                sharded = value.shape == unit.shard.shape
                for name, tensor in (unit.whole(value) if sharded else dict.fromkeys(unit.shapes, value)).items():
                    moments.setdefault(name, {})[key] = tensor
        groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
        model = {key: whole[name] for key, name in self.keys.items()}
        return {"model": model, "optimizer": moments, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's shards of what `state_dict` returned.  Raises ValueError where names or shapes differ."""
        require_same(state["model"], self.keys, self.units)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["model"][name])
        inner, moments = self.optimizer.state_dict(), state["optimizer"]
        for unit in self.units:
            unit.shard.data.copy_(unit.piece([state["model"][name] for name in unit.shapes]))
            if self.stage < 3:
                unit.gather()
        for index, unit in enumerate(self.trained if moments else ()):
            first, *_ = of_each = [moments[name] for name in unit.shapes]
            inner["state"][index] = {
                key: unit.piece([entries[key] for entries in of_each]) if value.dim() else value
                for key, value in first.items()
            }
        groups = [own | saved for own, saved in zip(inner["param_groups"], state["groups"], strict=True)]
        self.optimizer.load_state_dict({"state": inner["state"], "param_groups": groups})


# ---- what comes and goes together ------------------------------------------------------------------------


class Unit:
    """Some parameters of one dtype in one vector, and this rank's shard of it.

    full: [n], n a multiple of N.  shard: [n / N]; a part of `full` under stages 1 and 2, and under stage 3 memory of
    its own, while `full` has none unless the unit is in use.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        stage: int,
        group: ProcessGroup | None,
        initial: Callable[[str, torch.Size], Tensor] | None,
    ):
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.shapes = {name: p.shape for name, p in named.items()}
        self.padding = -sum(p.numel() for p in named.values()) % self.ranks
        self.slots: list[tuple[nn.Module, str, str]] = []  # every place in the model where one of them stands
        self.users: set[tuple[Layer, str]] = set()
        p = next(iter(named.values()))
        values = [initial(name, p.shape).to(p.dtype) if p.is_meta else p.detach() for name, p in named.items()]
        self.full = nn.Parameter(self.flat(values), p.requires_grad)
        shard = self.full.data.chunk(self.ranks)[self.rank]
        self.shard = nn.Parameter(shard.clone() if stage == 3 else shard, p.requires_grad)
        self.at_rest = self.shard if stage == 3 else self.full
        if stage == 3:
            self.full.untyped_storage().resize_(0)

    def gather(self) -> None:
        """all_gather P, from everybody's shard."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        ALL_GATHER(self.full.data, self.shard.data, group=self.group)

    def drop(self) -> None:
        """Give the memory back, and let the modules' parameters say so."""
        self.full.untyped_storage().resize_(0)
        for module, attribute, name in self.slots:
            setattr(module, attribute, Dropped(name, self.rank, self.ranks))

    def reduce(self) -> None:
        """reduce_scatter G; drop G."""
        gradient, self.full.grad = self.full.grad, None
        mean = reduce_scatter(gradient, self.group).div_(self.ranks)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)

    def flat(self, tensors: list[Tensor]) -> Tensor:
        """[n]: the tensors side by side, then the padding."""
        return torch.cat([*(x.flatten() for x in tensors), tensors[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters, by name, as views of such a vector."""
        *pieces, _ = flat.split([*(shape.numel() for shape in self.shapes.values()), self.padding])
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}

    def piece(self, tensors: list[Tensor]) -> Tensor:
        """This rank's part of what lies in the parameters' shapes."""
        return self.flat(tensors).chunk(self.ranks)[self.rank]

    def whole(self, piece: Tensor) -> dict[str, Tensor]:
        """By name and in the parameters' shapes, what every rank has one piece of."""
        flat = piece.new_empty(piece.numel() * self.ranks)
        ALL_GATHER(flat, piece, group=self.group)
        return self.views(flat)


class Layer:
    """A module, and where in it the parameters of which unit stand: {unit: {(module, attribute): name}}."""

    def __init__(self, module: nn.Module, places: dict[Unit, dict[tuple[nn.Module, str], str]]):
        self.module, self.places = module, places

    def gather(self, phase: str) -> None:
        for unit in self.places:
            if not unit.users:
                unit.gather()
            unit.users.add((self, phase))
        self.show()

    def drop(self, *phases: str) -> None:
        """A unit that others still use, or this layer in another phase (recomputation in backward), stays."""
        for unit in self.places:
            unit.users -= {(self, phase) for phase in phases}
            if not unit.users:
                unit.drop()

    def show(self) -> list[Tensor]:
        """Let the module's parameters be views of `full`; their gradients come together in the tensors returned."""
        uses = []
        for unit, places in self.places.items():
            with torch.enable_grad():  # in backward, too: a recomputation needs what the forward had
                uses.append(alias(unit.full))
                views = unit.views(uses[-1])
            for (module, attribute), name in places.items():
                setattr(module, attribute, views[name])
        return uses


class Dropped:
    """Stands where a parameter was.  Whatever is done with it raises RuntimeError."""

    def __init__(self, name: str, rank: int, ranks: int):
        self.text = (
            f"parameter {name!r} is dropped: rank {rank} of {ranks} holds a shard of its layer, "
            "and the whole only while the layer computes; zero.state_dict() has all of it"
        )

    def __repr__(self) -> str:
        return f"Dropped({self.text})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python and IPython ask for these of anything
            raise AttributeError(attribute)
        raise RuntimeError(self.text)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(next(x.text for x in tree_leaves((args, kwargs)) if isinstance(x, cls)))


# ---- from modules to units -------------------------------------------------------------------------------


def in_layers(
    model: nn.Module, layers: Iterable[nn.Module] | None, unit: Callable[[dict[str, nn.Parameter]], Unit]
) -> list[Layer]:
    """Take the parameters out of the modules and into units: those of one layer, dtype and `requires_grad` in one.

    A parameter that several layers share is the first one's, and each of them gathers it.
    """
    chosen = list(dict.fromkeys([*opened(model), model] if layers is None else layers))
    names = {id(p): name for name, p in model.named_parameters()}
    slots = {
        layer: [(module, attribute, names[id(p)]) for module, attribute, p in parameters_of(layer, chosen)]
        for layer in chosen
    }
    require_all(names.values(), {name for within in slots.values() for _, _, name in within})
    unit_of: dict[str, Unit] = {}
    for layer, within in slots.items():
        new = {name: module.get_parameter(attribute) for module, attribute, name in within if name not in unit_of}
        for number, named in enumerate(by_kind(new)):
            unit_of |= dict.fromkeys(named, unit(named))
            layer.register_parameter(f"flat{number}", unit_of[next(iter(named))].at_rest)
        for module, attribute, name in within:
            unit_of[name].slots.append((module, attribute, name))
            module._parameters.pop(attribute, None)
    made = []
    for layer, within in slots.items():
        places: dict[Unit, dict[tuple[nn.Module, str], str]] = {}
        for module, attribute, name in within:
            places.setdefault(unit_of[name], {})[module, attribute] = name
        made += [Layer(layer, places)] if places else []
    return made


def opened(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; in place of containers, theirs."""
    for child in model.children():
        yield from opened(child) if isinstance(child, CONTAINERS) else (child,)


def parameters_of(layer: nn.Module, chosen: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of all within a layer that is not within another one."""
    for attribute, p in layer._parameters.items():
        if p is not None:
            yield layer, attribute, p
    for child in layer.children():
        if child not in chosen:
            yield from parameters_of(child, chosen)


def by_kind(named: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for name, p in named.items():
        kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
    return list(kinds.values())


def require_all(names: Iterable[str], covered: set[str]) -> None:
    if missing := [name for name in names if name not in covered]:
        raise ValueError(
            f"layers miss {', '.join(map(repr, missing))}: "
            "add the modules that hold them, or the model itself, for all that no other layer has"
        )


def keys(model: nn.Module) -> dict[str, str]:
    """{each key of `model.state_dict()`: the name of the parameter or buffer}; a tied parameter has several keys."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {key: first.get(id(value), key) for key, value in model.state_dict(keep_vars=True).items()}


def require_same(state: dict[str, Tensor], keys: Iterable[str], units: list[Unit]) -> None:
    differ = [f"{key!r} is not in it" for key in keys if key not in state]
    differ += [f"{key!r} is not in the model" for key in state if key not in keys]
    differ = differ or [
        f"{name!r} has shape {tuple(state[name].shape)} in it and {tuple(shape)} in the model"
        for unit in units
        for name, shape in unit.shapes.items()
        if state[name].shape != shape
    ]
    if differ:
        raise ValueError(f"this state is of another model: {'; '.join(differ)}")


def alias(x: Any) -> Any:
    """The same numbers, as a tensor whose gradient is there when all uses of this one tensor are over."""
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def differentiable(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]


def when_all_have_gradients(tensors: list[Tensor], then: Callable[[], None]) -> None:
    # torch.autograd.graph.register_multi_grad_hook would keep all of these gradients until the last one is there.
    uses, there = len(tensors), 0  # not the tensors themselves: a hook that knew its own tensor would keep it alive

    def one_more(gradient: Tensor) -> None:
        nonlocal there
        there += 1
        if there % uses == 0:
            then()

    for x in tensors:
        x.register_hook(one_more)


# ---- collectives -----------------------------------------------------------------------------------------


def reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's N-th part of the sum over all ranks' `full`, 1-D.

    gloo's own reduce-scatter is an all-reduce, which sends twice as much.  There each rank sends every other one its
    part, and adds up what it gets in the order of the ranks: all of them, and every run, round alike.
    """
    ranks = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo":
        part = full.new_empty(full.numel() // ranks)
        REDUCE_SCATTER(part, full, group=group)
        return part
    parts = torch.empty_like(full)
    dist.all_to_all_single(parts, full, group=group)
    first, *others = parts.chunk(ranks)
    total = first.clone()
    for part in others:
        total += part
    return total
