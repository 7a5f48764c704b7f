"""The course's GPT in JAX: you give the layouts of arrays, and the compiler (XLA) adds the communication.

    gpt_in_jax         the model, its loss and AdamW as functions of arrays; they take the weights of labs.model
    annotations        the layout of each array on a mesh: one table for FSDP, TP and both; training with it
    shard_map          collectives written by hand instead: ZeRO 3, and a pipeline
    added_collectives  the collectives of any function, given the placements of its arguments and results
    training_result    the result of a training, as numbers and text without objects of JAX
    hlo                the collectives that the compiler has added, read from the compiled program

This folder needs JAX (the extra `gspmd`), which no other folder of labs imports.  JAX starts threads, and counts its
devices only once.  So labs.kit.extras.jax_devices runs a function of this folder in a process of its own, with any
number of devices.
"""
