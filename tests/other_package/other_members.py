"""What another package adds: facts alone, so that planning loads no torch."""

from batchwright.records.registries.optimizers import OptimizerSpec

LION = OptimizerSpec("lion", "other_torch:lion", rate=0.0003, title="Lion")
