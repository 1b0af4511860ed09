"""Text that comes a token at a time."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.tokenizers import bytes_tokenizer, end_of_document_id
from dseekjax.generation.writing import Writing

TOKENIZER = bytes_tokenizer("<|endoftext|>")
END = end_of_document_id(TOKENIZER, "<|endoftext|>")


def write(text, stop=(), prompt="so "):
    """Pieces as they come, and the writing."""
    writing = Writing(TOKENIZER, [END], stop, TOKENIZER.encode(prompt).ids)
    pieces = []
    for token in [*TOKENIZER.encode(text).ids, END]:
        pieces.append(writing.add(token))
        assert writing.text == "".join(pieces)
        if writing.finished:
            break
    return pieces, writing


@given(
    st.text(st.sampled_from("abcé水🙂 "), max_size=12),
    st.lists(st.text(st.sampled_from("abc水"), min_size=1), max_size=3),
)
def test_the_text_is_that_before_the_first_stop_string(text, stop):
    pieces, writing = write(text, stop)
    places = [text.find(each) for each in stop if each in text]
    assert writing.finished == ("stop" if places else "end")
    if not places:
        assert writing.text == text
        return
    # Of stop strings that end at the same token, any may be taken first.
    assert text.startswith(writing.text)
    assert len(writing.text) in places
    assert not any(each in writing.text for each in stop)
    assert all("\ufffd" not in piece for piece in pieces)


def test_what_may_become_a_stop_string_is_held_back():
    pieces, _ = write("one two END", ["END"])
    assert pieces == [*"one two ", "", "", ""]
    pieces, writing = write("an ENDive", ["ENDS"])
    assert pieces[:7] == ["a", "n", " ", "", "", "", "ENDi"]
    assert writing.text == "an ENDive"


def test_a_character_of_several_tokens_comes_whole():
    pieces, _ = write("é水")
    assert pieces == ["", "é", "", "", "水", ""]


def test_what_is_held_back_is_there_at_the_end():
    writing = Writing(TOKENIZER, [END], ["stop"], [])
    assert [writing.add(token) for token in TOKENIZER.encode("a st").ids] == ["a", " ", "", ""]
    assert writing.finish("length") == "st"
    assert (writing.text, writing.finished, len(writing.tokens)) == ("a st", "length", 4)


def test_of_several_stop_strings_in_one_token_the_first_in_the_text_counts():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"that": 0, "<unk>": 1}, unk_token="<unk>"))
    for stop in (["at", "h"], ["h", "at"]):
        writing = Writing(words, [END], stop, [])
        assert writing.add(0) == "t"
        assert (writing.text, writing.finished, writing.tokens) == ("t", "stop", [0])
