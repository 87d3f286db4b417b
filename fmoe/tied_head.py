"""A head that config.json ties to the embedding, in a checkpoint that holds one of its own."""

import logging
from dataclasses import replace

import torch
from safetensors import safe_open

from .architectures import FamilyConfig
from .checkpoint import Checkpoint

LOG = logging.getLogger("fmoe")
HEAD, EMBEDDING = "lm_head.weight", ".embed_tokens.weight"
ROWS = 4096  # that are compared at once


def untie_head(config: FamilyConfig, checkpoint: Checkpoint, /) -> FamilyConfig:
    """Give the config with a head of its own where the checkpoint has one that is not the embedding, and log it.

    Args:
        config: of a family.
        checkpoint: whose two tensors are compared where both are there; a head that is the embedding stays tied.
    """
    if not config.decoder.tied or HEAD not in checkpoint.tensors or not _differs(checkpoint):
        return config
    LOG.warning(
        "config.json ties the head to the embedding, but %s is another tensor: it is used as it is; set "
        "tie_word_embeddings to false to say so",
        HEAD,
    )
    untied: FamilyConfig = replace(config, decoder=replace(config.decoder, tied=False))  # type: ignore[type-var]
    return untied


def _differs(checkpoint: Checkpoint) -> bool:
    tensors = checkpoint.tensors
    names = [name for name in tensors if name.endswith(EMBEDDING) and not name.startswith("mtp.")]
    if len(names) != 1:
        return False  # the check of all tensors says what is wrong
    if tensors[names[0]].shape != tensors[HEAD].shape or tensors[names[0]].dtype != tensors[HEAD].dtype:
        return True
    with (
        safe_open(tensors[HEAD].file, framework="pt") as head_file,
        safe_open(tensors[names[0]].file, framework="pt") as embedding_file,
    ):
        head, embedding = head_file.get_slice(HEAD), embedding_file.get_slice(names[0])
        rows = tensors[HEAD].shape[0]
        return any(
            not torch.equal(head[start : start + ROWS], embedding[start : start + ROWS])
            for start in range(0, rows, ROWS)
        )
