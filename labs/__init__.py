"""Train a large model on many devices: the map of this package.

Each name in labs/ is a chapter, taught from scratch on torch.distributed: a file, or a folder with a file for each idea
and an outline in its `__init__`.  Read them in this order; each imports only what is above it.

    rope         rotary positions: where a token stands is an angle
    model        a small GPT for one device; knows nothing of parallelism
    data         the corpus, this Python's own standard library as bytes, and the sampler
    cost         pencil and paper: bytes held and bytes sent, for every strategy
    collectives  broadcast, all-gather, reduce-scatter, all-reduce, ... from send and recv
    group        what a strategy asks of its process group: the least bytes
    agree        what must be the same on all ranks, compared
    mesh         ranks as a grid with named axes, and a process group along each
    dtensor      a tensor that knows its layout, and computes as if it were whole
    hooks        what a strategy asks of autograd: when a layer's backward begins and ends
    dropped      what stands where memory is gone, so that nobody reads it
    elementwise  what an optimizer may not ask of a shard: its shape, its norm, its neighbours
    ddp          copies that agree: average the gradients; in buckets; while backward runs
    zero         the spare copies removed, stage by stage, a layer at a time
    fsdp         stage 3 parameter by parameter, gathered before it is needed
    memory       hold less: precision, recomputation, offload
    clip         the norm of the gradients, wherever their shards are
    tp           every matrix split, by a plan
    pp           the layers dealt out, micro-batches flowing through them: schedules as data, and what obeys them
    gspmd        a few layouts given, those of a whole program found, and its communication with them
    generate     one token after the other, with the keys and values of the past at hand
    llama        weights as they are published: a Llama's, under Hugging Face's names
    checkpoint   a training that survives: saved by all ranks, and loaded in any other layout
    parallel     all of it on one mesh: stages that are split and sharded
    plan         this model, on these machines, how? every layout that fits, the quickest first
    native       the same verbs as PyTorch ships them
    deepspeed    and as DeepSpeed does: a configuration says it (extra deepspeed)
    xla          the other road, JAX: say how arrays are laid out, and the compiler communicates (extra gspmd)

labs/kit is the laboratory around them, and not on the exam; its own map is in labs/kit/__init__.py.
"""
