"""Data sets: by name or from an .npz, the server's share, and how the rest is dealt to the workers."""

from noisegate.data.dataset import Dataset, hold_out
from noisegate.data.files import fetch, locate, verify
from noisegate.data.loading import load, own_path, read_examples
from noisegate.data.partition import dirichlet, given, iid, non_iid
from noisegate.data.source import DatasetSource, File
from noisegate.data.sources import SOURCES

__all__ = [
    "SOURCES",
    "Dataset",
    "DatasetSource",
    "File",
    "dirichlet",
    "fetch",
    "given",
    "hold_out",
    "iid",
    "load",
    "locate",
    "non_iid",
    "own_path",
    "read_examples",
    "verify",
]
