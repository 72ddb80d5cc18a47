"""Text as bytes: where it comes from, what is held out, and in which order training reads it.

The same files give the same bytes on every run: files are taken in a fixed pseudo-random order of their paths, so that
a cap on the size leaves a fair sample rather than the beginning of the alphabet.
"""

import gzip
import hashlib
import os
import stat
import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .errors import TrainError

MAX_BYTES = 64 * 1024 * 1024    # of a DATA file or folder
HELD_OUT_SHARE = 32             # one block in this many is held out,
HELD_OUT_BYTES = 256 * 1024     # but no more than this much text
BLOCK_BYTES = 16 * 1024         # a block of a long text; short texts have smaller ones

PRODUCT_FOLDERS = {"__pycache__", "runs", "dist"}  # inside the default sources: made from them, or not theirs


@dataclass(frozen=True)
class Source:
    """A part of the default text."""

    name: str
    roots: tuple[Path, ...]
    max_bytes: int
    suffixes: tuple[str, ...] = ()  # of file names; empty: any
    max_file_bytes: int = 256 * 1024


@dataclass
class Text:
    """A text and what it was made of."""

    data: bytes
    parts: dict[str, int] = field(default_factory=dict)  # bytes by source

    def describe(self) -> str:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in self.parts.items())
        return f"{readable(len(self.data))} of text" + (f" ({parts})" if len(self.parts) > 1 else f": {parts}")


def readable(size: int) -> str:
    """Bytes as kB or MB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def project_root() -> Path | None:
    """The project's source tree: the working directory or an ancestor of this file, where it is one."""
    candidates = [Path.cwd(), *Path(__file__).resolve().parents]
    return next((c for c in candidates if (c / "include" / "moelith" / "config.hpp").is_file()), None)


def default_sources() -> list[Source]:
    """The project's own documents and sources, then text that the system carries."""
    project = project_root() or Path(__file__).resolve().parents[1]
    code = (".md", ".txt", ".hpp", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", "Makefile")
    manual = Path("/usr/share/man")
    sections = tuple(sorted(manual.glob("man[1-9]*")))  # not the translations, which lie in folders of their languages
    return [
        Source("project", (project,), 4_000_000, code),
        Source("licences", (Path("/usr/share/common-licenses"),), 1_000_000),
        Source("manual pages", sections, 8_000_000),
        Source("package documents", (Path("/usr/share/doc"),), 4_000_000),
        Source("Python library", (Path(sysconfig.get_paths()["stdlib"]),), 8_000_000, (".py",)),
    ]


def _is_product(folder: str) -> bool:
    return folder.startswith("build") or folder in PRODUCT_FOLDERS or folder.endswith("-packages")


def _files_below(root: Path, fail, skip=lambda folder: False) -> list[Path]:
    """Files below root in a fixed pseudo-random order; hidden ones, and folders for which skip(name), are left out."""
    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [f for f in folders if not f.startswith(".") and not skip(f)]
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    found.sort(key=lambda p: (zlib.crc32(os.fsencode(p.relative_to(root))), str(p)))
    return found


def _read_file(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a regular file, decompressed if its name ends in .gz. Raises OSError or EOFError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("not a regular file")
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")
    with opened as file:
        return file.read(limit)


READ_ERRORS = (OSError, EOFError, zlib.error)


def _looks_like_text(data: bytes) -> bool:
    head = data[:8192]
    if b"\0" in head:
        return False
    control = sum(head.count(bytes((c,))) for c in range(32) if c not in b"\t\n\v\f\r\x1b\b")
    return control * 100 <= len(head)


def _collect(files: list[Path], limit: int, file_limit: int, fail) -> list[bytes]:
    """Texts of the files up to `limit` bytes in all; binary files and repeated contents are left out."""
    texts, seen, total = [], set(), 0
    for path in files:
        try:
            data = _read_file(path, min(file_limit, limit - total))
        except READ_ERRORS as error:
            fail(error, path)
            continue
        digest = hashlib.sha256(data).digest()
        if not data or digest in seen or not _looks_like_text(data):
            continue
        seen.add(digest)
        texts.append(data)
        total += len(data)
        if total >= limit:
            break
    return texts


def default_text() -> Text:
    """The text of default_sources(); what is missing or unreadable on this machine is left out."""
    parts, texts = {}, []
    for source in default_sources():
        files = [f for root in source.roots for f in _files_below(root, lambda error: None, _is_product)]
        if source.suffixes:
            files = [f for f in files if f.name.endswith(source.suffixes)]
        files.sort(key=lambda p: zlib.crc32(os.fsencode(p)) if len(source.roots) > 1 else 0)
        found = _collect(files, source.max_bytes, source.max_file_bytes, lambda error, path: None)
        if found:
            parts[source.name] = sum(map(len, found))
            texts += found
    return Text(b"\n".join(texts), parts)


def text_from(where: str, max_bytes: int = MAX_BYTES) -> Text:
    """The text of a file, or of all files below a folder. Every file there must be readable."""
    path = Path(where)

    def fail(error, at=None):
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TrainError(f"DATA: cannot read {at or getattr(error, 'filename', None) or path}: {reason}. "
                         "DATA is a readable file or folder of text, plain or .gz.")

    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        fail(error, path)
    if is_folder:
        data = b"\n".join(_collect(_files_below(path, fail), max_bytes, max_bytes, fail))
    else:
        try:
            data = _read_file(path, max_bytes)
        except READ_ERRORS as error:
            fail(error, path)
    if not data:
        kind = "folder holds no text" if is_folder else "file is empty"
        raise TrainError(f"DATA: the {kind}: {path}. DATA is a readable file or folder of text, plain or .gz.")
    return Text(data, {str(path): len(data)})


def split(data: bytes, context: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) bytes as uint8; whole blocks are held out, spread evenly over the text.

    Both parts hold at least one window of context + 1 bytes.
    """
    window = context + 1
    block = max(window, min(BLOCK_BYTES, len(data) // (2 * HELD_OUT_SHARE)))
    blocks = len(data) // block
    if blocks < 2:
        raise TrainError(f"DATA: {len(data)} bytes of text are too few: a context of {context} bytes needs "
                         f"{2 * window} (one window to train on and one to hold out).")
    held_out = max(1, min(blocks // HELD_OUT_SHARE, HELD_OUT_BYTES // block))
    mask = np.zeros(len(data), dtype=bool)
    for i in range(held_out):
        start = (2 * i + 1) * blocks // (2 * held_out) * block
        mask[start:start + block] = True
    everything = np.frombuffer(data, dtype=np.uint8)
    return everything[~mask], everything[mask]


def unigram_entropy(data: np.ndarray) -> float:
    """Bits per byte of the best model that knows only how often each byte occurs in this very text."""
    counts = np.bincount(data, minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


class Windows:
    """Training windows of context + 1 bytes in an order that a seed fixes: epoch after epoch, each window once in each.

    The position is one number, so a resumed run reads on where the stopped one was. Each epoch cuts the text at
    another offset.
    """

    def __init__(self, data: np.ndarray, context: int, seed: int, position: int = 0):
        self.data = data
        self.context = context
        self.seed = seed
        self.position = position  # windows given out so far
        self.per_epoch = max(1, (len(data) - 1) // context - 1)
        self._epoch = -1

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            spare = len(self.data) - 1 - self.per_epoch * self.context
            self._offset = int(random.integers(min(spare, self.context - 1) + 1))
            self._permutation = random.permutation(self.per_epoch)
            self._epoch = epoch
        return self._offset, self._permutation

    def next_batch(self, size: int) -> np.ndarray:
        """The next `size` windows: uint8 [size, context + 1]."""
        batch = np.empty((size, self.context + 1), dtype=np.uint8)
        for row in batch:
            offset, permutation = self._order(self.position // self.per_epoch)
            start = offset + int(permutation[self.position % self.per_epoch]) * self.context
            row[:] = self.data[start:start + self.context + 1]
            self.position += 1
        return batch


def held_out_windows(data: np.ndarray, context: int, at_most: int | None = None) -> np.ndarray:
    """Windows [n, context + 1] in which each byte is predicted once; at_most: so many of them, spread evenly."""
    count = (len(data) - 1) // context
    chosen = range(count) if at_most is None or at_most >= count else [i * count // at_most for i in range(at_most)]
    return np.stack([data[i * context:i * context + context + 1] for i in chosen])
