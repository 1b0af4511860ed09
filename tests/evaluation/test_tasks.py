"""Files of tasks: what is read, and what is refused."""

import collections
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from dseekjax.errors import UserError
from dseekjax.evaluation import results
from dseekjax.evaluation.likelihood import Likelihood
from dseekjax.evaluation.tasks import Choice, Continuation, Task, read_tasks
from tests.conftest import REPOSITORY

CHOICE = {"context": "a", "choices": ["b", "c"], "answer": 1}


def test_items_are_read_with_their_lines(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text(f"\n{json.dumps({**CHOICE, 'id': 7})}\n")
    (task,) = read_tasks(str(path))
    assert (task.name, task.items) == (str(path), (Choice(2, "a", ("b", "c"), 1),))
    path.write_text('{"context": "", "continuation": "é"}')
    (task,) = read_tasks(str(path))
    assert task.items == (Continuation(1, "", "é"),)


def test_a_task_has_the_name_that_tells_it_from_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.jsonl").write_text(json.dumps(CHOICE))
    assert [task.name for task in read_tasks("*/t.jsonl")] == ["a/t.jsonl", "b/t.jsonl"]
    (task,) = read_tasks(str(tmp_path / "a" / "t.jsonl"))
    assert task.name == "a/t.jsonl"


def test_a_byte_order_mark_at_the_start_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "task.jsonl"
    line = json.dumps(CHOICE)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8-sig")
    (task,) = read_tasks(str(path))
    assert [item.line for item in task.items] == [1, 2]
    path.write_text(f"{line}\n\ufeff{line}\n")
    with pytest.raises(UserError, match="line 2 is no JSON"):
        read_tasks(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON (EOF while parsing an object at column 1); mend it"),
        ("[]", "is no item; give"),
        ('{"context": "\\ud800", "continuation": "b"}', "is no JSON"),
        ('{"context": "a", "continuation": "\\ud800\\u0041"}', "is no JSON"),
        ('{"context": "a"}', "is no item; give"),
        ('{"choices": ["b", "c"], "answer": 1}', "has no context; give"),
        ({**CHOICE, "context": 3}, "has a int for a context; give a text"),
        ({**CHOICE, "choices": []}, "has a list of 0 for its choices; give a list of two or more texts"),
        ({**CHOICE, "choices": "bc"}, "has a str for its choices; give a list of two or more texts"),
        ({**CHOICE, "choices": ["b", ""]}, "has an empty choice; give some text"),
        ({**CHOICE, "answer": 2}, "has 2 for its answer, and choices from 0 to 1; give the number of one"),
        ({**CHOICE, "answer": "c"}, "has 'c' for its answer; give the number of the right choice, from 0"),
        ({**CHOICE, "answer": True}, "has True for its answer; give the number of the right choice, from 0"),
        ({"context": "a", "choices": ["b", "c"]}, "has None for its answer"),
        ({**CHOICE, "continuation": "b"}, "has both choices and a continuation; leave one of them out"),
        ('{"context": "a", "continuation": ""}', "has an empty continuation; give some text"),
        ('{"context": "a", "continuation": "b"}', "is a continuation and line 1 a choice; put them into files of"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path, line, message):
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps(CHOICE) + "\n" + (line if isinstance(line, str) else json.dumps(line)))
    with pytest.raises(UserError) as caught:
        read_tasks(str(path))
    assert str(caught.value).startswith(f"{path} line 2 {message}")
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text("\n\n")
    with pytest.raises(UserError, match="has no item; give lines of the form"):
        read_tasks(str(path))


def test_the_shipped_task_is_of_the_part_of_the_novel_that_the_quickstart_holds_out():
    novel = (REPOSITORY / "dseekjax" / "data" / "texts" / "emma.txt").read_text()
    chapters = re.split(r"(?m)^(?=CHAPTER )", novel)
    held_out = " ".join("".join(chapters[round(0.9 * len(chapters)) :]).split())
    (task,) = read_tasks("builtin:emma_endings")
    assert len(task.items) == 60
    assert {item.answer for item in task.items} == {0, 1, 2, 3}
    for item in task.items:
        assert [item.context + choice in held_out for choice in item.choices] == [i == item.answer for i in range(4)]
        assert len({tuple(sorted(re.findall(r"\w+", choice))) for choice in item.choices}) == 1
        assert len(set(item.choices)) == 4


def test_who_knows_nothing_scores_the_shipped_task_by_chance():
    """Models that look at the word before alone, and find each pair of words as likely as chance has it."""
    (task,) = read_tasks("builtin:emma_endings")
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        score_of = collections.defaultdict(rng.standard_normal)
        for item in task.items:
            scores = []
            for choice in item.choices:
                words = [*item.context.split()[-1:], *choice.split()]
                scores.append(sum(score_of[pair] for pair in itertools.pairwise(words)))
            found.append(int(np.argmax(scores)) == item.answer)
    # Six standard errors.
    assert np.mean(found) == pytest.approx(1 / 4, abs=6 * math.sqrt(3 / 16 / len(found)))


def test_the_shipped_endings_are_of_two_swaps_done_or_not():
    (task,) = read_tasks("builtin:emma_endings")
    for item in task.items:
        right = item.choices[item.answer].split()
        moved = [
            {place for place, (one, other) in enumerate(zip(right, choice.split(), strict=True)) if one != other}
            for choice in item.choices
        ]
        none, one, other, both = sorted(moved, key=len)
        assert (len(none), len(one), len(other)) == (0, 2, 2)
        assert both == one | other
        assert not one & other


def test_choices_are_compared_as_they_are_and_by_their_bytes(monkeypatch):
    choices = (" ab", "éé", "abcdefgh")
    task = Task("t", Path("t"), (Choice(1, "x", choices, 0), Choice(2, "y", choices, 1), Choice(3, "z", choices, 1)))
    # Over bytes the second is best, over characters the first, over squares of either the third.
    found = [Likelihood(log_probability, 1, False) for log_probability in (-3.0, -3.6, -8.2)] * 3
    monkeypatch.setattr(results, "log_likelihood", lambda trained, requests, **options: found)
    result = results.run_task(None, task)
    assert [(item["chosen"], item["chosen_per_byte"]) for item in result.items] == [(0, 1)] * 3
    assert (result.accuracy.value, result.accuracy_per_byte.value) == (1 / 3, 2 / 3)
    # Of 1, 0, 0: the standard deviation is the root of 1 / 3, and that of their mean of 1 / 9.
    assert result.accuracy.standard_error == pytest.approx(1 / 3)
    assert [item["num_bytes"] for item in result.items] == [[3, 4, 8]] * 3
    assert results.Share.of([True]) == results.Share(1.0, None)
