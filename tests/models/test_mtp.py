"""Draft (MTP) layers: loaded in every layout, and equal to a forward pass put together from pieces tested alone."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig, Qwen3NextConfig

import fmoe
from fmoe.architectures import KNOWN, Drafting, Following
from fmoe.compile.step import visible_slots
from fmoe.decoding import new_state, run
from fmoe.functional.attention import place_tokens
from fmoe.models import deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_next
from fmoe.models.decoder import Stream

from .test_deepseek import BASE as DEEPSEEK
from .test_qwen3_next import BASE as QWEN

V = 61
GLM = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "qwen3_next": Qwen3NextConfig(**QWEN),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
    "glm4_moe": Glm4MoeConfig(**GLM),
}
EXTRAS = {
    "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def split_experts(tensors):
    """Store stacked experts one by one."""
    out = {}
    for name, w in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, part in enumerate(w):
                gate, up = part.chunk(2)
                out |= {f"{base}{e}.gate_proj.weight": gate.clone(), f"{base}{e}.up_proj.weight": up.clone()}
        elif name.endswith(".experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": part.clone() for e, part in enumerate(w)}
        else:
            out[name] = w
    return out


def stack_experts(tensors):
    """Store experts that are stored one by one as stacks."""
    out, found = {}, {}
    for name, w in tensors.items():
        base, mark, rest = name.partition(".experts.")
        if mark and rest.endswith(".weight"):
            e, part, _ = rest.split(".")
            found.setdefault(f"{base}.experts.", {}).setdefault(part, {})[int(e)] = w
        else:
            out[name] = w
    for base, parts in found.items():
        gate, up, down = (
            torch.stack([parts[p][e] for e in sorted(parts[p])]) for p in ("gate_proj", "up_proj", "down_proj")
        )
        out |= {f"{base}gate_up_proj": torch.cat((gate, up), 1), f"{base}down_proj": down}
    return out


def draft_tensors(tensors, family, layers):
    """Make a draft layer out of the last layer of its kind, disturbed, and what stands around it."""
    rng = torch.Generator().manual_seed(5)
    source, target = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    if family == "qwen3_next":
        target = "mtp.layers.0."
    drafts = {
        target + name.removeprefix(source): w + 0.1 * torch.randn(w.shape, generator=rng)
        for name, w in tensors.items()
        if name.startswith(source)
    }
    hidden = tensors["model.norm.weight"].shape[0]
    extras = EXTRAS.get(family, EXTRAS["deepseek_v3"])
    prefix = "" if family == "qwen3_next" else target
    for extra, shape in zip(extras, ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,)), strict=True):
        drafts[f"{prefix}{extra}.weight"] = torch.randn(shape, generator=rng) * 0.3 + (family != "qwen3_next")
    return drafts


@pytest.fixture(scope="module", params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def write(make_reference, tmp_path_factory, family):
    """Write a checkpoint of the family, its own experts and those of the draft each in one of the two layouts."""
    reference = make_reference(CONFIGS[family])
    tensors = split_experts(load_file(reference.folder / "model.safetensors"))
    drafts = draft_tensors(tensors, family, CONFIGS[family].num_hidden_layers)

    def write_one(main=lambda tensors: tensors, mtp=lambda tensors: tensors, *, drop=()):
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(reference.folder, folder, dirs_exist_ok=True)
        kept = {name: w for name, w in mtp(drafts).items() if name not in drop}
        save_file(main(tensors) | kept, folder / "model.safetensors")
        return folder

    return write_one


@pytest.fixture(scope="module")
def model(write):
    return fmoe.load(write(), compile=False, speculate=True)


def norm(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def compose(model, ids):
    """Give (the model's logits, the draft's logits of the token after next) from the layers' own functions."""
    head, params, config = model.drafts.get(), model.params, model.config.decoder
    with torch.inference_mode():
        state = new_state(model, 1, len(ids))
        x_1TD, _ = run(model, model.eager, torch.tensor([ids]), state, visible=len(ids))
        hidden = norm(x_1TD, params.norm_D, config.eps)
        embedded = params.embed_VD[torch.tensor([ids[1:]])]
        pair = torch.cat(
            (
                norm(embedded, head.params.embed_norm_D, config.eps),
                norm(hidden[:, :-1], head.params.hidden_norm_D, config.eps),
            ),
            -1,
        )
        u = pair @ head.params.w_join_DN.T
        placement = place_tokens(
            torch.zeros(1, dtype=torch.int64),
            state.inv_freq_R,
            tokens=len(ids) - 1,
            slots=visible_slots(len(ids)),
            dtype=torch.float32,
            scale=config.rope.attention_factor,
        )
        full = config.layer_kinds.index(head.kind)
        layer = model.eager.layers[head.kind]
        cache = new_state(model, 1, len(ids)).caches[full]
        out = sum(layer(Stream(u, torch.zeros_like(u)), head.params.layer, cache, placement))
        return hidden[0] @ params.head_VD.T, norm(out, head.params.norm_D, config.eps)[0] @ params.head_VD.T


def step_through(model, ids, tokens):
    """Give the draft's logits behind each place, ``tokens`` at a time through its functions and one cache."""
    head = model.drafts.get()
    steps, config, params = head.eager, model.config.decoder, model.params
    with torch.inference_mode():
        state = new_state(model, 1, len(ids))
        x_1TD, _ = run(model, model.eager, torch.tensor([ids]), state, visible=len(ids))
        hidden, _ = steps.head(Stream(x_1TD, torch.zeros_like(x_1TD)), params.norm_D, params.head_VD)
        full = config.layer_kinds.index(head.kind)
        cache, found = new_state(model, 1, len(ids)).caches[full], []
        for start in range(0, len(ids) - 1, tokens):
            end = min(start + tokens, len(ids) - 1)
            following = Following(torch.tensor([ids[start + 1 : end + 1]]), params.embed_VD)
            stream = steps.join(hidden[:, start:end], head.params, following)
            placement = place_tokens(
                torch.tensor([start]), state.inv_freq_R, tokens=end - start, slots=128, dtype=torch.float32,
                scale=config.rope.attention_factor,
            )._replace(kept_B=torch.zeros(1, dtype=torch.int64))  # fmt: skip
            stream = steps.layers[head.kind](stream, head.params.layer, cache, placement)
            found.append(steps.head(stream, head.params.norm_D, params.head_VD)[1][0])
    return torch.cat(found)


@pytest.mark.parametrize("tokens", [1, 2, 4, 70])
def test_draft_logits_equal_a_forward_pass_put_together_by_hand(model, tokens):
    ids = draw_ids(70, seed=tokens)
    _, expected = compose(model, ids)
    found = step_through(model, ids, tokens)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


LAYOUTS = {"one-by-one": lambda tensors: tensors, "stacked": stack_experts}


@pytest.mark.parametrize("mtp", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("main", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_of_both_loads_and_agrees(write, model, main, mtp):
    other = fmoe.load(write(main, mtp), compile=False, speculate=True)
    ids = draw_ids(30)
    for found, expected in zip(compose(other, ids), compose(model, ids), strict=True):
        assert torch.equal(found, expected)


def test_a_shared_expert_of_the_draft_is_a_slot_too(model):
    layer, draft = model.params.layers[-1].mlp, model.drafts.get().params.layer.mlp
    assert [part.shape for part in draft[:3]] == [part.shape for part in layer[:3]]
    assert draft.shared is None and draft.w_down_EDF.shape[0] > model.config.router.num_experts


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_drafts_of_a_random_layer_change_nothing(model, drafts):
    prompts = [draw_ids(n, seed=n) for n in (1, 7, 65, 64)]
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        plain = fmoe.generate(model, prompts, max_new_tokens=12, ignore_eos=True, **options)
        found = fmoe.generate(model, prompts, max_new_tokens=12, ignore_eos=True, speculate=drafts, **options)
        assert [row.token_ids for row in found] == [row.token_ids for row in plain]


def test_a_missing_tensor_is_named_and_ignored_unless_asked_for(write, model):
    names = model.architecture.draft_names(model.config)
    for name, message in ((names.join, f"no {names.join}"), (names.norm, f"missing tensors (1): {names.norm}")):
        folder = write(drop=(name,))
        with pytest.raises(ValueError, match=re.escape(message)):
            fmoe.load(folder, speculate=True)
        other = fmoe.load(folder, compile=False)
        fmoe.generate(other, [[1, 2]], max_new_tokens=2)
        with pytest.raises(ValueError, match=re.escape(message)):
            fmoe.generate(other, [[1, 2]], max_new_tokens=2, speculate=1)
        assert (
            len(fmoe.generate(other, [[1, 2]], max_new_tokens=2, ignore_eos=True, speculate="auto")[0].token_ids) == 2
        )


def test_the_families_that_draft():
    drafting = [family for family in KNOWN if isinstance(family, Drafting)]
    assert {qwen3_next, deepseek_v3, glm4_moe, glm4_moe_lite} <= set(drafting)


def test_a_family_that_does_not_draft(make_reference):
    config = MixtralConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = fmoe.load(make_reference(config).folder, compile=False)
    with pytest.raises(ValueError, match=r"needs a draft \(MTP\) layer, and models of type mixtral have none here"):
        fmoe.generate(model, [[1]], speculate=1)


def test_drawn_weights_draft_too(write, tmp_path):
    shutil.copy(write() / "config.json", tmp_path)
    model = fmoe.load(tmp_path, weights="random", compile=False, seed=3)
    plain = fmoe.generate(model, [[1, 2, 3]], max_new_tokens=8, ignore_eos=True)
    found = fmoe.generate(model, [[1, 2, 3]], max_new_tokens=8, ignore_eos=True, speculate=2)
    assert found[0].token_ids == plain[0].token_ids and found[0].drafted > 0
