"""A draft with the target's own token ids skips the text. That is found out by the tokens, never by the vocabulary's size.

For want of a small sibling, the draft here is the target without its last three layers.
"""

from copy import deepcopy

from transformers import AutoModelForCausalLM, AutoTokenizer

from xtok import Budget, XTokAssisted
from xtok.pair import TARGET, prompts

target, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
draft = deepcopy(target)
draft.model.layers = draft.model.layers[:9]
draft.config.num_hidden_layers = 9
g = XTokAssisted((target, tokenizer), [(draft, tokenizer)], budget=Budget(3, width=4, schedule="constant")).generate(
    prompts()[0], max_new_tokens=64, do_sample=False
)
alone = XTokAssisted((target, tokenizer)).generate(prompts()[0], max_new_tokens=64, do_sample=False)
same = "yes" if g.token_ids == alone.token_ids else "no"
print(f"{g.stats.tokens_per_forward:.2f} tokens per forward of the target, the same ids: {same}")
