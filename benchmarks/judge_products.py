"""Take a run of the products' benchmark that was cut off into a results folder: its rows, and findings on all of them.

python benchmarks/judge_products.py RUN results/h200-kernels
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import fields
from pathlib import Path

from lowbitrl.bench import products
from lowbitrl.bench.record import Bench, Finding, Row

# How findings on these products begin: those of earlier runs go.
OURS = ("W4A16 ", "grouped W4A16 ", "emulated W4A4 ")
READ = {"float": float, "int": int}


def main(run: Path, folder: Path) -> None:
    """Findings that the run wrote itself stay as they are; a format it did not come to judge is judged by its rows."""
    bench = Bench("kernels", "", rows=rows_of(run / "kernels.csv"))
    bench.findings = [Finding(**line) for line in json.loads((run / "summary.json").read_text())]
    bench.command = bench.findings[0].command
    for name in products.FORMATS:
        if any(row.op == f"w4a16 {name}" for row in bench.rows):
            products.judge(bench, name)
    summary = folder / "summary.json"
    kept = [line for line in json.loads(summary.read_text()) if not line["what"].startswith(OURS)]
    summary.write_text(json.dumps(kept))
    bench.save(folder)


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV file that a benchmark wrote."""
    kinds = {field.name: READ.get(str(field.type), str) for field in fields(Row)}
    return [Row(**{n: kinds[n](v) for n, v in line.items()}) for line in csv.DictReader(path.open())]  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
