"""How much is guessed per round: as much as pays (the default), a constant, transformers' heuristic, or by confidence."""

from xtok import Budget, XTokAssisted
from xtok.pair import TARGET, TUNED, prompts

schedules = {
    "as much as pays": None,
    "constant": Budget(depth=5, width=1, schedule="constant"),
    "heuristic": Budget(depth=5, width=1, schedule="heuristic"),
    "while the draft is confident": Budget(depth=20, width=1, confidence=0.4, schedule="constant"),
}
for name, budget in schedules.items():
    g = XTokAssisted(TARGET, TUNED, budget=budget).generate(prompts()[0], max_new_tokens=64, do_sample=False)
    print(f"{name}: {g.stats.tokens_per_forward:.2f} tokens per forward, {g.stats.draft_forwards} forwards of the draft")
