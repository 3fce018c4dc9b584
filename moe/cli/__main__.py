"""`python -m moe.cli` is `moe`."""

from __future__ import annotations

import sys

from moe.cli import main

sys.exit(main())
