import subprocess
import sys

import pytest
import yaml

from dseekjax.config import Config, dump_config, load_config, recipe_path
from dseekjax.config_reference import describe, format_reference
from dseekjax.errors import UserError
from tests.conftest import REPOSITORY

RECIPES = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml"))


def problems(*overrides, path=None):
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_has_not_drifted(recipe, request):
    golden = REPOSITORY / "tests" / "golden" / f"{recipe}.yaml"
    text = dump_config(load_config(recipe_path(recipe)))
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text(), "a default or the recipe changed; if that is meant, run with --update-golden"


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_config_loads_again_identically(recipe, tmp_path):
    config = load_config(
        recipe_path(recipe), ["optimizer.schedule.kind=wsd", "data.evaluation_sources=[{path: a.txt}]"]
    )
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_overrides_reach_nested_keys_and_lists():
    config = load_config(
        recipe_path("quickstart"),
        ["data.sources.0.path=a.txt", "data.sources[0].weight=2", "optimizer.learning_rate=1e-4", "run.dir=x=y"],
    )
    assert (config.data.sources[0].path, config.data.sources[0].weight) == ("a.txt", 2.0)
    assert config.optimizer.learning_rate == 1e-4
    assert config.run.dir == "x=y"
    for name in ("2026-01-05", "2024-13-45", "7"):
        assert load_config(overrides=[f"run.dir={name}"]).run.dir == name


def test_all_problems_are_named_at_once_with_the_fix():
    text = problems("model.dim=3", "steps=4", "optmizer.learning_rate=3", "model.norm=foo", "train.steps=many")
    assert "unknown key model.dim; did you mean model.embed_dim?" in text
    assert "unknown key steps; did you mean train.steps?" in text
    assert "unknown key optmizer; did you mean optimizer?" in text
    assert "model.norm: 'foo' is wrong" in text
    assert "layer_norm|rms_norm" in text
    assert "train.steps: 'many' is wrong" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.attention.num_kv_heads=3", "num_kv_heads 3 does not divide num_heads 8"),
        ("model.num_layers=0", "model.num_layers: 0 is wrong"),
        ("model.rotary_scaling={kind: linear, factor: 2}", "rotary_scaling.kind linear needs positions to be rotary"),
        ("model.rotary_scaling={kind: linear}", "model.rotary_scaling.factor is missing"),
        ("model.rotary_scaling.kind=yarn", "'yarn' is wrong; it takes 'none', 'linear', 'llama3'"),
        ("model.rotary_scaling={kind: llama3, low_frequency_factor: 4}", "low_frequency_factor 4.0 is not below"),
        ("model.dropout=1.5", "model.dropout: 1.5 is wrong"),
        ("train.num_microbatches=3", "train.num_microbatches 3 does not divide train.global_batch_size 16"),
        ("data.sequence_length=4096", "exceeds model.max_positions 1024"),
        ("mesh.pipe=2", "mesh.pipe 2 is not supported yet"),
        ("mesh={pipe: 2, context: 2, context_attention: ring}", "set context_attention to all_to_all or all_gather"),
        ("mesh.data=-1", "mesh.data and mesh.fsdp are both -1"),
        ("mesh.rules={mlp: tensor}", "mesh.rules.mlp: 'tensor' is wrong: input should be a list, as in [a, b]"),
        ("mesh.data=0", "mesh.data 0 is no size"),
        ("mesh.nodes=1", "unknown key mesh.nodes; mesh has data, fsdp, "),
        ("model.vocabulary_size=99999999999", "model.vocabulary_size: 99999999999 is wrong"),
        ("data.tokenizer=train:7", "at least 257"),
        ("data.sources=[{}]", "data.sources.0.path is missing"),
        ("data.sources=[{path: a, document_separator: '('}]", "is not a regular expression"),
        (
            "data.sources=[{path: a, format: completion}]",
            "data.sources.0.format: 'completion' is wrong: it is a section of keys; give those, as in "
            "'data.sources.0.format={kind: completion}'",
        ),
        ("optimizer.schedule=linear", "as in 'optimizer.schedule={kind: linear}'"),
        ("model.attention=3", "model.attention: 3 is wrong: it is a section of keys; give those, as in model.a"),
        ("data.sources.4.path=a", "the list in the config file ends before that"),
        ("optimizer.schedule.kind=step", "'step' is wrong; it takes 'cosine', 'linear', 'wsd', 'constant'"),
        ("optimizer.schedule.warmup_steps=2000", "do not fit into train.steps 1000"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: nan is wrong"),
        ("train.steps", "not of the form key=value"),
        ("train.steps=true", "train.steps is true; give what it is to be"),
        ("checkpoint.keep_every=1500", "checkpoint.keep_every 1500 is no multiple"),
    ],
)
def test_impossible_values_are_refused(override, message):
    assert message in problems(override)


def test_files_that_are_no_config_are_refused(tmp_path):
    assert "cannot read" in problems(path=tmp_path / "none.yaml")
    for text, message in [
        ("a: [", "is not YAML"),
        ("- 1", "holds a list"),
        ("train:\n  steps: 1\n  steps: 2\n", "the key 'steps' is given twice"),
    ]:
        (tmp_path / "c.yaml").write_text(text)
        assert message in problems(path=tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("")
    assert load_config(tmp_path / "c.yaml") == Config()


def test_unknown_recipe_names_the_known_ones():
    with pytest.raises(UserError, match="gpt2_124m"):
        recipe_path("gpt5")


def test_every_key_is_explained():
    described = {key.name: key for key in describe(Config)}

    def leaves(values, prefix=""):
        for name, value in values.items():
            yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]

    assert set(leaves(yaml.safe_load(dump_config(Config())))) <= set(described)
    assert all(key.meaning and key.type for key in described.values())
    assert all(name in format_reference(Config) for name in described)


def test_help_and_bad_config_do_not_load_jax():
    code = (
        "import sys\nfrom dseekjax.train import main\n"
        "assert main(['--model', 'quickstart', 'train.stepz=1']) == 2\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'jax' not in sys.modules, 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optimizer.learning_rate" in done.stdout
    assert "Peak learning rate" in done.stdout


def test_a_key_of_another_kind_is_not_taken_for_a_misspelling():
    with pytest.raises(UserError) as error:
        load_config(overrides=["optimizer.schedule.final_fraction=0.1", "optimizer.schedule.kind=constant"])
    assert str(error.value) == (
        "optimizer.schedule of kind constant has no final_fraction; leave it out, or give all of it anew, as in "
        "'optimizer.schedule={kind: constant}'"
    )
