"""Shared code of several tests of recordings."""

from labs.kit.launch import run


def recording(fn, *args, ranks=2, record="communication"):
    return run(fn, *args, ranks=ranks, device="cpu", record=record).recording
