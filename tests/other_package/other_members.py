"""What another package adds: facts alone, so that planning loads no torch."""

from batchwright.records.registries.data_sources import DataSource
from batchwright.records.registries.launchers import Launcher
from batchwright.records.registries.methods import MethodSpec
from batchwright.records.registries.networks import NetworkSpec
from batchwright.records.registries.optimizers import OptimizerSpec
from batchwright.records.registries.trackers import TrackerSpec

PLATES = DataSource("plates", "other_torch:open_plates", takes_path=True, as_they_come=True)
TINY = NetworkSpec("tiny", "other_torch:tiny", least_side=2)
LION = OptimizerSpec("lion", "other_torch:lion", rate=0.0003, title="Lion")
GROWING = MethodSpec(
    "growing",
    "a batch twice as large in the second half",
    "a growing batch",
    plan="other_planning:lay_out",
    why="A larger batch later does what a lower rate does.",
    reference="Smith et al. 2018, arXiv 1711.00489",
)
WRITTEN = TrackerSpec(
    "written", "other_tracker:open_tracker", "other_tracker", "a file", folder=True
)
NOTED = Launcher("noted", "one worker, here, noted", "other_torch:train_noted", one_worker=True)
