"""Runs the code of one page in order: `python run_page.py PAGE`, in the folder it is to work in.

```python blocks share one namespace, ```bash blocks are run by `bash -e`; other fences are only read.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        language, code = block.groups()
        line = text.count("\n", 0, block.start(2))
        if (
            language == "python"
        ):  # blank lines first, so that a traceback names the line of the page
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        elif subprocess.run(["bash", "-e", "-c", code], check=False).returncode:
            sys.exit(f"{page}, line {line + 1}: the commands failed")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
