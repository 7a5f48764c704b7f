"""Training on machines that are shared with others: one trainer, and what joins it to launchers.

In this order:

    settings        what a training is: one dataclass, read from a TOML file and from flags
    tokens          the data of a training: the corpus, or a folder of text or of token files
    report          what a training says: a line, TensorBoard's logs and a JSON line for each step
    trainer         the training itself, on each rank: `train(settings)`
    command         python -m labs train, which starts the ranks, or joins those of torchrun
    train.sbatch    the batch script for Slurm
    kubernetes_job  the manifest of a TrainJob for Kubernetes, made of the same settings

The launchers are used as they are: torchrun, Slurm's sbatch and srun, Kubeflow's trainer.
"""
