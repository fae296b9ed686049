"""The README's Python runs as it stands, and the commands it shows exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fastcar.cli import _build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_five_lines_of_python_run(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {p.name for p in tmp_path.iterdir()} == {"clip.mp4", "trace.npz"}
    assert "replay ratio" in done.stdout


PAGES = [p.relative_to(ROOT) for p in sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.md")})]


def test_commands_in_the_documents_are_real():
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
    lines = [line.strip() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("fastcar ")]
    for line in commands:
        _build_parser().parse_args(shlex.split(line, comments=True)[1:])
    assert len(commands) > 10


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_example_in_transformers_runs(tmp_path):
    words = [sys.executable, ROOT / "examples" / "replay_in_transformers.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    ratio = float(re.findall(r"replay ratio ([\d.]+):", done.stdout)[0])
    assert ratio == pytest.approx(0.5, abs=0.03) and list(tmp_path.iterdir()) == []
