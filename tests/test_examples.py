"""The examples run as their heads say."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from test_docs import ROOT, read, run, shortened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("classify.py", 95), ("segment.py", 92), ("finetune_loop.py", 88)]
)
def test_an_example_of_ones_own_loop_runs_as_its_head_says(name, least, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True)
    head = read(f"examples/{name}").split('"""')[1].replace("\\\n", "")
    commands = re.findall(r"^    (\S.*)$", head, re.MULTILINE)
    assert commands[-1].startswith("torchrun --standalone --nproc-per-node 2")
    printed = [run(shortened(command, 2), tmp_path) for command in commands]
    last = [re.search(r"^epoch \d+: ([\d.]+)%\s*\Z", text, re.MULTILINE) for text in printed]
    scores = [float(found[1]) for found in last if found]
    assert len(scores) == 2  # the plain loop and the planned one
    assert min(scores) > least


@pytest.mark.slow
def test_the_example_of_fine_tuning_runs(tmp_path):
    brief = read("examples/finetune.py").replace('"budget": 3', '"budget": 1, "learning": 0')
    (tmp_path / "finetune.py").write_text(brief.replace("epochs=8", "epochs=2"))
    assert "of the held-out images" in run(f"{sys.executable} finetune.py", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "least"), [("lightning", 90), ("transformers", 80), ("accelerate", 90)]
)
def test_an_example_in_somebody_elses_trainer_changes_ten_lines_at_most_and_runs(
    trainer, least, tmp_path
):
    pytest.importorskip(trainer, reason=f"pip install 'batchwright[{trainer}]'")
    text = read(f"examples/in_{trainer}.py")
    body = text.split('"""', 2)[2]
    changed = [one for one in body.splitlines() if re.search(r"\bbw\b|\bfeed\b", one)]
    assert 2 <= len(changed) <= 10
    (tmp_path / f"in_{trainer}.py").write_text(text)
    (command,) = re.findall(r"^    (\S.*)$", text.split('"""')[1], re.MULTILINE)
    printed = run(command, tmp_path)
    assert float(re.search(r"^right: ([\d.]+)%", printed, re.MULTILINE)[1]) > least
