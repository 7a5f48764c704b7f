"""What tests of ranks find: processes that have begun, and a folder of their own."""

import tempfile

import pytest
import torch.distributed as dist

from labs.kit.launch import run


@pytest.fixture(scope="package", autouse=True)
def warm():
    run(dist.get_rank, ranks=2)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Temporary files of this test's jobs go here, and no others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
