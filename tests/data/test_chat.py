"""Conversations as text and tokens, against what was written out by hand."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from dseekjax.data.encoding import encode_examples
from dseekjax.data.reading.chat import NotAConversationError, Template, load_template
from dseekjax.data.reading.parts import cut_segments
from dseekjax.data.tokenizers import bytes_tokenizer
from dseekjax.errors import UserError
from tests.data.corpora import END

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{ bos_token }}{% for message in messages %}{% if loop.first and message.role == 'assistant' %}
{{ raise_exception('the user speaks first') }}{% endif %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = bytes_tokenizer(END)
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made


def template(source, bos_token="", eos_token=END):
    return Template(source, bos_token, eos_token, END)


def tokens_and_counts(tokenizer, segments):
    """The tokens of a conversation as words, and for each 1 or 0: whether it counts."""
    ids, _, counts = encode_examples(tokenizer, tokenizer.token_to_id(END), list(cut_segments(segments)))
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids], counts.tolist()


def by_hand(*stretches):
    """Words between bars are one token, all else is letters; what is in a tuple counts."""
    words, counts = [], []
    for stretch in stretches:
        counted = isinstance(stretch, tuple)
        for word in stretch[0] if counted else stretch:
            tokens = [word] if word in (*SPECIAL, END) else list(word)
            words += tokens
            counts += [counted] * len(tokens)
    return words, counts


def test_chatml_counts_answers_with_the_token_that_ends_them(tokenizer):
    expected = by_hand(
        ["<|im_start|>", "system\nBe short.", "<|im_end|>", "\n"],
        ["<|im_start|>", "user\n1+1?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"],
        (["2", "<|im_end|>"],),
        ["\n", "<|im_start|>", "user\n2+2?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"],
        (["4", "<|im_end|>", END],),
    )
    assert tokens_and_counts(tokenizer, template(CHATML).segments(TALK)) == expected
    assert tokens_and_counts(tokenizer, load_template("chatml", END).segments(TALK)) == expected


def test_llama3_begins_with_its_token_and_a_question_at_the_end_does_not_count(tokenizer):
    llama3 = template(LLAMA3, "<|begin_of_text|>", "<|eot_id|>")
    head, tail = ("<|start_header_id|>", "user", "<|end_header_id|>", "\n\n"), ["<|eot_id|>"]
    answer = ("<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n")
    expected = by_hand(
        ["<|begin_of_text|>", *head, "1+1?", *tail, *answer],
        (["2", *tail],),
        [*head, "2+2?", *tail, END],
    )
    assert tokens_and_counts(tokenizer, llama3.segments(TALK[1:4])) == expected


def test_plain_needs_no_tokens_of_its_own_and_is_closed_once():
    words, counts = tokens_and_counts(bytes_tokenizer(END), load_template("plain", END).segments(TALK[1:]))
    asked, again = "User:\n1+1?\n\nAssistant:\n", "\n\nUser:\n2+2?\n\nAssistant:\n"
    assert (words, counts) == by_hand([asked], (["2", END],), [again], (["4", END],))


turns = st.text(st.sampled_from(string.ascii_letters + " \n.é語"), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(turns, turns), min_size=1, max_size=4), st.sampled_from(["chatml", "plain"]))
def test_what_counts_is_the_answers_and_all_is_the_text_of_the_template(tokenizer, pairs, name):
    messages = [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    made = load_template(name, END)
    segments = made.segments(messages)
    ends = "<|im_end|>" if name == "chatml" else END
    counted = [segment.text for segment in segments if segment.counts]
    last = pairs[-1][1] + (ends if name == "chatml" else "")
    assert counted == [*(answer + ends for _, answer in pairs[:-1]), last]
    text = "".join(segment.text for segment in segments)
    whole = made._render(messages, False)
    assert whole.startswith(text)
    assert whole.removeprefix(text).strip() in ("", END)


def test_a_tokenizer_config_brings_template_and_tokens(tmp_path):
    settings = {
        "chat_template": [{"name": "default", "template": LLAMA3}, {"name": "tool_use", "template": "other"}],
        "bos_token": {"content": "<|begin_of_text|>", "lstrip": False},
        "eos_token": "<|eot_id|>",
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(settings))
    expected = template(LLAMA3, "<|begin_of_text|>", "<|eot_id|>")
    assert load_template(str(path), END) == expected
    (tmp_path / "chat_template.jinja").write_text(LLAMA3)
    assert load_template(str(tmp_path / "chat_template.jinja"), END) == expected
    path.unlink()
    assert load_template(str(tmp_path / "chat_template.jinja"), END) == template(LLAMA3)


def test_templates_have_what_transformers_gives_them_and_no_more():
    source = (
        "{% if tools is not none or documents is not none %}{{ raise_exception('no') }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{{ [message.content] | tojson }}{% endfor %}{{ strftime_now('%%') }}"
    )
    assert template(source)._render([{"role": "user", "content": "<é>"}], False) == '["<é>"]%'
    with pytest.raises(NotAConversationError, match="access to attribute '__class__' of 'str' object is unsafe"):
        template("{{ ''.__class__.__mro__ }}")._render([], False)
    with pytest.raises(NotAConversationError, match="access to attribute 'append' of 'list' object is unsafe"):
        template("{{ messages.append(1) }}")._render([], False)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", r"is no Jinja template \(Expected an expression"),
        ("{% generation %}x{% endgeneration %}", r"is no Jinja template \(Encountered unknown tag 'generation'"),
        ("{{ nothing.at_all }}", r"assistant has what the chat template refuses \('nothing' is undefined\)"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "has, by this chat template"),
        ("{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}", "leaves out what the user"),
        (
            "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
            "assistant has, by this chat template, another text before message 1 with it than without; give",
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "nothing that ends message 1, which is the assist"),
        ("{% for m in messages %}{{ m.contents }}{% endfor %}", "mine.jinja leaves out what the user says: tried with"),
        ("", "leaves out what the user says"),
        ("{% for m in messages %}{{ m.role }}:{% endfor %}", "leaves out what the user says"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out what the assistant says: tried with 'answering'",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(source, message, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    with pytest.raises(UserError, match=message) as raised:
        load_template(str(path), END)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_missing_templates_are_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for spec, message in (
        ("chatlm", r"cannot read the chat template chatlm \(No such file or directory\); give chatml, plain, or"),
        (str(tmp_path / "tokenizer_config.json"), r"tokenizer_config\.json has no chat_template; give"),
        (str(tmp_path / "other.json"), "cannot read the chat template .*other.json"),
    ):
        with pytest.raises(UserError, match=message):
            load_template(spec, END)


def test_markup_has_to_be_tokens(tokenizer):
    load_template("chatml", END).refuse_unknown_tokens(tokenizer)
    load_template("plain", END).refuse_unknown_tokens(bytes_tokenizer(END))
    with pytest.raises(UserError, match=r"writes '<\|im_start\|>', which is no token of the tokenizer"):
        load_template("chatml", END).refuse_unknown_tokens(bytes_tokenizer(END))
    source = "{% for m in messages %}<|{{m.role}}|>{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"writes '<\|user\|>', which is no token"):
        template(source).refuse_unknown_tokens(tokenizer)
    with_roles = bytes_tokenizer(END)
    with_roles.add_special_tokens(["<|user|>", "<|assistant|>"])
    template(source).refuse_unknown_tokens(with_roles)
    with pytest.raises(UserError, match="writes '<s>', which is no token"):
        template("", "<s>").refuse_unknown_tokens(tokenizer)


@pytest.mark.parametrize("content", ["r", "I", 'say "x"', "User", "over", "2\n\n1", ""])
@pytest.mark.parametrize(
    ("asked", "ending"),
    [
        ("{{ 'User: ' ~ m.content ~ ' (over, User)' }}", "\nUser:"),
        ("{{ '[INST] ' ~ m.content ~ ' [/INST]' }}", "\n[INST]"),
        ("{{ '### Q: ' ~ m.content | upper }}", "\n### Q:"),
        ("{{ 'Q=' ~ m.content | tojson }}", '\nQ="'),
    ],
)
def test_nothing_that_a_user_says_counts_for_the_end_of_a_turn(content, asked, ending):
    source = "{% for m in messages %}{% if m.role == 'user' %}" + asked + "{% else %}{{ '\nBot: ' ~ m.content ~ '\n' }}"
    source += "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\nBot: ' }}{% endif %}"
    said = [("user", "hi"), ("assistant", "yo"), ("user", content), ("assistant", "no")]
    segments = template(source).segments([{"role": role, "content": text} for role, text in said])
    assert [segment.text for segment in segments if segment.counts] == [f"yo{ending}", "no\n"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "has a str, where a list of messages is needed"),
        ([], "has no messages"),
        (["hello"], "has a str as message 0, where an object is needed"),
        (
            [{"role": "human", "content": "x"}],
            "has 'human' as message 0, where its role is one of system, devel",
        ),
        ([{"content": "x"}], "has None as message 0, where its role"),
        ([{"role": "user", "content": ["x"]}], "has a list as message 0, where its content is a string"),
        ([TALK[1], {"role": "assistant", "content": " "}], "has nothing but white space as message 1"),
        ([TALK[1]], "has no message of the assistant"),
        ([TALK[2]], r"has what the chat template refuses \(the user speaks first\)"),
    ],
)
def test_odd_messages_are_told_why(messages, message):
    with pytest.raises(NotAConversationError, match=message):
        template(LLAMA3).segments(messages)
