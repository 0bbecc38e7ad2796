"""Does yours keep the contract? The suites that all built-in parts pass.

    def test_my_model():
        check_model(MyModel)

One module each; this one gathers them. Each raises `Nonconforming`, whose message names the rule
that was broken and what broke it.
"""

from __future__ import annotations

from dpkit.testing.conform_launcher import check_launcher
from dpkit.testing.conform_link import check_link
from dpkit.testing.conform_model import check_model
from dpkit.testing.conform_policy import check_policy
from dpkit.testing.rules import Nonconforming

__all__ = ["Nonconforming", "check_launcher", "check_link", "check_model", "check_policy"]
