"""``python -m mok_cute``: the same commands as ``mok-cute``."""

from __future__ import annotations

import sys

from mok_cute.cli import main

if __name__ == "__main__":
    sys.exit(main())
