"""Train the small pair that xtok ships, again and from nothing but a folder of plain text.

    python examples/train_tiny_pair.py TEXTS --out xtok/pair

The target is a Llama with a SentencePiece Unigram tokenizer (byte fallback, dummy prefix), trained with 4 layers, then grown
to 12 and trained on; the draft is a GPT-NeoX with a byte-level BPE. They share the text they are trained on and nothing else:
neither ever sees the other's tokens or output.
Every 20th file is held out; the losses, next-token accuracies and prompts in the result come from those files alone.
Needs `pip install "xtok[tune]"`.
"""

import argparse
import io
import json
from pathlib import Path

import sentencepiece
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 20
HELD_OUT_EVERY = 20
PIECE_CHARACTERS = 600


def unigram_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A SentencePiece Unigram with byte fallback, trained by sentencepiece and written as a fast tokenizer."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line),
        model_writer=buffer,
        model_type="unigram",
        vocab_size=vocab_size,
        character_coverage=0.995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=20_000,
        max_sentencepiece_length=8,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
    vocab = [(spm.id_to_piece(i), spm.get_score(i)) for i in range(len(spm))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=spm.unk_id(), byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    controls = ["<unk>", "<s>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(c, normalized=False, special=True) for c in controls])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", spm.bos_id())])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def byte_level_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2 and GPT-NeoX have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    eos = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=eos, eos_token=eos, pad_token=eos)


def pieces(text: str) -> list[str]:
    """`text` cut at line ends into pieces of about `PIECE_CHARACTERS`."""
    result = [""]
    for line in text.splitlines(keepends=True):
        if len(result[-1]) > PIECE_CHARACTERS:
            result.append("")
        result[-1] += line
    return result


def windows(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> list[dict[str, torch.Tensor]]:
    """The texts as rows of `length` ids. A piece opens with the tokenizer's leading ids, which are never predicted."""
    ids, labels = [], []
    leading = tokenizer("").input_ids
    for text in tqdm(texts, desc="encode", unit="file"):
        for row in tokenizer(pieces(text)).input_ids:
            ids += row
            labels += [-100] * len(leading) + row[len(leading) :]
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    starts = range(0, len(ids) - length, length)
    return [{"input_ids": torch.tensor(ids[s : s + length]), "labels": torch.tensor(labels[s : s + length])} for s in starts]


def train(model: PreTrainedModel, rows: list[dict[str, torch.Tensor]], epochs: int, rate: float, tokens_per_step: int) -> None:
    """Plain language modelling by transformers' own Trainer, on the CPU or whatever accelerator is there."""
    arguments = TrainingArguments(
        output_dir="unused",
        save_strategy="no",
        report_to="none",
        num_train_epochs=epochs,
        per_device_train_batch_size=max(1, tokens_per_step // len(rows[0]["input_ids"])),
        learning_rate=rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        bf16=True,
        use_cpu=not torch.accelerator.is_available(),
        seed=SEED,
        logging_steps=200,
        dataloader_pin_memory=False,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()


@torch.inference_mode()
def held_out_figures(model: PreTrainedModel, rows: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Mean loss in nats per token, and the share of tokens that the model's best guess hits."""
    model = model.eval()
    loss, hits, total = 0.0, 0, 0
    for row in tqdm(rows, desc="held out", unit="window"):
        ids, labels = row["input_ids"][None].to(model.device), row["labels"][1:].to(model.device)
        logits = model(ids).logits[0, :-1].float()
        keep = labels != -100
        loss += torch.nn.functional.cross_entropy(logits[keep], labels[keep], reduction="sum").item()
        hits += int((logits[keep].argmax(-1) == labels[keep]).sum())
        total += int(keep.sum())
    return {"loss": loss / total, "accuracy": hits / total, "tokens": total}


def held_out_prompts(texts: list[str], count: int) -> list[str]:
    """Openings of paragraphs of the held-out files, cut behind their first comma or full stop after 20 characters."""
    lines = [line.strip("　 ") for text in texts for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 60 and "〓" not in line]
    prompts = []
    for line in lines[:: max(1, len(lines) // count)]:
        cuts = [i + 1 for i, c in enumerate(line) if c in "、。" and 20 <= i < 60]
        prompts.append(line[: cuts[0] if cuts else 40])
    return prompts[:count]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights as fp16 safetensors; the configuration says float32, so that loading them gives float32."""
    model.half().save_pretrained(folder)
    model.config.dtype = torch.float32
    model.config.use_cache = True
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def grown(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A copy of `model` with `layers` layers, a multiple of its own number. Its output is the same: the layers that are added
    after each one are noisy copies of it that add zero to the hidden states.
    """
    config = LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": layers})
    larger = LlamaForCausalLM(config).to(model.device)
    larger.load_state_dict({name: value for name, value in model.state_dict().items() if ".layers." not in name}, strict=False)
    copies = layers // model.config.num_hidden_layers
    for index, layer in enumerate(larger.model.layers):
        layer.load_state_dict(model.model.layers[index // copies].state_dict())
        if index % copies:
            for weight in (weight for weight in layer.parameters() if weight.dim() == 2):
                weight += torch.randn_like(weight) * weight.std() / 2
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return larger


def neox(tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(tokenizer),
            hidden_size=160,
            intermediate_size=480,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder of .txt files (UTF-8)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-epochs", type=int, default=5)
    parser.add_argument("--target-epochs", type=int, default=4)
    parser.add_argument("--grown-epochs", type=int, default=2, help="of the target with 12 layers")
    arguments = parser.parse_args()
    files = sorted(arguments.texts.glob("*.txt"))
    files = [f for f in files if f.name != "SOURCE.txt"]
    texts = [f.read_text(encoding="utf-8") for f in files]
    held_out = texts[::HELD_OUT_EVERY]
    training = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY]
    figures: dict[str, object] = {"held_out_files": [f.name for f in files[::HELD_OUT_EVERY]]}
    for name, tokenizer, build, length, epochs, tokens_per_step in (
        ("draft", byte_level_tokenizer(training, 4096), neox, 256, arguments.draft_epochs, 2048),
        ("target", unigram_tokenizer(training, 8000), llama, 512, arguments.target_epochs, 2048),
    ):
        set_seed(SEED)
        model = build(tokenizer)
        rows = windows(tokenizer, training, length)
        train(model, rows, epochs, 2e-3, tokens_per_step)
        if name == "target":
            model = grown(model, 12)
            train(model, rows, arguments.grown_epochs, 1e-3, tokens_per_step)
        figures[name] = {
            "parameters": model.num_parameters(),
            **held_out_figures(model, windows(tokenizer, held_out, length)),
        }
        save(model, tokenizer, arguments.out / name)
        print(name, figures[name])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "prompts.txt").write_text("\n".join(held_out_prompts(held_out, 120)) + "\n", encoding="utf-8")
    (arguments.out / "figures.json").write_text(json.dumps(figures, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
