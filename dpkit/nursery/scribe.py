"""The text of a request with stop strings, made as soon as its tokens arrive.

Whether and when somebody reads must not decide how long the engine runs. All other text can wait
until the engine has begun its next step, or for ever. Knows nothing of engines, books or readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import EngineOutput
    from dpkit.text.transcript import Transcript


class Scribe:
    """Writes one request's text.

    Args:
        transcript: Turns its tokens into text, and knows the stop strings.
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._unread = ""

    def scan(self, output: EngineOutput) -> EngineOutput:
        """Look for stop strings; what comes back says whether the request ends here.

        A tokenizer that fails ends its own request alone, so nothing is raised.
        """
        last = output.finish_reason is not None
        try:
            self._unread += self._transcript.feed(output.token_ids, last=last)
        except Exception as error:  # noqa: BLE001 - the reader's to handle
            return replace(output, finish_reason=FinishReason.ERROR, error=output.error or error)
        if self._transcript.stopped and output.error is None:
            return replace(output, finish_reason=FinishReason.STOP)
        return output

    def read(self, _token_ids: Sequence[int], *, last: bool) -> str:  # noqa: ARG002
        """Text that was not read before; in the place of `Transcript.feed`, which came earlier."""
        text, self._unread = self._unread, ""
        return text
