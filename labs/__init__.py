"""Train a large model on many devices: the map of this package.

Each file directly in labs/ teaches one thing, from scratch, on torch.distributed (cost and pp are folders, with a file
for each topic).  Read them in this order; each imports only files above it.

    model        a small GPT for one device; knows nothing of parallelism
    data         the corpus, this Python's own standard library as bytes, and the sampler
    cost         pencil and paper: bytes held and bytes sent, for every strategy
    collectives  broadcast, all-gather, reduce-scatter, all-reduce, ... from send and recv
    group        what a strategy asks of its process group: the least bytes, equal replicas
    grid         ranks as a grid with named axes
    mesh         its process groups: one along each axis
    placement    the layout of a tensor on a mesh: cut, whole, or as summands
    redistribute from one placement to another: the one collective between each pair
    algebra      what becomes of placements in an operation
    letters      which dim belongs to which, in operations on any shapes
    rules        the table of operations
    operation    one operation: prepared by its rule, carried out on blocks
    dtensor      a tensor that knows its layout, and computes as if it were whole
    autograd     what a strategy asks of autograd: when a layer's backward begins and ends
    ddp          copies that agree: average the gradients; in buckets; while backward runs
    layers       the modules whose parameters come and go together
    flat         layers as flat vectors: what is gathered, dropped and reduced at once
    zero         the spare copies removed, stage by stage
    sharded      one parameter, sharded: a piece for the optimizer, all of it for its layer
    parameter_group  the parameters of a layer, which travel together
    prefetch     the order of layers, and what is in flight because of it
    shardable    what can be sharded this way, and what is refused
    fsdp         stage 3 parameter by parameter, gathered before it is needed
    conjugate    the borders of a split layer: what crosses them forward, and what its gradient does backward
    shares       which part of a parameter each rank has: features, heads
    vocabulary   an embedding and a cross-entropy of a split vocabulary
    alike        what must be the same on all ranks of a split model, compared in its first step
    parallel_layers  the modules of a split transformer
    styles       how a module is split, and what crosses its borders
    splittable   what can be split this way, and what is refused
    tp           tensor parallelism: every matrix split, by a plan
    async_tp     a split layer's gather while its matrices multiply
    pp           the layers dealt out, micro-batches flowing through them: schedules as data, and what obeys them
    generate     one token after the other, with the keys and values of the past at hand
    llama        weights as they are published: a Llama's, under Hugging Face's names
    precision    compute in two bytes, remember in four; loss scaling
    clip         the norm of the gradients, wherever their shards are
    selective    operations whose outputs are kept, and not computed again
    recompute    activations computed twice, so that they need not be kept
    disk         numbers in files that no crash can spoil
    offload      optimizer state in host memory or on disk
    native       the same verbs as PyTorch ships them

labs/kit is the laboratory around them, and not on the exam; its own map is in labs/kit/__init__.py.
"""
