"""Tests of virtual devices: as many as were asked for; and a JAX that is pretended to be missing, or old."""

import sys
import time

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from labs.kit.extras import jax_devices
from labs.kit.launch import RankError, on_devices, on_processes, or_skip
from tests.extras import need_jax


def seen(after):
    import jax

    return after, len(jax.devices()), jax.devices()[0].platform


def test_as_many_devices_as_are_asked_for_and_none_here():
    need_jax()
    before = "jax" in sys.modules
    assert on_devices(seen, "a", devices=3) == ("a", 3, "cpu")
    assert on_devices(seen, after="b", devices=32) == ("b", 32, "cpu")
    assert ("jax" in sys.modules) == before


def everywhere(factor):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from labs.xla.annotations import mesh_of

    mesh = mesh_of({"dp": len(jax.devices())})
    cut, whole = NamedSharding(mesh, PartitionSpec("dp")), NamedSharding(mesh, PartitionSpec())
    numbers = jax.device_put(np.arange(8.0), cut)
    print("summed", flush=True)
    total = jax.jit(lambda x: factor * jnp.sum(x), out_shardings=whole)(numbers)
    return len(jax.local_devices()), len(jax.devices()), float(total)


def test_processes_know_of_each_other_and_say_nothing_of_it(capfd):
    need_jax()
    assert on_processes(everywhere, 2, processes=2, devices=2) == [(2, 4, 56.0)] * 2
    printed = capfd.readouterr().out
    assert "summed" in printed and "Gloo" not in printed


def leaves():
    import jax

    if jax.process_index() == 0:
        everywhere(2)


def test_processes_of_which_one_has_left_end_at_their_timeout():
    need_jax()
    with pytest.raises(RankError):
        on_processes(leaves, processes=2, devices=1, timeout=8)


def hangs():
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # JAX catches the signal if it knows of several processes
    time.sleep(100)


def test_one_that_hangs_ends_at_its_timeout():
    need_jax()
    began = time.monotonic()
    with pytest.raises(RankError, match=r"0\.5 s"):
        on_devices(hangs, devices=1, timeout=0.5)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("devices", [0, 257, 2.0, True])
def test_a_number_that_cannot_be_is_reported(devices):
    with pytest.raises(ValueError, match=f"devices={devices}: give a number from 1 to 256"):
        on_devices(seen, "a", devices=devices)
    with pytest.raises(ValueError, match=f"devices={devices}: give a number from 1 to 256"):
        on_processes(seen, "a", devices=devices)


def test_a_jax_that_is_missing_is_reported_with_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(jax_devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="JAX is not installed: `make learn EXTRA=gspmd` adds it"):
        on_devices(seen, "a")


def test_without_its_extra_a_notebook_says_so_and_its_cells_do_nothing(monkeypatch, capsys):
    shell = InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    or_skip("")
    assert shell.run_cell("1 + 1").result == 2
    or_skip("JAX is not installed: so add it")
    assert "JAX is not installed: so add it. Until then, the cells below do nothing.\n" in capsys.readouterr().out
    done = shell.run_cell("from nowhere import nothing\n1 + 1")
    assert done.success and done.result is None


@pytest.mark.parametrize(("version", "too_old"), [("0.9.2", True), ("0.10.0", False), ("1.0", False), ("0.4.35", True)])
def test_a_jax_that_is_too_old_is_reported(version, too_old, monkeypatch):
    monkeypatch.setattr(jax_devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax_devices.importlib.metadata, "version", lambda name: version)
    assert jax_devices.jax_missing() == (
        f"JAX {version} is older than 0.10: `make learn EXTRA=gspmd` brings a newer one" if too_old else ""
    )
