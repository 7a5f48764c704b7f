"""Fixtures of the tests of ranks: processes that have begun, and a folder of their own."""

import tempfile

import pytest
import torch.distributed as dist

from labs.kit.launch import run


@pytest.fixture(scope="package", autouse=True)
def warm():
    run(dist.get_rank, ranks=2)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Put the temporary files of this test's jobs, and no others, into one folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
