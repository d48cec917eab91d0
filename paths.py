"""Where the project is, and what a path in a config means."""

import glob
from pathlib import Path


PROJECT_DIR = Path(__file__).resolve().parent


def project_path(name_or_path: str) -> str:
    """A path that exists below the working folder or the project folder, absolute; else the argument (a Hub name)."""
    if not name_or_path:  # Path("") is the working folder
        return name_or_path
    path = Path(name_or_path).expanduser()
    for base in (Path.cwd(), PROJECT_DIR):
        if (base / path).exists():
            return str((base / path).resolve())
    return name_or_path


def missing_path(name_or_path: str) -> bool:
    """Whether text names a file or folder, not something on the Hugging Face Hub (``name``, ``owner/name``), and is not
    there: below the working or the project folder, or where a glob pattern finds something. Empty text names none."""
    if not name_or_path:
        return True
    path = Path(name_or_path).expanduser()
    bases = (Path.cwd(), PROJECT_DIR)
    if any((base / path).exists() or glob.glob(str(base / path), recursive=True) for base in bases):
        return False
    if name_or_path.startswith((".", "/", "~")) or len(path.parts) > 2 or path.suffix == ".parquet":
        return True
    return len(path.parts) == 2 and (PROJECT_DIR / path.parts[0]).is_dir()
