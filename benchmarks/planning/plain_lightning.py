"""The training script of `benchmarks.planning.plain_torch`, as people write it with Lightning.

Logger, checkpoints and progress bar are off, which makes it faster than by default. It uses nothing
of Batchwright and runs in an environment of its own: `pip install torch==2.13.0 lightning pillow
numpy`, Lightning 2.6, but neither 2.6.2 nor 2.6.3, which were withdrawn.
"""

import json
import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.planning.plain_images import NETWORKS, arguments, loaders, optimizer_of


class Classifier(lightning.LightningModule):
    """A network with its loss, optimizer and accuracy."""

    def __init__(self, network: nn.Module, rate: float, epochs: int) -> None:
        super().__init__()
        self.network, self.rate, self.epochs = network, rate, epochs

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        """Log the accuracy of a batch."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels))

    def on_validation_epoch_end(self) -> None:
        """Print the accuracy of all batches as a line of JSON."""
        accuracy = float(self.trainer.callback_metrics["accuracy"])
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        print(json.dumps({"accuracy": accuracy, "versions": versions}), flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        """SGD with Nesterov momentum, and a cosine schedule over the epochs."""
        optimizer, schedule = optimizer_of(self, self.rate, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    """Train."""
    asked = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(asked.seed, verbose=False)
    train, test, classes = loaders(asked)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=asked.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    network = NETWORKS[asked.network](classes)
    trainer.fit(Classifier(network, asked.rate, asked.epochs), train, test)


if __name__ == "__main__":
    main()
