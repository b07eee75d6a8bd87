"""What noisegate knows about a data set before its files are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from noisegate.data.dataset import Dataset


@dataclass(frozen=True)
class File:
    """One published file.

    sha256: sum of the file as published; a download must have it.
    content: sum of what is inside: of a .gz the decompressed bytes, of an .npz the bytes of its x followed by
    its y. A file with this sum is as good, since the wrapping differs between packagers (Debian strips name
    and date from the gzip header) while the content is the same. None if only the published file will do.
    url: public home of the file; None if it cannot be downloaded as it is.
    """

    sha256: str
    content: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class DatasetSource:
    """A data set of the catalog: how to read it, and the default settings of a run on it.

    model, workers, epochs: defaults of a run: name in MODELS, honest workers, passes over the data.
    batch, rate: likewise; None for those of any data set.
    reader: makes the Dataset from the checked contents of the files (decompressed, where they are .gz).
    layouts: sets of file names; any one of them is enough, the first that is complete is used.
    folders: further places to look, after the user's.
    by_hand: how to get the files where they cannot be downloaded.
    """

    name: str
    model: str
    workers: int
    epochs: int
    description: str
    license: str
    reader: Callable[[Mapping[str, bytes]], Dataset]
    files: Mapping[str, File] = field(default_factory=dict)
    layouts: tuple[tuple[str, ...], ...] = ()
    folders: tuple[str, ...] = ()
    by_hand: str = ""
    batch: int | None = None
    rate: float | None = None
