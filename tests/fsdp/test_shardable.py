"""What labs.fsdp refuses, as it shards or later, and the sentence."""

import torch
import torch.distributed as dist
from torch import nn

from labs.dtensor import Shard, distribute_tensor
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh
from tests.fsdp.common import linear, seeded


def of_two_dtypes(mesh):
    fully_shard(nn.Sequential(linear(), linear().double()), mesh=mesh)


def from_other_seeds(mesh):
    torch.manual_seed(dist.get_rank())
    fully_shard(nn.Linear(3, 3), mesh=mesh)


def replicas_from_other_seeds(mesh):
    from_other_seeds(Mesh((2, 1), ("replicate", "shard")))


def of_other_shapes(mesh):
    fully_shard(nn.Linear(3, 3 + dist.get_rank()), mesh=mesh)


def converted_later(mesh):
    fully_shard(linear(), mesh=mesh).double()(torch.ones(2, 3, dtype=torch.float64))


def optimizer_before(mesh):
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fully_shard(layer, mesh=mesh)(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def step_before_backward(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    loss = layer(torch.ones(2, 3)).square().sum()
    optimizer.step()
    loss.backward()


class Does(nn.Module):
    """A Linear, and something else in its forward: do(module, x)."""

    def __init__(self, do=lambda module, x: None, inner=linear):
        super().__init__()
        self.inner, self.do = inner(), do

    def forward(self, x):
        found = self.do(self, x)
        return self.inner(x) if found is None else found


def trained(do, mesh, inner=linear, inputs=None):
    model = fully_shard(Does(do, inner), mesh=mesh)
    model(torch.ones(2, 3) if inputs is None else inputs).sum().backward()
    return model


def parameters_in_forward(mesh):
    trained(lambda module, x: x @ next(module.parameters()), mesh)


def replaced_in_forward(mesh):
    def normalise(module, x):
        module.inner.weight.data = module.inner.weight.data / 2

    trained(normalise, mesh)


def frozen_and_replaced(mesh):
    def normalise(module, x):
        module.inner.weight.data = module.inner.weight.data / 2

    trained(normalise, mesh, lambda: linear().requires_grad_(False), torch.ones(2, 3, requires_grad=True))


def hook_after(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    layer(torch.ones(2, 3))


def gradient_before(mesh):
    layer = linear()
    layer(torch.ones(2, 3)).sum().backward()
    fully_shard(layer, mesh=mesh)


def plain_data(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer.weight.data = torch.ones(3, 3)


def a_loss_beside_the_output(mesh):
    kept = []
    trained(lambda module, x: kept.append(module.inner.weight.square().sum()), mesh)
    kept[0].backward()


def taken_out(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    del layer.weight
    layer(torch.ones(2, 3))


def frozen_on_one_rank(mesh):
    fully_shard(linear().requires_grad_(dist.get_rank() == 0), mesh=mesh)


def frozen_later_on_one_rank(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer(torch.ones(2, 3)).sum().backward()
    (layer.weight, layer.bias)[dist.get_rank()].requires_grad_(False)
    layer(torch.ones(2, 3))


def taking_one(mesh, do):
    model = Does(do)
    model.layers = nn.ModuleList([linear(), linear(), linear()])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def different_layers(mesh):
    taking_one(mesh, lambda model, x: model.layers[dist.get_rank()](x))(torch.ones(2, 3))


def different_layers_without_gradient(mesh):
    with torch.no_grad():
        different_layers(mesh)


def different_layers_on_replicas(mesh):
    different_layers(Mesh((2, 1), ("replicate", "shard")))


def different_layers_later(mesh):
    model = taking_one(mesh, lambda model, x: sum(model.layers[number](x) for number in model.numbers))
    for model.numbers in ([0, 1], [dist.get_rank()]):
        model(torch.ones(2, 3)).sum().backward()


def different_way_back(mesh):
    model = taking_one(mesh, lambda model, x: [layer(x) for layer in model.layers][1 + dist.get_rank()])
    model(torch.ones(2, 3)).sum().backward()


class Passes(nn.Linear):
    def forward(self, x):
        return super().forward(x) if dist.get_rank() == 0 else x


def passed_on_by_one_rank(mesh):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), Passes(3, 3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)(torch.ones(2, 3))


def no_divisor(mesh):
    fully_shard(linear(), mesh=mesh, reshard_after_forward=3)


def of_a_list(mesh):
    fully_shard(nn.ModuleList([linear()]), mesh=mesh)


def distributed_already(mesh):
    layer = linear()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    fully_shard(layer, mesh=mesh)


REFUSED = {  # beside the odd trainings (tests/odd.py)
    of_two_dtypes: "'0.bias' (torch.float32) and '1.bias' (torch.float64) cannot be gathered at once",
    from_other_seeds: "replicas differ from the start: parameter 'weight'",
    replicas_from_other_seeds: "replicas differ from the start: parameter 'weight'",
    of_other_shapes: "replicas differ from the start: parameter 'weight' is torch.float32 of shape (3, 3)",
    converted_later: "was sharded as a DTensor of torch.float32, and a DTensor of torch.float64 stands there now",
    optimizer_before: "make the optimizer after fully_shard",
    step_before_backward: "backward() of a loss from before step()",
    parameters_in_forward: "after fully_shard, parameters() gives DTensors",
    replaced_in_forward: "parameter 'inner.weight' was written to in a forward",
    frozen_and_replaced: "parameter 'inner.weight' was written to in a forward",
    hook_after: "parameter 'weight' has a hook that backward would not call",
    gradient_before: "parameter 'weight' has a gradient",
    plain_data: ".data of a DTensor (torch.float32, (3, 3) as [Shard(0)]) takes one that is all of this",
    a_loss_beside_the_output: "has been modified by an inplace operation",
    taken_out: "parameter 'weight' was taken out of its module after fully_shard",
    frozen_on_one_rank: "parameter 'weight' is torch.float32 of shape (3, 3)",
    frozen_later_on_one_rank: "ranks train different parameters: rank 0 ['bias'], rank 1 ['weight']",
    different_layers_without_gradient: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_layers_on_replicas: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_layers_later: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_way_back: "ranks go back through different layers: rank 0 ['layers.1', 'the model'], rank 1",
    passed_on_by_one_rank: "ranks can go back through different layers: rank 0 ['0', '1', 'the model'], rank 1 ['0',",
    no_divisor: "reshard_after_forward=3 on 2 ranks: give True, False, or a smaller number",
    of_a_list: "fully_shard of a ModuleList, which has no forward",
    distributed_already: "parameter 'weight' is a DTensor already",
}


def test_bad_input_is_refused_in_a_sentence():
    def body():
        mesh, said = Mesh((2,), ("dp",)), {}
        for case in REFUSED:
            try:
                case(mesh)
            except (ValueError, RuntimeError) as error:
                said[case.__name__] = str(error)
        return said

    for said in run(body, ranks=2):
        for case, text in REFUSED.items():
            assert text in said.get(case.__name__, "nothing"), case.__name__
