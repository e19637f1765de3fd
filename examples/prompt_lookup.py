"""Guesses without a model: what the text repeats, and what stands in documents of yours.

The answer quotes a document, as answers from retrieved documents do; here a logits processor makes the small target that ships
do so.
"""

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from xtok import PromptLookup, XTokAssisted
from xtok.pair import TARGET

document = "水車の羽根に水が当ると水車が回り、水車の軸が回る。水車の軸には歯車があり、歯車は臼の軸を回す。"


class Quotes(LogitsProcessor):
    """Makes the target quote the document."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids, self.start = ids, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Nothing but the document's next id is left."""
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids[min(input_ids.shape[1] - self.start, len(self.ids) - 1)]] = 0
        return only


for name, draft in {
    "no draft": None,
    "prompt lookup": PromptLookup(),
    "with documents": PromptLookup(corpus=[document]),
}.items():
    xt = XTokAssisted(TARGET, draft)
    prompt = "問：水車はどう回るか。答："
    ids = xt.tokenizer(document, add_special_tokens=False)["input_ids"]
    quotes = LogitsProcessorList([Quotes(ids, len(xt.tokenizer(prompt)["input_ids"]))])
    g = xt.generate(prompt, max_new_tokens=len(ids), do_sample=False, logits_processor=quotes)
    print(f"{name}: {g.stats.tokens_per_forward:.2f} tokens per forward of the target")
