"""Makes a tiny Llama with seeded random weights and a tokenizer of its own, for tests and demos of real vLLM on a CPU.

Run by the Python that vLLM is installed in; needs torch, tokenizers and safetensors, nothing of kvreturn.

The model talks nonsense, but every token depends on every KV value before it, so a wrong read shows at once. By default
it can only say whole words whose text encodes back to the one token that was generated; with --free it may say
anything, and retokenised histories differ from what was generated, as with real models now and then.

usage: python tiny_model.py FOLDER [--free] [--template plain|drop_thinking]
"""

import argparse
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, FEED_FORWARD, POSITIONS = 2048, 256, 4, 4, 2, 64, 512, 32_768
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
_TOOLS = (
    "{%- if tools -%}{{'<|im_start|>system\\n'}}{%- for tool in tools -%}{{ tool | tojson }}{{'\\n'}}{%- endfor -%}"
    "{{'<|im_end|>\\n'}}{%- endif -%}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] -%}{{'<tool_call>' + call.function.name + ' ' + "
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + "
    "'</tool_call>'}}{%- endfor -%}"
)
_OPEN = "{%- if add_generation_prompt -%}{{'<|im_start|>assistant\\n'}}{%- endif -%}"
TEMPLATES = {
    "plain": _TOOLS
    + "{%- for m in messages -%}{{'<|im_start|>' + m.role + '\\n' + (m.content or '')}}"
    + _CALLS
    # A generated answer ends in a space before <|im_end|> if its last word did; nothing is trimmed or added.
    + "{{'<|im_end|>\\n'}}{%- endfor -%}"
    + _OPEN,
    # As reasoning models do it: thinking of answers before the last question is left out.
    "drop_thinking": _TOOLS + "{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}"
    "{%- set ns = namespace(after=false) -%}"
    "{%- for m in messages -%}{{'<|im_start|>' + m.role + '\\n'}}"
    "{%- if m.role == 'assistant' and ns.after and m.reasoning -%}{{'<think>' + m.reasoning + '</think>'}}{%- endif -%}"
    "{{(m.content or '').split('</think>') | last if m.role == 'assistant' and not ns.after else (m.content or '')}}"
    + _CALLS
    + "{{'<|im_end|>\\n'}}{%- if m is sameas last -%}{%- set ns.after = true -%}{%- endif -%}{%- endfor -%}"
    + _OPEN,
}


def documents() -> Iterator[str]:
    """Text to learn the vocabulary from: the standard library's docstrings."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:
        for match in re.finditer(r'"""(.*?)"""', path.read_text(errors="ignore"), re.DOTALL):
            yield re.sub(r"[^\x20-\x7e\n]", " ", match.group(1))


def make_tokenizer(folder: Path, template: str) -> Tokenizer:
    """Train and save a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        documents(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(tokenizer.token_to_id(text)): {"content": text, "special": True, **plain} for text in SPECIAL}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[template],
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer


def make_weights(folder: Path, tokenizer: Tokenizer, *, free: bool) -> None:
    """Draw and save the weights."""
    generator = torch.Generator().manual_seed(1234)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    unit = HIDDEN**-0.5
    vocabulary = tokenizer.get_vocab_size()
    weights = {"model.embed_tokens.weight": draw(vocabulary, HIDDEN, 1.0), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN, 2.4 * unit),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN, 2.4 * unit),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN, 2.0 * unit),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD, 2.0 * unit),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN, unit),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN, unit),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD, FEED_FORWARD**-0.5),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    head = draw(vocabulary, HIDDEN, 3 * unit)
    if not free:
        for index in tokenizer.get_vocab().values():
            text = tokenizer.decode([index], skip_special_tokens=False)
            if not (re.fullmatch(r" [A-Za-z]+", text) and tokenizer.encode(text).ids == [index]):
                head[index] = 0
    weights["lm_head.weight"] = head
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def make_config(folder: Path, tokenizer: Tokenizer) -> None:
    """Save the model's configuration."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
        "attention_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "do_sample": False}))


def main() -> None:
    """Make the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--free", action="store_true", help="it may generate tokens whose text encodes to others")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="plain")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(arguments.folder, arguments.template)
    make_weights(arguments.folder, tokenizer, free=arguments.free)
    make_config(arguments.folder, tokenizer)


if __name__ == "__main__":
    main()
