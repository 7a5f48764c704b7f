"""Jobs of other launchers, with the arguments of the same training: a TrainJob for Kubernetes.

    python -m labs train configs/fsdp.toml --job IMAGE --nodes 2 --ranks 4 > job.yaml;  kubectl create -f job.yaml

For Slurm there is a batch script beside this file, train.sbatch; its head has what a site asks for.

Source: Kubeflow Trainer, API trainer.kubeflow.org/v1alpha1, whose runtime torch-distributed sets torchrun's variables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def train_job(image: str, nodes: int, ranks: int, arguments: Sequence[str]) -> str:
    """Return the manifest of a TrainJob as JSON, which kubectl reads like YAML.

    image: the container image that has the course.
    arguments: those of `python -m labs train`.
    Raises ValueError if the ranks cannot be divided among the nodes.
    """
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided among {nodes} nodes: change one of them")
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": nodes,
        "numProcPerNode": ranks // nodes,
        "command": ["torchrun", "-m", "labs", "train", *arguments],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    return (
        json.dumps(
            {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"generateName": "labs-train-"},
                "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
            },
            indent=2,
        )
        + "\n"
    )
