"""The libraries that are measured, each behind the same small functions.

A contender runs the prompts up to the first token, then gives one token per row and step. fmoe is driven through
``decode_batch``, which is what ``fmoe.generate`` runs; transformers through ``model.forward`` and argmax in a loop as
thin, without the checks of its ``generate``.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import fmoe
from fmoe.decoding import decode_batch
from fmoe.model import Model, choose_steps
from fmoe.options import Options, resolve_options

Prompts = Sequence[Sequence[int]]
Step = Callable[[Tensor, Any], Tensor]


def load_fmoe(folder: Path, /, *, compile: bool) -> Model:
    """Load in float32 on the CPU."""
    return fmoe.load(folder, device="cpu", dtype="float32", compile=compile, progress=False)


def load_transformers(folder: Path, experts: str, /) -> Any:
    """Load in float32 on the CPU with one implementation of the experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=experts)
    assert model.config._experts_implementation == experts
    return model.eval()


def greedy_options(model: Model, tokens: int, /) -> Options:
    """Ask for exactly ``tokens`` greedy tokens."""
    chosen = {"top_p": None, "top_k": None, "min_p": None, "seed": 0, "stop": None, "logprobs": None}
    return resolve_options(
        model.defaults,
        vocab_size=model.config.decoder.vocab_size,
        max_new_tokens=tokens,
        temperature=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        **chosen,  # type: ignore[arg-type]
    )


def start_fmoe(model: Model, prompts: Prompts, tokens: int, /) -> Iterator[list[int]]:
    """Decode as ``fmoe.generate`` does."""
    steps = choose_steps(model, sum(map(len, prompts)) + tokens * len(prompts))
    for turn in decode_batch(model, steps, prompts, greedy_options(model, tokens)):
        yield [token.id for token in turn]


def make_step(model: Any, /, *, compile: bool) -> Step:
    """Give a function of (tokens [B, T], cache) that returns the logits [B, V] after the last token."""
    forward = model.forward
    cache_argument = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def step(tokens_BT: Tensor, cache: Any) -> Tensor:
        logits_B1V = forward(tokens_BT, **{cache_argument: cache}, use_cache=True, logits_to_keep=1).logits
        return logits_B1V[:, -1]

    if not compile:
        return step
    # Graphs are kept with the code object; one of its own for each model and batch, so that a call searches one.
    step.__code__ = step.__code__.replace(co_name=f"step_{id(step)}")
    return torch.compile(step, fullgraph=True, dynamic=False)


class StaticRunner:
    """transformers with a static cache that is kept, its decode step compiled, its prefill not."""

    def __init__(self, model: Any, prompts: Prompts, tokens: int, /) -> None:
        self.prompts = torch.tensor(prompts)
        self.tokens = tokens
        self.prefill = make_step(model, compile=False)
        self.decode = make_step(model, compile=True)
        self.cache = StaticCache(config=model.config, max_cache_len=self.prompts.shape[1] + tokens)

    def __call__(self) -> Iterator[list[int]]:
        """Start a sequence."""
        self.cache.reset()
        return _loop(self.prefill, self.decode, self.prompts, self.cache, self.tokens)


def start_transformers(model: Any, prompts: Prompts, tokens: int, /) -> Iterator[list[int]]:
    """Decode uncompiled with a dynamic cache."""
    step = make_step(model, compile=False)
    return _loop(step, step, torch.tensor(prompts), DynamicCache(config=model.config), tokens)


def _loop(prefill: Step, decode: Step, prompts_BT: Tensor, cache: Any, tokens: int) -> Iterator[list[int]]:
    tokens_B = prefill(prompts_BT, cache).argmax(-1)
    yield tokens_B.tolist()
    for _ in range(tokens - 1):
        tokens_B = decode(tokens_B[:, None], cache).argmax(-1)
        yield tokens_B.tolist()


def reference_tokens(model: Any, prompts: Prompts, tokens: int, /) -> tuple[list[list[int]], list[list[float]]]:
    """Decode greedily with transformers, uncompiled, and keep how clear each choice was.

    Returns:
        (tokens of each row, best minus second-best logit of each).
    """
    step, cache, x_BT = make_step(model, compile=False), DynamicCache(config=model.config), torch.tensor(prompts)
    chosen, gaps = [], []
    for _ in range(tokens):
        best_B2, ids_B2 = step(x_BT, cache).topk(2)
        x_BT = ids_B2[:, :1]
        chosen.append(ids_B2[:, 0])
        gaps.append(best_B2[:, 0] - best_B2[:, 1])
    return torch.stack(chosen, 1).tolist(), torch.stack(gaps, 1).tolist()
