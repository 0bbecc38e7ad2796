"""`python -m dpkit` is `dpkit`."""

from __future__ import annotations

import sys

from dpkit.cli.main import main

sys.exit(main())
