"""What `predict` counts: accuracy, and recall, precision and confusions of each class."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchwright.records.text.formatting import counted, percent

TOP = 5
"""An image counts for the wider accuracy if its class is among so many most likely ones."""

_MOST_ROWS = 40  # classes in the table on a terminal


@dataclass
class Predicted:
    """What was counted over images.

    Attributes:
        classes: Names of the classes, in label order.
        images: Images that were classified.
        unreadable: Images that could not be read.
        in_top: Labelled images whose class is among the `TOP` most likely ones.
        confusion: Number of labelled images by label and found class; -1: outputs that are NaN.
    """

    classes: tuple[str, ...]
    images: int = 0
    unreadable: int = 0
    in_top: int = 0
    confusion: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def labelled(self) -> int:
        """Images whose class is known."""
        return self.confusion.total()

    @property
    def correct(self) -> int:
        """Labelled images whose class was found."""
        return sum(n for (label, guess), n in self.confusion.items() if label == guess)

    @property
    def accuracy(self) -> float | None:
        """Share of the labelled images whose class was found; `None` without labels."""
        return self.correct / self.labelled if self.confusion else None

    @property
    def top_accuracy(self) -> float | None:
        """Share of them whose class is among the `TOP` most likely; `None` with fewer classes."""
        if not self.confusion or len(self.classes) <= TOP:
            return None
        return self.in_top / self.labelled

    def by_class(self) -> list[ClassCounts]:
        """The counts of each class that was an image's or was found, in label order."""
        there, found = Counter[int](), Counter[int]()
        others: dict[int, Counter[int]] = {}
        for (label, guess), count in sorted(self.confusion.items()):
            there[label] += count
            found[guess] += count
            if 0 <= guess < len(self.classes) and guess != label:
                others.setdefault(label, Counter())[guess] += count
        rows = []
        for label, name in enumerate(self.classes):
            if there[label] or found[label]:
                ((other, times),) = others.get(label, Counter({label: 0})).most_common(1)
                confused_with = self.classes[other] if times else ""
                rows.append(
                    ClassCounts(
                        name,
                        images=there[label],
                        correct=self.confusion[label, label],
                        found=found[label],
                        confused_with=confused_with,
                        confusions=times,
                    )
                )
        return rows

    def class_table(self) -> tuple[str, list[list[str]]]:
        """Title and rows of a table of the classes; of many, those that were found least often."""
        found = self.by_class()
        title = "classes"
        if len(found) > _MOST_ROWS:
            title = f"the {_MOST_ROWS} of {len(found)} classes with the lowest recall"
            found = sorted(found, key=lambda one: 2.0 if one.recall is None else one.recall)
        return title, [
            [
                one.name,
                f"{one.images:,}",
                "" if one.recall is None else percent(one.recall),
                "" if one.precision is None else percent(one.precision),
                f"{one.confused_with} ({one.confusions:,})" if one.confused_with else "",
            ]
            for one in found[:_MOST_ROWS]
        ]

    def __str__(self) -> str:
        words = [counted(self.images, "image")]
        if self.accuracy is not None:
            share = percent(self.accuracy)
            words.append(f"accuracy {share} ({self.correct:,} of {self.labelled:,})")
        if self.top_accuracy is not None:
            words.append(f"top-{TOP} {percent(self.top_accuracy)} ({self.in_top:,})")
        if not self.confusion:
            words.append("none with a label")
        elif self.labelled < self.images:
            words.append(f"{self.images - self.labelled:,} without a label")
        return ", ".join(words)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        classes = [
            {
                "class": one.name,
                "images": one.images,
                "recall": one.recall,
                "precision": one.precision,
                "confused_with": one.confused_with or None,
                "confusions": one.confusions,
            }
            for one in self.by_class()
        ]
        return {
            "images": self.images,
            "unreadable": self.unreadable,
            "labelled": self.labelled,
            "accuracy": self.accuracy,
            "top5_accuracy": self.top_accuracy,
            "classes": classes,
        }


class ClassCounts(NamedTuple):
    """What was counted of a class.

    Attributes:
        name: The class.
        images: Images of it.
        correct: Those of them that were found to be of it.
        found: All images that were found to be of it.
        confused_with: The other class that its images were most often found to be of; empty: none.
        confusions: How often.
    """

    name: str
    images: int
    correct: int
    found: int
    confused_with: str
    confusions: int

    @property
    def recall(self) -> float | None:
        """Share of its images that were found; `None` without images."""
        return self.correct / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """Share of right ones among those that were found; `None` if none was."""
        return self.correct / self.found if self.found else None
