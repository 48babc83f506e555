"""Data that tell who loads them, for loader processes that import as little as can be."""

import os

from torch.utils.data import Dataset


class Processes(Dataset):
    """Each item is the number of the process that loads it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return os.getpid()
