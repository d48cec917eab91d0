"""Reading ``metrics.jsonl``: one JSON object per logged step; perf_logger.py documents its keys."""

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of all lines but a last one that was cut short or is still being written.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is not the last is no record.
    """
    lines = path.read_text(errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_constant=lambda name: None)  # NaN and Infinity are no JSON
            record["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a metrics line; repair it or move the file away.") from error
        records.append(record)
    return records
