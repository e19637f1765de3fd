"""Lossy on request: guesses merely typical of the target's distribution are accepted. The texts are not the target's own."""

import warnings

from xtok import XTokAssisted
from xtok.errors import LossyWarning
from xtok.pair import TARGET, TUNED, prompts

sampled = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "seed": 1}
with warnings.catch_warnings():
    warnings.simplefilter("ignore", LossyWarning)
    lossy = XTokAssisted(TARGET, TUNED, acceptance="typical")
for name, xt in {"exact": XTokAssisted(TARGET, TUNED), "typical, lossy": lossy}.items():
    g = xt.generate(prompts()[0], **sampled)
    print(f"{name}: {g.stats.tokens_per_forward:.2f} tokens per forward, stats.exact is {g.stats.exact}")
