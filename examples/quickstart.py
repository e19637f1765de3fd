"""Generate with the pair that ships, and compare with the target alone. Any other pair works by hub id or local path.

python examples/quickstart.py
"""

from xtok import XTokAssisted, pair


def main() -> None:
    """Print a continuation and what it cost."""
    xt = XTokAssisted(pair.TARGET, pair.DRAFT)
    prompt = pair.prompts()[0]
    generation = xt.generate(prompt, max_new_tokens=64, do_sample=False)
    alone = XTokAssisted(pair.TARGET).generate(prompt, max_new_tokens=64, do_sample=False)
    print(prompt + generation.text)
    print(f"{generation.stats.tokens_per_forward:.2f} tokens per forward of the target")
    print("identical to the target alone:", "yes" if generation.token_ids == alone.token_ids else "NO")


if __name__ == "__main__":
    main()
