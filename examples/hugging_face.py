"""The Hugging Face way in: `model.generate` as ever, with one more argument.

python examples/hugging_face.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from xtok import XTokAssisted, pair


def main() -> None:
    """Generate twice by the same call, with and without xtok."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(pair.TARGET), AutoTokenizer.from_pretrained(pair.TARGET)
    xt = XTokAssisted((model, tokenizer), pair.DRAFT)
    inputs = tokenizer(pair.prompts()[1], return_tensors="pt")
    settings = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3}
    alone = model.generate(**inputs, **settings)
    assisted = model.generate(**inputs, **settings, custom_generate=xt, streamer=TextStreamer(tokenizer))
    print("identical to the target alone:", "yes" if alone.tolist() == assisted.tolist() else "NO")


if __name__ == "__main__":
    main()
