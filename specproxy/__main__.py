"""`python -m specproxy`."""

from __future__ import annotations

import sys

from specproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
