"""Makes a draft model for one target from scratch, and trains it on texts that the target writes."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from xtok.align.projection import projection
from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.assisted import XTokAssisted
from xtok.drafts.given import without_a_model
from xtok.models.cache import device_of, vocabulary_size
from xtok.models.load import Source, draft_model, load
from xtok.models.modes import Modes, within
from xtok.results.progress import stage
from xtok.tune.answers import WRITING, check_prompts, prompts_for, write_for
from xtok.tune.examples import IGNORED, training_examples
from xtok.tune.training import fit, planned
from xtok.tune.vocabulary import small_tokenizer
from xtok.tune.work import (
    Settings,
    card_of,
    check,
    fingerprint,
    finish,
    measured,
    per_forward,
    settings_of,
    work_of_draft,
    writing_arguments,
)

_RATE = 2e-3
_WINDOW = 1024
_HEAD = 64
"""The size of an attention head, which the kernels of serving engines support."""
ALONE, NO_MODEL, DRAFT = "target alone", "lookup and recycling", "and the draft"


@dataclass(frozen=True)
class Made:
    """The result of `make_draft`.

    `path`: the draft's folder. `parameters`: how many it has. `texts`, `tokens`: how many of the target's texts it was trained
    on, and how many of the target's tokens those have. `epochs`: tokens per forward pass of the target after each epoch, on
    the prompts that decided when to stop. `ways`: for each way of picking and each system, on held-out prompts: tokens per
    forward pass of the target, and the speed, where the target alone has 1.
    """

    path: Path
    parameters: int
    texts: int
    tokens: int
    epochs: tuple[float, ...]
    ways: dict[str, dict[str, tuple[float, float]]]


@within(Modes())
def make_draft(
    target: Source,
    out: str | os.PathLike[str],
    prompts: Sequence[str] | None = None,
    *,
    parameters: int = 5_000_000,
    hours: float = 1.0,
    vocabulary: int = 6144,
    starts: int = 4,
    max_new_tokens: int = 192,
    sampled: float = 0.5,
    temperature: float | None = None,
) -> Made:
    """Make a draft model for a target that has no small sibling. `out`: the folder for the draft.

    Law: `XTokAssisted(target, out)` gives what `XTokAssisted(target)` gives.

    For two fifths of `hours`, the target writes texts of up to `max_new_tokens` tokens. With a chat template, it answers
    `prompts`, or, without any, questions that it writes itself. Otherwise it continues `starts` beginnings of each prompt. A
    share `sampled` of the texts is sampled, at `temperature` (None: as the target's generation config says); the others are
    greedy. For the rest of the time, a tokenizer of about `vocabulary` ids is derived from these texts, and a Llama of about
    `parameters` parameters is trained on the texts and on the target's distributions (Hinton et al. 2015, arXiv 1503.02531),
    until it gains nothing. A small vocabulary makes a draft fast.

    If this was stopped, call it again with the same arguments to resume. Raises `InvalidInputError` for invalid settings, for
    missing, too few or too long prompts, for an `out` that holds something else or was started with other settings, and if
    accelerate is missing; `UnsupportedModelError` or `UnsupportedTokenizerError` for an unsupported target.
    """
    settings = settings_of(locals())
    check(settings, out, "accelerate", parameters=100_000, vocabulary=512, starts=1, max_new_tokens=1)
    pair = load(target, "target")
    arguments = writing_arguments(settings)
    check_prompts(pair, prompts, arguments)
    work = work_of_draft(Path(out), settings | {"target's weights": fingerprint(*pair)})
    chosen = prompts_for(pair, prompts, starts, work / "apart")
    texts = write_for(pair, chosen, 3600 * hours * WRITING, work / "texts", **arguments)
    counts = Counter(token for one in texts for token in one.ids)
    tokenizer = small_tokenizer(pair[1], counts, [one.text for one in texts], vocabulary)
    untrained: Any = _model(tokenizer, parameters)
    learner = draft_model((untrained.to(device_of(pair[0])), tokenizer))
    view = token_bytes(pair[1])
    model: Any = learner.model
    rows = training_examples(learner, view, texts)
    own_ids = _first_ids(view, learner.vocabulary.view, vocabulary_size(pair[0])).to(model.device)
    loss = partial(loss_of, own_ids=own_ids)
    plan = planned(model, rows, loss, 3600 * hours * (1 - WRITING), work / "plan.json")

    def measure() -> float:
        return per_forward(pair, (model.eval(), tokenizer), chosen.stopping, **arguments)[0]

    found = fit(model, rows, partial(loss, bf16=plan.bf16), measure, work / "training", epochs=plan.epochs, rate=_RATE)
    model.config.use_cache = True  # the trainer switches it off
    model = model.eval().to(torch.bfloat16)
    with stage("measuring what the draft brings"):
        drafts = {ALONE: None, NO_MODEL: without_a_model(), DRAFT: (model, tokenizer)}
        systems = {system: XTokAssisted(pair, draft) for system, draft in drafts.items()}
        counts_by_way = measured(systems, chosen.kept, **arguments)
    ways = {
        way: {system: (one.tokens / one.forwards, by[ALONE].seconds / one.seconds) for system, one in by.items()}
        for way, by in counts_by_way.items()
    }
    made = Made(Path(out), sum(weight.numel() for weight in model.parameters()), len(rows), counts.total(), tuple(found), ways)
    finish(model, tokenizer, _card(settings, made), made.path, work)
    return made


def _model(tokenizer: Any, parameters: int) -> PreTrainedModel:
    """A Llama with random weights: one block, or more from 16 million parameters on.

    A forward pass of a small model takes time for each block rather than for each parameter, so few wide ones are best. They
    also learnt more: after four epochs on 260,000 tokens of SmolLM2, one block of 512 guessed 27.2% of the tokens (6.3 M
    parameters), two of 384 24.6% (5.9 M), four of 256 23.6% (4.7 M).
    """
    vocabulary, blocks = len(tokenizer), max(1, isqrt(parameters // 4_000_000))
    width = max(
        size
        for size in range(_HEAD, 64 * _HEAD, _HEAD)
        if size == _HEAD or vocabulary * size + 12 * blocks * size**2 <= parameters
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=width * 8 // 3 // 32 * 32,
                num_hidden_layers=blocks,
                num_attention_heads=width // _HEAD,
                max_position_embeddings=_WINDOW,
                tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )


def _first_ids(target: TokenBytes, draft: TokenBytes, size: int) -> Tensor:
    """For each of the target's ids, the draft's first id for the same text, (size,), int64; -1 if there is none."""
    found, pairs = torch.full((size,), -1, dtype=torch.int64, device="cpu"), projection(draft, target)
    whole = pairs.weights == 1
    found[pairs.draft_ids[whole]] = pairs.target_ids[whole]
    return found


def loss_of(model: Any, inputs: dict[str, Tensor], own_ids: Tensor, bf16: bool = False) -> Tensor:
    """The mean loss of a draft's ids, a scalar: cross-entropy with the text, at half weight where the target's distribution is
    known, and there with that distribution, too.

    `inputs`: those of `xtok.tune.examples.batch`. `own_ids`: the draft's id for each of the target's, (target's vocabulary,),
    -1 for none.
    """
    labels = inputs["labels"][:, 1:]
    learnt = labels != IGNORED
    with torch.autocast(labels.device.type, torch.bfloat16, enabled=bf16):
        states = model.base_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        logits = model.get_output_embeddings()(states[:, :-1][learnt])
    logs = logits.float().log_softmax(dim=-1)
    ids = own_ids[inputs["likeliest"][:, 1:][learnt]]
    probabilities = inputs["probabilities"][:, 1:][learnt].masked_fill(ids < 0, 0.0)
    known = probabilities.sum(dim=-1) > 0
    hard = -logs.gather(1, labels[learnt][:, None])[:, 0] * torch.where(known, 0.5, 1.0)
    soft = -(probabilities * logs.gather(1, ids.clamp_min(0))).sum(dim=-1)
    loss: Tensor = (hard + soft).mean()
    return loss


def _card(settings: Settings, made: Made) -> str:
    lead = (
        f"A Llama of {made.parameters / 1e6:.1f} M parameters, made by xtok to guess what `{settings['target']}` writes next. "
        f"It was trained on {made.texts:,} texts that the target wrote, of {made.tokens:,} tokens in all."
    )
    titles = ["picked", "by", "tokens per forward of the target", "speed"]
    ways = [
        [way, system, *(f"{one:.2f}" for one in figures)] for way, by in made.ways.items() for system, figures in by.items()
    ]
    return card_of(settings, "A draft", lead, [titles, *ways], "after each epoch", made.epochs, library_name="transformers")
