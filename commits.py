"""The folders of checkpoints: which of them count, how one comes to count, and how it goes.

Files and folders only; checkpoint.py says what they hold.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

MARKER = "commit.json"
EARLIER_RUNS = "earlier_runs.json"
FOLDER_NAME = re.compile(r"step_\d+(\.staging)?")


def last_earlier_commit(directory: Path) -> int:
    """What ``earlier_runs.json`` says: commits up to this number are not the present run's; 0 without that file.

    Raises:
        ValueError: the file is damaged.
    """
    path = directory / EARLIER_RUNS
    try:
        return int(json.loads(path.read_text())["last_commit"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: delete it, and the checkpoints of earlier runs count as this one's"
        ) from error


def committed_checkpoints(
    directory: Path, after_commit: int = 0, warn: bool = False
) -> list[tuple[dict[str, Any], Path]]:
    """(marker, folder) of every whole checkpoint, the oldest first.

    Args:
        after_commit: those with a greater commit number only; 0: all.
        warn: name the folders passed over because they are not whole.
    """
    found = []
    for folder in sorted(directory.iterdir()):
        if folder.is_dir() and FOLDER_NAME.fullmatch(folder.name):
            marker = read_marker(folder)
            if marker is not None:
                found.append((marker, folder))
            elif warn:
                logger.warning("ignoring %s: half-written or damaged (no valid %s)", folder, MARKER)
    newer = (pair for pair in found if pair[0]["commit"] > after_commit)
    return sorted(newer, key=lambda pair: pair[0]["commit"])


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Contents of the commit marker; None if it or a file that it lists is missing, damaged or too short."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        whole = all((folder / name).stat().st_size >= size for name, size in marker["files"].items())
        whole = whole and all(
            isinstance(marker[key], int) for key in ("step", "scheduler_steps", "world_size", "commit")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if whole else None


def promote(staging: Path) -> None:
    """Gives a committed staging folder its final name, in place of an older checkpoint of the same step."""
    final = staging.with_suffix("")
    if final.exists():
        remove(final)
    os.rename(staging, final)
    sync_to_disk(final.parent)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its marker first: no part of it may count."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file in one move; durable when this returns."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    sync_to_disk(temporary)
    os.replace(temporary, path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
