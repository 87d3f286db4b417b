"""Triton kernels of the MoE layer; each launch function runs alone, on CUDA, ROCm or in Triton's interpreter."""

from ..settings import Settings as Settings
from ..settings import Tile as Tile
from ..settings import default_settings as default_settings
from ..settings import settings_from_ints as settings_from_ints
from ..settings import settings_to_ints as settings_to_ints
from .layer import compute_experts_kernels as compute_experts_kernels
from .layer import run_moe_layer as run_moe_layer
from .layer import run_moe_layer_apart as run_moe_layer_apart
from .route import Table as Table
from .route import route_tokens as route_tokens
from .route import tabulate as tabulate
from .sort import Tiles as Tiles
from .sort import sort_pairs as sort_pairs
