"""The other road: the course's GPT in JAX, where you say how arrays are laid out and the compiler (XLA) communicates.

    pure         the model, its loss and AdamW as functions of arrays; they load the weights of labs.model
    annotations  how each array is laid out on a mesh: one table for FSDP, TP and both; training on it
    mapped       collectives written by hand instead: ZeRO 3, and a pipeline
    placed       the collectives of any function, its arguments and results placed as labs.dtensor says it
    compiled     what is left of it, without JAX
    hlo          the collectives that the compiler has put in, read from what it has compiled

It needs JAX, the extra `gspmd`, which no other folder of labs imports.  JAX starts threads, and counts its devices
once: labs.kit.virtual runs a function in a process of its own, on as many devices as are asked for.
"""
