"""The model of lm-eval, against its interface."""

import importlib
import sys

import pytest

from dseekjax.errors import UserError
from dseekjax.evaluation.likelihood import log_likelihood, log_likelihood_rolling
from dseekjax.generation.complete import Writer
from dseekjax.generation.sampling import Sampling
from tests.references import lm_eval_interface
from tests.references.lm_eval_interface import Instance


def test_lm_eval_is_answered_in_the_order_of_its_requests(run, trained, monkeypatch):
    lm_eval_interface.install(monkeypatch)
    importlib.import_module("dseekjax.evaluation.lm_eval")
    # As lm-eval's command makes it.
    arguments = {"run": run.path, "mesh.data": 2}
    additional = {"batch_size": 1, "max_batch_size": None, "device": None}
    model = lm_eval_interface.MODELS["dseekjax"].create_from_arg_obj(arguments, additional)

    pairs = [("300 bottles", " of beer"), ("", "3"), ("300 ", "bottles of rum")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    expected = log_likelihood(trained, pairs)
    assert [log for log, _ in found] == pytest.approx([each.log_probability for each in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [each.is_greedy for each in expected]

    texts = ["7 bottles of beer on the wall, for long", "3"]
    rolling = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts])
    whole = [each.log_probability for each in log_likelihood_rolling(trained, texts)]
    assert rolling == pytest.approx(whole, rel=1e-4)
    assert model.cache_hook.kept[:1] == [("loglikelihood", pairs[0], found[0])]
    assert model.cache_hook.kept[3:] == [
        ("loglikelihood_rolling", (text,), each) for text, each in zip(texts, rolling, strict=True)
    ]
    assert model.tokenizer_name.endswith("run")

    greedy, drawn = {"until": [" on"], "max_gen_toks": 8}, {"do_sample": True, "temperature": 0.5, "max_gen_toks": 4}
    long = "300 bottles of beer on the wall. 301 bottles"
    wanted = [("300 bottles of", greedy), (long, greedy), ("300", drawn)]
    written = model.generate_until([Instance("generate_until", {}, each, 0) for each in wanted])
    writer = Writer(trained)
    # Of what is too long the end is kept, and as much as leaves room for half of what the model takes.
    last = trained.tokenizer.encode(long).ids[-(writer.context - 8) :]
    (kept,) = model._encoded([long], 256)
    assert kept == trained.tokenizer.encode(long).ids[-(writer.context // 2) :]
    (short,) = model._encoded(["300"], 256)
    assert len(short) == 3
    never_mind = {"until": None, "temperature": None, "top_k": 0, "max_gen_toks": 2}
    (nothing_said,) = model.generate_until([Instance("generate_until", {}, ("300", never_mind), 0)])
    assert nothing_said == next(writer.complete(["300"], max_tokens=2, sampling=Sampling(0.0))).text
    expected = writer.complete(["300 bottles of", last], max_tokens=8, stop=[" on"], sampling=Sampling(0.0))
    assert written[:2] == [each.text for each in expected]
    assert written[2] == next(writer.complete(["300"], max_tokens=4, sampling=Sampling(0.5))).text
    assert model.cache_hook.kept[-2] == ("generate_until", wanted[2], written[2])
    # What changes nothing is taken, and so is every name that lm-eval's own models take for the most tokens.
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        same = {"until": [" on"], name: 8, "do_sample": False, **sys.modules[type(model).__module__].CHANGE_NOTHING}
        assert model.generate_until([Instance("generate_until", {}, (wanted[0][0], same), 0)]) == written[:1]
    for name, value in (("num_beams", 2), ("repetition_penalty", 1.1), ("anything", 1)):
        message = f"generation_kwargs has {name}, which the model dseekjax does not know; it takes until, max_gen_toks"
        with pytest.raises(UserError, match=message):
            model.generate_until([Instance("generate_until", {}, ("a", {name: value}), 0)])


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "dseekjax.evaluation.lm_eval", raising=False)
    with pytest.raises(UserError, match=r"lm-eval is missing; install it with `pip install 'dseekjax\[lm-eval\]'`"):
        importlib.import_module("dseekjax.evaluation.lm_eval")
