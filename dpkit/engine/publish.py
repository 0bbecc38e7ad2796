"""When an engine's counts are worth a message. Knows numbers only; the busy loop sends."""

from __future__ import annotations

from attrs import define, field

# KV usage is a ratio of block counts: without this, 6/50 - 5/50 falls short of 0.02 by rounding.
_ROUNDING = 1e-9


@define
class PublishGate:
    """Remembers what was published last; asked after every drain and after every step.

    Starts from an idle engine, which is what the coordinator assumes until it hears otherwise.
    """

    kv_publish_delta: float  # vLLM compares counts only and so never shows KV growing in decodes
    counts: tuple[int, int] = field(default=(0, 0), init=False)
    _kv: float = field(default=0.0, init=False)

    def due(self, running: int, waiting: int, kv_cache_usage: float) -> bool:
        """Whether to publish now; True counts as published."""
        moved = abs(kv_cache_usage - self._kv)
        changed = (running, waiting) != self.counts
        if not changed and not 0.0 < moved >= self.kv_publish_delta - _ROUNDING:
            return False
        self.counts = (running, waiting)
        self._kv = kv_cache_usage
        return True
