"""The course's strategies as PyTorch ships them: the functions that you call at work.

ours                              PyTorch's
ddp.Overlapped(model); .sync()    ddp(model); nothing to call: the end of backward waits
zero.Zero(model, stage=1, ...)    zero1(model, AdamW, lr=...): another sharding, whole parameters to each rank
zero.Zero(model, stage=2, ...)    fsdp(model, layers, reshard_after_forward=False), but P is sharded between steps, too
zero.Zero(model, stage=3, ...)    fsdp(model, layers)
fsdp.fully_shard(layer), ...      fsdp(model, layers, mesh, ...): mesh, resharding and dtypes have the same names
mesh.Mesh((2, 2), names)          device_mesh(mesh)
tp.parallelize(model, mesh, plan) tp(model, mesh, plan): the same plan; loss and backward within loss_parallel()
cp.ring_attention                 templated_ring, as the attention of context_parallel(model, group, ...)
moe.ExpertParallel(model, mesh)   expert_parallel(model, device_mesh(mesh)): the model, and a function that averages
parallel.Parallel(stages, ...)    parallel(mine, device_mesh(mesh), plan), and then pp(stages, ...)
pp.Pipeline(stages, lists, loss)  pp(stages, "1f1b", microbatches, loss), and step() in place of forward_backward()
checkpoint.save(folder, step, ..) save_checkpoint(where, model, optimizer): more is lost silently
checkpoint.load(where, held)      load_checkpoint(where, model, optimizer)
checkpoint.Saver(folder).save(..) save_in_background(where, model, optimizer), and .result()
llama's names, in safetensors     save_hugging_face(where, model), load_hugging_face(where, model)

Read the files in this order:

    distributed_data_parallel  DistributedDataParallel: a copy on every rank; and a sharded optimizer state
    fsdp2                      a DeviceMesh, and fully_shard on it: every parameter sharded, gathered layer by layer
    parallelize_module         tensor parallelism: every matrix split, by the same plan
    templated_ring             ring attention by PyTorch's template, on a CPU, too
    pipelining                 stages and schedules, and checks that PyTorch does not make
    grouped_experts            DTensor experts, an all-to-all with autograd, and DDP for the rest
    three_dimensions           FSDP, TP and PP on one mesh; the norm over all axes
    state_dicts                the state dicts that a checkpoint consists of
    dcp                        saving and loading checkpoints; weights in Hugging Face's format
"""

# ruff: noqa: F401

from labs.native.dcp import (
    load_checkpoint,
    load_hugging_face,
    save_checkpoint,
    save_hugging_face,
    save_in_background,
)
from labs.native.distributed_data_parallel import ddp, zero1
from labs.native.fsdp2 import device_mesh, fsdp
from labs.native.grouped_experts import expert_parallel
from labs.native.parallelize_module import tp
from labs.native.pipelining import HAS_V, V, pp
from labs.native.state_dicts import set_states, states
from labs.native.templated_ring import templated_ring
from labs.native.three_dimensions import clip_gradients, parallel
