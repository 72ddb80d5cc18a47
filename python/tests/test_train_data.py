"""Text of the trainer: what is read, what is held out, and in which order."""

import gzip
import os

import numpy as np
import pytest

from moelith.train import data
from moelith.train.errors import TrainError


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x00binary too\xff")
    assert data.text_from(str(tmp_path / "a.txt")).data == b"\x00binary too\xff"
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"packed"))
    assert data.text_from(str(tmp_path / "b.gz")).data == b"packed"
    assert data.text_from(str(tmp_path / "a.txt"), max_bytes=4).data == b"\x00bin"


def test_a_folder_is_read_in_one_order_without_binaries_hidden_files_and_repetitions(tmp_path):
    for folder in ("here", "there"):
        names = [f"{i}/f{i}.txt" for i in range(8)]
        for name in names if folder == "here" else reversed(names):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True)
            path.write_text(f"text {path.name}")
        (tmp_path / folder / "copy.txt").write_text("text f3.txt")
        (tmp_path / folder / "program").write_bytes(b"\x7fELF\0\0")
        (tmp_path / folder / ".hidden").write_text("secret")
        (tmp_path / folder / "packed.gz").write_bytes(gzip.compress(b"packed"))
    text = data.text_from(str(tmp_path / "here")).data
    assert text == data.text_from(str(tmp_path / "there")).data
    assert sorted(text.split(b"\n")) == sorted([b"packed", *(b"text f%d.txt" % i for i in range(8))])


def make_unreadable(kind, path):
    if kind == "missing":
        return "No such file"
    if kind == "empty file":
        path.touch()
        return "the file is empty"
    if kind == "named pipe":
        os.mkfifo(path)
        return "not a regular file"
    if kind == "damaged gz":
        (path.parent / "text.gz").write_bytes(gzip.compress(b"text" * 100)[:-20])
        path.symlink_to(path.parent)
        return "text.gz"
    path.mkdir()
    if kind == "dangling link in a folder":
        (path / "link").symlink_to("nowhere")
        return "link: No such file"
    if kind == "folder of binaries":
        (path / "a").write_bytes(b"\0\1\2")
    return "holds no text"


@pytest.mark.parametrize("kind", ["missing", "empty file", "named pipe", "damaged gz", "empty folder",
                                  "folder of binaries", "dangling link in a folder"])
def test_unreadable_data_is_an_error_that_names_it(tmp_path, kind):
    path = tmp_path / "data"
    expected = make_unreadable(kind, path)
    with pytest.raises(TrainError, match=expected) as error:
        data.text_from(str(path))
    assert str(error.value).startswith("DATA: ") and str(tmp_path) in str(error.value)


def test_the_default_text_is_large_enough_and_the_same_each_time():
    text = data.default_text()
    assert len(text.data) > 1_000_000 and text.data == data.default_text().data
    assert {"project", "Python library"} <= text.parts.keys()
    assert b"namespace moelith" in text.data


@pytest.mark.parametrize("size, context", [(130, 64), (10_000, 64), (3_000_000, 256), (30_000_000, 256)])
def test_whole_blocks_are_held_out(size, context):
    text = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    training, held_out = data.split(text, context)
    assert len(training) + len(held_out) == size
    assert context < len(held_out) <= max(size // 32, context + 1, size // 2 if size < 1000 else 0)
    assert len(held_out) <= 256 * 1024
    position = text.index(held_out[:context + 1].tobytes())  # a block, as it stands in the text, is not trained on
    assert training.tobytes().find(text[position:position + context + 1]) < 0


def test_too_little_text_is_an_error():
    with pytest.raises(TrainError, match="DATA: 100 bytes of text are too few: a context of 64 bytes needs 130"):
        data.split(b"x" * 100, 64)


def test_unigram_entropy():
    assert data.unigram_entropy(np.frombuffer(b"aabc", dtype=np.uint8)) == 1.5
    assert data.unigram_entropy(np.frombuffer(b"aaaa", dtype=np.uint8)) == 0
    assert data.unigram_entropy(np.arange(256, dtype=np.uint8)) == 8


def test_windows_cover_an_epoch_once_and_go_on_from_a_position():
    text = np.arange(1000, dtype=np.uint32).astype(np.uint8)
    windows = data.Windows(text, context=10, seed=3)
    epochs = [windows.next_batch(windows.per_epoch) for _ in range(2)]
    for epoch in epochs:
        assert len({row[:2].tobytes() + row[-2:].tobytes() for row in epoch}) > 20
        assert ((np.diff(epoch.astype(int), axis=1) % 256) == 1).all()  # pieces of the text as they stand
    assert not np.array_equal(*epochs)

    again = data.Windows(text, context=10, seed=3, position=37)
    np.testing.assert_array_equal(again.next_batch(100), np.concatenate(epochs)[37:137])
    first = [data.Windows(text, context=10, seed=seed).next_batch(5) for seed in (3, 4)]
    assert not np.array_equal(*first)


def test_starts_of_an_epoch_are_distinct():
    text = np.frombuffer(b"".join(i.to_bytes(4, "big") for i in range(5000)), dtype=np.uint8)
    windows = data.Windows(text, context=20, seed=0)
    batch = windows.next_batch(windows.per_epoch)
    assert len({row.tobytes() for row in batch}) == windows.per_epoch >= len(text) // 20 - 2


def test_a_text_of_one_window_is_enough():
    windows = data.Windows(np.arange(65, dtype=np.uint8), context=64, seed=0)
    np.testing.assert_array_equal(windows.next_batch(3), np.tile(np.arange(65, dtype=np.uint8), (3, 1)))


def test_held_out_windows_predict_each_byte_once():
    text = np.arange(101, dtype=np.uint8)
    windows = data.held_out_windows(text, context=10)
    np.testing.assert_array_equal(windows[:, 1:].flatten(), text[1:])
    assert data.held_out_windows(text, 10, at_most=4)[:, 0].tolist() == [0, 20, 50, 70]
