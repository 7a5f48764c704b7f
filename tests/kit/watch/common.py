"""What several tests of recordings use."""

from labs.kit.launch import run


def recording(fn, *args, ranks=2, record="communication"):
    return run(fn, *args, ranks=ranks, device="cpu", record=record).recording
