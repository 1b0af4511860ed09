"""Fields other than tokens come through the same loader."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from dseekjax.data import examples
from dseekjax.data.batches import EvaluationBatches
from dseekjax.data.endless import Shuffled
from dseekjax.data.examples import Examples, write_examples
from dseekjax.data.feed import TrainingFeed
from dseekjax.errors import UserError


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "digits"
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.uint8)
    write_examples(
        folder, ({"image": image, "label": np.int32(label)} for image, label in zip(images, labels, strict=True))
    )
    return folder, images, labels


def test_an_epoch_of_digits_has_every_image_with_its_label_once(digits):
    folder, images, labels = digits
    digit_records = Examples.of(folder)
    assert len(digit_records) == 1797
    (batch,) = (1797,)
    feed = TrainingFeed(
        [Shuffled(digit_records, 3)],
        [1.0],
        [2],
        global_batch_size=batch,
        rows=np.arange(batch),
        num_batches=2,
        prefetch=1,
    )
    expected = sorted((image.tobytes(), label) for image, label in zip(images, labels.tolist(), strict=True))
    epochs = list(feed.start(feed.state(0)))
    assert len(epochs) == 2
    for fields in epochs:
        assert fields["image"].shape == (1797, 8, 8)
        assert fields["image"].dtype == np.uint8
        assert fields["label"].dtype == np.int32
        found = zip(fields["image"], fields["label"].tolist(), strict=True)
        assert sorted((image.tobytes(), label) for image, label in found) == expected
    assert (epochs[0]["label"] != epochs[1]["label"]).any()


def test_evaluation_fills_up_the_last_batch(digits):
    folder, images, _ = digits
    batches = EvaluationBatches([Examples.of(folder)], 500, np.arange(500))
    assert len(batches) == 4
    assert (batches[1]["image"] == images[500:1000]).all()
    assert (batches[3]["image"][297:] == 0).all()


@given(st.lists(st.integers(0, 1796), min_size=1, max_size=9))
def test_any_order_is_read(digits, indices):
    folder, images, labels = digits
    fields = Examples.of(folder).read(np.asarray(indices))
    assert (fields["image"] == images[indices]).all()
    assert (fields["label"] == labels[indices]).all()


def test_what_is_wrong_is_one_sentence(digits, tmp_path):
    folder, _, _ = digits
    with pytest.raises(UserError, match=r"cannot write .*File exists"):
        write_examples(folder, [{"x": 1}])
    with pytest.raises(UserError, match="example 1 has the fields"):
        write_examples(tmp_path / "a", [{"x": np.zeros(2)}, {"x": np.zeros(3)}])
    with pytest.raises(UserError, match="there are no examples"):
        write_examples(tmp_path / "b", [])
    for nothing in ({}, {"x": object()}):
        with pytest.raises(UserError, match="give arrays or numbers of a fixed size"):
            write_examples(tmp_path / "b", [nothing])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="holds no examples that can be read"):
        Examples.of(tmp_path)
    write_examples(tmp_path / "c", [{"x": 1}])
    (file,) = (tmp_path / "c").glob("*.array_record")
    file.write_bytes(b"no")
    with pytest.raises(UserError, match="is damaged: the checksum of examples-00000"):
        Examples.of(tmp_path / "c")


def test_many_examples_lie_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "FILE_BYTES", 100)
    write_examples(tmp_path / "many", ({"x": np.arange(i, i + 4)} for i in range(20)))
    assert len(list((tmp_path / "many").glob("*.array_record"))) == 5
    assert (Examples.of(tmp_path / "many").read(np.arange(19, -1, -1))["x"][:, 0] == np.arange(19, -1, -1)).all()
