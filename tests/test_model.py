"""fmoe/model.py: load() from the outside, and what it refuses before a weight is read."""

import copy
import json
import logging
import os
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

import fmoe
import fmoe.model
from fmoe.loading import named_tensors
from fmoe.model import CPU_COMPILE_TOKENS, choose_steps, find_folder, resolve_folder, text_config

DEMO = Path(fmoe.__file__).parent / "demo"
CONFIG = json.loads((DEMO / "config.json").read_text())


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", compile=False)


@pytest.fixture
def write(tmp_path):
    """Write the demo with another config.json; its other files are linked."""

    def write(config, *, drop=()):
        for file in DEMO.iterdir():
            if file.name not in ("config.json", *drop):
                os.symlink(file, tmp_path / file.name)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def no_weights(monkeypatch):
    def read(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(fmoe.model, "load_params", read)


def test_demo(demo):
    assert demo.folder == DEMO
    assert (demo.dtype, demo.device.type, demo.compile) == (torch.float32, "cpu", False)
    assert demo.config.decoder.layer_kinds == tuple(CONFIG["layer_types"])
    assert (demo.config.decoder.vocab_size, demo.config.decoder.max_context) == (4096, 4096)
    assert demo.config.shared.slots == 1
    assert demo.defaults.temperature == 0 and demo.defaults.eos_ids == (0,)
    assert demo.text is not None
    kept_float32 = {path for path, t in named_tensors(demo.params) if t.dtype == torch.float32}
    assert kept_float32 == {path for path, _ in named_tensors(demo.params)}


def test_a_model_is_a_value(demo):
    with pytest.raises(FrozenInstanceError):
        demo.compile = True
    assert replace(demo, compile=True).params is demo.params
    assert repr(demo) == f"Model(qwen3_next, {str(DEMO)!r}, torch.float32, device='cpu')"


@pytest.mark.parametrize("path", [str(DEMO), DEMO, DEMO.parent / "demo" / "."], ids=repr)
def test_a_path_is_text_or_path(demo, path):
    model = fmoe.load(path, compile=False)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(fmoe.logits(model, ids), fmoe.logits(demo, ids))


def test_resolve_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve_folder("demo") == DEMO
    assert resolve_folder("./demo") == Path("demo")
    assert resolve_folder("~/model") == Path("/home/somebody/model")
    assert resolve_folder(Path("a/b")) == Path("a/b")


def test_text_config():
    flat, nested = {"num_hidden_layers": 3}, {"text_config": {"hidden_size": 4}, "x": 1}
    assert text_config(flat) is flat
    assert text_config(nested) == {"hidden_size": 4}
    assert text_config(flat | nested) == flat | nested
    assert text_config({"text_config": None}) == {"text_config": None}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16"], ids=str)
def test_half_precision(demo, dtype):
    """Near the float32 logits; states and whatever decides about decay stay float32."""
    model = fmoe.load("demo", dtype=dtype, compile=False)
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    ids = torch.tensor([[3440, 261, 2078, 271, 261, 1039]])
    found, expected = fmoe.logits(model, ids), fmoe.logits(demo, ids)
    assert found.dtype == torch.float32
    assert 1e-4 < (found - expected).abs().max() < 0.5
    float32 = {path.split(".")[-1] for path, t in named_tensors(model.params) if t.dtype == torch.float32}
    assert float32 == {"input_norm_D", "post_norm_D", "norm_D", "norm_HC", "decay_H", "dt_bias_H"}
    state = model.architecture.init_state(model.config, 1, 64, dtype=model.dtype, device=model.device)
    assert state.caches[0].state_BHKV.dtype == torch.float32
    assert state.caches[0].window_BWN.dtype == state.caches[3].k_BJMC.dtype == model.dtype
    assert len(fmoe.generate(model, "In the beginning", max_new_tokens=4)[0].token_ids) == 4


def test_which_steps_run(demo):
    for compile, tokens, compiled in [
        (False, 10**9, False),
        (True, 1, True),
        ("auto", CPU_COMPILE_TOKENS - 1, False),
        ("auto", CPU_COMPILE_TOKENS, True),
    ]:
        assert choose_steps(replace(demo, compile=compile), tokens).compiled is compiled
    gpu = replace(demo, compile="auto", device=torch.device("cuda"), announce_graphs=lambda: None)
    assert choose_steps(gpu, 1).compiled is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "yes"}, "compile='yes' must be True, False or 'auto'"),
        ({"compile": None}, "compile=None must be"),
        ({"compile": 1.0}, "compile=1.0 must be"),
        ({"compile": 1}, "compile=1 must be"),
        ({"progress": "x"}, "progress='x' must be True, False or None"),
        ({"progress": 1}, "progress=1 must be"),
        ({"device": None}, "device=None must be a string or a torch.device; known are auto, cpu, cuda, cuda:N"),
        ({"device": 1.5}, "device=1.5 must be"),
        ({"device": []}, r"device=\[\] must be"),
        ({"device": "tpu"}, "unknown device 'tpu'; known are auto, cpu, cuda, cuda:N"),
        ({"device": "meta"}, "unknown device 'meta'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'; known are auto, float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "unknown dtype 'torch.int8'"),
        ({"shared_experts": "yes"}, "shared_experts='yes' must be 'auto', 'fused' or 'separate'"),
        ({"shared_experts": None}, "shared_experts=None must be"),
    ],
    ids=str,
)
def test_bad_arguments(options, message, no_weights):
    with pytest.raises(ValueError, match=message):
        fmoe.load("demo", **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"model_type": "gpt9", "architectures": ["GPT9"]},
            ValueError,
            r"model_type 'gpt9' with architectures \['GPT9'\] is unknown; known model types: .*qwen3_next",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
            NotImplementedError,
            "rope type 'longrope' is unknown; known: default, yarn",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            ValueError,
            "unknown quant_method 'gptq'; known are 'fp8'",
        ),
        (
            {"layer_types": ["linear_attention"] * 7 + ["mamba"]},
            NotImplementedError,
            r"layer_types \['mamba'\] are unknown; known: linear_attention, full_attention",
        ),
        ({"layer_types": ["linear_attention"]}, ValueError, "must list num_hidden_layers=8 kinds"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias=True is not implemented; implemented: False"),
        ({"hidden_size": None}, ValueError, "config.json: hidden_size must be an integer >= 1, got None"),
        ({"num_experts_per_tok": 17}, ValueError, "num_experts_per_tok=17 must be in 1..num_experts=16"),
        ({"linear_num_key_heads": 3}, ValueError, "linear_num_value_heads=8 must be a multiple of .*=3"),
        ({"num_key_value_heads": 3}, ValueError, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"dtype": "int4"}, ValueError, "config.json has dtype 'int4'; known are float32, bfloat16, float16"),
        ({"dtype": "float16"}, ValueError, r"wrong dtypes \(\d+\): .* \(expected float16 or float32, got bfloat16"),
        ({"moe_intermediate_size": 32}, ValueError, r"wrong shapes .*experts.0.gate_proj.weight \(expected \[32, 256"),
        ({"num_experts": 17}, ValueError, r"missing tensors \(24\): model.layers.0.mlp.experts.16.gate_proj"),
        ({"num_experts": 15}, ValueError, r"unknown tensors \(24\): model.layers.0.mlp.experts.15"),
        ({"num_hidden_layers": 9, "layer_types": None}, ValueError, r"missing tensors .*: model.layers.8.linear_attn"),
        ({"shared_expert_intermediate_size": 0}, ValueError, r"wrong shapes .*shared_expert.gate_proj.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_config(write, changes, error, message, no_weights):
    with pytest.raises(error, match=message):
        fmoe.load(write(CONFIG | changes))


def test_a_bad_generation_config(write, no_weights):
    folder = write(CONFIG, drop=("generation_config.json",))
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p=7 must be a number in \(0, 1\]"):
        fmoe.load(folder)


@pytest.mark.parametrize(
    ("drop", "error", "message"),
    [
        (("model-00002-of-00002.safetensors",), FileNotFoundError, "names files that are not there: model-00002-of"),
        (
            ("model.safetensors.index.json", "model-mtp.safetensors", "model-00001-of-00002.safetensors"),
            FileNotFoundError,
            "lacks model-00001-of-00002.safetensors; finish the download",
        ),
    ],
    ids=["shard", "index-and-shard"],
)
def test_missing_files(write, drop, error, message, no_weights):
    with pytest.raises(error, match=message):
        fmoe.load(write(CONFIG, drop=drop))


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/nothing; give one with config.json"):
        fmoe.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"is empty; expected config.json and \*.safetensors"):
        fmoe.load(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"no folder org/name; fmoe does not download: .* hf download org/name --l"
    ):
        fmoe.load("org/name")


def test_a_folder_that_reads_like_a_published_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_folder("org/name") == Path("org/name")
    for path in ("a/b/c", "./a/b", str(tmp_path / "nothing"), "x" * 5000 + "/y"):
        assert find_folder(path) == Path(path)


@pytest.mark.parametrize("path", [None, 5, True, b"demo", "", ["demo"]], ids=repr)
def test_what_is_no_path(path):
    message = rf"path must be a folder's name, a Path or 'demo', got {re.escape(repr(path))}"
    with pytest.raises(ValueError, match=message):
        fmoe.load(path)


def test_copies_are_the_model(demo):
    assert copy.deepcopy(demo) is copy.copy(demo) is demo
    assert copy.deepcopy([demo])[0] is demo


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_model_cannot_be_pickled(demo, protocol):
    with pytest.raises(ValueError, match=rf"a model cannot be pickled; call fmoe.load\('{DEMO}'\) in each process"):
        pickle.dumps(demo, protocol)


def test_compiling_is_announced_once(caplog):
    model = fmoe.load("demo", device="cpu", compile="auto")
    with caplog.at_level(logging.INFO, "fmoe"):
        choose_steps(model, CPU_COMPILE_TOKENS - 1)
        assert caplog.messages == []
        for tokens in (CPU_COMPILE_TOKENS, 1, CPU_COMPILE_TOKENS):
            choose_steps(model, tokens)
        choose_steps(replace(model, compile=True), 1)
    assert caplog.messages == ["compiling graphs (once per process; a minute or more)"]


def test_a_process_that_was_forked_is_warned(monkeypatch, caplog):
    monkeypatch.setattr(fmoe.model, "PROCESS", -1)
    fmoe.load("demo", compile=False)
    assert caplog.messages == []  # one thread does not hang
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    fmoe.load("demo", compile=False)
    [message] = caplog.messages
    assert message.startswith("this process was forked after fmoe was imported; if torch ran on several threads")
