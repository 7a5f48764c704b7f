"""Training of large models on many devices: the map of this package.

Each name in labs/ is a chapter, taught from scratch on torch.distributed: a file, or a folder with a file for each idea
and an outline in its `__init__`.  Read the chapters in this order; each one imports only chapters above it.

    rope         rotary positions: a token's position as an angle
    model        a small GPT for one device, which knows nothing of parallelism
    data         the corpus, this Python's own standard library as bytes, and the sampler
    cost         pencil and paper: bytes held and bytes sent, for every strategy
    collectives  broadcast, all-gather, reduce-scatter, all-reduce, ... from send and recv
    group        the collectives that strategies call, each with the least bytes on any backend
    agree        comparisons between ranks of what must be the same on all of them
    unaveraged   the check that an optimizer steps nothing whose gradient nobody averages
    mesh         ranks as a grid with named axes, and a process group along each
    dtensor      a tensor that knows its layout, and computes as if it were whole
    hooks        the moments at which a layer's backward begins and ends, as autograd reports them
    dropped      placeholders for parameters whose memory is freed, so that reading one raises an error
    optimizer_probe  the check that an optimizer treats each element by itself, so that it can update shards
    ddp          replicas that stay equal: gradients are averaged, in buckets, while backward runs
    zero         data parallelism without redundant copies, stage by stage, a layer at a time
    fsdp         stage 3 parameter by parameter, gathered before it is needed
    memory       fewer bytes held: mixed precision, recomputation, offload
    clip         the norm of the gradients, wherever their shards are
    llama        a Llama's published weights, under Hugging Face's names
    moe          experts: a feed-forward of many MLPs, of which each token uses a few
    tp           every weight matrix split between ranks, by a plan
    cp           every sequence cut into pieces, whose ranks meet in attention
    pp           the layers split into stages, through which micro-batches flow: schedules as data, and their executor
    gspmd        the layouts and collectives of a whole program, derived from a few annotations
    generate     one token after the other, with a cache of keys and values
    checkpoint   a training's state, saved by all ranks, and loaded in any other layout
    parallel     all strategies on one mesh: stages that are split and sharded
    plan         every layout in which a model fits on given machines, the fastest first
    native       the same strategies as PyTorch ships them
    deepspeed    the same strategies in DeepSpeed, chosen by a configuration (extra deepspeed)
    xla          the same strategies in JAX: annotate arrays' layouts, and the compiler communicates (extra gspmd)

labs/kit is the laboratory around these chapters, which runs and measures them; labs/kit/__init__.py has a map of it.
labs/clusters has the trainer, `python -m labs train`, and what joins it to torchrun, Slurm and Kubernetes.
labs/exercises has the exercises and challenges of the notebooks, one file each.
"""
