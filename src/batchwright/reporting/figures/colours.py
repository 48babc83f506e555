"""Colours of figures.

Those of Okabe and Ito, which people with any common colour vision tell apart.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
YELLOW, GREY, PALE, SKY = "#F0E442", "#666666", "#BBBBBB", "#56B4E9"
SHADE = "#EEEEEE"  # behind every other stage of the learning rate

PART_COLOURS = {
    "set-up": GREY,
    "input": ORANGE,
    "compute": BLUE,
    "wait": YELLOW,
    "communication": RED,
    "evaluation": GREEN,
    "checkpoints": PURPLE,
    "other": PALE,
}
"""Colour of each part of a run's time, in the order in which they are drawn."""

ROUND_COLOURS = {
    "large": BLUE,
    "small": SKY,
    "wait": YELLOW,
    "exchange": RED,
    "evaluation": GREEN,
}
"""Colour of what a worker does in a round, in the order in which it is drawn."""
