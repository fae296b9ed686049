import os
import struct
import subprocess
import sys
import textwrap

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastcar.training import world
from fastcar.video import _write_mp4, check_output, contact_sheet, read_video, write_sheet, write_video


@pytest.fixture(scope="module")
def clip():
    """A large yellow star over a striped background: few colours, sharp edges."""
    sprite = world.Sprite("star", "yellow", "large", "right", 16, 32)
    return world.render(world.Scene("striped", "gray", 0, (sprite,)))


def decibels(a, b):
    return 10 * np.log10(255**2 / np.square(a.astype(float) - b).mean())


def small(frames, scale):
    """Undo an enlargement by averaging."""
    count, height, width, _ = frames.shape
    return frames.reshape(count, height // scale, scale, width // scale, scale, 3).mean((2, 4))


def stream_of(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        return codec.name, codec.pix_fmt, stream.average_rate, float(stream.duration * stream.time_base), codec


def test_mp4_comes_back_enlarged_and_right_in_colour(clip, tmp_path):
    path = write_video(clip, tmp_path / "clip.mp4")
    frames = read_video(path)
    assert frames.shape == (8, 256, 256, 3) and frames.dtype == np.uint8
    assert decibels(small(frames, 4), clip) > 44
    assert np.abs(frames[:, 2::4, 2::4].astype(int) - clip).mean() < 1.5
    name, pixels, rate, seconds, codec = stream_of(path)
    assert (name, pixels, rate, seconds) == ("h264", "yuv420p", 8, 1.0)
    assert (codec.colorspace, codec.color_range) == (1, 1)  # BT.709, studio range


def test_mp4_without_x264_is_mpeg4(clip, tmp_path):
    path = tmp_path / "clip.mp4"
    _write_mp4(clip, path, 8, encoder="mpeg4")
    assert stream_of(path)[0] == "mpeg4"
    frames = read_video(path)
    assert frames.shape == (8, 256, 256, 3)
    assert decibels(small(frames, 4), clip) > 38


@pytest.mark.parametrize(
    ("size", "scale", "written"),
    [
        ((64, 64), None, (256, 256)),
        ((64, 96), None, (256, 384)),
        ((96, 96), None, (384, 384)),  # 3 would do, but 4 keeps colours whole
        ((256, 256), None, (256, 256)),
        ((301, 256), None, (602, 512)),  # an odd side is doubled
        ((64, 64), 1, (64, 64)),
        ((33, 65), 2, (66, 130)),
    ],
)
def test_mp4_scale(size, scale, written, tmp_path):
    frames = np.full((2, *size, 3), 90, np.uint8)
    assert read_video(write_video(frames, tmp_path / "a.mp4", scale=scale)).shape == (2, *written, 3)


def test_mp4_keeps_time(clip, tmp_path):
    for fps, seconds in ((8, 1.0), (16, 0.5), (0.5, 16.0), (29.97, 8 / 29.97)):
        assert stream_of(write_video(clip, tmp_path / "a.mp4", fps=fps))[3] == pytest.approx(seconds, abs=0.002)


def test_the_same_clip_is_the_same_file(clip, tmp_path):
    for extension in ("mp4", "gif", "png"):
        a, b = (write_video(clip, tmp_path / f"{name}.{extension}") for name in "ab")
        assert a.read_bytes() == b.read_bytes()


def test_gif_of_few_colours_is_exact(clip, tmp_path):
    path = write_video(clip, tmp_path / "clip.gif")
    assert np.array_equal(read_video(path), clip.repeat(4, 1).repeat(4, 2))
    with Image.open(path) as image:
        assert image.n_frames == 8
        assert image.info["loop"] == 0
        delays = []
        for i in range(8):
            image.seek(i)
            delays.append(image.info["duration"])
    assert sum(delays) == 1000 and set(delays) <= {120, 130}


def test_gif_keeps_frames_that_stand_still(tmp_path):
    frames = np.full((5, 16, 16, 3), (10, 200, 30), np.uint8)
    frames[4] = (200, 10, 30)
    assert np.array_equal(read_video(write_video(frames, tmp_path / "a.gif", scale=1)), frames)


def test_gif_is_read_alike_by_others(clip, tmp_path):
    path = write_video(clip, tmp_path / "a.gif", scale=1)
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert np.array_equal(frames, clip)


def test_gif_of_many_colours_is_close(tmp_path):
    x = np.arange(64, dtype=np.uint8)
    frames = np.stack(
        [np.stack(np.broadcast_arrays(4 * x[:, None], 4 * x[None], np.uint8(20 * t)), -1) for t in range(8)]
    )
    assert decibels(read_video(write_video(frames, tmp_path / "a.gif", scale=1)), frames) > 27


def test_png_is_a_row_then_a_grid(tmp_path):
    frames = np.arange(11, dtype=np.uint8)[:, None, None, None] * np.ones((1, 128, 128, 3), np.uint8)
    path = write_video(frames[:3], tmp_path / "row.png")
    row = np.asarray(Image.open(path))
    assert row.shape == (4 + 132, 4 + 3 * 132, 3)
    assert [row[70, 4 + 132 * i, 0] for i in range(3)] == [0, 1, 2]
    grid = np.asarray(Image.open(write_video(frames, tmp_path / "grid.png")))
    assert grid.shape == (4 + 2 * 132, 4 + 8 * 132, 3)
    assert grid[4, 4 + 7 * 132, 0] == 7
    assert [grid[4 + 132, 4 + 132 * i, 0] for i in range(4)] == [8, 9, 10, 255]


def test_contact_sheet_pixels():
    red, blue = (np.full((2, 2, 2, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    sheet = contact_sheet([("", red), ("", blue)], scale=1, gap=1)
    w, r, b = (255, 255, 255), (255, 0, 0), (0, 0, 255)
    white = [w] * 7
    assert sheet.tolist() == [[list(p) for p in line] for line in (
        white,
        [w, r, r, w, r, r, w],
        [w, r, r, w, r, r, w],
        white,
        [w, b, b, w, b, b, w],
        [w, b, b, w, b, b, w],
        white,
    )]  # fmt: skip


def test_contact_sheet_labels_take_the_lines_they_need(clip):
    bare = contact_sheet([("", clip)])
    one = contact_sheet([("dense", clip)])
    many = contact_sheet([("a large yellow star moving right over a striped gray background " * 4, clip)])
    assert one.shape == (bare.shape[0] + 22, *bare.shape[1:])
    assert many.shape[1] == bare.shape[1] and (many.shape[0] - bare.shape[0] - 4) % 18 == 0
    assert many.shape[0] > one.shape[0]
    assert np.array_equal(one[26:], bare[4:])
    assert (one[4:26] < 100).any()


def test_contact_sheet_of_unequal_lengths(clip):
    sheet = contact_sheet([("long", clip), ("short", clip[:2])])
    assert np.array_equal(sheet[-132:-4, 4:132], clip[0].repeat(2, 0).repeat(2, 1))
    assert (sheet[-132:, 4 + 2 * 132 :] == 255).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one clip"),
        ([("a", np.zeros((1, 4, 4, 3), np.uint8)), ("b", np.zeros((1, 4, 5, 3), np.uint8))], "one size"),
        ([("a", np.zeros((1, 4, 4, 3), np.float32))], "uint8"),
    ],
)
def test_contact_sheet_refuses(rows, message):
    with pytest.raises(ValueError, match=message):
        contact_sheet(rows)


def test_write_sheet(clip, tmp_path):
    rows = [("dense", clip), ("replay 0.80", clip)]
    path = write_sheet(rows, tmp_path / "sheet.png")
    assert np.array_equal(np.asarray(Image.open(path)), contact_sheet(rows))
    with pytest.raises(ValueError, match=r"'\.mp4'; expected one of \.png"):
        write_sheet(rows, tmp_path / "sheet.mp4")


@pytest.mark.parametrize(
    ("frames", "options", "message"),
    [
        (np.zeros((2, 8, 8, 3), np.float32), {}, r"uint8 \[F, H, W, 3\], got float32 \[2, 8, 8, 3\]"),
        (np.zeros((8, 8, 3), np.uint8), {}, r"got uint8 \[8, 8, 3\]"),
        (np.zeros((0, 8, 8, 3), np.uint8), {}, r"got uint8 \[0, 8, 8, 3\]"),
        (np.zeros((2, 8, 8, 1), np.uint8), {}, r"got uint8 \[2, 8, 8, 1\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), {"fps": 0}, "fps"),
        (np.zeros((2, 8, 8, 3), np.uint8), {"fps": float("nan")}, "fps .* got nan"),
        (np.zeros((2, 8, 8, 3), np.uint8), {"scale": 0}, "scale .* got 0"),
        (np.zeros((2, 8, 8, 3), np.uint8), {"scale": 1.5}, "scale .* got 1.5"),
        (np.zeros((2, 9, 8, 3), np.uint8), {"scale": 1}, "even sides, got 8x9"),
    ],
)
def test_write_refuses_and_leaves_nothing(frames, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_video(frames, tmp_path / "a.mp4", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["clip.avi", "clip", "clip.MP3", "clip.mp4.part"])
def test_unknown_extension(name, tmp_path):
    with pytest.raises(ValueError, match=r"unknown extension .*expected one of \.mp4, \.gif, \.png"):
        check_output(tmp_path / name)


def test_check_output_leaves_nothing(tmp_path):
    assert check_output(str(tmp_path / "a.MP4")) == tmp_path / "a.MP4"
    assert check_output(tmp_path / "trace.npz", extensions=(".npz",))
    assert not list(tmp_path.iterdir())


def test_check_output_of_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(check_output("a.gif")) == "a.gif"


def test_unwritable_places(tmp_path, clip):
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"folder\.mp4 is a folder; expected the name of a file"):
        check_output(tmp_path / "folder.mp4")
    with pytest.raises(OSError, match=r"a\.mp4 cannot be written: there is no folder .*/file; make it"):
        write_video(clip, tmp_path / "file" / "a.mp4")
    with pytest.raises(OSError, match=r"a\.mp4 cannot be written: there is no folder .*/nowhere; make it"):
        check_output(tmp_path / "nowhere" / "a.mp4")
    with pytest.raises(OSError, match=r"cannot be written \(File name too long\)"):
        check_output(tmp_path / ("a" * 300 + ".mp4"))
    with pytest.raises(OSError, match=r"/proc/a\.mp4 cannot be written \(.*\); choose another folder"):
        check_output("/proc/a.mp4")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(OSError, match="Permission denied"):
        check_output(tmp_path / "locked" / "a.mp4")


def test_an_existing_file_is_replaced_whole_or_not_at_all(clip, tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="scale"):
        write_video(clip, path, scale=-1)
    assert path.read_bytes() == b"old"
    write_video(clip, path)
    assert len(read_video(path)) == 8
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("extension", ["mp4", "gif", "png"])
def test_nothing_is_left_by_an_interrupt(extension, tmp_path):
    """A real process gets Ctrl-C as soon as its half-written file shows up."""
    script = f"""
        import os, pathlib, signal, threading, time
        import numpy as np
        from fastcar.video import write_video

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
        folder = pathlib.Path({str(tmp_path)!r})

        def interrupt():
            while not any(f.stat().st_size for f in folder.glob(".*.{extension}")):
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        frames = np.random.default_rng(0).integers(0, 256, (80, 96, 96, 3), dtype=np.uint8)
        try:
            write_video(frames, folder / "a.{extension}", scale=6)
        except KeyboardInterrupt:
            print("interrupted")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout == "interrupted\n"
    assert not list(tmp_path.iterdir())


def test_folder_of_png_in_the_order_of_their_numbers(tmp_path):
    for i in (0, 1, 2, 10):
        Image.fromarray(np.full((4, 6, 3), i, np.uint8)).save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    frames = read_video(tmp_path)
    assert frames.shape == (4, 4, 6, 3)
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2, 10]


def test_folder_with_frames_of_two_sizes(tmp_path):
    for i in (1, 2):
        Image.new("RGB", (i, 3)).save(tmp_path / f"{i}.png")
    with pytest.raises(ValueError, match=r"several sizes \(height, width\): \[\(3, 1\), \(3, 2\)\]"):
        read_video(tmp_path)


@pytest.mark.parametrize("name", ["a.png", "a.apng", "a.webp"])
def test_animated_pictures(name, tmp_path):
    frames = np.zeros((4, 6, 8, 3), np.uint8)
    frames[np.arange(4), 2, 1 + np.arange(4)] = (250, 120, 10)
    pictures = [Image.fromarray(frame) for frame in frames]
    options = {"lossless": True} if name.endswith("webp") else {"format": "PNG"}
    pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], duration=100, **options)
    assert np.array_equal(read_video(tmp_path / name), frames)


@settings(max_examples=20, deadline=None)
@given(total=st.integers(1, 30), frames=st.integers(1, 30))
def test_evenly_spaced_frames(total, frames, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    for i in range(total):
        Image.new("RGB", (1, 1), (i, 0, 0)).save(folder / f"{i}.png")
    if total < frames:
        with pytest.raises(ValueError, match=f"{total} frames, fewer than the {frames} asked for"):
            read_video(folder, frames)
        return
    chosen = read_video(folder, frames)[:, 0, 0, 0].astype(int)
    assert len(chosen) == frames and chosen[0] == 0
    steps = np.diff([*chosen, total])
    assert steps.min() >= 1 and steps.max() - steps.min() <= 1


def test_evenly_spaced_frames_of_an_mp4(clip, tmp_path):
    path = write_video(clip, tmp_path / "a.mp4")
    assert np.array_equal(read_video(path, 4), read_video(path)[::2])


def test_a_video_filmed_upright_is_turned(tmp_path):
    frames = np.zeros((2, 64, 96, 3), np.uint8)
    frames[:, :16, -16:] = 255  # the corner at the top right
    path = write_video(frames, tmp_path / "a.mp4", scale=1)
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 44  # in version 0 of the track header
    assert struct.unpack_from(">9i", data, matrix) == (65536, 0, 0, 0, 65536, 0, 0, 0, 2**30)
    struct.pack_into(">9i", data, matrix, 0, 65536, 0, -65536, 0, 0, 0, 0, 2**30)  # a quarter clockwise
    path.write_bytes(data)
    turned = read_video(path)
    assert turned.shape == (2, 96, 64, 3)
    assert turned[0, -8:, -8:].min() > 230  # now at the bottom right
    assert turned[0, :64].max() < 25


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png", "a.mov", "a"])
def test_unreadable_files(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match="does not exist; expected a video file"):
        read_video(path)
    for content in (b"", b"no video at all" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.* cannot be read as a video \(.+\); expected mp4"):
            read_video(path)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
def test_a_file_cut_short(name, clip, tmp_path):
    path = write_video(clip, tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(ValueError, match="cannot be read as a video"):
        read_video(path)


def test_no_frames(tmp_path):
    with pytest.raises(ValueError, match="holds no frames"):
        read_video(tmp_path)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        sound = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        sound.sample_rate = 44100
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match="no video stream"):
        read_video(tmp_path / "sound.mp4")
    with pytest.raises(ValueError, match="frames must be at least 1, got 0"):
        read_video(tmp_path / "sound.mp4", 0)
