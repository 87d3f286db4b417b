"""A loaded model, one frozen value, and how it is loaded."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch

from fmoe.compile.decode_choice import add_decode_kernels, choose_draft_kernels
from fmoe.compile.plan import Plan
from fmoe.compile.select import Decision, Requested, check_requested, choose
from fmoe.compile.step import Steps, compile_steps
from fmoe.functional.deltanet import DeltaConfig, delta_mix
from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import MoEParams, SharedExperts, SharedPlan

from .architectures import (
    DIFFER,
    Architecture,
    DraftParams,
    FamilyConfig,
    Layers,
    Params,
    choose_tokens,
    compute_logits,
    find_architecture,
    ignored_tensors,
    start_step,
)
from .capture import Shelf
from .checkpoint import open_checkpoint, stored_dtype
from .drafting import DraftHead, DraftShelf, Source, bind_head, read_drafts
from .fingerprint import WeightsHash
from .graph_files import GraphFile, find_graph_file
from .loading import check_params, load_params, make_meta_params
from .options import Defaults, read_defaults
from .placing import resolve_device, resolve_dtype, resolve_state_dtype, why_not_fp8
from .plan_search import Search, search_plans
from .planning import Tune, check_tune, decide_kernels, list_keys, plan_layers, prepare_layout
from .random_weights import Weights, check_weights, load_random, open_config
from .text import Text, load_text
from .tied_head import untie_head

LOG = logging.getLogger("fmoe")

Compile = bool | Literal["auto"]

# On a CPU, compiling costs a minute or more once and saves about a third of each step after.
CPU_COMPILE_TOKENS = 30_000

PROCESS = os.getpid()  # where this module was imported; another one was forked


def _announce_graphs(graph_file: Callable[[], GraphFile] | None = None, /) -> Callable[[], None]:
    """Make a function that takes graphs from a file or says that they are compiled; further calls do nothing."""

    def announce() -> None:
        if graph_file is not None and (found := graph_file()).load():
            LOG.info("compiled graphs come from %s", found.file)
        else:
            LOG.info("compiling graphs (once per process; a minute or more)")

    return cache(announce)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """Everything needed to generate; nothing in it changes after loading."""

    folder: Path
    architecture: Architecture
    config: FamilyConfig
    params: Params
    dtype: torch.dtype
    device: torch.device
    eager: Steps
    graphs: Steps
    compile: Compile
    text: Text | None
    defaults: Defaults
    kernels: Requested = "auto"  # what the plans may name; "aiter" where the weights have its layout
    decision: Decision = field(default_factory=Decision)
    plans: tuple[Plan, ...] = ()
    announce_graphs: Callable[[], None] = field(default_factory=_announce_graphs)
    process: int = field(default_factory=os.getpid)  # where it was loaded
    shelf: Shelf = field(default_factory=Shelf)  # the batch that decoded last, where its steps are captured
    weights_hash: WeightsHash = field(default_factory=WeightsHash)
    drafts: DraftShelf = field(default_factory=DraftShelf)  # the draft (MTP) head, read when it is first asked for

    def __copy__(self) -> Self:
        """Give the model itself: nothing in it changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any], /) -> Self:
        """Give the model itself: nothing in it changes."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: compiled graphs and the tokenizer's threads belong to one process."""
        raise ValueError(f"a model cannot be pickled; call fmoe.load({str(self.folder)!r}) in each process")

    def __repr__(self) -> str:
        """Name the model in one line; its tensors would fill screens."""
        family = self.architecture.MODEL_TYPES[0]
        return f"Model({family}, {str(self.folder)!r}, {self.dtype}, device={str(self.device)!r})"


def resolve_folder(path: str | os.PathLike[str], /) -> Path:
    """Turn ``"demo"`` into the checkpoint inside the package, anything else into a path.

    Raises:
        ValueError: no path at all.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise ValueError(f"path must be a folder's name, a Path or 'demo', got {path!r}")
    return Path(str(files("fmoe"))) / "demo" if path == "demo" else Path(path).expanduser()


def find_folder(path: str | os.PathLike[str], /) -> Path:
    """Resolve a folder, and say where the name of a published model stands for one that it is not downloaded.

    Raises:
        ValueError: no path at all.
        FileNotFoundError: there is no such folder, and ``path`` reads like org/name.
    """
    folder = resolve_folder(path)
    if re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name := os.fspath(path)) and not folder.exists():
        raise FileNotFoundError(
            f"no folder {folder}; fmoe does not download: run, e.g., hf download {name} --local-dir FOLDER "
            "and load that FOLDER"
        )
    return folder


def check_progress(progress: object, /) -> None:
    """Raise ValueError unless ``progress`` is what load and generate take."""
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress={progress!r} must be True, False or None")


def text_config(raw: Mapping[str, Any], /) -> Mapping[str, Any]:
    """The language model's part of a config.json: ``text_config`` where the file nests it, else the file.

    Whether the head is tied stands beside it, or in it.
    """
    nested, tied = raw.get("text_config"), raw.get("tie_word_embeddings")
    if not isinstance(nested, Mapping) or "num_hidden_layers" in raw:
        return raw
    return nested if tied is None else {**nested, "tie_word_embeddings": tied}


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    state_dtype: str | torch.dtype = "auto",
    shared_experts: SharedExperts = "auto",
    compile: Compile = "auto",
    kernels: Requested = "auto",
    tune: Tune = "cached",
    weights: Weights = "stored",
    seed: int = 0,
    speculate: bool = False,
    progress: bool | None = None,
) -> Model:
    """Load a checkpoint folder: config.json, *.safetensors and, for text, tokenizer.json.

    Args:
        path: the folder, or ``"demo"`` for the small model inside the package.
        device: ``auto`` is the GPU if there is one, else the CPU.
        dtype: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU if memory allows.
        state_dtype: of recurrent states; ``auto`` is float32. ``bfloat16`` halves what large batches read and keep,
            at an error that docs/performance.md states, and runs the reference in place of Triton's kernel.
        shared_experts: ``auto`` fuses them into the routed set where their widths allow it, ``fused`` raises where
            they do not, ``separate`` keeps them apart. The logits are the same.
        compile: ``auto`` compiles on a GPU and for long work; True and False force it.
        kernels: ``auto`` takes the fused kernels that can run, ``reference`` none; ``triton`` and ``aiter`` raise
            where they cannot run.
        tune: ``cached`` takes what ``fmoe.tune`` found here earlier, else the table that comes with fmoe, else a
            rule; ``search`` measures first what was never measured here; ``off`` goes by rule.
        weights: ``random`` draws them on the device by config.json alone, to measure a model that is not there;
            without tokenizer.json its prompts are token ids.
        seed: of random weights.
        speculate: read the draft (MTP) head too; else that is done when ``generate`` is first asked to speculate.
        progress: show a bar when loading takes over two seconds; None does so on a terminal.

    Raises:
        ValueError, NotImplementedError: the checkpoint is not what config.json promises, or not supported.
        FileNotFoundError: a file is missing.
        RuntimeError: kernels asked for by name cannot run.
    """
    check_requested(kernels)
    check_tune(tune)
    check_weights(weights, seed)
    if not isinstance(compile, bool) and not (isinstance(compile, str) and compile == "auto"):
        raise ValueError(f"compile={compile!r} must be True, False or 'auto'")
    check_progress(progress)
    if os.getpid() != PROCESS and torch.get_num_threads() > 1:
        LOG.warning(
            "this process was forked after fmoe was imported; if torch ran on several threads before, it hangs now: "
            "start workers with 'spawn', or call torch.set_num_threads(1) in each"
        )
    folder = find_folder(path)
    checkpoint = open_checkpoint(folder) if weights == "stored" else open_config(folder)
    architecture = find_architecture(checkpoint.config)
    raw = text_config(checkpoint.config)
    config = _set_state_dtype(architecture.parse_config(raw, shared_experts=shared_experts), state_dtype)
    if weights == "stored":
        config = untie_head(config, checkpoint)
    text = load_text(folder)
    defaults = read_defaults(checkpoint.generation_config, checkpoint.config, text)
    resolved_device = resolve_device(device)
    build = partial(_build, architecture, config)
    decide = partial(decide_kernels, config=config, device=resolved_device, requested=kernels, progress=progress)
    if weights == "random":
        params, resolved_dtype = load_random(build, checkpoint.config, dtype=dtype, device=resolved_device, seed=seed)
        decision = decide(params)
    else:
        ignore = ignored_tensors(config.decoder)
        stored = stored_dtype(checkpoint)
        report = check_params(build, checkpoint, dtype=stored, ignore=ignore)
        resolved_dtype = resolve_dtype(dtype, stored=stored, num_params=report.num_params, device=resolved_device)
        # Before any weight is read: what was asked for by name may not run here.
        keep_fp8, names = not why_not_fp8(resolved_device), checkpoint.tensors
        decision = decide(make_meta_params(build, dtype=resolved_dtype, names=names, keep_fp8=keep_fp8))
        params = load_params(
            build, checkpoint, dtype=resolved_dtype, device=resolved_device, ignore=ignore, progress=progress
        )
    loaded = [params]
    del params  # the list alone holds them while their layout changes
    params = prepare_layout(loaded, decision)
    if shared_experts == "auto":
        _log_separate_experts(config, params)
    plans = plan_layers(list_keys(params, config), resolved_device, requested=decision.requested, tune=tune)
    if tune == "search":
        keys = [plan.key for plan in plans]
        plans = search_plans(
            params,
            config.router,
            keys,
            resolved_device,
            requested=decision.requested,
            search=Search(),
            progress=progress,
        )
    bind = partial(_choose_kernels, config, resolved_device, resolved_dtype, plans, decision)
    eager, graphs = _make_steps(architecture, config, resolved_device, bind)
    source = Source(folder, architecture, config, resolved_dtype, resolved_device, weights, seed, decision, progress)
    drafts = DraftShelf(partial(read_drafts, source, params), _bind_drafts(architecture, config, resolved_device, bind))
    if speculate:
        drafts.get()
    graph_file = partial(
        find_graph_file, architecture, config, resolved_dtype, resolved_device, str(decision.requested)
    )
    return Model(
        announce_graphs=_announce_graphs(graph_file),
        folder=folder,
        architecture=architecture,
        config=config,
        params=params,
        dtype=resolved_dtype,
        device=resolved_device,
        eager=eager,
        graphs=graphs,
        compile=compile,
        kernels=decision.requested,
        decision=decision,
        plans=plans,
        text=text,
        defaults=defaults,
        drafts=drafts,
    )


Bind = Callable[[bool], Kernels]  # the kernels of compiled steps, or of others


def _choose_kernels(
    config: FamilyConfig,
    device: torch.device,
    dtype: torch.dtype,
    plans: tuple[Plan, ...],
    decision: Decision,
    compiled: bool,
) -> Kernels:
    kernels = choose(device, compiled=compiled, plans=plans, decision=decision)
    kernels = add_decode_kernels(kernels, device, dtype, decision.requested, sinks=decision.sinks)
    return _keep_delta_reference(kernels, config)


def _make_steps(
    architecture: Architecture, config: FamilyConfig, device: torch.device, bind: Bind
) -> tuple[Steps, Steps]:
    """Bind config and kernels: the plain functions, and the graphs, of which nothing is compiled yet."""
    eps = config.decoder.eps
    head = partial(compute_logits, eps=eps)

    def make(compiled: bool) -> tuple[Layers, dict[str, Any]]:
        kernels = bind(compiled)
        return architecture.make_layers(config, kernels), {
            "start": partial(start_step, config=config.decoder, slots=None),
            "choose": partial(choose_tokens, eps=eps, kernels=kernels) if kernels.choose_tokens else None,
            "masked": kernels.attend_step is None,
        }

    eager, plain = make(False)
    graphs, options = make(True)
    return Steps(eager, head, compiled=False, **plain), compile_steps(graphs, head, device=device, **options)


def _bind_drafts(
    architecture: Architecture, config: FamilyConfig, device: torch.device, bind: Bind
) -> Callable[[DraftParams], DraftHead]:
    return lambda params: bind_head(params, architecture, config, lambda c: choose_draft_kernels(bind(c)), device)


def replan(model: Model, plans: tuple[Plan, ...], /) -> Model:
    """Give the model with other plans and, where they differ, graphs that are yet to be compiled."""
    if plans == model.plans:
        return model
    family, config, device = model.architecture, model.config, model.device
    bind = partial(_choose_kernels, config, device, model.dtype, plans, model.decision)
    eager, graphs = _make_steps(family, config, device, bind)
    drafts = model.drafts.rebind(_bind_drafts(family, config, device, bind))
    return replace(model, plans=plans, eager=eager, graphs=graphs, drafts=drafts)


def _build(architecture: Architecture, config: FamilyConfig, fill: Any) -> Params:
    return architecture.build_params(fill, config)


def _set_state_dtype(config: FamilyConfig, requested: str | torch.dtype) -> FamilyConfig:
    delta = getattr(config, "delta", None)
    dtype = resolve_state_dtype(requested, recurrent=isinstance(delta, DeltaConfig))
    if dtype == torch.float32:
        return config
    changed: FamilyConfig = replace(config, delta=replace(delta, state_dtype=dtype))  # type: ignore[type-var]
    return changed


def _keep_delta_reference(kernels: Kernels, config: FamilyConfig) -> Kernels:
    """Take the reference of DeltaNet's step where its state is not in float32, which is all that the kernel reads."""
    delta = getattr(config, "delta", None)
    if not isinstance(delta, DeltaConfig) or delta.state_dtype == torch.float32 or kernels.delta_decode is delta_mix:
        return kernels
    LOG.info("delta_decode: reference (the kernel reads states in float32, these are in %s)", delta.state_dtype)
    return replace(kernels, delta_decode=delta_mix)


def _log_separate_experts(config: FamilyConfig, params: Params) -> None:
    """Say why shared experts are not fused, once per load."""
    plan = getattr(config, "shared", None)
    if not isinstance(plan, SharedPlan) or not plan.width:
        return
    if any(isinstance(layer.mlp, MoEParams) and layer.mlp.shared is not None for layer in params.layers):
        LOG.info("shared experts: %s", f"separate: {DIFFER}" if plan.slots else plan.reason)


def choose_steps(model: Model, tokens: int, /) -> Steps:
    """Take the compiled graphs or the plain functions, by ``model.compile`` and the work ahead.

    Args:
        model: as loaded.
        tokens: an upper bound of the tokens that will be processed.
    """
    if model.compile == "auto":
        compiled = model.device.type != "cpu" or tokens >= CPU_COMPILE_TOKENS
    else:
        compiled = bool(model.compile)
    if compiled:
        model.announce_graphs()
        model.graphs.forget()
    return model.graphs if compiled else model.eager
