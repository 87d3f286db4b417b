"""Measure decode and prefill of a loaded model through what ``fmoe.generate`` runs, beside the limit of the machine.

Everything is measured in one process: the rates of the machine, the first token, each case. A sample of decode is a
run of steps between two points where the device has finished, a sample of prefill is one whole prompt.
"""

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from .ambient import check_model, undisturbed
from .benchmark_drafts import DraftCase, measure_drafts
from .benchmark_machine import finish, measure_rates, process_age_s, read_peak_bytes, reset_peak
from .benchmark_parts import Profile, Watch, add_rest, count_moe_layers, profile_kernels, trace_kernels
from .byte_limit import PARTS, Rates, Work, count_work, limit_seconds, part_limits
from .decoding import Token, decode_batch, new_state, prefill
from .loading import count_params, named_tensors
from .model import Model, choose_steps
from .options import Options, Speculate, check_speculate, is_integer, resolve_options
from .random_weights import MOST_SEED

LOG = logging.getLogger("fmoe")

WARM_UPS = 4  # steps, or prompts, before the clock starts
TRACED = 4  # steps under the profiler
SPARE = 2  # tokens nobody takes: captured steps run ahead, and so the last ones that are taken launch as many
WATCHED = 4  # uncompiled steps whose experts are counted
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    batch_sizes: of decode.
    context: tokens of each prompt, random ones.
    prefill_tokens: lengths of single prompts.
    new_tokens: steps of one sample of decode.
    repetitions: samples of each case.
    seed: of the prompts.
    speculate: drafts of a step; 0 measures none, else decode is measured with them too.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    context: int = 512
    prefill_tokens: tuple[int, ...] = (512,)
    new_tokens: int = 32
    repetitions: int = 5
    seed: int = 0
    speculate: Speculate = 0

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "prefill_tokens"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or not all(is_integer(value) and value >= 1 for value in values):
                raise ValueError(f"{name}={values!r} must be integers >= 1, such as (1, 8)")
        for name in ("context", "new_tokens", "repetitions"):
            if not is_integer(value := getattr(self, name)) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int >= 1")
        if not is_integer(self.seed) or not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed={self.seed!r} must be an int in 0..{MOST_SEED}")
        check_speculate(self.speculate)

    @property
    def decode_tokens(self) -> int:
        """Tokens that a sequence gets: the first, those that warm up, the timed, the traced and the spare ones."""
        return 1 + WARM_UPS + self.repetitions * self.new_tokens + TRACED + SPARE


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of a decode step."""

    name: str
    ms: float
    limit_ms: float
    bytes: float
    kernels: float | None  # None where no GPU was traced


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Decode at one batch size; ``gbps`` and ``ratio`` compare with the limit of the bytes and operations."""

    batch: int
    context: int
    new_tokens: int
    samples_ms: tuple[float, ...]  # per step
    ms_per_step: float  # their median
    tokens_per_s: float
    bytes_per_step: float
    flops_per_step: float
    gbps: float
    limit_ms: float
    ratio: float  # ms_per_step / limit_ms
    experts_expected: float  # distinct ones of a MoE layer, if every choice were as likely
    experts_counted: float  # of the steps that were watched; the bytes are theirs
    compiled: bool
    kernels_per_step: float | None
    copies_per_step: float | None
    parts: tuple[PartTime, ...]
    gaps_ms: float
    parts_of: str  # what the parts were measured on
    prompts_ms: float  # all prompts, to the first tokens; the first time with what was compiled meanwhile
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One prompt of ``tokens`` random tokens."""

    tokens: int
    samples_ms: tuple[float, ...]
    ms: float
    tokens_per_s: float
    bytes: float
    flops: float
    tflops: float
    limit_ms: float
    ratio: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Everything ``fmoe bench`` prints."""

    model: str
    family: str
    weights: str
    dtypes: tuple[str, ...]  # of the parameters, that of most bytes first
    params: int
    param_bytes: int
    device: str
    torch: str
    threads: int
    kernels: str
    shared_slots: int  # of the expert stacks
    load_s: float | None
    first_token_s: float | None  # since the process started
    peak_bytes: int | None  # of the whole process, loading included
    rates: Rates
    decode: tuple[DecodeCase, ...]
    prefill: tuple[PrefillCase, ...]
    drafts: tuple[DraftCase, ...] = ()  # decode with drafts, where they were asked for


def run_benchmark(
    model: Model, settings: Settings, /, *, weights: str = "stored", load_s: float | None = None
) -> Benchmark:
    """Measure every case of the settings.

    Args:
        model: from ``fmoe.load``.
        settings: what to measure.
        weights: where the weights come from, for the record.
        load_s: how long loading took, for the record.

    Raises:
        ValueError: a case is longer than the model's context.
        RuntimeError: the model's logits held NaN or infinity.
    """
    check_model(model, "benchmark.run_benchmark")
    _check_context(model, settings)
    peaks = [read_peak_bytes(model.device)]
    with undisturbed(model):
        next(_decode(model, 1, settings, tokens=1))
        first_token_s = process_age_s()
        shown = f"{first_token_s:.1f}" if first_token_s else "?"
        LOG.info("the first token came %s s after the process started", shown)
        peaks.append(read_peak_bytes(model.device))
        rates = measure_rates(model.device, model.dtype)
        LOG.info("this machine moves %.1f GB/s and computes %.2f TFLOP/s", rates.gbps, rates.tflops)
        decode = tuple(measure_decode(model, batch, settings, rates) for batch in settings.batch_sizes)
        drafts = tuple(_measure_drafts(model, case, settings) for case in decode) if settings.speculate else ()
        prefills = tuple(measure_prefill(model, tokens, settings, rates) for tokens in settings.prefill_tokens)
    peaks += [case.peak_bytes for case in decode] + [case.peak_bytes for case in prefills]
    known = [peak for peak in peaks if peak is not None]
    sizes: dict[str, int] = {}
    for _, tensor in named_tensors(model.params):
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    params, param_bytes = count_params(model.params)
    return Benchmark(
        model=model.folder.name,
        family=model.architecture.MODEL_TYPES[0],
        weights=weights,
        dtypes=tuple(sorted(sizes, key=lambda dtype: -sizes[dtype])),
        params=params,
        param_bytes=param_bytes,
        device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        kernels=model.kernels,
        shared_slots=int(getattr(getattr(model.config, "shared", None), "slots", 0)),
        load_s=load_s,
        first_token_s=first_token_s,
        peak_bytes=max(known) if known else None,
        rates=rates,
        decode=decode,
        prefill=prefills,
        drafts=drafts,
    )


def measure_decode(model: Model, batch: int, settings: Settings, rates: Rates, /) -> DecodeCase:
    """Time decode steps of ``batch`` sequences behind random prompts, then look at where their time goes."""
    reset_peak(model.device)
    run = _decode(model, batch, settings, tokens=settings.decode_tokens)
    begin = time.perf_counter()
    next(run)
    prompts_ms = (time.perf_counter() - begin) * 1e3
    samples_ms, profile = _time_steps(run, settings, model.device)
    peak = read_peak_bytes(model.device)
    take(run, settings.decode_tokens)  # to its end, where what it took is left to others
    watch, watched_s = _watch(model, batch, settings)
    ms, on_gpu = statistics.median(samples_ms), model.device.type == "cuda"
    middle = settings.context + 1 + WARM_UPS + settings.repetitions * settings.new_tokens // 2
    layers = count_moe_layers(model.params.layers)
    count = partial(count_step, model, batch=batch, context=middle)
    expected, work = count(), count(distinct=watch.distinct_per_layer(layers)) if layers else count()
    limit_ms = limit_seconds(work, rates) * 1e3
    seconds = add_rest({part: s / WATCHED for part, s in watch.seconds.items()}, watched_s)
    case = DecodeCase(
        batch=batch,
        context=settings.context,
        new_tokens=settings.new_tokens,
        samples_ms=tuple(samples_ms),
        ms_per_step=ms,
        tokens_per_s=batch / ms * 1e3,
        bytes_per_step=work.total_bytes,
        flops_per_step=work.total_flops,
        gbps=work.total_bytes / ms / 1e6,
        limit_ms=limit_ms,
        ratio=ms / limit_ms,
        experts_expected=expected.distinct,
        experts_counted=work.distinct,
        compiled=_steps_of(model, batch, settings).compiled,
        kernels_per_step=profile.kernels if profile else None,
        copies_per_step=profile.copies if profile else None,
        parts=list_parts(work, rates, profile, seconds),
        # of the steps that were not traced: tracing makes gaps longer, and kernels hardly
        gaps_ms=max(ms - profile.busy_ms, 0.0) if profile else 0.0,
        parts_of="traced steps" if profile else f"uncompiled steps{' on the host' if on_gpu else ''}",
        prompts_ms=prompts_ms,
        peak_bytes=peak,
    )
    LOG.info("decode, batch %d: %.3f ms a step, %.2f x the limit", batch, ms, case.ratio)
    return case


def _measure_drafts(model: Model, plain: DecodeCase, settings: Settings) -> DraftCase:
    model.drafts.get()
    prompts = draw_prompts(model, plain.batch, settings.context, settings.seed)
    options = replace(greedy_options(model, settings.decode_tokens), speculate=settings.speculate)
    times = {"new_tokens": settings.new_tokens, "repetitions": settings.repetitions, "warm_ups": WARM_UPS}
    return measure_drafts(model, prompts, options, plain=plain.tokens_per_s, **times)


def measure_prefill(model: Model, tokens: int, settings: Settings, rates: Rates, /) -> PrefillCase:
    """Time one prompt of random tokens, to the logits of its last one."""
    reset_peak(model.device)
    prompts = draw_prompts(model, 1, tokens, settings.seed)
    steps = choose_steps(model, tokens)
    samples_ms = []
    for turn in range(1 + settings.repetitions):
        state = new_state(model, 1, tokens)
        finish(model.device)
        begin = time.perf_counter()
        prefill(model, steps, prompts, state)
        finish(model.device)
        if turn:  # the first one compiles
            samples_ms.append((time.perf_counter() - begin) * 1e3)
    ms = statistics.median(samples_ms)
    work = count_step(model, batch=1, context=0, tokens=tokens)
    limit_ms = limit_seconds(work, rates) * 1e3
    LOG.info("prefill, %d tokens: %.2f ms, %.2f x the limit", tokens, ms, ms / limit_ms)
    return PrefillCase(
        tokens=tokens,
        samples_ms=tuple(samples_ms),
        ms=ms,
        tokens_per_s=tokens / ms * 1e3,
        bytes=work.total_bytes,
        flops=work.total_flops,
        tflops=work.total_flops / ms / 1e9,
        limit_ms=limit_ms,
        ratio=ms / limit_ms,
        peak_bytes=read_peak_bytes(model.device),
    )


def list_parts(work: Work, rates: Rates, profile: Profile | None, seconds: dict[str, float], /) -> tuple[PartTime, ...]:
    """Put the time of each part beside its limit: from a trace, or else from ``seconds``."""
    limits = part_limits(work, rates)
    return tuple(
        PartTime(
            name=part,
            ms=profile.parts_ms[part] if profile else seconds[part] * 1e3,
            limit_ms=limits[part] * 1e3,
            bytes=work.bytes[part],
            kernels=profile.parts_kernels[part] if profile else None,
        )
        for part in PARTS
    )


def draw_prompts(model: Model, batch: int, tokens: int, seed: int, /) -> list[list[int]]:
    """Draw token ids, other ones in each row."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.decoder.vocab_size
    prompts: list[list[int]] = torch.randint(0, vocab_size, (batch, tokens), generator=generator).tolist()
    return prompts


def _check_context(model: Model, settings: Settings) -> None:
    limit = model.config.decoder.max_context
    needed = settings.context + settings.decode_tokens
    if settings.batch_sizes and needed > limit:
        raise ValueError(
            f"context={settings.context} and {settings.decode_tokens} tokens behind it need {needed} positions, the "
            f"model has {limit}; take a shorter context, fewer new_tokens or fewer repetitions"
        )
    if longest := [tokens for tokens in settings.prefill_tokens if tokens > limit]:
        raise ValueError(f"prefill_tokens={max(longest)} must be at most the model's context of {limit} tokens")


def _steps_of(model: Model, batch: int, settings: Settings) -> Any:
    return choose_steps(model, batch * (settings.context + settings.decode_tokens))


def _decode(model: Model, batch: int, settings: Settings, *, tokens: int, steps: Any = None) -> Iterator[list[Token]]:
    prompts = draw_prompts(model, batch, settings.context, settings.seed)
    return decode_batch(model, steps or _steps_of(model, batch, settings), prompts, greedy_options(model, tokens))


def greedy_options(model: Model, tokens: int, /) -> Options:
    """Ask for exactly ``tokens`` greedy tokens."""
    chosen: dict[str, Any] = dict.fromkeys(("top_p", "top_k", "min_p", "stop", "logprobs"))
    return resolve_options(
        model.defaults,
        vocab_size=model.config.decoder.vocab_size,
        max_new_tokens=tokens,
        temperature=0.0,
        repetition_penalty=1.0,
        seed=0,
        ignore_eos=True,
        **chosen,
    )


def _time_steps(
    run: Iterator[Sequence[Token]], settings: Settings, device: torch.device
) -> tuple[list[float], Profile | None]:
    """Time the steps of a run in samples, then trace some on a GPU."""
    take(run, WARM_UPS)
    samples_ms = []
    for _ in range(settings.repetitions):
        finish(device)
        begin = time.perf_counter()
        take(run, settings.new_tokens)
        finish(device)
        samples_ms.append((time.perf_counter() - begin) * 1e3 / settings.new_tokens)
    if device.type != "cuda":
        return samples_ms, None
    kernels = trace_kernels(lambda: take(run, TRACED))
    if not kernels:
        LOG.warning("torch's profiler saw nothing on the GPU, so no kernels are counted")
    return samples_ms, profile_kernels(kernels, TRACED) if kernels else None


def _watch(model: Model, batch: int, settings: Settings) -> tuple[Watch, float]:
    """Run a few steps uncompiled and watched; also returns the seconds of one."""
    watch = Watch(model)
    run = _decode(model, batch, settings, tokens=1 + WATCHED, steps=watch.steps)
    next(run)
    watch.forget()
    begin = time.perf_counter()
    take(run, WATCHED)
    return watch, (time.perf_counter() - begin) / WATCHED


def count_step(model: Model, /, **options: Any) -> Work:
    """Count a step's bytes and operations; options as of ``count_work``."""
    state = model.architecture.init_state(model.config, 1, 64, dtype=model.dtype, device=META)
    return count_work(model.params, model.config, state.caches, **options)


def take(run: Iterator[Any], steps: int, /) -> None:
    """Take so many steps of a run."""
    for _ in islice(run, steps):
        pass
