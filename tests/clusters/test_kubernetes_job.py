"""Tests of the manifest for Kubernetes by Kubeflow's own models, which must not lose a field of it."""

import json

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from labs.clusters.command import main, without_job
from labs.clusters.kubernetes_job import train_job


def test_kubeflow_reads_every_field_of_a_train_job():
    """Kubeflow's models drop unknown fields without a word, so what they print is compared."""
    manifest = json.loads(train_job("registry/labs:1", 2, 4, ["configs/fsdp.toml", "--steps", "3"]))
    read = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert json.loads(read.to_json()) == manifest
    trainer = manifest["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    manifest["spec"]["trainer"]["numNode"] = 2
    assert json.loads(TrainerV1alpha1TrainJob.from_dict(manifest).to_json()) != manifest


def test_the_command_prints_it_with_the_arguments_of_the_training(capsys):
    given = ["--strategy", "fsdp", "--job", "registry/labs:1", "--nodes", "2", "--ranks=4", "--steps", "3"]
    assert main(given) == 0
    command = json.loads(capsys.readouterr().out)["spec"]["trainer"]["command"]
    assert command == ["torchrun", "-m", "labs", "train", "--strategy", "fsdp", "--steps", "3"] == [
        "torchrun", "-m", "labs", "train", *without_job(given),
    ]  # fmt: skip


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 ranks cannot be divided among 3 nodes"):
        train_job("image", 3, 4, [])
