"""A module that is never done with being imported, when a zygote imports it."""

from __future__ import annotations

import os
import time
from pathlib import Path

if "SLOW" in os.environ:
    Path(os.environ["SLOW"]).touch()
    time.sleep(1000)
