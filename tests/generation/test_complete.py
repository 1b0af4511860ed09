"""The loop that continues texts, on a model of random parameters."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from dseekjax.data.tokenizers import bytes_tokenizer, end_of_document_id
from dseekjax.errors import UserError
from dseekjax.generation import complete
from dseekjax.generation.complete import Writer
from dseekjax.generation.sampling import Sampling
from dseekjax.trained import before_a_text
from dseekjax.training.program import build_program
from tests.tiny import tiny_config

PROMPTS = ["a", "some words", "é 水"]
GREEDY = Sampling(temperature=0)


def model(*overrides, num_devices=1):
    program = build_program(tiny_config("model.vocabulary_size=320", *overrides), jax.devices()[:num_devices])
    tokenizer = bytes_tokenizer("<|endoftext|>")
    return SimpleNamespace(
        config=program.config,
        program=program,
        params=program.init().params,
        tokenizer=tokenizer,
        end_tokens=(end_of_document_id(tokenizer, "<|endoftext|>"),),
        begin_tokens=(),
    )


@pytest.fixture(scope="module")
def writer():
    return Writer(model())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=3.0, top_k=200, top_p=0.99, seed=5)])
def test_a_text_does_not_depend_on_those_beside_it(writer, sampling):
    together = list(writer.complete(PROMPTS, max_tokens=6, sampling=sampling))
    assert [completion.prompt for completion in together] == PROMPTS
    in_parts = list(writer.complete(PROMPTS, max_tokens=6, sampling=sampling, batch_size=2))
    alone = [
        next(writer.complete([prompt], max_tokens=6, sampling=sampling, first=number))
        for number, prompt in enumerate(PROMPTS)
    ]
    assert in_parts == alone == together
    if sampling is not GREEDY:
        assert together != list(writer.complete(PROMPTS, max_tokens=6, sampling=Sampling(3.0, 200, 0.99, seed=6)))


def test_a_mesh_writes_the_same(writer):
    on_mesh = Writer(model("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", num_devices=8))
    # Three texts on four replicas.
    expected = list(writer.complete(PROMPTS, max_tokens=6, sampling=GREEDY))
    assert list(on_mesh.complete(PROMPTS, max_tokens=6, sampling=GREEDY)) == expected


def test_tokens_are_those_that_the_tokenizer_has(writer):
    for completion in writer.complete(["x"] * 8, max_tokens=12, sampling=Sampling(temperature=100.0)):
        assert all(token < 257 for token in completion.tokens)


def test_pieces_make_up_the_text_and_reasons_are_told(writer, monkeypatch):
    script = iter(writer._tokenizer.encode("one. two. three").ids)

    def scripted(logits, texts, number, sampling):
        return np.full(len(texts), next(script), np.int32)

    monkeypatch.setattr(complete, "sample", scripted)
    pieces = []
    (stopped,) = writer.complete(["so "], stop=[". tw"], on_text=lambda number, piece: pieces.append((number, piece)))
    assert (stopped.text, stopped.finish_reason) == ("one", "stop")
    assert "".join(piece for _, piece in pieces) == "one"

    script = iter([*writer._tokenizer.encode("one").ids, *writer._end_tokens, 7, 7, 7])
    (ended,) = writer.complete(["so "])
    assert (ended.text, ended.finish_reason, len(ended.tokens)) == ("one", "end", 3)

    script = iter([65] * 100)
    (cut,) = writer.complete(["so "], max_tokens=4)
    assert (len(cut.tokens), cut.finish_reason) == (4, "length")
    # No memory is taken for what cannot come.
    (full,) = writer.complete(["so "], max_tokens=10**9)
    # The model has 24 positions, three of which the prompt takes.
    assert (len(full.tokens), full.finish_reason) == (21, "context")


def test_the_longest_text_is_the_models_or_the_sequences_of_training():
    assert complete.context_length(tiny_config("data.sequence_length=12")) == 24
    assert complete.context_length(tiny_config("data.sequence_length=12", "model.positions=rotary")) == 12


def test_numbers_that_make_no_sense_are_refused(writer):
    for wrong in ({"max_tokens": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="0 is too few; give 1 or more"):
            next(writer.complete(["a"], **wrong))


@pytest.mark.parametrize(
    ("prompts", "stop", "message"),
    [
        (["a", ""], [], "prompt 2 is empty; give it a word"),
        (["x" * 24], [], "prompt 1 has 24 tokens, and the model's context is 24.*shorten it to 23 or fewer"),
        (["a"], [""], "stop is an empty text"),
        (["a", "\ud800"], [], "prompt 2 is no Unicode text"),
        ([[3, 320]], [], "prompt 1 has the token 320, and the model knows those from 0 to 319"),
        ([[-1]], [], "prompt 1 has the token -1"),
        ("Emma", [], "prompts is a text; give a list of texts"),
    ],
)
def test_what_cannot_be_continued_is_refused_at_once(writer, prompts, stop, message):
    with pytest.raises(UserError, match=message):
        writer.complete(prompts, stop=stop)


def test_texts_begin_as_the_model_was_trained(writer):
    begun = model()
    begun.begin_tokens = (256,)
    options = {"max_tokens": 4, "sampling": GREEDY}
    (expected,) = writer.complete([np.array([256, *writer._tokenizer.encode("so").ids])], **options)
    (found,) = Writer(begun).complete(["so"], **options)
    assert found.tokens == expected.tokens


def test_what_a_tokenizer_puts_before_a_text_is_found():
    tokenizer = bytes_tokenizer("<|endoftext|>")
    assert before_a_text(tokenizer) == ()
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    assert before_a_text(tokenizer) == (256,)
