"""Tokens of examples, and which of them count, by templates and tokenizers of several kinds, told apart by hand."""

import json
import string

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dseekjax.data.encoding import encode_examples
from dseekjax.data.reading.chat import Template
from dseekjax.data.reading.documents import Passed, read_documents, whole
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.reading.parts import Segment, cut_segments
from dseekjax.data.reading.rows import ChatRow, CompletionRow
from dseekjax.data.tokenizers import bytes_tokenizer, train_tokenizer
from tests.data.corpora import END, TEXTS

SPECIAL = ["</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>"]
SPOKEN = "She was there. He was here: she, 語 and é saw it 12 times.\n\nUser: so?\nAssistant: yes"


def byte_level(prefix_space: bool, trim_offsets: bool | None) -> Tokenizer:
    """As those of GPT-2, RoBERTa and Llama 3."""
    made = train_tokenizer([SPOKEN, *TEXTS[:9]] * 3, 400, END)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if trim_offsets is not None:
        made.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return made


def llama_2(metaspace: bool) -> Tokenizer:
    """As that of Llama 2, which puts a space before a text, and Mistral's, which does so at its start alone."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=sorted({*string.ascii_letters, *" .,\n:"} - {"\n", " "} | {"▁"}),
        limit_alphabet=60,
        show_progress=False,
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    made.train_from_iterator(["She was there. He was here she saw it so yes User Assistant"] * 9, trainer)
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([END])
    return made


TOKENIZERS = {
    "bytes": bytes_tokenizer(END),
    "gpt2": byte_level(False, False),
    "roberta": byte_level(True, True),
    "llama3": byte_level(False, None),
    "llama2": llama_2(metaspace=False),
    "mistral": llama_2(metaspace=True),
}
for tokenizer in TOKENIZERS.values():
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])

# How each begins, how it writes who speaks, what ends a turn, what comes after that and does not count.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "\n"),
    ),
    "closed by eos": (
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|user|>\n", "<|assistant|>\n", "</s>", ""),
    ),
    "closed by a tag": (
        "{% for m in messages %}{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
        "{{ m.content ~ '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>", "\n"),
    ),
    "closed by the tag of the next": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' ~ m.content ~ '[/INST]' }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}",
        ("", "[/INST]", "[INST]", ""),
    ),
    "closed by the next": (
        "{% for m in messages %}{% if not loop.first %}{{ '<|end|>\n' }}{% endif %}"
        "{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|end|>\n<|assistant|>' }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>", "\n"),
    ),
    "closed by who speaks next": (
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("", "<|assistant|>", "<|user|>", ""),
    ),
    "closed by words": (
        "{% for m in messages %}{{ ('\n\nUser:' if m.role == 'user' else '\n\nAssistant:') ~ ' ' ~ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}",
        ("", "\n\nAssistant:", "\n\nUser:", ""),
    ),
}


def by_hand(name: str, talk: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """The text of questions and answers in turns, and what of it counts."""
    asked, answered, end, after = TEMPLATES[name][1]
    space = " " if name == "closed by words" else ""
    opening = asked or end
    text = [(opening, False)]
    for number, (question, answer) in enumerate(talk):
        text.append((("" if not number else asked) + space + question, False))
        if name in ("chatml", "closed by a tag", "closed by the next"):
            text.append((end + after, False))
        text += [(answered, False), (space + answer, True)]
        last = number == len(talk) - 1
        # What the next message would write is not there after the last answer.
        if not last or name in ("chatml", "closed by a tag", "closed by eos"):
            text.append((end, True))
        if not last:
            text.append((after, False))
    return text


def characters(stretches) -> list[tuple[str, bool]]:
    return [(letter, bool(counts)) for text, counts in stretches for letter in text]


def spelled(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[bytes]:
    """What each token stands for in a text, from its spelling in the vocabulary alone."""
    words = [tokenizer.id_to_token(i) for i in ids]
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        found = [
            word.encode() if word in (*SPECIAL, END) else bytes(byte_of[letter] for letter in word) for word in words
        ]
    else:
        found = [
            bytes([int(word[3:5], 16)]) if word.startswith("<0x") else word.replace("▁", " ").encode() for word in words
        ]
    # A space that some put before a text, and before what follows a special token, is not of the text.
    left, spelling = text.encode(), []
    for word in found:
        word = word if left.startswith(word) else word.removeprefix(b" ")
        assert left.startswith(word), (left, word)
        left = left[len(word) :]
        spelling.append(word)
    assert not left
    return spelling


def expected_tokens(tokenizer: Tokenizer, stretches: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Tokens of the whole text, each of which counts if one of its bytes is of a letter that does."""
    text = "".join(text for text, _ in stretches)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    of_bytes = [counts for letter, counts in characters(stretches) for _ in letter.encode()]
    counts, place = [], 0
    for word in spelled(tokenizer, text, ids):
        # One that stands for no letter goes with the letter after it.
        counts.append(any(of_bytes[place : place + max(1, len(word))]))
        place += len(word)
    return ids, counts


def counted_tokens(tokenizer: Tokenizer, segments) -> tuple[list[int], list[bool]]:
    ids, _, counts = encode_examples(tokenizer, tokenizer.token_to_id(END), list(cut_segments(segments)))
    assert (ids[-1], counts[-1]) == (tokenizer.token_to_id(END), segments[-1].counts)
    return ids[:-1], counts[:-1].tolist()


spoken = st.text(st.sampled_from("Shewasthr. \n:é語12"), min_size=1, max_size=9).filter(str.strip)


@given(st.lists(st.tuples(spoken, spoken), min_size=1, max_size=3), st.sampled_from(sorted(TEMPLATES)))
def test_answers_and_what_ends_them_count(talk, name):
    messages = [
        {"role": role, "content": content}
        for pair in talk
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    segments = Template(TEMPLATES[name][0], "", "</s>", END).segments(messages)
    expected = by_hand(name, talk)
    assert characters(segments) == characters(expected)
    for tokenizer in TOKENIZERS.values():
        assert counted_tokens(tokenizer, segments) == expected_tokens(tokenizer, expected)


@given(spoken, spoken, st.sampled_from(["", " ", "\n", "é"]))
def test_completions_have_the_tokens_of_the_whole_text(prompt, completion, between):
    row = CompletionRow("prompt", "completion").read({"prompt": prompt + between, "completion": completion})
    for tokenizer in TOKENIZERS.values():
        expected = expected_tokens(tokenizer, [(prompt + between, False), (completion, True)])
        assert counted_tokens(tokenizer, row.segments) == expected


def test_no_space_is_invented_where_an_answer_begins():
    tokenizer = TOKENIZERS["llama2"]
    ids, counts = counted_tokens(tokenizer, [Segment("<|assistant|>\n", False), Segment("She was.</s>")])
    answer = [tokenizer.id_to_token(i) for i, counted in zip(ids, counts, strict=True) if counted]
    assert "".join(answer) == "She▁was.</s>"


extras = st.dictionaries(st.sampled_from(["name", "tool_calls", "thought"]), st.text(max_size=3), max_size=3)
talks = st.lists(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), spoken, extras), min_size=1, max_size=4), max_size=5
)


@given(talks)
def test_chats_are_the_same_from_parquet_as_from_json_lines(tmp_path_factory, talks):
    folder = tmp_path_factory.mktemp("chats")
    source = (
        "{% for m in messages %}{{ m.role }}{% for key in ('name', 'tool_calls', 'thought') %}"
        "{% if key in m %}{{ key ~ '=' ~ m[key] }}{% endif %}{% if m[key] is defined %}+{% endif %}{% endfor %}"
        ": {{ m.content }}<|end|>{% endfor %}"
    )
    rows = [
        {"messages": [{"role": role, "content": content, **more} for role, content, more in talk]}
        for talk in [[("user", "a", {}), ("assistant", "b", {"name": "ann"})], *talks]
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    read = []
    for name in ("a.jsonl", "a.parquet"):
        (file,) = find_inputs([str(folder / name)])
        span = whole(file)
        passed = Passed.of(span)
        row = ChatRow("messages", Template(source, "", END, END))
        read.append((list(read_documents(span, Format(example=row), passed)), passed.reasons))
    assert read[0] == read[1]
    assert read[0][0]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_tokenizers_of_this_test_differ_in_what_it_is_about(name):
    encoding = TOKENIZERS[name].encode("She was", add_special_tokens=False)
    begins = encoding.tokens[0].startswith(("Ġ", "▁"))
    assert begins == (name in ("roberta", "llama2", "mistral"))
