"""Heads on the target itself, trained by `xtok train-heads`; those for the target that ships are there."""

from xtok import Budget, HeadsDrafter, XTokAssisted
from xtok.pair import HEADS, TARGET, prompts

heads = HeadsDrafter(HEADS)
for number, ranks in enumerate(heads.trained.accuracy, start=1):
    print(f"step {number}: the likeliest token was right in {ranks[0]:.0%}, one of the five likeliest in {sum(ranks):.0%}")
xt = XTokAssisted(TARGET, [heads], budget=Budget(depth=5, width=4, nodes=32, schedule="constant"))
g = xt.generate(prompts()[0], max_new_tokens=64, do_sample=False)
same = g.token_ids == XTokAssisted(TARGET).generate(prompts()[0], max_new_tokens=64, do_sample=False).token_ids
print(f"{g.stats.tokens_per_forward:.2f} tokens per forward of the target, the same ids: {'yes' if same else 'no'}")
