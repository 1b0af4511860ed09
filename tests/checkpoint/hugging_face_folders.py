"""Small checkpoints in the layout of Hugging Face, with every name and shape written out."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file

VOCABULARY, EMBED, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, POSITIONS = 40, 16, 4, 2, 8, 24, 2, 32

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": EMBED,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": EMBED,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 2,
}


def llama_tensors(seed=0):
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, EMBED),
        "model.norm.weight": (EMBED,),
        "lm_head.weight": (VOCABULARY, EMBED),
    }
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (EMBED,),
            f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, EMBED),
            f"model.layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"model.layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"model.layers.{i}.self_attn.o_proj.weight": (EMBED, HEADS * HEAD_DIM),
            f"model.layers.{i}.post_attention_layernorm.weight": (EMBED,),
            f"model.layers.{i}.mlp.gate_proj.weight": (HIDDEN, EMBED),
            f"model.layers.{i}.mlp.up_proj.weight": (HIDDEN, EMBED),
            f"model.layers.{i}.mlp.down_proj.weight": (EMBED, HIDDEN),
        }
    return random_tensors(shapes, seed)


def gpt2_tensors(seed=0, prefix="transformer."):
    shapes = {
        "wte.weight": (VOCABULARY, EMBED),
        "wpe.weight": (POSITIONS, EMBED),
        "ln_f.weight": (EMBED,),
        "ln_f.bias": (EMBED,),
    }
    for i in range(LAYERS):
        shapes |= {
            f"h.{i}.ln_1.weight": (EMBED,),
            f"h.{i}.ln_1.bias": (EMBED,),
            f"h.{i}.attn.c_attn.weight": (EMBED, 3 * EMBED),
            f"h.{i}.attn.c_attn.bias": (3 * EMBED,),
            f"h.{i}.attn.c_proj.weight": (EMBED, EMBED),
            f"h.{i}.attn.c_proj.bias": (EMBED,),
            f"h.{i}.ln_2.weight": (EMBED,),
            f"h.{i}.ln_2.bias": (EMBED,),
            f"h.{i}.mlp.c_fc.weight": (EMBED, 4 * EMBED),
            f"h.{i}.mlp.c_fc.bias": (4 * EMBED,),
            f"h.{i}.mlp.c_proj.weight": (4 * EMBED, EMBED),
            f"h.{i}.mlp.c_proj.bias": (EMBED,),
        }
    return random_tensors({prefix + name: shape for name, shape in shapes.items()}, seed)


def random_tensors(shapes, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder, config=LLAMA_CONFIG, tensors=None, shards=1, words=VOCABULARY):
    """A whole checkpoint; with several shards also their index."""
    folder.mkdir()
    tensors = llama_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", words)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    placed = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        save_file(part, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def write_mistral(folder):
    """A checkpoint whose window and template have to survive."""
    config = {**LLAMA_CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24}
    write_folder(folder, {**config, "new_key": 1}, shards=2)
    for name, text in (
        ("tokenizer_config.json", json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"})),
        ("special_tokens_map.json", '{"eos_token": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": 2, "temperature": 0.6}'),
    ):
        (folder / name).write_text(text)
    return folder


def write_tokenizer(path, words=VOCABULARY):
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, words)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))
