"""Checkpoints of Hugging Face: where each number goes, what each device reads, what is refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dseekjax.checkpoint.hugging_face import gpt2, llama
from dseekjax.checkpoint.hugging_face.config_json import parse
from dseekjax.checkpoint.hugging_face.families import FAMILIES, describe, family_of
from dseekjax.checkpoint.hugging_face.reading import import_parameters
from dseekjax.checkpoint.hugging_face.tensor_files import TensorFiles, some
from dseekjax.checkpoint.hugging_face.writing import export_parameters
from dseekjax.config import load_config
from dseekjax.errors import UserError
from dseekjax.models.config import DecoderConfig
from dseekjax.training.program import build_program
from tests.checkpoint.hugging_face_folders import (
    EMBED,
    GPT2_CONFIG,
    HEAD_DIM,
    HEADS,
    LLAMA_CONFIG,
    gpt2_tensors,
    llama_tensors,
    write_folder,
)
from tests.tiny import LLAMA, tiny_config


def program_of(folder, *overrides, devices=8):
    section = json.dumps(describe(folder).model_section)
    config = load_config(overrides=[f"model={section}", "data.sequence_length=16", *overrides])
    return build_program(config, jax.devices()[:devices])


def imported(folder, *overrides, devices=8):
    program = program_of(folder, *overrides, devices=devices)
    return import_parameters(TensorFiles(folder), describe(folder).family, program.state_shape.params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama") / "hf", shards=3)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("gpt2") / "hf", GPT2_CONFIG, gpt2_tensors())


MAPPED = {f"{family}-{mapped.ours}": mapped for family in (gpt2, llama) for mapped in family.TENSORS}


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
@given(data=st.data())
def test_what_is_written_is_read_again_slice_by_slice(mapped, data):
    shape = [data.draw(st.integers(1, 4)) for _ in mapped.axes.partition(" -> ")[0].split()]
    array = np.arange(np.prod(shape)).reshape(shape)
    whole = [np.full_like(mapped.to_theirs(array), -1)] * mapped.parts
    whole[mapped.part] = mapped.to_theirs(array)
    tensor = np.concatenate(whole, axis=-1)
    assert tensor.shape == mapped.their_shape(shape)
    index = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(data.draw(st.sampled_from([slice(None), slice(start, data.draw(st.integers(start + 1, size)))])))
    np.testing.assert_array_equal(mapped.read(tensor.__getitem__, shape, tuple(index)), array[tuple(index)])


def test_every_number_has_its_place(folder, gpt2_folder):
    params, theirs = imported(folder), llama_tensors()
    for i in range(2):
        query = theirs[f"model.layers.{i}.self_attn.q_proj.weight"].reshape(HEADS, HEAD_DIM, EMBED)
        output = theirs[f"model.layers.{i}.self_attn.o_proj.weight"].reshape(EMBED, HEADS, HEAD_DIM)
        attention = params["runs"][0]["attention"]
        for head in range(HEADS):
            np.testing.assert_array_equal(attention["query"]["kernel"][i, :, head], query[head].T)
            np.testing.assert_array_equal(attention["output"]["kernel"][i, head], output[:, head].T)
        down = params["runs"][0]["feed_forward"]["down"]["kernel"][i]
        np.testing.assert_array_equal(down, theirs[f"model.layers.{i}.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(params["unembedding"]["embedding"], theirs["lm_head.weight"])

    params, theirs = imported(gpt2_folder), gpt2_tensors()
    for i in range(2):
        fused = theirs[f"transformer.h.{i}.attn.c_attn.weight"].reshape(EMBED, 3, HEADS, EMBED // HEADS)
        bias = theirs[f"transformer.h.{i}.attn.c_attn.bias"].reshape(3, HEADS, EMBED // HEADS)
        for part, name in enumerate(("query", "key", "value")):
            ours = params["runs"][0]["attention"][name]
            np.testing.assert_array_equal(ours["kernel"][i], fused[:, part])
            np.testing.assert_array_equal(ours["bias"][i], bias[part])


@pytest.mark.parametrize("which", ["llama", "gpt2"])
def test_each_device_reads_its_own_slices(which, folder, gpt2_folder, monkeypatch):
    source = folder if which == "llama" else gpt2_folder
    files, read = TensorFiles(source), []

    def spied(name, index):
        array = TensorFiles.read(files, name, index)
        read.append((name, array.size))
        return array

    monkeypatch.setattr(files, "read", spied)
    program = program_of(source, "mesh.fsdp=4", "mesh.tensor=2")
    params = import_parameters(files, describe(source).family, program.state_shape.params)
    on_devices = sum(shard.data.size for array in jax.tree.leaves(params) for shard in array.addressable_shards)
    assert sum(size for _, size in read) == on_devices
    for name, size in read:
        whole = int(np.prod(files.shape(name)))
        # A bias is cut along the heads or not at all.
        parts = 8 if len(files.shape(name)) == 2 and "wpe" not in name else 4 if "bias" not in name else 1
        assert size <= whole / parts, name


def test_files_are_written_bit_by_bit_as_they_were_read(folder, gpt2_folder, tmp_path):
    for name, source, theirs in (("llama", folder, llama_tensors()), ("gpt2", gpt2_folder, gpt2_tensors())):
        out = tmp_path / name
        out.mkdir()
        params = imported(source, "mesh.fsdp=4", "mesh.tensor=2")
        export_parameters(params, FAMILIES[name], out)
        written = load_file(out / "model.safetensors")
        assert set(written) == set(theirs)
        for key, array in written.items():
            np.testing.assert_array_equal(array, theirs[key], err_msg=key)


def test_shards_are_small_and_listed(folder, tmp_path):
    limit, seen = 3000, []
    export_parameters(
        imported(folder), FAMILIES["llama"], tmp_path, shard_bytes=limit, watch=lambda *bytes: seen.append(bytes)
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert sorted(files) == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert all(sum(array.nbytes for array in tensors.values()) <= limit for tensors in files.values())
    layers = [
        min((int(name.split(".")[2]) for name in files[file] if ".layers." in name), default=-1)
        for file in sorted(files)
    ]
    assert layers == sorted(layers)
    total = sum(array.nbytes for array in llama_tensors().values())
    assert index["metadata"]["total_size"] == total
    assert seen[-1] == (total, total)
    assert len(seen) == len(files)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    jax.tree.map(np.testing.assert_array_equal, imported(tmp_path), imported(folder))


def test_half_precision_in_and_out(tmp_path):
    theirs = llama_tensors()
    for dtype in (ml_dtypes.bfloat16, np.float16):
        halves = {name: array.astype(dtype) for name, array in theirs.items()}
        source = write_folder(tmp_path / np.dtype(dtype).name, tensors=halves)
        params = imported(source)
        assert {array.dtype.name for array in jax.tree.leaves(params)} == {"float32"}
        np.testing.assert_array_equal(params["unembedding"]["embedding"], halves["lm_head.weight"].astype(np.float32))
    out = tmp_path / "out"
    out.mkdir()
    export_parameters(imported(write_folder(tmp_path / "whole")), FAMILIES["llama"], out, dtype="bfloat16")
    for name, array in load_file(out / "model.safetensors").items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, theirs[name].astype(ml_dtypes.bfloat16))


def test_buffers_and_a_missing_prefix_are_no_mismatch(gpt2_folder, tmp_path):
    saved_alone = gpt2_tensors(prefix="")
    for dtype in (np.float32, np.bool_, np.uint8):
        saved_alone |= {f"h.{i}.attn.bias": np.ones((1, 1, 32, 32), dtype) for i in range(2)}
        source = write_folder(tmp_path / np.dtype(dtype).name, GPT2_CONFIG, saved_alone)
        jax.tree.map(np.testing.assert_array_equal, imported(source), imported(gpt2_folder))


def test_other_dtypes_of_what_is_needed_are_refused(tmp_path):
    tensors = llama_tensors()
    tensors["model.norm.weight"] = np.ones(EMBED, np.float64)
    with pytest.raises(UserError, match=r"hf/model.safetensors: model.norm.weight is of the dtype F64; give a .* F32"):
        imported(write_folder(tmp_path / "hf", tensors=tensors))


def test_what_is_named_like_a_buffer_is_listed(tmp_path):
    tensors = {**gpt2_tensors(), "transformer.h.2.attn.c_attn.bias": np.ones(3 * EMBED, np.float32)}
    with pytest.raises(UserError, match=r"the files hold transformer.h.2.attn.c_attn.bias, which it does not have"):
        imported(write_folder(tmp_path / "hf", GPT2_CONFIG, tensors))


def test_an_output_beside_tied_embeddings_has_to_be_the_same(tmp_path):
    tensors, config = llama_tensors(), {**LLAMA_CONFIG, "tie_word_embeddings": True}
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight, but tie_word_embedd"):
        imported(write_folder(tmp_path / "other", config, tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert "unembedding" not in imported(write_folder(tmp_path / "same", config, tensors))


def test_names_on_one_side_only_are_listed_both_sides(tmp_path):
    tensors = llama_tensors()
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors[f"model.layers.{i}.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        del tensors[f"model.layers.{i}.mlp.gate_proj.weight"]
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError) as caught:
        imported(write_folder(tmp_path / "hf", tensors=tensors))
    text = str(caught.value)
    assert "it needs model.layers.*.mlp.gate_proj.weight (2), model.layers.1.mlp.up_proj.weight, which no" in text
    assert "the files hold model.layers.*.self_attn.q_norm.weight (2), which it does not have" in text
    assert "inv_freq" not in text
    assert "\n" not in text


def test_an_index_of_other_files_is_refused(tmp_path):
    source = write_folder(tmp_path / "hf", shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    placed = index["weight_map"]
    norm = placed.pop("model.norm.weight")
    placed["model.norm.scale"] = norm
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    head = placed["lm_head.weight"]
    placed["lm_head.weight"] = second if head == first else first
    path.write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        TensorFiles(source)
    assert str(caught.value) == (
        f"{path} is not of the files beside it: it lists model.norm.scale, which no file holds; the files hold "
        f"model.norm.weight, which it does not list; it lists lm_head.weight in {placed['lm_head.weight']}, which is "
        f"in {head}; fetch the folder again"
    )


def test_other_shapes_are_refused(tmp_path):
    source = write_folder(tmp_path / "hf", {**LLAMA_CONFIG, "num_key_value_heads": 4})
    with pytest.raises(UserError, match=r"k_proj.weight has the shape \(16, 16\), and the model .* needs \(32, 16\)"):
        imported(source)


def test_a_long_list_is_counted():
    assert some(f"t{chr(97 + i)}" for i in range(14)).endswith("tl and 2 more")


def section(values, model_type="llama", config=LLAMA_CONFIG, path="config.json"):
    kind = FAMILIES[model_type].config_json
    return parse(kind, {**config, **values}, path).model_section()


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({}, 10000.0, {"kind": "none"}),
        ({"partial_rotary_factor": 1.0, "rope_theta": 7}, 7.0, {"kind": "none"}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0, {"kind": "none"}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"kind": "linear", "factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            {
                "kind": "llama3",
                "factor": 8,
                "low_frequency_factor": 1,
                "high_frequency_factor": 4,
                "original_positions": 64,
            },
        ),
    ],
)
def test_rotations_are_read_from_old_and_new_keys_and_written(values, theta, scaling):
    found = section(values)
    assert (found["rotary_theta"], found["rotary_scaling"]) == (theta, scaling)
    model = DecoderConfig.model_validate(found)
    assert DecoderConfig.model_validate(section(llama.llama_config_json(model, 32))) == model


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("outside", "inside", "expected"), [(None, None, 32), (48, None, 48), (48, 64, 48), (None, 64, 64)]
)
def test_original_positions_are_those_that_transformers_takes(key, outside, inside, expected):
    scaling = {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": inside}
    if inside is None:
        del scaling["original_max_position_embeddings"]
    values = {**LLAMA_CONFIG, key: scaling}
    if outside is not None:
        values["original_max_position_embeddings"] = outside
    assert section(values, config={})["rotary_scaling"]["original_positions"] == expected
    # They stay what they were where the model is written for longer sequences.
    longer = parse(llama.LlamaJson, values, "config.json").with_context_length(values, 96)
    assert longer["max_position_embeddings"] == 96
    assert section(longer, config={})["rotary_scaling"]["original_positions"] == expected


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "the rope type is 'yarn', of which",
        ),
        ("llama", {"rope_scaling": {"type": ["linear"]}}, "the rope type is ['linear'], of which"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor of the rope type 'llama3'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "two"}}, 'factor is "two", where a number above'),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is null, where a number above 0 is needed"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3, which does not divide the num_attention_heads",
        ),
        ("llama", {"rms_norm_eps": 0.0}, "config.json: rms_norm_eps is 0.0, of which there is no counterpart here"),
        ("llama", {"initializer_range": 0.0}, "config.json: initializer_range is 0.0, of which"),
        ("llama", {"max_position_embeddings": 0}, "config.json: max_position_embeddings is 0, of which"),
        ("llama", {"eos_token_id": "2"}, 'config.json: eos_token_id is "2", of which'),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, which is no length; null is for none"),
        ("gpt2", {"n_positions": 0}, "config.json: n_positions is 0, of which"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is \"gelu\", of which there is no counterpart here: only 'silu'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters differ among layers"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is true"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true and attention_bias false"),
        ("llama", {"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}'),
        ("llama", {"hidden_size": "big"}, 'hidden_size is "big"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
        ("gpt2", {"activation_function": "swish"}, 'activation_function is "swish"'),
    ],
)
def test_what_a_config_has_that_we_have_not_is_refused(model_type, values, message):
    with pytest.raises(UserError) as caught:
        section(values, model_type, GPT2_CONFIG if model_type == "gpt2" else LLAMA_CONFIG)
    assert message in str(caught.value)


def test_defaults_are_those_of_transformers():
    bare = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    bare["num_attention_heads"] = 32
    assert section({}, "llama", bare)["attention"] == {"num_heads": 32, "num_kv_heads": 32, "head_dim": 2}
    assert section({}, "mistral", bare)["attention"]["num_kv_heads"] == 8
    assert section({}, "gpt2", {})["feed_forward"] == {"hidden_dim": 3072, "activation": "gelu"}
    assert [section({}, kind, bare)["biases"] for kind in ("llama", "mistral", "qwen2")] == ["none", "none", "qkv"]


def test_windows():
    def window(model_type, **values):
        return parse(FAMILIES[model_type].config_json, {**LLAMA_CONFIG, **values}, "config.json").window

    assert window("llama") is None
    assert window("mistral") == 4096
    assert window("mistral", sliding_window=None) is None
    assert window("mistral", sliding_window=24) == 24
    assert window("qwen2", sliding_window=24) is None
    assert window("qwen2", sliding_window=24, use_sliding_window=True) is None
    assert window("qwen2", sliding_window=24, use_sliding_window=True, max_window_layers=1) == 24


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.attention.num_kv_heads=4",), "GPT2LMHeadModel"),
        (LLAMA, "LlamaForCausalLM"),
        ((*LLAMA, "model.biases=attention", "model.tied_embeddings=true"), "LlamaForCausalLM"),
        ((*LLAMA, "model.biases=qkv"), "Qwen2ForCausalLM"),
        ((), "model.attention.num_kv_heads 2 (it has as many as num_heads)"),
        (("model.norm=rms_norm", "model.attention.num_kv_heads=4"), "model.norm rms_norm (it has layer_norm)"),
        (("model.biases=none", "model.attention.head_dim=16"), "model.biases none (it has all) and model.attention"),
        ((*LLAMA, "model.feed_forward.activation=gelu"), "model.feed_forward.activation gelu (it has swiglu)"),
        ((*LLAMA, "model.norm=layer_norm"), "model.norm layer_norm (it has rms_norm)"),
    ],
)
def test_models_are_written_as_what_they_are_or_refused(overrides, expected):
    model = tiny_config(*overrides).model
    if expected.endswith(("Model", "LM")):
        family = family_of(model)
        assert family.architecture == expected
        values = {"model_type": family.model_type, **family.write_config(model, 24)}
        back = DecoderConfig.model_validate(parse(family.config_json, values, "config.json").model_section())
        same = {"scan_layers": model.scan_layers, "loss_chunk": model.loss_chunk, "max_positions": model.max_positions}
        assert back.model_copy(update=same) == model
    else:
        with pytest.raises(UserError) as caught:
            family_of(model)
        assert expected in str(caught.value)
