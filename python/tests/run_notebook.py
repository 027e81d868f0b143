# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the code cells of a notebook one after the other, without Jupyter and without a screen."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"
    with open(sys.argv[1], encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{sys.argv[1]}:cell {number}", "exec"), names)


if __name__ == "__main__":
    main()
