"""vLLM's own command line, on a machine without its compiled extensions and without a GPU.

Runs in vLLM's environment. ``vllm_main.py serve MODEL --headless …`` is ``vllm serve MODEL
--headless …``; vLLM knows a CPU by the name of its build only, so it is told.
"""

from __future__ import annotations

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
torch.accelerator.empty_cache = lambda: None  # at the end, of an accelerator that is not there

from vllm.entrypoints.cli.main import main  # noqa: E402 - it asks for the platform

if __name__ == "__main__":
    main()
