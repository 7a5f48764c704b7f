"""The same ZeRO in other hands: DeepSpeed, where a configuration says what `labs.zero` says in code (extra deepspeed).

    configuration  what the file may say: its keys, batch sizes that agree, and FSDP's settings in its words
    engine         a model under a configuration, on CPU without a compiler; its whole parameters; what is missing
    saved          its checkpoints, for as many ranks or, as universal ones, for any number
    estimates      what it says beforehand that a model will need, and what that leaves out

DeepSpeed is imported within the functions that need it: without it, these files can be imported, and say so when they
are used.
"""
