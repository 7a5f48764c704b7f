"""Tests of PyTorch's private names that the course uses: each exists in the installed PyTorch, and does the same.

The course's own source is searched for names that are missing from the table here.
"""

import operator
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from labs.kit.watch.c10d_tap import reduction
from labs.kit.watch.kinds_of_memory import keep

LABS = Path(__file__).resolve().parent.parent / "labs"
NAMES = """
    torch                                     Tensor._base Tensor._version Tensor._values Tensor._indices
                                              Tensor._make_wrapper_subclass Tensor._make_subclass Tensor._use_count
                                              Tensor._backward_hooks Tensor._post_accumulate_grad_hooks
                                              UntypedStorage._cdata ScriptObject._get_method _assert_async
    torch._C                                  DispatchKey _current_graph_task_id _will_engine_execute_node
                                              _are_functorch_transforms_active
                                              _ImperativeEngine _autograd.DeviceType.PrivateUse1
                                              _set_throw_on_mutable_data_ptr _functorch.peek_interpreter_stack
    torch._C._autograd                        _unsafe_set_version_counter _top_saved_tensors_default_hooks
                                              _push_saved_tensors_default_hooks _pop_saved_tensors_default_hooks
    torch._dynamo                             eval_frame._callback_from_stance
    torch._ops                                HigherOrderOperator OpOverload
    torch._subclasses.fake_tensor             FakeTensor FakeTensorMode
    torch.autograd                            Variable._execution_engine.queue_callback
    torch.autograd.graph                      _engine_run_backward
    torch.distributed                         distributed_c10d._new_group_with_tag distributed_c10d._world
                                              distributed_c10d._check_p2p_op_list
    torch.distributed.fsdp                    FSDPModule._get_fsdp_state
    torch.distributed.fsdp._fully_shard._fsdp_param
                                              _chunk_with_empty
    torch.distributed.fsdp._fully_shard._fsdp_param_group
                                              FSDPParamGroup._reshard_after_forward
    torch.distributed                         _functional_collectives
    torch._C._distributed_c10d                _resolve_process_group
    torch.optim.optimizer                     _get_foreach_kernels_supported_devices
    torch.distributed.tensor.experimental._context_parallel._attention
                                              _cp_options _templated_ring_attention
                                              _templated_ring_attention_backward
    torch.distributed.pipelining._utils       _StageBackwardMeta _StageForwardMeta
    torch.distributed.pipelining.stage        PipelineStage._recv_meta PipelineStage._send_meta
    torch.distributed.pipelining.schedules    _PipelineSchedule PipelineScheduleSingle._initialize_stage
                                              PipelineScheduleMulti._initialize_stages
    torch.nn.parallel                         DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    torch.nn.parallel.distributed             _sync_module_states _verify_param_shape_across_processes
    torch.testing._internal.distributed       fake_pg
    torch.utils                               _device.DeviceContext
    torch.distributed.tensor.debug            _clear_sharding_prop_cache
    torch.utils.backend_registration          _DummyBackendModule _DummyDeviceGuard
                                              _setup_privateuseone_for_python_backend
    torch.ops                                 _c10d_functional._wrap_tensor_autograd c10d._allgather_base_
                                              c10d._reduce_scatter_base_
                                              aten._scaled_dot_product_flash_attention_for_cpu
                                              aten._scaled_dot_product_flash_attention_for_cpu_backward
                                              aten._scaled_dot_product_flash_attention
                                              aten._scaled_dot_product_efficient_attention
                                              aten._scaled_dot_product_cudnn_attention aten.add.Tensor._schema
                                              aten.add.Tensor._overloadname aten._foreach_add aten._to_copy
                                              aten._softmax aten._softmax_backward_data aten._local_scalar_dense
                                              aten._log_softmax aten._log_softmax_backward_data aten._unsafe_view
                                              aten._fused_rms_norm aten._fused_rms_norm_backward
                                              aten._amp_foreach_non_finite_check_and_unscale
    torch.utils._python_dispatch              TorchDispatchMode._should_skip_dynamo
    torch.utils._pytree                       tree_flatten tree_leaves tree_map_only tree_unflatten
"""
OF_A_MODULE = (
    *("_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"),
)
OF_FSDP = ("_fsdp_param_group",)
OF_DDP = ("_ddp_params_and_buffers_to_ignore",)  # tests/test_ddp.py lets PyTorch set it
# These are asked for by hasattr, since only some versions have them.
OF_SOME_VERSIONS = {"_warmup_backward_result", "_initialize_pipeline_distributed_state", "_inference_mode"}
NOT_PYTORCHS = {
    "_exit",
    "_asdict",  # a NamedTuple has this name and the next three
    "_replace",
    "_fields",
    "_field_defaults",
    "_getframe",
    "_DummyThread",
    "_render_traceback_",
    "_repr_mimebundle_",
    "_like",
    "_foreach_",
    "_fused_",
    "_DYNAMIC_CLASS_TRACKER_BY_CLASS",  # cloudpickle has this name and the next
    "_class_setstate",
    "_lru_cache_wrapper",  # functools has this name
}
SET_BY_US = {"_is_param", "_step_supports_amp_scaling"} | set(vars(keep))  # a later PyTorch asks for it


def names():
    """Yield (module, dotted name)."""
    module = ""
    for word in NAMES.split():
        if word.startswith("torch"):
            module = word
        else:
            yield module, word


def missing(module, name):
    try:
        operator.attrgetter(name)(torch.ops if module == "torch.ops" else import_module(module))
    except (AttributeError, ImportError):
        return f"{module}.{name}"


def test_pytorch_has_them_all():
    gone = [text for pair in names() if (text := missing(*pair))]
    gone += [f"Module.{name}" for name in OF_A_MODULE if not hasattr(nn.Linear(1, 1), name)]
    gone += [f"FSDPState.{name}" for name in OF_FSDP if not hasattr(FSDPState(), name)]
    assert not gone, f"PyTorch {torch.__version__} has no {', '.join(gone)}: look in labs for where it is used"


def test_the_table_names_them_all():
    sources = [path.read_text(encoding="utf-8") for path in LABS.rglob("*.py")]
    own = {name for text in sources for name in re.findall(r"(?:def |self\.)(_\w+)", text)}
    used = {name for text in sources for name in re.findall(r"[\w)\]]\.(_[a-zA-Z]\w*)", text)}
    used |= {name for text in sources for name in re.findall(r"[\"'](_[a-zA-Z]\w*)[\"']", text)}
    known = (
        {part for pair in names() for part in ".".join(pair).split(".")} | {*OF_A_MODULE, *OF_FSDP, *OF_DDP} | SET_BY_US
    )
    shared = {path.stem for path in (LABS / "exercises").rglob("_*.py")}
    assert used - own - known - NOT_PYTORCHS - OF_SOME_VERSIONS - shared == set()


# ---- behaviour -------------------------------------------------------------------------------------------


def test_a_version_is_set_back():
    x = torch.ones(2)
    version = x._version
    increment_version(x)
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))
    assert x._version == version


def test_a_backward_tells_its_number_and_which_nodes_it_will_run():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    nodes, seen = [get_gradient_edge(leaf).node for leaf in (x, y)], []

    def look(gradient):
        seen.append((torch._C._current_graph_task_id(), *map(torch._C._will_engine_execute_node, nodes)))

    product = x * 2
    product.register_hook(look)
    for _ in range(2):
        product.sum().backward(retain_graph=True)
    (first, *run), (second, *again) = seen
    assert run == again == [True, False] and first != second
    assert torch._C._current_graph_task_id() == -1


def test_the_innermost_hooks_on_what_is_kept_are_on_top():
    autograd, packed = torch._C._autograd, []
    assert autograd._top_saved_tensors_default_hooks(False) is None
    autograd._push_saved_tensors_default_hooks(packed.append, print)
    top = autograd._top_saved_tensors_default_hooks(False)
    (torch.ones(2, requires_grad=True) ** 2).detach()
    autograd._pop_saved_tensors_default_hooks()
    assert top[0] == packed.append and len(packed) == 1 and autograd._top_saved_tensors_default_hooks(False) is None


def test_a_compiled_module_says_so():
    module = nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


@pytest.mark.parametrize("name", ["SUM", "MAX"])
def test_a_reduction_has_a_number(name):
    assert reduction(torch.distributed.ReduceOp(getattr(torch.distributed.ReduceOp, name))) == name.lower()
