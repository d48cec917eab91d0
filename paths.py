"""Where the project is, and what a path in a config means."""

from pathlib import Path


PROJECT_DIR = Path(__file__).resolve().parent


def project_path(name_or_path: str) -> str:
    """A path that exists below the working folder or the project folder, absolute; else the argument (a Hub name)."""
    for base in (Path.cwd(), PROJECT_DIR):
        if (base / name_or_path).exists():
            return str((base / name_or_path).resolve())
    return name_or_path
