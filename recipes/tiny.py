"""Create a tiny model with random weights, its tokenizer and some data, to try the recipes without a network.

python recipes/tiny.py runs/tiny

model/                             a Llama of one layer; a byte tokenizer with a chat template
chat/train.jsonl, chat/test.jsonl  messages, for sft.py
prompts.jsonl                      prompt and answer, for grpo.py and distill.py
text.txt                           a source file of Python's own library, for pretrain.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# With --assistant_only_loss, only text between `generation` and `endgeneration` counts.
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and four chat tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("end", "pad", "user", "assistant")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make(folder: Path) -> None:
    """Write the model, the tokenizer and the data into ``folder``."""
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(8) for b in range(8)]
    chats = [
        json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        for question, answer in sums
    ]
    prompts = [json.dumps({"prompt": question, "answer": answer}) for question, answer in sums]
    (folder / "chat").mkdir(parents=True, exist_ok=True)
    for name, lines in {"chat/train": chats[:56], "chat/test": chats[56:], "prompts": prompts}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "text.txt").write_text(Path(str(argparse.__file__)).read_text("utf-8"), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it")
    make(parser.parse_args().folder)
