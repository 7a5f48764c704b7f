"""ZeRO by DeepSpeed: a configuration file says what `labs.zero` says in code (extra deepspeed).

    configuration  checks of a configuration: its keys and batch sizes; its translation from and to FSDP's settings
    engine         DeepSpeed's engine of a model, on CPU without a compiler; the model's full parameters
    saved          DeepSpeed's checkpoints, for the same number of ranks or, as universal ones, for any number
    estimates      DeepSpeed's own estimates of the memory that a model will need, and what they leave out

Each function that needs DeepSpeed imports it.  Without DeepSpeed, these files can be imported, and their functions
raise an error when they are called.
"""
