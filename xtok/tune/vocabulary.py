"""A tokenizer of a small vocabulary, for a draft that is made for one target."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_LONGEST = 16
"""How many characters a token of a trained tokenizer may have."""


def small_tokenizer(tokenizer: Any, counts: Mapping[int, int], texts: Sequence[str], size: int) -> Any:
    """A tokenizer of about `size` ids for texts of the model that `tokenizer` belongs to.

    A BPE or Unigram tokenizer is reduced to its most frequent tokens. As these are the target's own, the draft guesses one of
    them in one step, and rarer ones in a few. In place of any other tokenizer, a byte-level BPE is trained on `texts`. Control
    tokens and the chat template are kept. `counts`: how often the target wrote each id.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = None if backend is None else json.loads(backend.to_str())
    kind = None if state is None else state["model"].get("type")
    if state is not None and kind in ("BPE", "Unigram"):
        made = (_without_rare_merges if kind == "BPE" else _without_rare_pieces)(state, counts, size)
    else:
        made = _trained(tokenizer, texts, size)
    names = {name: getattr(tokenizer, name) for name in _NAMED if getattr(tokenizer, name, None) is not None}
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, chat_template=tokenizer.chat_template, clean_up_tokenization_spaces=False, **names)


def _without_rare_merges(state: dict[str, Any], counts: Mapping[int, int], size: int) -> Tokenizer:
    """A BPE with the most frequent tokens and all that they are merged from."""
    vocab: dict[str, int] = state["model"]["vocab"]
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in state["model"]["merges"]]
    parts = {a + b: (a, b) for a, b in reversed(merges)}
    kept = {token for token in vocab if token not in parts}  # bytes, characters and control tokens
    for token in sorted(vocab, key=lambda token: -counts.get(vocab[token], 0)):
        missing, found = [token], set[str]()
        while missing:
            one = missing.pop()
            if one not in kept and one not in found:
                found.add(one)
                missing += parts[one]
        if not counts.get(vocab[token]) or len(kept | found) > size:
            break
        kept |= found
    state["model"]["vocab"] = {token: i for i, token in enumerate(sorted(kept, key=vocab.__getitem__))}
    state["model"]["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= kept]
    return _rebuilt(state, state["model"]["vocab"])


def _without_rare_pieces(state: dict[str, Any], counts: Mapping[int, int], size: int) -> Tokenizer:
    """A Unigram with the most frequent pieces, and all of one character, by which it can write any text that the target can."""
    pieces: list[list[Any]] = state["model"]["vocab"]
    unknown = state["model"]["unk_id"]
    controls = {one["content"] for one in state["added_tokens"]}
    controls |= {"▁"}  # without which a space would be written by the bytes of "▁"
    always = [
        i
        for i, (piece, _) in enumerate(pieces)
        if i == unknown or piece in controls or (piece[:3] == "<0x" and piece[-1] == ">")
    ]
    others = sorted(
        set(range(len(pieces))).difference(always), key=lambda i: (-counts.get(i, 0), len(pieces[i][0]), -pieces[i][1])
    )
    kept = sorted([*always, *others[: max(0, size - len(always))]])
    state["model"]["vocab"] = [pieces[i] for i in kept]
    state["model"]["unk_id"] = None if unknown is None else kept.index(unknown)
    return _rebuilt(state, {pieces[i][0]: new for new, i in enumerate(kept)})


def _rebuilt(state: dict[str, Any], ids: Mapping[str, int]) -> Tokenizer:
    """A tokenizer from a changed state. Added tokens get new ids, and texts get no special tokens around them."""
    for i, one in enumerate(state["added_tokens"]):
        one["id"] = ids.get(one["content"], len(ids) + i)
    state.update(post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _trained(tokenizer: Any, texts: Sequence[str], size: int) -> Tokenizer:
    """A byte-level BPE, trained on texts, with the control tokens of another tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, max_token_length=_LONGEST, show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(str(name), normalized=False, special=True) for name in tokenizer.all_special_tokens])
    return made
