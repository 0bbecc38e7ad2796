"""What load is put on: something that answers requests, wherever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkit.bench.plan import Ask
    from dpkit.bench.prompts import PromptMaker
    from dpkit.bench.record import Record


class Target(ABC):
    """Answers requests; many at once."""

    name: str
    """Where it is."""
    model: str
    """What answers there."""
    is_exact: bool
    """Whether prompts have just as many tokens as is wanted."""

    @abstractmethod
    def prompts(self, *, seed: int, prefix: int) -> PromptMaker:
        """Make prompts in the form that it takes; `PromptMaker` says what the arguments are."""

    @abstractmethod
    async def ask(self, ask: Ask, record: Record) -> None:
        """Send a request and write into `record` when what comes: moments, counts and the engine.

        The beginning, the end and the outcome are the caller's to write.

        Raises:
            AskFailed: there is no whole answer.
        """
