import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fastcar.training import world
from fastcar.training.clips import FolderClips, WorldClips
from fastcar.video import write_video


def write_captions(folder, rows, kind="csv"):
    if kind == "csv":
        with (folder / "captions.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["file", "caption"])
            writer.writerows(rows)
    else:
        lines = [json.dumps({"file": name, "caption": caption}) for name, caption in rows]
        (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two real videos and a folder of frames, without captions."""
    folder = tmp_path_factory.mktemp("videos")
    for i, name in enumerate(["a.mp4", "b.gif"]):
        write_video(world.render(world.sample("train", 0, i)[0]), folder / name)
    (folder / "c").mkdir()
    for t in range(16):
        picture = np.zeros((64, 96, 3), np.uint8)
        picture[:, 16:80] = 10 * t
        Image.fromarray(picture).save(folder / "c" / f"{t}.png")
    return folder


@pytest.fixture
def folder(videos, tmp_path):
    for video in videos.iterdir():
        (tmp_path / video.name).symlink_to(video)
    return tmp_path


ROWS = [("a.mp4", "first, with a comma"), ("b.gif", " second\t one "), ("c", "third"), ("a.mp4", "first again")]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folder_of_videos(kind, folder):
    write_captions(folder, ROWS, kind)
    source = FolderClips(folder, side=64, frames=8)
    assert len(source) == 4
    assert source.captions == ["first, with a comma", "second one", "third", "first again"]
    for i in range(2):
        frames, caption = source.get(i)
        assert caption == source.captions[i]
        assert frames.shape == (8, 64, 64, 3) and frames.dtype == np.uint8
        truth = world.render(world.sample("train", 0, i)[0])
        assert np.abs(frames.astype(int) - truth).mean() < 2
    assert np.array_equal(source.get(0)[0], source.get(3)[0])
    frames, _ = source.get(2)
    assert (frames == 20 * np.arange(8)[:, None, None, None]).all()  # the middle square of every second frame


def test_resizing_and_choosing_frames(folder):
    write_captions(folder, ROWS)
    frames, _ = FolderClips(folder, side=16, frames=4).get(2)
    assert frames.shape == (4, 16, 16, 3)
    assert (frames == 40 * np.arange(4)[:, None, None, None]).all()


@pytest.mark.parametrize("size", [(32, 48), (48, 32), (33, 50)])
def test_the_middle_square(size, tmp_path):
    (tmp_path / "v").mkdir()
    picture = np.zeros((*size, 3), np.uint8)
    top, left = ((side - min(size)) // 2 for side in size)
    picture[top : top + min(size), left : left + min(size)] = 200
    Image.fromarray(picture).save(tmp_path / "v" / "0.png")
    write_captions(tmp_path, [("v", "a square")])
    frames, _ = FolderClips(tmp_path, side=8, frames=1).get(0)
    assert (frames == 200).all()


def test_a_byte_order_mark_and_more_columns(folder):
    (folder / "captions.csv").write_bytes(b"\xef\xbb\xbfcaption, licence, file\r\nein T\xc3\xb6pfchen, CC0, a.mp4\r\n")
    assert FolderClips(folder).captions == ["ein Töpfchen"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (None, "", FileNotFoundError, r"no captions\.csv \(columns file,caption\) or captions\.jsonl"),
        ("captions.csv", "", ValueError, "lacks the column 'file' and 'caption'"),
        ("captions.csv", "file,text\na.mp4,x\n", ValueError, "lacks the column 'caption'; .* got 'file,text'"),
        ("captions.csv", "file,caption\n", ValueError, "names no clips"),
        ("captions.csv", "file,caption\na.mp4,x\nz.mp4,x\n", FileNotFoundError, "line 3: the video .*z.mp4 does not"),
        ("captions.csv", "file,caption\na.mp4\n", ValueError, r"line 2: no 'caption' \(got None\)"),
        ("captions.csv", "file,caption\na.mp4, \n", ValueError, r"line 2: no 'caption' \(got ''\)"),
        ("captions.csv", "file,caption\na.mp4,x, y\n", ValueError, "line 2: more values than columns; quote captions"),
        ("captions.csv", b"file,caption\na.mp4,\xff\n", ValueError, "cannot be read as CSV in UTF-8"),
        ("captions.jsonl", '{"file": "a.mp4"}\n', ValueError, "line 1: no 'caption'"),
        ("captions.jsonl", '\n{"file": 3, "caption": "x"}\n', ValueError, r"line 2: no 'file' \(got 3\)"),
        ("captions.jsonl", '{"file": "a.mp4", "caption": "x"\n', ValueError, "line 1: no JSON"),
        ("captions.jsonl", '["a.mp4", "x"]\n', ValueError, 'line 1: expected {"file"'),
        ("captions.jsonl", b'{"file": "\xff"}', ValueError, "cannot be read in UTF-8"),
        ("captions.jsonl", "\n", ValueError, "names no clips"),
    ],
)
def test_bad_captions(name, content, error, message, folder):
    if name:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(error, match=message):
        FolderClips(folder)


def test_bad_folders_and_sizes(folder):
    write_captions(folder, ROWS)
    with pytest.raises(ValueError, match="at least 1, got 0 and 8"):
        FolderClips(folder, side=0)
    write_captions(folder, ROWS, "jsonl")
    with pytest.raises(ValueError, match=r"both captions\.csv and captions\.jsonl"):
        FolderClips(folder)
    with pytest.raises(FileNotFoundError, match="is no folder; expected one with videos"):
        FolderClips(folder / "a.mp4")


def test_bad_videos_are_named_when_read(folder):
    (folder / "broken.mp4").write_bytes(b"no video")
    write_captions(folder, [("a.mp4", "short"), ("broken.mp4", "broken"), ("c", "gone")])
    source = FolderClips(folder, frames=9)
    with pytest.raises(ValueError, match=r"captions\.csv, line 2: .*a\.mp4 has 8 frames, fewer than the 9 asked for"):
        source.get(0)
    with pytest.raises(ValueError, match=r"captions\.csv, line 3: .*broken\.mp4 cannot be read as a video"):
        source.get(1)
    (folder / "c").unlink()
    with pytest.raises(FileNotFoundError, match=r"captions\.csv, line 4: .*c does not exist"):
        source.get(2)


def many(folder, count):
    """So many files that count as videos until they are read."""
    rows = []
    for i in range(count):
        name = f"{i:03}.mp4"
        (folder / name).touch()
        rows += [(name, f"clip {i}"), (name, f"clip {i} told otherwise")]
    write_captions(folder, rows)


def test_split(tmp_path):
    many(tmp_path, 400)
    train, validation = FolderClips.split(tmp_path, side=32, frames=4)
    assert len(train) + len(validation) == 800
    assert not {c.split()[1] for c in train.captions} & {c.split()[1] for c in validation.captions}
    assert 20 <= len(validation) <= 60
    assert (train.side, validation.frames) == (32, 4)
    again = FolderClips.split(tmp_path, side=32, frames=4)
    assert [repr(source) for source in again] == [repr(train), repr(validation)]
    held_out = validation.captions
    many(tmp_path, 200)
    assert [c for c in held_out if int(c.split()[1]) < 200] == FolderClips.split(tmp_path)[1].captions


@pytest.mark.parametrize("count", [2, 3, 5])
def test_split_of_a_few(count, tmp_path):
    many(tmp_path, count)
    train, validation = FolderClips.split(tmp_path)
    assert len(train) >= 2
    assert len(validation) >= 2
    assert len(train) + len(validation) == 2 * count


def test_split_of_one(tmp_path):
    many(tmp_path, 1)
    with pytest.raises(ValueError, match="names one video; training and validation need at least two"):
        FolderClips.split(tmp_path)


def test_repr_of_a_folder_identifies_its_content(folder, tmp_path_factory):
    write_captions(folder, ROWS)
    known = repr(FolderClips(folder))
    assert known.startswith("FolderClips(side=64, frames=8, count=4, ")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (elsewhere / path.name).symlink_to(path.resolve())
    assert repr(FolderClips(elsewhere)) == known
    different = [repr(FolderClips(folder, side=32)), repr(FolderClips(folder, frames=4))]
    write_captions(folder, [("a.mp4", "changed"), *ROWS[1:]])
    different.append(repr(FolderClips(folder)))
    write_captions(folder, ROWS)
    (folder / "b.gif").unlink()
    (folder / "b.gif").write_bytes(b"shorter")
    different.append(repr(FolderClips(folder)))
    assert len({known, *different}) == 5


def test_world_clips():
    source = WorldClips("validation", seed=3, count=10)
    assert len(source) == 10
    frames, caption = source.get(4)
    scene, expected = world.sample("validation", 3, 4)
    assert caption == expected
    assert np.array_equal(frames, world.render(scene))
    with pytest.raises(ValueError, match="unknown split 'all'; expected one of train, validation, test"):
        WorldClips("all")


def test_repr_of_the_world_identifies_its_content(monkeypatch):
    known = repr(WorldClips("test", 1, 5))
    assert known.startswith("WorldClips('test', seed=1, count=5, ")
    assert repr(WorldClips("test", 1, 5)) == known
    code = "from fastcar.training.clips import WorldClips; print(WorldClips('test', 1, 5))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == known  # the same in another process
    others = [repr(WorldClips(*args)) for args in (("train", 1, 5), ("test", 2, 5), ("test", 1, 6))]
    monkeypatch.setattr(world, "STEP", 5)
    assert len({known, repr(WorldClips("test", 1, 5)), *others}) == 5
