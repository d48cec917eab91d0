"""Where the project is, and what a path in a config means."""

import glob
import os
from pathlib import Path


PROJECT_DIR = Path(__file__).resolve().parent
OWN_FOLDERS = ("data", "model_configs", "tokenizers", "hydra_config")
"""Of the project; nobody on the Hugging Face Hub has such a name."""


def project_path(name_or_path: str) -> str:
    """A path that exists below the working folder or the project folder, absolute; else the argument (a Hub name)."""
    if not name_or_path:  # Path("") is the working folder
        return name_or_path
    path = os.path.expanduser(name_or_path)
    for base in (Path.cwd(), PROJECT_DIR):
        if os.path.exists(base / path):
            return str((base / path).resolve())
    return name_or_path


def missing_path(name_or_path: str) -> bool:
    """Whether text names a file or folder, not something on the Hugging Face Hub (``name``, ``owner/name``), and is not
    there: below the working or the project folder, or where a glob pattern finds something. Empty text names none."""
    if not name_or_path:
        return True
    path = os.path.expanduser(name_or_path)
    for base in (Path.cwd(), PROJECT_DIR):
        if os.path.exists(base / path) or glob.glob(str(base / path), recursive=True):
            return False
    parts = Path(path).parts
    local = name_or_path.startswith((".", "/", "~")) or name_or_path.endswith(".parquet") or glob.has_magic(path)
    return local or len(parts) > 2 or (len(parts) == 2 and parts[0] in OWN_FOLDERS)
