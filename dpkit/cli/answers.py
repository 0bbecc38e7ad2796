"""How answers reach the terminal: streamed, whole and in the order of their prompts; or as JSON.

Several answers arrive at once, but a terminal has one cursor: the first unfinished one is streamed
as it comes, those behind it are held until it is their turn. JSON lines go out as requests end.
Each prompt has exactly one answer here, whatever became of it.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import click
from attrs import define, field

from dpkit.cli.words import one_line
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.messages import Completion
    from dpkit.nursery.stream import OutputStream

_BLANK = 20
"""Characters that are shown, quoted, of a prompt in which there is nothing to see."""


class Output:
    """Standard output. When it breaks, it says so once, and swallows the rest."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.on_broken: Callable[[], None] = lambda: None

    def write(self, text: str) -> None:
        """Write now."""
        if self.error is not None:
            return
        try:
            click.echo(text, nl=False)
        except OSError as error:
            self.error = error
            self.on_broken()


class Answers(Protocol):
    """Where the outputs of all prompts go; one `turn` a prompt, in order."""

    def turn(self, prompt: str, on_out: Callable[[], None]) -> Turn:
        """Take the next place in line; `on_out` is called when the answer is out, all of it."""


class Turn(Protocol):
    """The answer to one prompt, as it comes."""

    def text(self, stream: OutputStream, text: str) -> None:
        """More text; `stream` says from which engine."""

    def finished(self, completion: Completion) -> None:
        """The answer is complete."""

    def ended(self, stream: OutputStream | None, reason: FinishReason, error: str) -> None:
        """There will be no more, by an error or an abort; `stream` is None if there was none."""


@define(eq=False)
class _TextTurn:
    line: TextAnswers
    prompt: str
    on_out: Callable[[], None]
    held: list[str] = field(factory=list)
    begun: bool = False
    over: bool = False

    def text(self, stream: OutputStream, text: str) -> None:
        self._begin(stream)
        self.held.append(text)
        self.line.flush()

    def finished(self, completion: Completion) -> None:
        self._end(f" [{completion.finish_reason}]\n\n")

    def ended(self, stream: OutputStream | None, reason: FinishReason, error: str) -> None:
        after_text = self.begun
        self._begin(stream)
        if reason is FinishReason.ABORT:
            self._end(f"{' ' * after_text}[{reason}]\n\n")
        else:
            newline = "\n" * after_text
            self._end(f"{newline}error: {error}\n\n")

    def _begin(self, stream: OutputStream | None) -> None:
        if not self.begun:
            self.begun = True
            self.held.append(_header(_engine(stream) or "no engine", self.prompt))

    def _end(self, tail: str) -> None:
        self.held.append(tail)
        self.over = True
        self.line.flush()


class TextAnswers:
    """Answers for people."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._turns: deque[_TextTurn] = deque()

    def turn(self, prompt: str, on_out: Callable[[], None]) -> Turn:
        """Take the next place in line; `on_out` is called when the answer is out, all of it."""
        turn = _TextTurn(self, prompt, on_out)
        self._turns.append(turn)
        return turn

    def flush(self) -> None:
        """Print what the first in line has, and go on to the next when it has ended."""
        while self._turns:
            first = self._turns[0]
            self._output.write("".join(first.held))
            first.held.clear()
            if not first.over:
                return
            self._turns.popleft()
            first.on_out()


def _header(engine: str, prompt: str) -> str:
    """What stands above an answer: who gave it, to what."""
    asked = one_line(prompt) or repr(prompt[:_BLANK])
    return f"{click.style(f'[{engine}]', fg='cyan')} {click.style(asked, bold=True)}\n"


def _engine(stream: OutputStream | None) -> str | None:
    return stream.engine.name if stream and stream.placement else None


@define(eq=False)
class _JsonTurn:
    output: Output
    prompt: str
    on_out: Callable[[], None]

    def text(self, stream: OutputStream, text: str) -> None:
        pass  # a JSON line is written whole, at the end

    def finished(self, completion: Completion) -> None:
        self._write(
            text=completion.text,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            engine=completion.engine.name,
            ttft_s=completion.ttft_s,
            latency_s=completion.latency_s,
        )

    def ended(self, stream: OutputStream | None, reason: FinishReason, error: str) -> None:
        self._write(
            text=stream.text if stream else "",
            token_ids=stream.token_ids if stream else [],
            finish_reason=reason,
            engine=_engine(stream),
            ttft_s=None,
            latency_s=None,
            error=error,
        )

    def _write(self, **fields: object) -> None:
        self.output.write(to_json({"prompt": self.prompt} | fields))
        self.on_out()


class JsonAnswers:
    """Answers for programs: one object a line, in order of completion."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def turn(self, prompt: str, on_out: Callable[[], None]) -> Turn:
        """Take a place; `on_out` is called when the answer is out."""
        return _JsonTurn(self._output, prompt, on_out)


def to_json(record: dict[str, Any]) -> str:
    """One line; letters as they are where the reader's encoding has them all."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    return f"{text}\n"
