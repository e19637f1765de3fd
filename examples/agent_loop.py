"""A memory of earlier requests, in an agent's loop over one file: edit it, run its tests, fix it.

`python examples/agent_loop.py smollm2` takes a chat model (fetched once, 93 MB) and 30 requests in place of the bundled models
and three. Requests are the same with and without the memory, in turns.
"""

import sys
from time import process_time

from xtok import HeadsDrafter, PromptLookup, TokenRecycling, XTokAssisted
from xtok.pair import pair

FILE = '''"""A small inventory."""

from dataclasses import dataclass, field


@dataclass
class Item:
    name: str
    price: float
    quantity: int = 0

    def total(self) -> float:
        return self.price * self.quantity


@dataclass
class Inventory:
    items: dict[str, Item] = field(default_factory=dict)

    def add(self, name: str, price: float, quantity: int = 1) -> Item:
        item = self.items.get(name)
        if item is None:
            item = Item(name, price)
            self.items[name] = item
        item.quantity += quantity
        return item

    def remove(self, name: str, quantity: int = 1) -> None:
        item = self.items[name]
        item.quantity -= quantity
        if item.quantity < 0:
            raise ValueError(name)

    def total(self) -> float:
        return sum(item.total() for item in self.items.values())
'''
CHANGES = {  # what each round changes, and the method whose test fails then
    "rename `quantity` to `count`": "remove",
    "add a method `names` that returns the sorted names": "add",
    "let `remove` delete an item when none is left": "total",
    "add a method `find` that returns an item or None": "find",
    "let `add` raise ValueError for a negative price": "add",
    "add a method `most_expensive`": "names",
    "let `total` round to two digits": "total",
    "add a method `clear`": "clear",
    "add a `currency` to Item": "remove",
    "let `remove` check the quantity first": "most_expensive",
}
models = pair(sys.argv[1] if len(sys.argv) > 1 else "aozora")
heads, others = HeadsDrafter(models.heads), TokenRecycling()
plain = XTokAssisted(models.target, [heads, PromptLookup(), others])
remembering = XTokAssisted((plain.model, plain.tokenizer), [heads, PromptLookup(memory=16 * 2**20), TokenRecycling()])


def asked(text):
    system = {"role": "system", "content": "You are a careful programmer. Answer with code only."}
    return [system, {"role": "user", "content": text}] if models.chats else text[-200:]


requests = []
for run, (change, method) in enumerate(CHANGES.items(), start=1):
    requests += [
        asked(f"Here is inventory.py:\n\n```python\n{FILE}```\n\nIn this file, {change}. Write the whole class Inventory."),
        asked(
            f"The tests of inventory.py say:\n\nE   AssertionError in test_{method}: Inventory.{method} gave a wrong result "
            f"(run {run})\n\nWrite the method `{method}` of class Inventory, correctly."
        ),
        asked(
            f"test_{method} of inventory.py passes now. Write the class Inventory of inventory.py with `add`, `remove` and "
            "`total` as it is after the fix."
        ),
    ]

totals = {"without": [0, 0, 0.0], "with a memory": [0, 0, 0.0]}
for prompt in requests if models.chats else requests[:3]:
    texts = []
    for (way, total), xt in zip(totals.items(), (plain, remembering), strict=True):
        start = process_time()
        g = xt.generate(prompt, max_new_tokens=128 if models.chats else 24, do_sample=False)
        new = g.stats.new_tokens, g.stats.target_forwards, process_time() - start
        totals[way] = [before + more for before, more in zip(total, new, strict=True)]
        texts.append(g.token_ids)
    print("the same ids:", "yes" if texts[0] == texts[1] else "no")
for way, (tokens, forwards, seconds) in totals.items():
    print(f"{way}: {tokens / forwards:.2f} tokens per forward, {tokens / seconds:.1f} tokens per CPU second")
