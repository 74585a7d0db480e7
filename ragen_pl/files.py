"""Write files that are complete whenever they exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` and rename it to `path` at the end of the block.

    A process that is killed inside the block leaves `path` as it was.

    Args:
        path: the file to write. Its folder must exist.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
