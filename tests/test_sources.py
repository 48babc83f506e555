import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from batchwright.errors import DataError, JobError
from batchwright.records import Job
from batchwright.training.batches.feeding import DatasetFeed
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.sources import AtResolution, ImageData, open_data

pytestmark = pytest.mark.usefixtures("own_cache")


def stores(data: ImageData) -> tuple[ImageStore, ImageStore]:
    assert isinstance(data.train, ImageStore)
    assert isinstance(data.val, ImageStore)
    return data.train, data.val


def test_digits_are_split_by_class_and_the_same_for_every_seed() -> None:
    data = open_data(Job(data="digits", seed=0))
    train, val = stores(data)
    assert (len(train), len(val)) == (1437, 360)
    assert torch.bincount(val.labels).tolist() == [36] * 10
    assert data.facts.classes == tuple("0123456789")
    assert data.facts.side == 8
    assert data.facts.split == "36 images of each digit, the same in every job"
    assert open_data(Job(data="digits", seed=1)).facts == data.facts


def test_the_digest_of_digits_never_changes() -> None:
    digest = "c29b302fb0e975f9b39992c8089bb07c2e634305a9dfa1a250861c031a2929e4"
    assert open_data(Job(data="digits")).facts.digest == digest


def test_digits_are_all_the_images_of_scikit_learn_at_full_range() -> None:
    from sklearn.datasets import load_digits

    train, val = stores(open_data(Job(data="digits")))
    assert train.images is not None
    assert val.images is not None
    ours = torch.cat([train.images, val.images])
    assert torch.equal(ours[..., 0], ours[..., 2])
    ours_by_value = sorted(map(bytes, ours[..., 0].numpy()))
    wanted = np.floor(load_digits().images * 255 / 16 + 0.5).astype(np.uint8)
    assert ours_by_value == sorted(map(bytes, wanted))
    assert int(ours.max()) == 255


@pytest.mark.slow
def test_cached_digits_are_opened_without_scikit_learn() -> None:
    open_data(Job(data="digits"))
    code = (
        "import sys; from batchwright.records import Job\n"
        "from batchwright.workload.data.sources import open_data\n"
        "open_data(Job(data='digits')); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digit", "did you mean digits?"),
        ("cifar1000:/data", "did you mean cifar100:PATH?"),
        ("imagefolders:/data", "did you mean imagefolder:PATH?"),
        ("digits:/data", "did you mean digits?"),
        ("???", "choose one of digits, cifar10:PATH"),
        ("cifar100", "data=cifar100 needs the folder: data=cifar100:PATH"),
        ("imagefolder:", "needs the folder"),
        ("cifar10:/no/such/folder", "/no/such/folder does not exist"),
        ("cifar10:~nobody-has-this-name/x", "there is no such home folder; give the whole path"),
    ],
)
def test_unknown_data_are_refused_with_a_hint(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_data(Job(data=text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------ data from a function


def dataset(count: int = 3, *, shape: tuple[int, ...] = (3, 6, 8), label: int = 1) -> TensorDataset:
    return TensorDataset(torch.zeros(count, *shape), torch.full((count,), label))


def provide(monkeypatch: pytest.MonkeyPatch, returned: Any) -> Job:
    module = types.ModuleType("some_users_data")
    module.load = lambda: returned  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_users_data", module)
    return Job(data="some_users_data:load")


def test_a_users_data_sets_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = dataset(3), dataset(2, shape=(3, 9, 9))
    job = provide(monkeypatch, (train, val, ["a", "b"]))
    data = open_data(job)
    for own, given in ((data.train, train), (data.val, val)):
        assert all(torch.equal(own[i][0], given[i][0]) and own[i][1] == 1 for i in range(2))
    assert (data.facts.train_samples, data.facts.val_samples) == (3, 2)
    assert data.facts.classes == ("a", "b")
    assert data.facts.side == 6
    assert (data.mean, data.std) == ((0, 0, 0), (1, 1, 1))
    assert open_data(job).facts == data.facts


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


PIXELS = torch.zeros(3, 6, 8)


class Unfinished:
    def __len__(self) -> int:
        raise TypeError("not yet")

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (dataset(), "must return (train, validation, class names)"),
        ((Endless(), dataset(), "ab"), "the training data (Endless) cannot be indexed"),
        ((dataset(), iter([1]), "ab"), "cannot be indexed"),
        ((dataset(), dataset(0), ["a", "b"]), "the validation data (TensorDataset) are empty"),
        ((dataset(), dataset(), "ab"), "names of two or more classes"),
        ((dataset(), dataset(), 7), "names of two or more classes"),
        ((dataset(label=2), dataset(), ["a", "b"]), "label 2 is outside the 2 class names"),
        ((dataset(shape=(6, 8)), dataset(), ["a", "b"]), "a torch.float32 tensor (6, 8)"),
        (([("text", 0)], dataset(), ["a", "b"]), "its image is a str"),
        (([1], dataset(), ["a", "b"]), "training item 0 is not"),
        (({1: 2}, dataset(), ["a", "b"]), "training item 0 fails (KeyError: 0)"),
        (([(PIXELS, 0.0)], dataset(), ["a", "b"]), "whole-number label): TypeError: 'float'"),
        ((Unfinished(), dataset(), ["a", "b"]), "(Unfinished) have no length (TypeError: not yet)"),
    ],
)
def test_a_users_data_set_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, returned: Any, message: str
) -> None:
    job = provide(monkeypatch, returned)
    with pytest.raises(DataError) as caught:
        open_data(job)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = (PIXELS, 1)


@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("part", "items", "message"),
    [
        ("train", [GOOD, (PIXELS, 2)], "training item 1: label 2 is outside the 2 class names"),
        ("train", [GOOD, (PIXELS, -100)], "training item 1: label -100 is outside the 2 class"),
        (
            "train",
            [GOOD, (PIXELS[:, 1:], 1)],
            "(3, 5, 8), where the first training image asks for (3, 6, 8)",
        ),
        ("train", [GOOD, (None, 1)], "its image is a NoneType"),
        ("val", [GOOD, (PIXELS, 2)], "held-out item 1: label 2 is outside the 2 class names"),
        ("val", [GOOD, (PIXELS[:1], 1)], "image asks for (3, any, any): give all"),
        (
            "val",
            [GOOD, (PIXELS[:, 1:], 1)],
            "item 0 one of (3, 6, 8), which stay different at 6 px",
        ),
    ],
)
def test_an_item_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, part: str, items: Any, message: str, loaders: int
) -> None:
    parts = {"train": [GOOD], "val": [GOOD], part: items}
    data = open_data(provide(monkeypatch, (*parts.values(), ["a", "b"])))
    own = AtResolution(data.val, 6) if part == "val" else data.train  # as in a training
    feed = DatasetFeed(own, device=torch.device("cpu"), seed=0, loaders=loaders)
    with pytest.raises(DataError) as caught:
        list(feed.training([torch.arange(2)], epoch=0, resolution=6))
    feed.close()
    assert message in str(caught.value)
    assert str(caught.value).startswith("data=some_users_data:load: ")
    assert "\n" not in str(caught.value)


def test_held_out_images_of_several_sizes_may_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [(torch.zeros(3, side, side), 1) for side in (9, 6, 12)]
    data = open_data(provide(monkeypatch, ([GOOD], items, ["a", "b"])))
    held_out = AtResolution(data.val, 6)
    assert {tuple(held_out[i][0].shape) for i in range(3)} == {(3, 6, 6)}


def test_a_held_out_item_that_fails_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = provide(monkeypatch, ([GOOD], {1: GOOD}, ["a", "b"]))
    with pytest.raises(DataError, match=r"held-out item 0 fails \(KeyError: 0\)"):
        open_data(job)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
@pytest.mark.parametrize("label", [True, np.int32(1), torch.tensor([1], dtype=torch.int16)])
def test_images_of_any_float_and_labels_of_any_whole_number_can_be_trained_on(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, label: Any
) -> None:
    items = [(PIXELS.to(kind), label)] * 2
    data = open_data(provide(monkeypatch, (items, items, ["a", "b"])))
    images, labels = default_collate([data.train[0], data.train[1]])
    assert (images.dtype, labels.dtype, labels.tolist()) == (torch.float32, torch.int64, [1, 1])


def test_a_random_split_of_a_function_is_the_same_at_every_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpys = np.random.mtrand._rand  # the global generator, as `np.random.permutation` uses it

    def split() -> Any:
        orders = [torch.randperm(20).tolist(), [*range(20)], numpys.permutation(20).tolist()]
        random.shuffle(orders[1])
        parts = [[(torch.full((3, 6, 6), float(i)), 1) for i in order] for order in orders]
        return parts[0] + parts[1], parts[2], ["a", "b"]

    job = provide(monkeypatch, None)
    monkeypatch.setattr(sys.modules["some_users_data"], "load", split)

    def draw(seed: int) -> tuple[float, ...]:
        if seed:
            random.seed(seed)
            numpys.seed(seed)
            torch.manual_seed(seed)
        return random.random(), numpys.rand(), float(torch.rand(()))

    found = []
    for seed in (1, 2):  # a process that goes on has drawn other numbers before
        draw(seed)
        data = open_data(job)
        after = draw(0)
        draw(seed)
        assert after == draw(0)
        parts = data.train, data.val
        found.append([[float(part[i][0].mean()) for i in range(len(part))] for part in parts])
    assert found[0] == found[1]


def test_a_module_that_seeds_when_it_is_imported_splits_alike_at_every_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seeds_at_import.py").write_text(
        "import torch\n"
        "torch.manual_seed(5)\n"
        "def load():\n"
        "    items = [(torch.full((3, 6, 6), float(i)), 1) for i in torch.randperm(20).tolist()]\n"
        "    return items[:10], items[10:], ['a', 'b']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, again = (open_data(Job(data="seeds_at_import:load")).val for _ in range(2))
    assert all(torch.equal(first[i][0], again[i][0]) for i in range(10))


def test_a_function_that_fails_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("disk on fire\nsecond line")

    provide(monkeypatch, None)
    monkeypatch.setattr(sys.modules["some_users_data"], "load", fail)
    with pytest.raises(DataError, match=r"some_users_data:load failed: OSError: disk on fire$"):
        open_data(Job(data="some_users_data:load"))


def test_what_made_a_function_fail_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no labels") from KeyError("label")

    provide(monkeypatch, None)
    monkeypatch.setattr(sys.modules["some_users_data"], "load", fail)
    with pytest.raises(DataError, match=r"load failed: ValueError: no labels: KeyError: 'label'$"):
        open_data(Job(data="some_users_data:load"))


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match="no_such_module_at_all"):
        open_data(Job(data="no_such_module_at_all:load"))
