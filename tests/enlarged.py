"""Enlarged copies of small trained models, which cost as much as large ones and pick the same ids. As a command (`make gpu`):
figures of the bundled pair on a GPU, at about the sizes of llm-jp-13B and open-calm-small.
"""

import json
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtok.bench.compare import compare, described, rows_of
from xtok.bench.runs import SETTINGS
from xtok.pair import DRAFT, TARGET, prompts

OUTPUTS = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
"""The projections by which attention and MLPs write to the residual stream."""


@torch.no_grad()
def enlarged(model: Any, width: int, blocks: int) -> Any:
    """A Llama or GPT-NeoX with MLPs of that width and so many blocks, and the same logits: what is added writes zeros to the
    residual stream (after Net2Net, Chen, Goodfellow, Shlens 2016, arXiv 1511.05641).
    """
    config = deepcopy(model.config)
    config.intermediate_size, config.num_hidden_layers = width, blocks
    with model.device:
        made = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    own = dict(model.named_parameters())
    for name, weight in made.named_parameters():
        if name.split(".")[-2] in OUTPUTS:
            weight.zero_()
        if name in own:
            weight[tuple(slice(size) for size in own[name].shape)] = own[name]
    return made


def main() -> None:
    found = []
    for folder, parameters, blocks, matrices in ((TARGET, 13e9, 40, 3), (DRAFT, 160e6, 12, 2)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
        width = round(parameters / blocks / model.config.hidden_size / matrices)
        found.append((enlarged(model, width, blocks), AutoTokenizer.from_pretrained(folder)))
    setting = SETTINGS["penalty"]
    done = compare(found[0], found[1], prompts()[::6][:8], setting, max_new_tokens=64)
    rows = [asdict(row) for row in rows_of(done, sampled=False)]
    print(json.dumps({"device": described(found[0][0]), "setting": setting.title, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
