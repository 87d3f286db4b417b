"""DeepSeek-V3, R1 and Kimi-K2: DeepSeek-V2's layers with sigmoid scores and a bias that balances the experts.

Source: the published config.json of DeepSeek-V3 and Kimi-K2-Instruct; arXiv:2412.19437. Kimi-K2 calls itself
``kimi_k2`` and names DeepseekV3ForCausalLM as its architecture. The draft layers that
``num_nextn_predict_layers`` counts stand behind ``num_hidden_layers``; the first one drafts, with the model's own
embedding and head, of which it has copies.
"""

from fmoe.functional.moe import SharedExperts

from .deepseek_v2 import KIND, latent_rope, layer_params, make_config
from .deepseek_v2 import Config as Config
from .deepseek_v2 import build_params as build_params
from .deepseek_v2 import init_state as init_state
from .deepseek_v2 import make_layers as make_layers
from .mla import latent_config
from .mtp import DraftParams, draft_params
from .mtp import draft_names as draft_names
from .routers import BIAS, read_sigmoid_router
from .settings import Raw, read_bool, read_int
from .weights import Fill

MODEL_TYPES: tuple[str, ...] = ("deepseek_v3", "kimi_k2")
ARCHITECTURES: tuple[str, ...] = ("DeepseekV3ForCausalLM",)
DRAFT_KIND = KIND


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    rope = latent_rope(raw)
    return make_config(
        raw,
        rope,
        latent_config(raw, rope, interleaved=read_bool(raw, "rope_interleave", True)),
        read_sigmoid_router(raw),
        shared_experts=shared_experts,
        dense_layers=read_int(raw, "first_k_dense_replace", 3),
        bias=BIAS,
        drafts=1,
    )


def build_drafts(fill: Fill, config: Config) -> DraftParams:
    """Describe the draft layer, which is one more sparse layer, and what stands around it."""
    layer = layer_params(fill, f"model.layers.{len(config.decoder.layer_kinds)}", config, sparse=True)
    return draft_params(fill, draft_names(config), layer, config.decoder.hidden_size)
