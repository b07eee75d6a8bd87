"""Files that a command writes beside what it prints."""

from pathlib import Path
from uuid import uuid4

from noisegate.errors import StoreError
from noisegate.files import write_whole


def write_beside(path: Path, content: str) -> None:
    """Write a file that is complete as soon as it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    write_whole(path, content.encode(), f".{path.name}.{uuid4().hex}.part")  # another command may write the same file
