"""Tests of labs.fsdp.step_state: after a failed backward, a training continues as if it had not happened.

The reference is the same training without it.  Ranks that use different layers: test_what_can_be_sharded.py.
"""

import torch
import torch.distributed as dist

from labs.kit.launch import run
from labs.mesh import Mesh
from tests.fsdp.common import awkward, sharded
from tests.models import batch


def test_after_a_backward_that_failed_the_next_one_is_right():
    def body():
        mesh, found = Mesh((2,), ("dp",)), []
        for fails in (False, True):
            model = sharded(awkward(), mesh)
            model(batch(0, dist.get_rank())).backward()
            model.zero_grad()
            if fails:  # fails inside a layer, while an earlier micro-batch waits
                model.set_requires_gradient_sync(False)
                model(batch(1, dist.get_rank())).backward()
                model.set_requires_gradient_sync(True)
                handle = model.layers[0][1].register_full_backward_pre_hook(lambda *_: 1 / 0)
                try:
                    model(batch(1, dist.get_rank())).backward()
                except ZeroDivisionError:
                    found.append("failed")
                handle.remove()
                model.zero_grad()
            model(batch(2, dist.get_rank())).backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
        return found

    for right, failed, after in run(body, ranks=2):
        assert failed == "failed"
        assert right.keys() == after.keys()
        assert all(torch.equal(right[name], after[name]) for name in right)
