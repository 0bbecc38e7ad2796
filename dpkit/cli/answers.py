"""How answers reach the terminal: streamed, whole and in the order of their prompts; or as JSON.

Several answers arrive at once, but a terminal has one cursor: the first unfinished one is streamed
as it comes, those behind it are held until it is their turn. JSON lines go out as requests end.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

import click
from attrs import define, field

if TYPE_CHECKING:
    from dpkit.errors import DpkitError
    from dpkit.messages import Completion
    from dpkit.nursery.stream import OutputStream


class Answers(Protocol):
    """Where the outputs of all prompts go; one `turn` a prompt, in order."""

    def turn(self, prompt: str) -> Turn:
        """Take the next place in line for the answer to `prompt`."""


class Turn(Protocol):
    """The answer to one prompt, as it comes."""

    def text(self, stream: OutputStream, text: str) -> None:
        """More text; `stream` says from which engine."""

    def finished(self, completion: Completion) -> None:
        """The answer is complete."""

    def failed(self, stream: OutputStream | None, error: DpkitError) -> None:
        """There will be no more; `stream` is None if there never was any."""


@define(eq=False)
class _TextTurn:
    line: TextAnswers
    prompt: str
    held: list[str] = field(factory=list)
    begun: bool = False
    ended: bool = False

    def text(self, stream: OutputStream, text: str) -> None:
        if not self.begun:
            self.begun = True
            self.held.append(self.line.header(stream.engine.name, self.prompt))
        self.held.append(text)
        self.line.flush()

    def finished(self, completion: Completion) -> None:
        self._end(f" [{completion.finish_reason}]\n\n")

    def failed(self, stream: OutputStream | None, error: DpkitError) -> None:
        if not self.begun:
            engine = stream.engine.name if stream and stream.placement else "no engine"
            self.held.append(self.line.header(engine, self.prompt))
        self._end(f"error: {error}\n\n")

    def _end(self, tail: str) -> None:
        self.held.append(tail)
        self.ended = True
        self.line.flush()


class TextAnswers:
    """Answers for people."""

    def __init__(self) -> None:
        self._turns: list[_TextTurn] = []

    def turn(self, prompt: str) -> Turn:
        """Take the next place in line for the answer to `prompt`."""
        turn = _TextTurn(self, prompt)
        self._turns.append(turn)
        return turn

    def header(self, engine: str, prompt: str) -> str:
        """What stands above an answer: who gave it, to what."""
        return f"{click.style(f'[{engine}]', fg='cyan')} {click.style(prompt, bold=True)}\n"

    def flush(self) -> None:
        """Print what the first in line has, and go on to the next when it has ended."""
        while self._turns:
            first = self._turns[0]
            click.echo("".join(first.held), nl=False)
            first.held.clear()
            if not first.ended:
                return
            self._turns.pop(0)


@define(eq=False)
class _JsonTurn:
    prompt: str

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

    def failed(self, stream: OutputStream | None, error: DpkitError) -> None:
        self._write(
            text=stream.text if stream else "",
            token_ids=stream.token_ids if stream else [],
            finish_reason="error",
            engine=stream.engine.name if stream and stream.placement else None,
            ttft_s=None,
            latency_s=None,
            error=str(error),
        )

    def _write(self, **fields: object) -> None:
        click.echo(json.dumps({"prompt": self.prompt} | fields, ensure_ascii=False))


class JsonAnswers:
    """Answers for programs: one object a line, in order of completion."""

    def turn(self, prompt: str) -> Turn:
        """Take the next place in line for the answer to `prompt`."""
        return _JsonTurn(prompt)
