"""Models that are compiled, have adapters, see images, or lie beside others: the ids of the target alone, or a refusal."""

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import tiny
from worlds import alone, deep, fitting, quick, tokenizer

from xtok import Budget, Context, HeadsDrafter, PromptLookup, Tree, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.heads import described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.models.capabilities import traits

TOKENS = tokenizer("byte-level BPE")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
PROMPTS = ["The quick brown fox", "aaaa bbbb aaaa bbbb", "x"]
TREE = Budget(3, width=2, schedule="constant")


class Beside:
    """Guesses the right text after a wrong branch, so that what is kept stood after other nodes."""

    def __init__(self, whole: list[int]) -> None:
        self.whole = whole

    def propose(self, context: Context, budget: Budget) -> Tree:
        right = self.whole[len(context.ids) :][:3]
        wrong = (right[0] + 1) % 256 if right else 0
        return Tree((wrong, *right), (-1, -1, *range(1, len(right)))) if right else Tree()


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT_CONFIG = {
    "vocab_size": 430,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    **IDS,
}


def qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(text_config=TEXT_CONFIG, vision_config=vision, **IDS)
    made: Any = transformers.Qwen2VLForConditionalGeneration(config).double().eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return made


@pytest.mark.parametrize("prompt", PROMPTS)
def test_trees_are_exact_where_positions_are_of_several_kinds(prompt: str) -> None:
    """Found by a hostile trial: with multimodal rotary positions, side branches got those of other nodes: ids were wrong."""
    lm, ids = qwen2_vl(), TOKENS(prompt).input_ids
    right = alone(deepcopy(lm), ids, **GREEDY)
    found = XTokAssisted((lm, TOKENS), Beside([*ids, *right]), budget=TREE).generate(ids, **GREEDY)
    assert found.token_ids == right
    assert found.stats.accepted > 6


def test_a_model_that_has_seen_an_image_is_tried_as_if_it_had_not() -> None:
    lm = qwen2_vl()
    lm.model.rope_deltas = torch.tensor([[-5]])
    ids = TOKENS(PROMPTS[0]).input_ids
    found = XTokAssisted((lm, TOKENS), Beside([*ids, *alone(qwen2_vl(), ids, **GREEDY)]), budget=TREE).generate(ids, **GREEDY)
    assert found.token_ids == alone(qwen2_vl(), ids, **GREEDY)


def whole(lm: Any) -> None:
    lm.compile(backend="eager")


def inside(lm: Any) -> None:
    lm.model = torch.compile(lm.model, backend="eager")


@pytest.mark.parametrize(
    ("architecture", "dtype", "does", "after"),
    [
        ("Qwen2", torch.bfloat16, inside, True),
        *deep(("Qwen2", torch.bfloat16, inside, False), *(("Llama", torch.float32, whole, after) for after in (False, True))),
    ],
)
def test_a_model_may_be_compiled(architecture: str, dtype: torch.dtype, does: Callable[[Any], None], after: bool) -> None:
    """Found by a hostile trial: dynamo raised an error about a range with symbolic ends."""
    torch.compiler.reset()
    lm = deepcopy(fitting(TOKENS, architecture, 0, dtype=dtype))
    few = PROMPTS[1:2] if quick() else PROMPTS
    expected = [XTokAssisted((deepcopy(lm), TOKENS)).generate(prompt, **GREEDY).token_ids for prompt in few]
    xt = XTokAssisted((lm, TOKENS), PromptLookup()) if after else None
    does(lm)
    xt = xt or XTokAssisted((lm, TOKENS), PromptLookup())
    assert [xt.generate(prompt, **GREEDY).token_ids for prompt in few] == expected


def test_trials_compile_nothing() -> None:
    """Found by a hostile trial: dynamo's limit was reached in trials, and then nothing was shared or branched."""
    torch.compiler.reset()
    lm = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float32))
    lm.compile(backend="eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    XTokAssisted((lm, TOKENS))
    assert traits(lm).shares and traits(lm).branches
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_embeddings_with_adapters_are_no_linear_layers() -> None:
    """Found by a hostile trial: PEFT's have sizes of the same names, and were given numbers that are no ids."""
    peft = pytest.importorskip("peft")
    lm = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float64))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    model = peft.get_peft_model(lm, config).eval().base_model.model
    ids = TOKENS(PROMPTS[0]).input_ids
    assert XTokAssisted((model, TOKENS)).generate(ids, **GREEDY).token_ids == alone(model, ids, **GREEDY)


def test_what_peft_adds_to_inputs_is_refused() -> None:
    """Found by a hostile trial: a learnt prompt was left out without a word, and adapters by row ended in a raw error."""
    peft = pytest.importorskip("peft")
    base = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float64))
    tuned = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).double().eval()
    rows = torch.tensor([TOKENS(PROMPTS[0]).input_ids] * 2)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(rows), **GREEDY}
    with pytest.raises(UnsupportedArgumentError, match="PeftModelForCausalLM puts a learnt prompt before the text"):
        tuned.generate(input_ids=rows, custom_generate=XTokAssisted((base, TOKENS)), **given)
    base = deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float64))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config, adapter_name="a").eval()
    adapted.add_adapter("b", config)
    xt = XTokAssisted((base, TOKENS))
    with pytest.raises(UnsupportedArgumentError, match="adapter_names differ by row"):
        adapted.generate(input_ids=rows, custom_generate=xt, adapter_names=["a", "b"], **given)
    adapted = peft.get_peft_model(deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float64)), config).eval()
    xt = XTokAssisted((adapted.base_model.model, TOKENS))
    assert torch.equal(adapted.generate(input_ids=rows, custom_generate=xt, **given), adapted.generate(input_ids=rows, **given))


def test_heads_for_a_target_with_several_hidden_states_for_an_id_are_refused(tmp_path: Path) -> None:
    """Found by a hostile trial: they were taken, and lost in each text."""
    lm = tiny("gemma3n_text", len(TOKENS) + 5)
    save_heads(MedusaHeads(2, lm.config.hidden_size), described(lm, token_bytes(TOKENS)), tmp_path / "heads")
    with pytest.raises(InvalidInputError, match="doesn't return one hidden state for each id"):
        XTokAssisted((lm, TOKENS), HeadsDrafter(tmp_path / "heads"))


def test_a_gguf_file_keeps_its_own_tokenizer_beside_that_of_another_model(tmp_path: Path) -> None:
    """Found by a hostile trial: it got the neighbour's without a word."""
    gguf_files = pytest.importorskip("gguf_files")
    file = gguf_files.write(tmp_path / "a.gguf", deepcopy(fitting(TOKENS, "Llama", 0, dtype=torch.float32)), TOKENS)
    before = XTokAssisted(str(file))
    tokenizer("characters").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 1}')
    after = XTokAssisted(str(file))
    assert after.tokenizer(PROMPTS[0]).input_ids == before.tokenizer(PROMPTS[0]).input_ids
    assert after.model.generation_config.max_new_tokens is None
    assert os.path.samefile(after.tokenizer.name_or_path, file)
