"""Files that are whole or not there."""

import contextlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes renames inside the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name, makes it durable, and renames it: a failure leaves what was there before."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)
