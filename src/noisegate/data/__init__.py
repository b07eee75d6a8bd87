"""Data sets: by name or from files of one's own, the server's share, and how the rest is dealt to the workers."""

from noisegate.data.dataset import Dataset, hold_out
from noisegate.data.description import describe
from noisegate.data.files import fetch, locate, verify
from noisegate.data.loading import load, own_files, own_path, read_examples
from noisegate.data.partition import dirichlet, given, iid, non_iid
from noisegate.data.source import DatasetSource, File
from noisegate.data.sources import SOURCES
from noisegate.data.tables import Columns

__all__ = [
    "SOURCES",
    "Columns",
    "Dataset",
    "DatasetSource",
    "File",
    "describe",
    "dirichlet",
    "fetch",
    "given",
    "hold_out",
    "iid",
    "load",
    "locate",
    "non_iid",
    "own_files",
    "own_path",
    "read_examples",
    "verify",
]
