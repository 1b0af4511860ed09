"""Likelihoods are those that each request has alone, in a page of plain JAX."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dseekjax.data.tokenizers import train_tokenizer
from dseekjax.errors import UserError
from dseekjax.evaluation.likelihood import encode_pairs, log_likelihood, log_likelihood_rolling, rolling_windows

REQUESTS = [
    ("7 bottles of", " beer"),
    ("7 bottles of ", "beer on"),
    ("", "9 bottles"),
    ("1", "2"),
    ("x" * 40, "y" * 24),
    *((f"{i} bottles", " of beer"[: 1 + i % 8]) for i in range(40)),
]


def test_each_request_has_its_own_likelihood_whatever_shares_its_row(trained, plain_log_probabilities):
    told = []
    found = log_likelihood(trained, REQUESTS, tell=told.append)
    for (context, continuation), likelihood in zip(REQUESTS, found, strict=True):
        moved = context[len(context.rstrip()) :]
        # Of bytes, one token each.
        tokens = trained.tokenizer.encode(context + continuation, add_special_tokens=False).ids
        scored = len(moved + continuation)
        tokens = ([trained.end_token] * (not context) + tokens)[-25:]
        log_probabilities, greedy = plain_log_probabilities(np.array(tokens))
        assert likelihood.num_tokens == scored
        assert likelihood.log_probability == pytest.approx(log_probabilities[-scored:].sum(), rel=1e-4, abs=1e-3)
        assert likelihood.is_greedy == greedy[-scored:].all()
    assert any(likelihood.is_greedy for likelihood in found)
    assert not all(likelihood.is_greedy for likelihood in found)
    assert told == ["1 of 45 requests are longer than data.sequence_length 24; of their contexts only the end counts."]


def test_token_ids_are_taken_as_they_are(trained):
    ids = trained.tokenizer.encode("7 bottles of beer", add_special_tokens=False).ids
    as_ids, as_text, empty = log_likelihood(trained, [(ids[:9], ids[9:]), ("7 bottles", " of beer"), ([], ids)])
    assert as_ids.log_probability == pytest.approx(as_text.log_probability, rel=1e-5)
    assert empty.num_tokens == len(ids)
    assert log_likelihood(trained, []) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("a", ""), "request 1 has an empty continuation; give some text"),
        (("a", "b" * 25), "request 1 has a continuation of 25 tokens, and data.sequence_length is 24; shorten it"),
        (("a", [1]), "request 1 has a text and token ids; give both alike"),
        (("\ud800", "b"), r"request 1 has '\\ud800' in its context, half of a character; give whole ones"),
        (("a", "b\udfff"), r"request 1 has '\\udfff' in its continuation, half of a character; give whole ones"),
        (([1], [258]), "request 1 has 258 in its continuation, and the model has token ids from 0 to 257; give those"),
        (([-5], [3]), "request 1 has -5 in its context, and the model has token ids from 0 to 257; give those"),
        (([3] * 60 + [9999], [3]), "request 1 has 9999 in its context, and the model has token ids from .*"),
    ],
)
def test_what_cannot_be_scored_is_refused(trained, request_, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        log_likelihood(trained, [("a", "b"), request_])


def test_a_text_of_half_characters_is_refused(trained):
    with pytest.raises(UserError, match=r"^request 1 has '\\ud800' in its text, half of a character; give whole ones$"):
        log_likelihood_rolling(trained, ["a", "b\ud800"])


WORDS = ["beer on the wall", "bottles of beer", "a wallet of bottles", " on  the beer"]
LEARNED = train_tokenizer(WORDS * 50, 290, "<end>")
END = LEARNED.token_to_id("<end>")


@given(st.text("abelo tsrw", max_size=12), st.text("abelo tsrw", min_size=1, max_size=12))
@settings(max_examples=300)
def test_context_and_continuation_are_the_text_and_the_boundary_is_at_the_context(context, continuation):
    ((before, after),) = encode_pairs(LEARNED, END, [(context, continuation)])
    assert LEARNED.decode(before, skip_special_tokens=True) == context.rstrip()
    assert LEARNED.decode(after) == context[len(context.rstrip()) :] + continuation
    whole = LEARNED.encode(context + continuation).ids
    alone = LEARNED.encode(context.rstrip()).ids
    assert before == (alone or [END])
    # As lm-eval has it, where that loses nothing.
    if whole[: len(alone)] == alone:
        assert after == whole[len(alone) :]


def test_rolling_windows_are_those_of_lm_eval():
    """The example in the documentation of lm-eval's `LM.loglikelihood_rolling`."""
    windows = [(list(tokens), scored) for tokens, scored in rolling_windows(["BOS", *range(10)], 4)]
    assert windows == [(["BOS", 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert list(rolling_windows(["BOS"], 4)) == []


def test_rolling_scores_each_token_once_with_as_much_context_as_fits(trained, plain_log_probabilities):
    text = "".join(f"{i} bottles of beer on the wall.\n" for i in range(3))
    tokens = [trained.end_token, *trained.tokenizer.encode(text, add_special_tokens=False).ids]
    expected = sum(
        plain_log_probabilities(np.array(window))[0][-scored:].sum() for window, scored in rolling_windows(tokens, 24)
    )
    rolling, short, empty = log_likelihood_rolling(trained, [text, "7 bottles", ""])
    assert rolling.num_tokens == len(tokens) - 1
    assert rolling.log_probability == pytest.approx(expected, rel=1e-4)
    assert short.log_probability == pytest.approx(log_likelihood(trained, [("", "7 bottles")])[0].log_probability)
    assert empty == (0.0, 0, True)
