"""Print text while it is written, in whole characters.

python examples/streaming.py
"""

from xtok import XTokAssisted, pair


def main() -> None:
    """Stream one continuation."""
    xt = XTokAssisted(pair.TARGET, pair.DRAFT)
    prompt = pair.prompts()[2]
    print(prompt, end="", flush=True)
    for piece in xt.stream(prompt, max_new_tokens=64, do_sample=False):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
