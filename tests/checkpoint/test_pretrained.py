"""Tests of labs.checkpoint.exporting and pretrained: each layout exports to transformers and imports from it, bit
for bit.
"""

import importlib
import json
import os
import resource
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from labs import pp
from labs.checkpoint import Held, export, load_pretrained, pretrained
from labs.kit.launch import run
from labs.kit.record import mark
from labs.llama import load, names, save
from labs.llama.weights import INDEX
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.rope import RopeScaling
from tests.checkpoint.common import CONFIG, LAYOUTS, alone, numbers, same, sharded, words_of
from tests.depth import deepen

SCALED = replace(CONFIG, context=30, rope_scaling=RopeScaling(4.0, low=0.5, high=2.0, context=8), eps=1e-6)
TIED = replace(CONFIG, tied=True)
CASES = [("untied", SCALED, [*LAYOUTS]), ("tied", TIED, ["zero-3", "fsdp", "fsdp-tp", "pp"])]


def whole(folder):
    """Return all tensors of a folder, and check that each is in the file that the index names."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, x in load_file(path).items():
            assert index["weight_map"][name] == path.name
            found[name] = x
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


FEWER = [("untied", SCALED, [*LAYOUTS][::2]), ("tied", TIED, ["zero-3", "pp"])]


def out_and_in(folder, ranks, cases):
    """Export in every layout of this many ranks, and load what one process saved. Returns what is wrong."""
    wrong = []
    for case, config, layouts in cases:
        for layout in (each for each in layouts if LAYOUTS[each][0] == ranks):
            held, *_ = LAYOUTS[layout][1](GPT(config, seed=2))
            export(folder / case / layout, held, config)
            expected = numbers(held)
            held, *_ = LAYOUTS[layout][1](GPT(config, seed=9))
            before = numbers(held)
            load_pretrained(folder / case / "saved", held, config)
            found = numbers(held)
            if same(found, before) or not same(found, expected):
                wrong.append((case, layout))
    return wrong


@pytest.mark.parametrize("cases", [FEWER, *deepen(CASES)], ids=["half", "all"])
def test_every_layout_writes_what_transformers_loads_and_takes_it_bit_for_bit(cases, tmp_path, monkeypatch):
    for case, config, _ in cases:
        save(GPT(config, seed=2), tmp_path / case / "saved")
    for ranks in (1, 2, 3, 4, 8):
        for wrong in run(out_and_in, tmp_path, ranks, cases, ranks=ranks):
            assert not wrong
    for case, config, layouts in cases:
        expected = load_file(tmp_path / case / "saved" / "model.safetensors")
        for layout in layouts:
            folder = tmp_path / case / layout
            assert same(whole(folder), expected), layout
            assert (folder / "config.json").read_bytes() == (tmp_path / case / "saved" / "config.json").read_bytes()
            assert len([*folder.glob("*.safetensors")]) == LAYOUTS[layout][0]
        assert sorted(path.name for path in (tmp_path / case).iterdir()) == sorted([*layouts, "saved"])
        transformers_computes_the_same(folder, GPT(config, seed=2), monkeypatch)


def transformers_computes_the_same(folder, model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
    llama, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.randint(model.config.vocab, (2, model.config.context))
    assert torch.allclose(llama(tokens).logits, model(tokens), rtol=0, atol=1e-5)


# ---- memory and reads ------------------------------------------------------------------------------------

LARGE = Config(vocab=4096, dim=256, depth=3, heads=4, kv_heads=4, hidden=1024, context=8)  # 20 MiB
LARGEST = LARGE.vocab * LARGE.dim * 4


def test_a_rank_holds_one_tensor_more_at_most_and_reads_what_it_needs(tmp_path):
    def body():
        held, *_ = sharded(GPT(LARGE), Mesh((3,), ("dp",)))
        mark("step")
        export(tmp_path / "out", held, LARGE)
        mark("step")
        read, elements = pretrained.read, []

        def counted(*arguments):
            x = read(*arguments)
            elements.append(x.numel())
            return x

        pretrained.read = counted
        load_pretrained(tmp_path / "out", held, LARGE)
        mark("end")
        return sum(elements), sum(x.numel() for part in held.parts().values() for x in part.blocks.values())

    results = run(body, ranks=3, device="cpu", record="memory")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 3
    most = []
    for rank, (path, (read, needed)) in enumerate(zip(files, results, strict=True)):
        assert read == needed
        # A mapped file takes no memory of the process, but it is counted as if it did.
        for step, mapped in enumerate((path.stat().st_size, 0)):
            before, *later = [size for _, size in results.recording.during(rank, step)]
            most.append(max(later) - before - mapped)
    assert LARGEST / 2 < max(most) <= LARGEST


# ---- other dtypes ----------------------------------------------------------------------------------------

ODD = Config(vocab=5, dim=6, depth=2, heads=3, kv_heads=3, hidden=7, context=6)


def several_dtypes(seed):
    model = GPT(ODD, seed).bfloat16()
    for layer in model.layers.values():
        layer.mlp_norm.double()
    return model


def test_each_tensor_keeps_its_dtype_and_is_taken_in_another(tmp_path):
    def body():
        export(tmp_path / "out", Held(several_dtypes(2)), ODD)
        held, model, optimizer = alone(GPT(ODD, seed=9))
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        load_pretrained(tmp_path / "out", held, ODD)
        return same(numbers(held), numbers(Held(several_dtypes(2).float()))), len(optimizer.state)

    assert list(run(body, ranks=2)) == [(True, 0)] * 2
    found = whole(tmp_path / "out")
    assert {found[names(ODD)[name]].dtype for name in ("embed.weight", "layers.0.mlp_norm.weight")} == {
        torch.bfloat16,
        torch.float64,
    }
    model = GPT(ODD, seed=9).double()
    load(model, tmp_path / "out")
    assert same(model.state_dict(), several_dtypes(2).double().state_dict())


# ---- bad input -------------------------------------------------------------------------------------------


def without(folder, name, **others):
    """Remove that tensor from the folder, and add others."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path) | others
    del tensors[name]
    save_file(tensors, path)


def cut_short(folder):
    path = max(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def pointing_out_of_it(folder):
    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(index.replace("model-00001", "../model-00001"))


NORM = "model.norm.weight"
DAMAGES = [
    (cut_short, "model-00002-of-00002.safetensors cannot be read"),
    (lambda folder: max(folder.glob("*.safetensors")).unlink(), "model-00002-of-00002.safetensors cannot be read"),
    (lambda folder: without(folder, NORM), f"has no {NORM}, which is norm.weight here"),
    (pointing_out_of_it, "names '../model-00001-of-00002.safetensors', which is not in its folder"),
    (lambda folder: (folder / INDEX).write_text("{}"), "has no model.embed_tokens.weight, which is embed.weight here"),
    (lambda folder: (folder / INDEX).unlink(), "model.safetensors cannot be read"),
    (shutil.rmtree, "config.json cannot be read"),
]
OTHERS = [  # models and configs that do not match the folder
    (lambda: Held(GPT(SCALED)), SCALED, "eps is 1e-06 in the model and 1e-05 in"),
    (lambda: Held(GPT(replace(CONFIG, hidden=8))), CONFIG, "of shape (8, 12): by the config it is (10, 12)"),
    (lambda: Held(GPT(CONFIG).to(torch.float8_e5m2)), CONFIG, "'embed.weight' is torch.float8_e5m2 of shape (13, 12)"),
    (lambda: Held(nn.Linear(3, 3)), CONFIG, "a Llama of this config has no 'weight'"),
    (lambda: Held(GPT(TIED)), CONFIG, "the config has tied=False, but the model has tied=True"),
    (lambda: Held(*pp.cut(GPT(CONFIG), 3)[:2]), CONFIG, "model.norm.weight is on no rank"),
]


def of_lbfgs():
    """Return a model whose optimizer state a checkpoint cannot have; here only the weights count."""
    model = GPT(CONFIG)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[model.embed.weight]["func_evals"] = 1
    return Held(model, optimizer=optimizer)


def test_another_model_is_reported_on_all_ranks_before_a_tensor_has_changed(tmp_path):
    def body():
        model, rank = GPT(CONFIG, seed=2), dist.get_rank()
        export(tmp_path / "out", Held(model), CONFIG)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        said = []
        for number, (damage, _) in enumerate(DAMAGES):
            where = tmp_path / str(number)
            if rank == 0:
                shutil.copytree(tmp_path / "out", where)
                damage(where)
            dist.barrier()
            said.append(words_of(lambda: load_pretrained(where, Held(model), CONFIG)))  # noqa: B023
        where = tmp_path / ("out" if rank else "nowhere")
        said.append(words_of(lambda: load_pretrained(where, Held(model), CONFIG)))
        for make, config, _ in OTHERS:
            said.append(words_of(lambda: load_pretrained(tmp_path / "out", make(), config)))  # noqa: B023
        return said, sum(p.abs().sum().item() for p in model.parameters())

    expected = (
        [words for _, words in DAMAGES] + ["nowhere/config.json cannot be read"] + [words for *_, words in OTHERS]
    )
    for said, changed in run(body, ranks=2):
        assert changed == 0
        for words, sentence in zip(said, expected, strict=True):
            assert sentence in (words or "") and "\n" not in words, (words, sentence)


def test_what_cannot_be_exported_is_reported_on_all_ranks_and_nothing_is_left(tmp_path):
    def body():
        model, rank, said = GPT(CONFIG), dist.get_rank(), []

        def tried(folder, held, config=CONFIG):
            said.append(words_of(lambda: export(folder, held, config)))

        export(tmp_path / "out", of_lbfgs(), CONFIG)
        load_pretrained(tmp_path / "out", of_lbfgs(), CONFIG)
        tried(tmp_path / "out", Held(model))
        (tmp_path / "file").touch()
        tried(tmp_path / "file" / "out", Held(model))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        tried(tmp_path / "other", Held(model))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for make, config, _ in OTHERS[1:]:
            tried(tmp_path / "other", make(), config)
        tried(tmp_path / "other", Held(model), replace(CONFIG, context=6 + rank))
        with torch.no_grad():
            model.norm.weight += rank
        tried(tmp_path / "other", Held(model))
        return said, sorted(path.name for path in tmp_path.iterdir())

    expected = ["out is there already", "Not a directory", "model-00002-of-00002.safetensors cannot be written"]
    expected += [words for *_, words in OTHERS[1:]]
    expected += ["the config's context is 6 on rank 0 and 7 on rank 1", f"'{NORM}' differs on ranks 0 and 1"]
    for said, left in run(body, ranks=2):
        assert left == ["file", "out"]
        for words, sentence in zip(said, expected, strict=True):
            assert sentence in (words or "") and "\n" not in words, (words, sentence)


def test_no_right_to_write_is_reported(tmp_path):
    def body():
        (tmp_path / "closed").mkdir()
        (tmp_path / "closed").chmod(0o500)
        if os.geteuid() == 0:  # root may write anywhere
            os.seteuid(65534)
        return words_of(lambda: export(tmp_path / "closed" / "out", Held(GPT(CONFIG)), CONFIG))

    assert "Permission denied" in run(body, ranks=1)[0]
