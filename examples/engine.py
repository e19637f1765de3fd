"""Texts that come and go, written together: tickets, pieces of text, `async for`, cancelling, and figures of the engine.

python examples/engine.py
"""

import asyncio
from concurrent.futures import CancelledError

from xtok import Engine, Ticket, XTokAssisted, pair


async def read(ticket: Ticket) -> str:
    """What a coroutine does while others run."""
    return "".join([piece async for piece in ticket])


async def read_all(tickets: list[Ticket]) -> list[str]:
    """Read several texts at once."""
    return await asyncio.gather(*map(read, tickets))


def main() -> None:
    """Cancel one text, read another piece by piece, and two more in coroutines."""
    xt = XTokAssisted(pair.TARGET, pair.DRAFT)
    prompts, settings = pair.prompts()[:3], {"do_sample": False, "repetition_penalty": 1.2}
    with Engine(xt, batch_size=4) as engine:
        unwanted = engine.submit(pair.prompts()[3], max_new_tokens=2000, **settings)
        first, *others = [engine.submit(prompt, max_new_tokens=48, **settings) for prompt in prompts]
        next(iter(unwanted))
        unwanted.cancel()
        print(prompts[0], end="")
        for piece in first:
            print(piece, end="", flush=True)
        print()
        for prompt, text in zip(prompts[1:], asyncio.run(read_all(others)), strict=True):
            print(prompt + text)
        try:
            unwanted.result()
        except CancelledError:
            print("one text was cancelled")
        stats = engine.stats
        print(f"{stats.tokens} tokens, {stats.tokens_per_second:.0f} a second; {stats.running} run, {stats.waiting} wait")
    alone = [xt.generate(prompt, max_new_tokens=48, **settings).token_ids for prompt in prompts]
    same = [ticket.result().token_ids for ticket in (first, *others)] == alone
    print("the same ids as each text by itself:", "yes" if same else "NO")


if __name__ == "__main__":
    main()
