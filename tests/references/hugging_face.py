"""Models by `transformers`, in an environment of its own that has no JAX: files in, files out.

    python hugging_face.py make --family llama --out DIR
    python hugging_face.py logits --model DIR --tokens tokens.npz --out logits.npz
    python hugging_face.py step --model DIR --batch batch.npz --out STEPPED_DIR --learning-rate 0.01
    python hugging_face.py generate --model DIR --prompts tokens.npz --new-tokens 16 --out out.npz

Loading torch takes seconds, so a `+` between two commands runs the second in the same process.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SHAPE = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES = {
    "gpt2": lambda: GPT2Config(**GPT2_SHAPE),
    "gpt2_untied": lambda: GPT2Config(**GPT2_SHAPE, tie_word_embeddings=False, activation_function="gelu", n_inner=48),
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=16, rope_parameters=LLAMA3),
    "llama_biases": lambda: LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LINEAR
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
}


def make(options):
    """A random model, with no parameter left at a one or zero that it starts from, and a tokenizer."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[options.family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.to(getattr(torch, options.dtype)).save_pretrained(options.out, max_shard_size=options.shard_size)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(options.words - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(options.out)


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def logits(options):
    """Of `tokens` [rows, length], where `lengths` [rows], if given, tells what is not padding."""
    given = np.load(options.tokens)
    tokens = torch.from_numpy(given["tokens"].astype(np.int64))
    mask = None
    if "lengths" in given:
        mask = (torch.arange(tokens.shape[1])[None] < torch.from_numpy(given["lengths"])[:, None]).long()
    with torch.no_grad():
        np.savez(options.out, logits=load(options.model)(tokens, attention_mask=mask).logits.numpy())


def step(options):
    """One step of AdamW on `tokens`, `targets` and `loss_weights` [rows, length]; matrices alone decay."""
    given = {name: torch.from_numpy(array) for name, array in np.load(options.batch).items()}
    model = load(options.model)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
    )
    losses = torch.nn.functional.cross_entropy(
        model(given["tokens"].long()).logits.flatten(0, 1), given["targets"].long().flatten(), reduction="none"
    )
    weights = given["loss_weights"].flatten()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
    optimizer.step()
    model.save_pretrained(options.out)
    np.savez(Path(options.out) / "loss.npz", loss=loss.detach().numpy())


def generate(options):
    """Greedily, `new_tokens` after each of `tokens` [rows, length], cut off at `lengths` [rows], if given."""
    given = np.load(options.prompts)
    tokens = torch.from_numpy(given["tokens"].astype(np.int64))
    lengths = given["lengths"] if "lengths" in given else np.full(len(tokens), tokens.shape[1])
    model = load(options.model)
    # Nothing ends a text before its time.
    model.generation_config.eos_token_id = None
    count = options.new_tokens

    def continued(prompts):
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return whole[:, prompts.shape[1] :]

    rows = [continued(row[None, :length])[0].numpy() for row, length in zip(tokens, lengths, strict=True)]
    np.savez(options.out, tokens=np.stack(rows).astype(np.int32))
    prompt = tokens[:1, : int(lengths[0])]
    for size in options.batch_sizes:
        seconds = []
        for _ in range(1 + options.repeats):
            began = time.perf_counter()
            continued(prompt.repeat(size, 1))
            seconds.append(time.perf_counter() - began)
        print(f"batch {size}: {min(seconds[1:]) / count:.6f} seconds per token")


def encode(options):
    """Prints the ids of a text, and a chat of it as the template has it, if there is one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    print(tokenizer.encode(options.text), tokenizer.eos_token)
    if tokenizer.chat_template:
        print(tokenizer.apply_chat_template([{"role": "user", "content": options.text}], tokenize=False))


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(action, *names):
        added = commands.add_parser(action.__name__, description=action.__doc__)
        added.set_defaults(action=action)
        for name in names:
            added.add_argument(name, required=True)
        return added.add_argument

    add = command(make, "--out")
    add("--family", required=True, choices=FAMILIES)
    add("--seed", type=int, default=0)
    add("--dtype", default="float32")
    add("--shard-size", default="5GB")
    add("--words", type=int, default=VOCABULARY)
    command(logits, "--model", "--tokens", "--out")
    add = command(step, "--model", "--batch", "--out")
    add("--learning-rate", type=float, required=True)
    for name, default in (("beta1", 0.9), ("beta2", 0.95), ("epsilon", 1e-8), ("weight-decay", 0.1), ("clip-norm", 1)):
        add(f"--{name}", type=float, default=default)
    command(encode, "--model", "--text")
    add = command(generate, "--model", "--prompts", "--out")
    add("--new-tokens", type=int, required=True)
    add("--batch-sizes", type=int, nargs="*", default=[])
    add("--repeats", type=int, default=3)
    return parser.parse_args(arguments)


def main(arguments):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parts = [[]]
    for word in arguments:
        if word == "+":
            parts.append([])
        else:
            parts[-1].append(word)
    for options in [parse(part) for part in parts]:
        options.action(options)


if __name__ == "__main__":
    main(sys.argv[1:])
