"""Where the files of data sets are, whether they are whole, and how to get them."""

import os
import sys
from pathlib import Path

from noisegate import checks
from noisegate.data.contents import checked
from noisegate.data.source import DatasetSource
from noisegate.data.sources import SOURCES
from noisegate.errors import DataError

VARIABLE = "NOISEGATE_DATA"


def folders(source: DatasetSource) -> list[Path]:
    """The folders that may hold the files of `source`, in the order they are tried."""
    own = [root / source.name for root in _roots()]
    return own + [Path(folder) for folder in source.folders]


def locate(source: DatasetSource) -> dict[str, Path]:
    """The files of `source`, by name, from the first folder that holds a complete set of them.

    Only names are looked at; `verify` and reading look inside. A damaged file is therefore reported, never
    passed over for a copy elsewhere. A data set that needs no file gives an empty dict.
    """
    layouts = source.layouts or (tuple(source.files),)
    tried = folders(source)
    for folder in tried:
        for layout in layouts:
            paths = {name: folder / name for name in layout}
            if all(path.is_file() for path in paths.values()):
                return paths
    wanted = " or ".join(" + ".join(layout) for layout in layouts)
    raise DataError(
        f"data set {source.name!r} not found: looked for {wanted} in {', '.join(map(str, tried))}; "
        f"{_remedy(source)}, or set {VARIABLE} to the folder that holds {source.name}/"
    )


def verify(name: str) -> list[tuple[str, str]]:
    """(file, status) of each file that `load(name)` would read: "ok", "missing" or what is wrong with it.

    A data set that needs no file gives an empty list.
    """
    checks.one_of(SOURCES, dataset=name)
    source = SOURCES[name]
    try:
        located = locate(source)
    except DataError:
        return _incomplete(source)
    return [(file, _status(source, file, path)) for file, path in located.items()]


def fetch(name: str, folder: Path | str | None = None, progress: bool = True) -> list[Path]:
    """Download the files of `name` into `folder`/`name`/ and return their paths.

    folder: where data sets live; by default $NOISEGATE_DATA, or else the cache folder, which is where `load`
    looks.
    progress: say on stderr which file is being fetched.

    A file appears in its place whole and with the published sha256, or not at all; one that is already there
    with that sum is not fetched again. A data set that needs no file gives an empty list.
    """
    checks.one_of(SOURCES, dataset=name)
    source = SOURCES[name]
    if not source.files:
        return []
    homes = {file: record.url for file, record in source.files.items() if record.url is not None}
    if not homes:
        raise DataError(f"data set {name!r} cannot be fetched: {source.by_hand}; put it in {folders(source)[0]}")
    target = (_roots()[0] if folder is None else expanded(folder, "folder")) / name
    return [_download(url, file, source, target, progress) for file, url in homes.items()]


def expanded(path: str | Path, what: str = "path") -> Path:
    """`path` with a `~` or `~user` at its beginning replaced by that user's home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # nobody has that name, or nobody knows where home is
        raise DataError(f"{what} = {checks.shown(str(path))}: whose home is that? write the folder out") from None


def _roots() -> list[Path]:
    given = os.environ.get(VARIABLE)
    if not given:
        return [expanded("~/.cache/noisegate", "cache")]
    try:
        return [expanded(given, VARIABLE), Path("~/.cache/noisegate").expanduser()]
    except RuntimeError:  # nobody knows where home is, and nobody has to
        return [Path(given)]


def _remedy(source: DatasetSource) -> str:
    if source.by_hand:
        return f"it cannot be fetched: {source.by_hand}"
    return f"run `noisegate data fetch {source.name}`"


def _incomplete(source: DatasetSource) -> list[tuple[str, str]]:
    """Statuses where no folder is complete: of the last layout, which is the one that can be fetched."""
    layout = source.layouts[-1] if source.layouts else tuple(source.files)
    statuses = []
    for file in layout:
        found = [path for folder in folders(source) if (path := folder / file).is_file()]
        statuses.append((file, _status(source, file, found[0]) if found else "missing"))
    return statuses


def _status(source: DatasetSource, file: str, path: Path) -> str:
    try:
        checked(path, source.files[file])
    except DataError as error:
        return str(error)
    return "ok"


def _download(url: str, file: str, source: DatasetSource, target: Path, progress: bool) -> Path:
    import pooch

    if progress:
        print(f"fetching {url}", file=sys.stderr, flush=True)
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # pooch tells of each download itself; one line is enough
    try:
        downloader = pooch.HTTPDownloader(progressbar=False)
        known = f"sha256:{source.files[file].sha256}"
        # pooch writes to a temporary file in the same folder, checks the sum, and renames.
        return Path(pooch.retrieve(url, known_hash=known, fname=file, path=target, downloader=downloader))
    except OSError as error:  # of requests too: all its errors are OSErrors
        raise DataError(
            f"{url}: could not be fetched into {target} ({error}); check the connection and that the folder "
            "can be written to, or put the file there by hand"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url}: what was fetched does not have the published sha256 {source.files[file].sha256} and was "
            f"thrown away ({error}); try again later, or put the file into {target} by hand"
        ) from error
    finally:
        logger.setLevel(level)
