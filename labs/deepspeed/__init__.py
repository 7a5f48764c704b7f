"""ZeRO by DeepSpeed: a configuration file says what `labs.zero` says in code (extra deepspeed).

    configuration  checks of a configuration: its keys and batch sizes; its translation from and to FSDP's settings
    engine         a model under a configuration, on CPU without a compiler; its full parameters
    saved          its checkpoints, for the same number of ranks or, as universal ones, for any number
    estimates      its own estimates of the memory that a model will need, and what they leave out

Each function that needs DeepSpeed imports it: without DeepSpeed, these files can be imported, and raise when they are
used.
"""
