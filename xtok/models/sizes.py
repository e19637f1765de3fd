"""How large models are, told by their configurations."""

from os import PathLike

import torch
from transformers import AutoConfig

from xtok.models.load import from_config


def parameters(source: str | PathLike[str]) -> int:
    """How many parameters a forward of a model reads: all but the rows that ids are looked up in. No weights are loaded.

    Of a mixture of experts, all are counted. `source` is one that `load_without_weights` took.
    """
    with torch.device("meta"):
        model = from_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
    rows, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    whole = sum(int(weight.numel()) for weight in model.parameters())
    return whole if head is not None and head.weight is rows else whole - int(rows.numel())
