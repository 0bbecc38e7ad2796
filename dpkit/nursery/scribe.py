"""The text of one request: made when it is read, or with stop strings as soon as its tokens arrive.

Whether and when somebody reads must not decide how long the engine runs, so stop strings are looked
for on arrival; all other text can wait until the engine has begun its next step, or for ever.
Knows nothing of engines, books or readers.
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
        transcript: Turns its tokens into text.
        scans: Whether there are stop strings; if so, every output is to pass through `scan`.
    """

    def __init__(self, transcript: Transcript, *, scans: bool) -> None:
        self.scans = scans
        self._transcript = transcript
        self._unread = ""

    def scan(self, output: EngineOutput) -> EngineOutput:
        """Look for stop strings; what comes back says whether the request ends here.

        A tokenizer that fails ends its own request alone, so nothing is raised.
        """
        try:
            self._unread += self._transcript.feed(
                output.token_ids, last=output.finish_reason is not None
            )
        except Exception as error:  # noqa: BLE001 - the reader's to handle
            return replace(output, finish_reason=FinishReason.ERROR, error=output.error or error)
        if self._transcript.stopped and output.error is None:
            return replace(output, finish_reason=FinishReason.STOP)
        return output

    def read(self, token_ids: Sequence[int], *, last: bool) -> str:
        """Text that is certain and was not read before; `token_ids` are those of what is read now.

        Error handling:
            What the tokenizer raises, unless it has been told by `scan`.
        """
        if not self.scans:
            return self._transcript.feed(token_ids, last=last)
        text, self._unread = self._unread, ""
        return text
