"""``fmoe.tune``: measure a loaded model's operators and give the model with the plans that follow."""

import os
from collections.abc import Sequence
from pathlib import Path

from fmoe.compile.device import describe_device
from fmoe.compile.plan_tables import export_table

from .ambient import check_model
from .model import Model, check_progress, replan
from .plan_search import BATCH_SIZES, BUDGET_S, KEY_BUDGET_S, MAX_TOKENS, Search, search_plans


def tune(
    model: Model,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    max_tokens: int = MAX_TOKENS,
    budget_s: float = BUDGET_S,
    key_budget_s: float = KEY_BUDGET_S,
    progress: bool | None = None,
    force: bool = False,
) -> Model:
    """Choose the implementation and settings of each operator by measuring; nothing is compiled or run afterwards.

    What is found is kept in the cache folder for this device and these versions, and taken from there next time.

    Args:
        model: as loaded.
        batch_sizes: of the decode steps to come.
        max_tokens: of the prompts to come.
        budget_s: seconds for everything; what is not measured by then goes by the tables and the rule as before.
        key_budget_s: seconds for one operator at one token count.
        progress: show a bar; None does so on a terminal only.
        force: measure again what was measured on this machine.

    Returns:
        The model with the new plans; the given one is unchanged, and is returned itself where nothing differs.

    Raises:
        ValueError: no model, or an argument out of its range.
        RuntimeError: called while a graph is captured or traced.
    """
    check_model(model, "tune")
    check_progress(progress)
    search = Search(tuple(batch_sizes), max_tokens, budget_s, key_budget_s, force)
    plans = search_plans(
        model.params,
        getattr(model.config, "router", None),
        [plan.key for plan in model.plans],
        model.device,
        requested=model.kernels,
        search=search,
        progress=progress,
    )
    return replan(model, plans)


def export_tuned(model: Model, path: str | os.PathLike[str], /) -> None:
    """Write what was measured of a model's operators on this machine as a table that fmoe can be shipped with.

    Args:
        model: as loaded.
        path: the file; other operators in it stay.

    Raises:
        ValueError: nothing was measured.
    """
    export_table(describe_device(model.device), Path(path), keys=[plan.key for plan in model.plans])
