"""Several drafts at once: their guesses are merged into one tree.

With a budget, all are asked in every round. Without one, each is asked only when its guesses are expected to save more time
than they cost.
"""

from xtok import Budget, HeadsDrafter, PromptLookup, XTokAssisted
from xtok.pair import DRAFT, HEADS, TARGET, TUNED, prompts

prompt = prompts()[0]
alone = XTokAssisted(TARGET).generate(prompt, max_new_tokens=64, do_sample=False)
mixtures = {
    "one draft": [DRAFT],
    "two drafts": [DRAFT, TUNED],
    "a draft, the target's own heads, and what the text repeats": [TUNED, HeadsDrafter(HEADS), PromptLookup()],
}
for name, drafts in mixtures.items():
    g = XTokAssisted(TARGET, drafts, budget=Budget(5, width=4, schedule="constant")).generate(
        prompt, max_new_tokens=64, do_sample=False
    )
    same = "yes" if g.token_ids == alone.token_ids else "no"
    print(f"{name}: {g.stats.tokens_per_forward:.2f} tokens per forward of the target, the same ids: {same}")
