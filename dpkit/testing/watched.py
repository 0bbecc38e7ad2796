"""A policy whose calls are watched: dispatch forgives a hook that raises, `check_policy` does not.

Part of `dpkit.testing.conform_policy`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpkit.abc import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.abc import End, LoadView
    from dpkit.messages import GenerateRequest
    from dpkit.testing.rules import Subject


class WatchedPolicy(Policy):
    """Passes every call on, and remembers the first that raised."""

    def __init__(self, policy: Policy, subject: Subject) -> None:
        self._policy = policy
        self._subject = subject
        self._broken: tuple[str, Exception] | None = None

    def verify(self) -> None:
        """Check that no call has raised so far.

        Raises:
            Nonconforming: one has.
        """
        if self._broken is not None:
            call, error = self._broken
            with self._subject.must(f"`{call}` does not raise"):
                raise error

    @contextmanager
    def _watching(self, call: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._broken = self._broken or (call, error)
            raise

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        """Watch a pick."""
        with self._watching("pick"):
            return self._policy.pick(request, view)

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float | None:
        """Watch a score."""
        with self._watching("score"):
            return self._policy.score(request, index, view)

    def scores(self, request: GenerateRequest, view: LoadView) -> Sequence[float] | None:
        """Watch all scores."""
        with self._watching("scores"):
            return self._policy.scores(request, view)

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Watch a charge."""
        with self._watching("on_charge"):
            self._policy.on_charge(request, index, view)

    def on_release(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Watch a release."""
        with self._watching("on_release"):
            self._policy.on_release(request, index, view)

    def on_answered(self, request: GenerateRequest, view: LoadView) -> None:
        """Watch an answer."""
        with self._watching("on_answered"):
            self._policy.on_answered(request, view)

    def on_end(self, request: GenerateRequest, end: End, view: LoadView) -> None:
        """Watch an end."""
        with self._watching("on_end"):
            self._policy.on_end(request, end, view)

    def on_engines(self, view: LoadView) -> None:
        """Watch a change of engines."""
        with self._watching("on_engines"):
            self._policy.on_engines(view)

    def on_snapshot(self, view: LoadView) -> None:
        """Watch a snapshot."""
        with self._watching("on_snapshot"):
            self._policy.on_snapshot(view)

    def on_report(self, index: int, view: LoadView) -> None:
        """Watch a report."""
        with self._watching("on_report"):
            self._policy.on_report(index, view)
