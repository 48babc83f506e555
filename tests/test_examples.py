"""The examples run as their heads say."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from textwrap import indent

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from forked import forking
from test_docs import ROOT, blocks, entered, quickly, read, shortened

IMPORTED = ("lightning", "transformers.trainer")  # by the programs themselves


@pytest.fixture(scope="module", autouse=True)
def forks():
    """What the programs of this file are forked from."""
    with forking(*(one for one in IMPORTED if find_spec(one.partition(".")[0]))):
        yield


@pytest.fixture
def prints(tmp_path_factory):
    """Folder for what they print."""
    return tmp_path_factory.mktemp("prints")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("classify.py", 95), ("segment.py", 92), ("finetune_loop.py", 88)]
)
def test_an_example_of_ones_own_loop_runs_as_its_head_says(name, least, tmp_path, prints):
    shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True)
    head = read(f"examples/{name}").split('"""')[1].replace("\\\n", "")
    commands = re.findall(r"^    (\S.*)$", head, re.MULTILINE)
    assert commands[-1].startswith("torchrun --standalone --nproc-per-node 2")
    # With the loop's own batch; a plan's own, and so the accuracy, follows the machine's speed.
    given = [
        re.sub("base_batch=([0-9]+)", r"\g<0> global_batch=\1 probe.learning=0", shortened(command))
        for command in commands
    ]
    printed = [entered(command, tmp_path, prints) for command in given]
    last = [re.search(r"^epoch \d+: ([\d.]+)%\s*\Z", text, re.MULTILINE) for text in printed]
    scores = [float(found[1]) for found in last if found]
    assert len(scores) == 2  # the plain loop and the planned one
    assert min(scores) > least


@pytest.mark.slow
def test_the_example_of_fine_tuning_runs(tmp_path, prints):
    brief = read("examples/finetune.py").replace("epochs=8", 'epochs=2, precision="float32"')
    brief = brief.replace('"budget": 3', '"budget": 0.3, "learning": 0')
    (tmp_path / "finetune.py").write_text(brief)
    assert "of the held-out images" in entered("python finetune.py", tmp_path, prints)


@pytest.mark.slow
def test_the_example_of_images_with_an_augmentation_of_ones_own_learns(tmp_path, prints):
    text = read("examples/own_images.py")
    (tmp_path / "own_images.py").write_text(text)
    (command,) = re.findall(r"^    (batchwright .*)$", text.split('"""')[1], re.MULTILINE)
    keys = "global_batch=64 precision=float32 workers=1 launch=in-process loaders=0"
    short = quickly(command.replace("epochs=8", "epochs=3"))
    entered(f"{short} {keys}", tmp_path, prints)
    (run,) = (tmp_path / "runs").iterdir()
    assert bw.load(run).accuracy > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "least"), [("lightning", 90), ("transformers", 80), ("accelerate", 90)]
)
def test_an_example_in_somebody_elses_trainer_changes_ten_lines_at_most_and_runs(
    trainer, least, tmp_path, prints
):
    pytest.importorskip(trainer, reason=f"pip install 'batchwright[{trainer}]'")
    text = read(f"examples/in_{trainer}.py")
    body = text.split('"""', 2)[2]
    changed = [one for one in body.splitlines() if re.search(r"\bbw\b|\bfeed\b", one)]
    assert 2 <= len(changed) <= 10
    (tmp_path / f"in_{trainer}.py").write_text(text)
    (command,) = re.findall(r"^    (\S.*)$", text.split('"""')[1], re.MULTILINE)
    printed = entered(command, tmp_path, prints)
    assert float(re.search(r"^right: ([\d.]+)%", printed, re.MULTILINE)[1]) > least


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "entry"), [("lightning", "fit"), ("transformers", "train")])
def test_the_trainers_of_the_page_run(trainer, entry, tmp_path, prints):
    """In the example of that trainer, for an epoch."""
    pytest.importorskip(trainer, reason=f"pip install 'batchwright[{trainer}]'")
    found = blocks(read("docs/trainers.md"), "python")
    (shown,) = [code for code in found if f"bw.For{trainer.title()}(" in code]
    brief = "max_epochs=1, logger=False, enable_checkpointing=False, accelerator='cpu', "
    shown = shown.replace("devices=2", f"{brief}devices=2")
    shown = shown.replace('"auto"', '"auto", probe={"budget": 0.3, "learning": 0}')
    text = read(f"examples/in_{trainer}.py").replace("num_train_epochs=15", "num_train_epochs=1")
    first = "    trainer = lightning" if trainer == "lightning" else "    bw.ForTransformers"
    before, _, rest = text.partition(first)
    after = re.split(rf"trainer\.{entry}\(.*\)\n", rest)[1]
    (tmp_path / "shown.py").write_text(before + indent(shown, "    ") + after)
    printed = entered("python shown.py", tmp_path, prints)
    assert "batch_size" in printed
    assert "right: " in printed


@pytest.mark.slow
def test_the_loops_and_the_probe_of_the_page_on_trainers_run(monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="pip install 'batchwright[accelerate]'")
    labels = torch.arange(120) % 3
    dataset = TensorDataset(functional.one_hot(labels, 6).float(), labels)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def batch(size):
        return dataset[torch.arange(size) % len(dataset)]

    known = {
        "DataLoader": DataLoader,
        "accelerator": accelerate.Accelerator(cpu=True),
        "batch": batch,
        "bw": bw,
        "criterion": nn.CrossEntropyLoss(),
        "dataset": dataset,
        "loader": DataLoader(dataset, 40, shuffle=True),
        "model": model,
        "optimizer": optimizer,
        "step": step,
    }
    found = blocks(read("docs/trainers.md"), "python")
    (loop,) = [code for code in found if "bw.ForAccelerate(" in code]
    (own,) = [code for code in found if "bw.Sampler(" in code]
    (probed,) = [code for code in found if "bw.probe(" in code]
    before = model.weight.detach().clone()
    exec(loop, dict(known))  # noqa: S102 - our own document
    assert not torch.equal(model.weight, before)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model.zero_grad()
    exec(own, dict(known))  # noqa: S102 - as above
    assert model.weight.grad.abs().sum() > 0
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    scope = dict(known)
    exec(probed, scope)  # noqa: S102 - as above
    assert scope["plan"].epochs == 10
