"""Trains heads for a target, which stays frozen, on texts that it writes."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad, smooth_l1_loss
from transformers import DynamicCache, PreTrainedModel

from xtok.drafts.heads import LAST, HeadsDrafter, HeadsInfo, described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.drafts.sequential import HEAD_DIM, SequentialHeads, sequential_config
from xtok.errors import InvalidInputError, shown
from xtok.models.cache import CACHE, device_of, output_embeddings, stacked, vocabulary_size
from xtok.models.load import Source, load, target_model
from xtok.models.modes import Modes, within
from xtok.models.prompts import prompt_ids
from xtok.models.timing import timed
from xtok.results.progress import stage
from xtok.tune.examples import IGNORED, Example, WrittenText, batch
from xtok.tune.training import BATCH, check, fit, per_forward
from xtok.tune.writing import given_prompts, own_questions, write, write_for

Kind = Literal["sequential", "medusa"]
_DECAY = 0.8
"""The weight of a step's loss, relative to that of the step before it."""
_RANKS = 5
_RATE = 2e-3
_WRITING = 0.4
"""The share of the time in which the target writes texts."""
_EPOCHS = 12
_WINDOW = 512
"""How many positions sequential heads see at most; if all training texts are shorter, as many as the longest has."""


@dataclass(frozen=True)
class TrainedHeads:
    """The result of `train_heads`.

    `file`: the file with the heads. `parameters`: how many they have. `texts`, `tokens`: how many they were trained on.
    `accuracy`, (steps, 5): how often each step's most likely id, its second most likely, up to its fifth, was right; without
    steps for which all texts were too short. `after`: tokens per forward pass of the target with the heads, over all ways of
    picking; `ways`: for each of them. `right`, (steps,) for each key of `ways`: how often a step's most likely id was right in
    texts that were picked in that way. All four are measured on held-out prompts. `epochs`: tokens per forward pass in each
    epoch, on the prompts that decided when to stop; the best was kept.
    """

    file: Path
    parameters: int
    texts: int
    tokens: int
    accuracy: tuple[tuple[float, ...], ...]
    after: float
    ways: dict[str, float]
    right: dict[str, tuple[float, ...]]
    epochs: tuple[float, ...]


@within(Modes())
def train_heads(
    target: Source,
    out: str | os.PathLike[str],
    prompts: Sequence[str] | None = None,
    *,
    kind: Kind = "sequential",
    hours: float = 1.0,
    steps: int = 4,
    size: int | None = None,
    vocabulary: int = 8192,
    starts: int = 4,
    max_new_tokens: int = 192,
    sampled: float = 0.5,
    temperature: float | None = None,
) -> TrainedHeads:
    """Train heads for a target, which stays frozen. `out`: the file for them, in safetensors.

    Law: `XTokAssisted(target, HeadsDrafter(out))` gives what `XTokAssisted(target)` gives.

    For two fifths of `hours`, the target writes texts of up to `max_new_tokens` tokens. With a chat template, it answers
    `prompts`, or, without any, questions that it writes itself. Otherwise it continues `starts` beginnings of each prompt. A
    share `sampled` of the texts is sampled, at `temperature` (None: as the target's generation config says); the others are
    greedy. For the rest of the time, heads are trained on these texts, until nothing is gained.

    `kind` "sequential": a decoder layer of width `size` (None: the target's hidden size), which learns to guess `steps` ids in
    a row: first from the target's hidden states, then from its own (EAGLE-3, Li et al. 2025, arXiv 2503.01840). It learns the
    target's distributions, and to predict the target's last hidden states (EAGLE, Li et al. 2024, arXiv 2401.15077). It can
    guess the `vocabulary` ids that the target writes most. "medusa": one head for each of the `steps` ids after the next one.

    Each time that the heads are better than before, they are written to `out`, so that an interrupted training leaves its best
    so far. Raises `InvalidInputError` for invalid settings, for missing, too few or too long prompts, for an `out` that
    exists, and for a target whose output embedding heads can't share; `UnsupportedModelError` or
    `UnsupportedTokenizerError` for an unsupported target.
    """
    least = {} if size is None else {"size": HEAD_DIM}
    check(locals(), steps=1, vocabulary=64, starts=1, max_new_tokens=1, **least)
    if kind not in get_args(Kind):
        raise InvalidInputError(f"kind is {shown(kind)}; use one of {', '.join(map(repr, get_args(Kind)))}.")
    file = Path(out)
    if file.is_dir():
        raise InvalidInputError(f"{out} is a folder. Give the path of a file for the heads.")
    if file.exists():
        raise InvalidInputError(f"{file} exists, where the heads would be written. Choose another path, or remove it.")
    made = target_model(load(target, "target"))  # loaded first: gradients pass through its output embedding
    model, pair = made.model, (made.model, made.vocabulary.tokenizer)
    info = described(model, made.vocabulary.view)
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampled": sampled}
    arguments |= {} if temperature is None else {"temperature": temperature}
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder:
        now = Path(folder) / file.name
        learnt: list[Any] | None = None
        if prompts is None:
            stopping, kept = own_questions(pair, arguments)
        else:
            chats = getattr(pair[1], "chat_template", None) is not None
            stopping, kept, learnt = given_prompts(pair, prompts, starts, arguments, chats=chats)
        rows = _examples(pair, write_for(pair, learnt, [*stopping, *kept], 3600 * hours * _WRITING, **arguments))
        if not rows:
            raise InvalidInputError("The target wrote no text of 2 tokens or more. Give other prompts, or more hours.")
        info = replace(info, layers=(LAST,))
        if kind == "sequential":
            info = replace(info, layers=_layers(model), window=min(_WINDOW, max(len(row.input_ids) for row in rows)))
        heads = _untrained(model, info, rows, steps, vocabulary, size)
        loss = partial(loss_of, model, layers=info.layers, steps=steps)
        epochs, bf16 = planned(heads, rows, loss, 3600 * hours * (1 - _WRITING))

        def measured(prompts: Sequence[Any]) -> tuple[float, dict[str, float]]:
            save_heads(heads, info, now)
            return per_forward(pair, [HeadsDrafter(now)], prompts, **arguments)

        def measure() -> float:
            return measured(stopping)[0]

        loss = partial(loss, bf16=bf16)
        found = fit(heads, rows, loss, measure, lambda _: os.replace(now, file), epochs=epochs, rate=_RATE)
        with stage("measuring what was gained"):
            after, ways = measured(kept)
            held_out = write(pair, kept, shows=False, **arguments)
            by_way = {way: _examples(pair, [text for text in held_out if text.way == way]) for way in ways}
            measure_accuracy = partial(accuracies, model, heads, layers=info.layers, steps=steps)
            right = {way: tuple(ranks[0] for ranks in measure_accuracy(some)) for way, some in by_way.items()}
            accuracy = measure_accuracy([row for some in by_way.values() for row in some])
        save_heads(heads, replace(info, accuracy=accuracy), now)
        os.replace(now, file)
    parameters = sum(part.numel() for part in heads.parameters())
    tokens = sum(int((row.labels != IGNORED).sum()) for row in rows)
    return TrainedHeads(file, parameters, len(rows), tokens, accuracy, after, ways, right, tuple(found))


def planned(heads: Any, rows: Sequence[Example], loss: Callable[..., Tensor], seconds: float) -> tuple[int, bool]:
    """How many epochs fit into `seconds`, and whether steps are faster in bfloat16. `loss`: of heads and a batch, with a
    keyword `bf16`.
    """
    inputs = batch(rows[:BATCH], next(heads.parameters()).device)

    def seconds_per_step(bf16: bool) -> float:
        copy, spans = deepcopy(heads), []
        optimizer = torch.optim.AdamW(copy.parameters())
        for _ in range(3):
            with timed() as span, torch.enable_grad():
                loss(copy, inputs, bf16=bf16).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            spans.append(span.seconds)
        return min(spans)

    with stage("timing a few steps of training"):
        took, bf16 = min((seconds_per_step(bf16), bf16) for bf16 in (False, True))
    return max(1, min(_EPOCHS, int(seconds / (took * len(rows) / BATCH)))), bf16


def _examples(target: tuple[Any, Any], texts: Sequence[WrittenText]) -> list[Example]:
    """The target's texts as training examples, in its own ids, without those of one id, which teach nothing."""
    rows = []
    for one in texts:
        if len(one.ids) < 2:
            continue
        before = prompt_ids(target[1], one.start)
        ids = torch.tensor([*before, *one.ids], dtype=torch.int64, device="cpu")
        labels = torch.tensor([*[IGNORED] * len(before), *one.ids], dtype=torch.int64, device="cpu")
        rows.append(Example(ids, labels, *(pad(part, (0, 0, len(before), 0)) for part in (one.likeliest, one.probabilities))))
    return rows


def _layers(model: PreTrainedModel) -> tuple[int, ...]:
    """A low, a middle and the last layer of a target."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return tuple(dict.fromkeys((max(1, count // 10), max(1, count // 2), LAST)))


def _untrained(
    model: PreTrainedModel, info: HeadsInfo, rows: Sequence[Example], steps: int, vocabulary: int, size: int | None
) -> MedusaHeads | SequentialHeads:
    """Untrained heads, in float32."""
    if info.window is None:
        return MedusaHeads(steps, info.hidden_size).to(device_of(model))
    counts = Counter(token for row in rows for token in row.labels.tolist() if token != IGNORED)
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(vocabulary)), dtype=torch.int64, device="cpu")
    heads = ceil((size or info.hidden_size) / HEAD_DIM)
    size, groups = heads * HEAD_DIM, next(count for count in range(max(1, heads // 3), 0, -1) if heads % count == 0)
    config = sequential_config(len(ids), size, size, heads, groups, info.window)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made: Any = SequentialHeads(config, len(info.layers), model.get_input_embeddings(), output_embeddings(model), ids)
    made.to(device_of(model), torch.float32)
    inputs = batch(rows[:BATCH], device_of(model))
    hidden = _hidden(model, inputs, info.layers)
    sizes = hidden.square().mean(dim=-1).sqrt()[inputs["attention_mask"] == 1]  # (ids, layers)
    made.scales.copy_(1 / sizes.median(dim=0).values)  # a few ids, as the first, have a hundred times the others' size
    return made  # type: ignore[no-any-return]


@torch.no_grad()
def _hidden(target: Any, inputs: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
    """The target's hidden states of a batch, (rows, ids, layers, hidden size), float32."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    output = target.base_model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return stacked(output, layers).float()


def _unrolled(heads: Any, hidden: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
    """For each step, the last hidden states that it predicts, (rows, places, hidden size). From place i, step s (from 0 on)
    predicts the state at i + 1 + s, from which the id at i + 2 + s is picked, given the ids before that. If the
    longest text has fewer ids than there are steps, there are fewer.

    `hidden`: the target's, (rows, ids, layers, hidden size). `ids`: (rows, ids), int64.
    """
    if isinstance(heads, MedusaHeads):
        predicted = heads(hidden[:, :, -1].to(heads.weight.dtype))
        for head in range(steps):
            yield predicted[:, :, head]
        return
    size = ids.shape[1] - 1
    states, cache = heads.fused(hidden[:, :size]), DynamicCache()
    order = torch.arange(size, dtype=torch.int64, device=ids.device)
    own = torch.eye(size, dtype=torch.bool, device=ids.device)  # what a place guessed in an earlier step
    for step in range(min(steps, size)):
        near = (order <= order[:, None]) & (order > order[:, None] + step - heads.window)
        mask = torch.cat([near, *[own] * step], dim=1)
        read = pad(ids[:, 1 + step :], (0, step))
        sees = torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)
        sees = sees[None, None].expand(len(ids), 1, -1, -1)
        inputs = {CACHE: cache, "use_cache": True, "attention_mask": sees, "position_ids": order[None] + step}
        states, cache = heads.step(read, states, **inputs)
        yield heads.out(states)


def _guesses(
    target: Any, heads: Any, inputs: dict[str, Tensor], layers: Sequence[int], steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each step: the logits of the heads' ids at the places where the target wrote the guessed id, (places, ids), float32;
    those places, (rows, ids - 2 - step), bool; and the last hidden states there, predicted and the target's, (places, hidden
    size) each.

    `inputs`: a batch of `xtok.tune.examples.batch`.
    """
    hidden = _hidden(target, inputs, layers)
    for step, predicted in enumerate(_unrolled(heads, hidden, inputs["input_ids"], steps)):
        places = inputs["labels"][:, 2 + step :] != IGNORED
        if places.any():
            found, wanted = predicted[:, : places.shape[1]][places], hidden[:, 1 + step : -1, -1][places]
            yield _logits(target, heads, found).float(), places, found.float(), wanted


def _logits(target: Any, heads: Any, states: Tensor) -> Tensor:
    """Logits from last hidden states, by the target's frozen output embedding."""
    if isinstance(heads, SequentialHeads):
        return heads.logits_of(states)
    embedding = output_embeddings(target)
    frozen = {name: weight.detach() for name, weight in embedding.state_dict(keep_vars=True).items()}
    return functional_call(embedding, frozen, states.to(embedding.weight.dtype))  # type: ignore[no-any-return]


def loss_of(
    target: Any, heads: Any, inputs: dict[str, Tensor], layers: Sequence[int], steps: int, bf16: bool = False
) -> Tensor:
    """The sum of the steps' losses, a scalar: each has 0.8 times the weight of the one before it. A step's loss is the
    cross-entropy with the target's distribution, where that is known; sequential heads add the distance of the last hidden
    states that they predict from the target's, relative to the size of those.
    """
    device, losses = device_of(target), list[Tensor]()
    own = _own_ids(heads, target).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for step, (logits, places, found, wanted) in enumerate(_guesses(target, heads, inputs, layers, steps)):
            likeliest, probabilities = (inputs[name][:, 2 + step :][places] for name in ("likeliest", "probabilities"))
            ids = own[likeliest]
            known = probabilities.masked_fill(ids < 0, 0.0)
            picked = logits.gather(1, ids.clamp_min(0))
            loss = (known * (logits.logsumexp(dim=-1, keepdim=True) - picked)).sum(dim=-1).mean()
            if isinstance(heads, SequentialHeads):
                unit = wanted.square().mean().sqrt()
                loss = loss + smooth_l1_loss(found / unit, wanted / unit)
            losses.append(_DECAY**step * loss)
    return torch.stack(losses).sum()


def _own_ids(heads: Any, target: Any) -> Tensor:
    """For each of the target's ids, its index among the ids that heads guess, (vocabulary,), int64; -1 if they don't."""
    size = vocabulary_size(target)
    every = torch.arange(size, dtype=torch.int64, device="cpu")
    if isinstance(heads, MedusaHeads):
        return every
    found = torch.full_like(every, -1)
    found[heads.ids] = every[: len(heads.ids)]
    return found


@torch.no_grad()
def accuracies(
    target: Any, heads: Any, rows: Sequence[Example], layers: Sequence[int], steps: int
) -> tuple[tuple[float, ...], ...]:
    """How often each step's most likely id, its second most likely, up to its fifth, was right, (steps, 5), without steps for
    which all texts are too short.
    """
    right, seen = (torch.zeros(steps, size, dtype=torch.float32, device="cpu") for size in (_RANKS, 1))
    own = _own_ids(heads, target)
    for at in range(0, len(rows), BATCH):
        inputs = batch(rows[at : at + BATCH], device_of(target))
        for step, (logits, places, _, _) in enumerate(_guesses(target, heads, inputs, layers, steps)):
            came = own[inputs["labels"][:, 2 + step :][places].cpu()]
            ranks = min(_RANKS, logits.shape[1])
            right[step, :ranks] += (logits.topk(ranks).indices.cpu() == came[:, None]).sum(dim=0)
            seen[step] += len(came)
    return tuple(map(tuple, (right / seen)[: int((seen > 0).sum())].tolist()))
