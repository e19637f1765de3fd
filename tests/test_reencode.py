"""Law 3: re-encoding is canonical, shown against encoding from scratch."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from worlds import CORPUS, FAMILIES, examples, texts, tokenizer, unigram

from xtok.align.continuation import Reencoder
from xtok.align.encoding import Encoder, encoder
from xtok.align.tokenbytes import token_bytes

ENCODERS: dict[tuple[str, int], Encoder] = {}


def encoder_of(family: tuple[str, int]) -> Encoder:
    if family not in ENCODERS:
        tokens = tokenizer(*family)
        ENCODERS[family] = encoder(tokens, token_bytes(tokens))
    return ENCODERS[family]


families = st.tuples(st.sampled_from(sorted(FAMILIES)), st.integers(0, 2))


class Reencoding(RuleBasedStateMachine):
    """Law 3: re-encoding is canonical, after any appends and truncations, each checked against the slow way."""

    @initialize(family=families)
    def start(self, family: tuple[str, int]) -> None:
        self.encoder = encoder_of(family)
        self.fast = Reencoder(self.encoder)
        self.slow = b""

    @rule(text=texts())
    def append_text(self, text: str) -> None:
        self._append(text.encode())

    @rule(line=st.sampled_from(CORPUS), data=st.data())
    def append_in_pieces_cut_anywhere(self, line: str, data: st.DataObject) -> None:
        whole = line.encode()
        cut = data.draw(st.integers(0, len(whole)))
        self._append(whole[:cut])
        self._append(whole[cut:])

    @rule(junk=st.binary(max_size=3))
    def append_bytes_that_are_no_text(self, junk: bytes) -> None:
        self._append(junk)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(0, len(self.slow)))
        self.fast.truncate(size)
        self.slow = self.slow[:size]

    def _append(self, data: bytes) -> None:
        self.fast.append(data)
        self.slow += data

    @invariant()
    def ids_are_those_of_the_whole_text(self) -> None:
        if not hasattr(self, "fast"):
            return
        whole = self.slow.removesuffix(self.fast.pending) if self.fast.pending else self.slow
        assert self.fast.ids == self.encoder.ids(whole.decode(errors="replace"))

    @invariant()
    def only_an_unfinished_character_is_pending(self) -> None:
        if hasattr(self, "fast"):
            assert len(self.fast.pending) < 4
            assert self.slow.endswith(self.fast.pending)


Reencoding.TestCase.settings = examples(400, stateful_step_count=12)
TestReencoding = Reencoding.TestCase


def test_the_unknown_id_is_the_models_own_and_not_what_the_tokenizer_calls_so() -> None:
    """Found by the state machine: unknown characters side by side become one id, so nothing may be cut between them."""
    tokens = unigram(CORPUS[1::2], fallback=False)
    tokens.unk_token = "</s>"
    made = encoder(tokens, token_bytes(tokens))
    assert made.unknown == 0 != tokens.unk_token_id
    for cut in range(40):
        reencoder = Reencoder(made)
        reencoder.append(CORPUS[0].encode()[:cut])
        reencoder.append(CORPUS[0].encode()[cut:])
        assert reencoder.ids == made.ids(CORPUS[0])


@given(families, st.lists(st.sampled_from(CORPUS), min_size=2, max_size=6), st.integers(1, 5))
def test_growing_token_by_token_gives_what_encoding_at_once_gives(family: tuple[str, int], lines: list[str], step: int) -> None:
    reencoder = Reencoder(encoder_of(family))
    text = "。".join(lines)
    for i in range(0, len(text), step):
        reencoder.append(text[i : i + step].encode())
    assert reencoder.ids == encoder_of(family).ids(text)


def test_an_append_costs_the_new_bytes_and_not_the_context() -> None:
    """Counted in characters that are encoded, so that no clock is needed."""
    for family in ("byte-level BPE", "Unigram with byte fallback", "SentencePiece BPE"):
        whole = encoder_of((family, 0))
        counted = 0

        def count(text: str, whole: Encoder = whole):
            nonlocal counted
            counted += len(text)
            return whole.encode(text)

        reencoder = Reencoder(
            Encoder(whole.view, whole.ids, count, whole.pretokenizes, whole.normalizes, whole.cuttable, whole.unknown)
        )
        reencoder.append("。".join(CORPUS * 20).encode())
        counted = 0
        for character in "吾輩は猫である。名前はまだ無い。":
            reencoder.append(character.encode())
        assert counted < 16 * 150, family


def test_the_mark_that_some_tokenizers_write_for_a_space_may_stand_in_a_text() -> None:
    """Found by the state machine: `▁new` is a token, and so nothing may be cut after a literal `▁`."""
    mine = encoder_of(("SentencePiece BPE", 0))
    fast = Reencoder(mine)
    for data in (b"\xe2\x96\x81", b"n", b"ew line"):
        fast.append(data)
    assert fast.ids == mine.ids("▁new line")


@given(family=families, text=texts())
def test_the_model_alone_cuts_a_continuation_as_the_whole_tokenizer_does(family: tuple[str, int], text: str) -> None:
    mine = encoder_of(family)
    if mine.bare is not None:
        whole = mine.encode_after(text)
        assert whole is None or mine.bare(text) == whole.ids


def test_tokenizers_that_do_no_more_than_write_spaces_are_cut_by_their_model_alone() -> None:
    bare = {name for name in FAMILIES if encoder_of((name, 0)).bare is not None}
    assert bare == {"Unigram with byte fallback", "Unigram without fallback", "SentencePiece BPE"}
