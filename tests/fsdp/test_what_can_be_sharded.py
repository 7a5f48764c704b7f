"""Tests of the cases that labs.fsdp refuses, when it shards or later, and of the sentence of each."""

import copy
import io
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

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
    """A Linear whose forward does something else, too: do(module, x)."""

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
    model = Does(lambda module, x: x @ next(module.parameters()))
    fully_shard(model.inner, mesh=mesh)  # the parameters of `inner` are not whole yet
    fully_shard(model, mesh=mesh)(torch.ones(2, 3))


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


REFUSED = {  # refusals besides those of the odd trainings (tests/odd.py)
    of_two_dtypes: "'0.bias' (torch.float32) and '1.bias' (torch.float64) cannot be gathered at once",
    from_other_seeds: "replicas differ from the start: parameter 'weight'",
    replicas_from_other_seeds: "replicas differ from the start: parameter 'weight'",
    of_other_shapes: "replicas differ from the start: parameter 'weight' is torch.float32 of shape (3, 3)",
    converted_later: "sharded as a DTensor of torch.float32, and another one, a DTensor of torch.float64, stands there",
    optimizer_before: "make the optimizer after fully_shard",
    step_before_backward: "backward() of a loss from before step()",
    parameters_in_forward: "after fully_shard, parameters() gives DTensors",
    replaced_in_forward: "parameter 'inner.weight' was written to in a forward",
    frozen_and_replaced: "parameter 'inner.weight' was written to in a forward",
    hook_after: "parameter 'weight' has a hook that backward would not call",
    gradient_before: "parameter 'weight' has a gradient",
    plain_data: ".data of a DTensor (torch.float32, (3, 3) as [Shard(0)]) takes a DTensor of the same dtype",
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


# ---- advice in refusals ----------------------------------------------------------------------------------


def loaded_by_assigning(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=True)
    layer(torch.ones(2, 3))


def transposed_memory(mesh):
    fully_shard(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last), mesh=mesh)


def of_a_kind_of_its_own(mesh):
    layer = linear()
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    fully_shard(layer, mesh=mesh)


def with_a_gather_of_its_own(mesh):
    layer = linear()
    layer.weight.fsdp_pre_all_gather = lambda mesh: None
    fully_shard(layer, mesh=mesh)


def by_a_word(mesh):
    fully_shard(linear(), mesh=mesh, reshard_after_forward="yes")


def by_a_number_later(mesh):
    fully_shard(linear(), mesh=mesh).set_reshard_after_forward(2)


def on_pytorchs_mesh(mesh):
    fully_shard(linear(), mesh=init_device_mesh("cpu", (2,)))


def of_nothing(mesh):
    fully_shard([], mesh=mesh)


def cut_elsewhere(mesh):
    fully_shard(linear(), mesh=mesh, shard_placement_fn=lambda p: Shard(1))


def misspelt(mesh):
    fully_shard(linear(), mesh=mesh, ignored_parameters=set())


def half_reduced(mesh):
    fully_shard(linear(), mesh=mesh).set_requires_all_reduce(False)


def prefetching_a_stranger(mesh):
    fully_shard(linear(), mesh=mesh).set_modules_to_forward_prefetch([linear()])


def prefetching(mesh, *moments):
    model = fully_shard(nn.Sequential(*(fully_shard(linear(), mesh=mesh) for _ in range(3))), mesh=mesh)
    for forward in moments:
        if forward:
            model(torch.ones(2, 3))
        else:
            model[0].set_modules_to_forward_prefetch([model[1 + dist.get_rank()]])


def prefetching_others(mesh):
    prefetching(mesh, False, True)


def prefetching_others_later(mesh):
    prefetching(mesh, True, False)


def prefetching_on_one_rank(mesh):
    model = fully_shard(nn.Sequential(*(fully_shard(linear(), mesh=mesh) for _ in range(2))), mesh=mesh)
    if dist.get_rank():
        model[1].set_modules_to_backward_prefetch([model[0]])
    model(torch.ones(2, 3))


def within_a_transform(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    torch.func.grad(lambda x: layer(x).sum())(torch.ones(2, 3))


def through_pytorchs_helper(mesh):
    get_model_state_dict(fully_shard(linear(), mesh=mesh), options=StateDictOptions(full_state_dict=True))


def the_optimizer_through_pytorchs_helper(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    get_optimizer_state_dict(layer, torch.optim.SGD(layer.parameters(), lr=0.1))


def copied(mesh):
    copy.copy(fully_shard(linear(), mesh=mesh))


def saved_by_torch(mesh):
    torch.save(fully_shard(linear(), mesh=mesh).state_dict(), io.BytesIO())


def scaled(mesh):
    layer, scaler = fully_shard(linear(), mesh=mesh), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)


def clipped(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer(torch.ones(2, 3)).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=True)


def orthogonal(mesh):
    nn.init.orthogonal_(fully_shard(linear(), mesh=mesh).weight)


def the_unit_matrix(mesh):
    nn.init.eye_(fully_shard(linear(), mesh=mesh).weight)


def in_shared_memory(mesh):
    fully_shard(linear(), mesh=mesh).share_memory()


LEADS_OUT = {
    loaded_by_assigning: "load without assign=True",
    transposed_memory: "parameter 'weight' has the strides (72, 1, 24, 8)",
    of_a_kind_of_its_own: "parameter 'weight' is a TwoTensor",
    with_a_gather_of_its_own: "with ways of its own: give a plain parameter",
    by_a_word: "reshard_after_forward='yes': give True, False, None, or a number",
    by_a_number_later: "set_reshard_after_forward(2): give True or False",
    on_pytorchs_mesh: "is no labs.mesh.Mesh: give Mesh(",
    of_nothing: "fully_shard of an empty list",
    cut_elsewhere: "labs.fsdp cuts parameters along their first dim",
    misspelt: "fully_shard() has no argument 'ignored_parameters'",
    half_reduced: "set_requires_gradient_sync(False)",
    prefetching_a_stranger: "a Linear to prefetch, which was not given to fully_shard",
    prefetching_others: "rank 0 [('0', ['1'])], rank 1 [('0', ['2'])]; give the same lists",
    prefetching_others_later: "rank 0 [('0', ['1'])], rank 1 [('0', ['2'])]; give the same lists",
    prefetching_on_one_rank: "rank 0 [], rank 1 [('1', ['0'])]; give the same lists",
    within_a_transform: "fully_shard within torch.func.grad or vmap",
    through_pytorchs_helper: "save with labs.checkpoint",
    the_optimizer_through_pytorchs_helper: "save with labs.checkpoint",
    copied: "copy before fully_shard; to save it, labs.checkpoint.save",
    saved_by_torch: "full_tensor()",
    scaled: "LossScale looks for an overflow over all ranks",
    clipped: "labs.clip.clip_gradients adds up",
    orthogonal: "copy_(distribute_tensor(...))",
    the_unit_matrix: "with distribute_tensor (it is the whole)",
    in_shared_memory: "share_memory_() of a DTensor",
}


def said_of(cases):
    mesh, said = Mesh((2,), ("dp",)), {}
    for case in cases:
        try:
            case(mesh)
        except Exception as error:
            said[case.__name__] = str(error)
    return said


def test_refusals_name_a_call_that_works():
    for said in run(partial(said_of, [*LEADS_OUT]), ranks=2):
        for case, text in LEADS_OUT.items():
            assert text in said.get(case.__name__, "nothing"), case.__name__


def test_shards_are_filled_by_a_truncated_normal():
    """Check the initialization that torchtitan uses for models whose memory to_empty() made."""

    def body():
        whole = torch.stack([nn.init.trunc_normal_(fully_shard(nn.Linear(100, 80)).weight).full_tensor() for _ in "ab"])
        tail = nn.init.trunc_normal_(fully_shard(nn.Linear(100, 80)).weight, a=1.0, b=2.0).full_tensor()
        return whole.std().item(), whole.abs().max().item(), tail.min().item(), tail.max().item(), whole[0, 0, 0].item()

    def seeded_body():
        torch.manual_seed(0)
        return body()

    (one, other) = run(seeded_body, ranks=2)
    assert one == other
    std, largest, least, most, _ = one
    assert 0.85 < std < 0.91 and 1.9 < largest <= 2.0 and 1.0 <= least < 1.01 and 1.9 < most <= 2.0
