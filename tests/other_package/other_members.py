"""What another package adds: facts alone, so that planning loads no torch."""

from batchwright.records.registries.data_sources import DataSource
from batchwright.records.registries.networks import NetworkSpec
from batchwright.records.registries.optimizers import OptimizerSpec

PLATES = DataSource("plates", "other_torch:open_plates", takes_path=True, as_they_come=True)
TINY = NetworkSpec("tiny", "other_torch:tiny", least_side=2)
LION = OptimizerSpec("lion", "other_torch:lion", rate=0.0003, title="Lion")
