"""A model's own chat template: jinja2 source from its files, run where it can do no harm.

Offers templates what Hugging Face's do (trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a plain `tojson`). Knows nothing of tokens.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dpkit.errors import ModelUnsupported, RequestRejected, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ChatTemplate:
    """One compiled template and the special tokens that it may name.

    Raises:
        ModelUnsupported: the source is no template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, where: str = "this model"
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a syntax error, or what nesting without end leads to
            line = getattr(error, "lineno", None)
            at = f", line {line}" if line else ""
            raise ModelUnsupported(f"{where}: chat template{at}: {describe(error)}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Text of the conversation up to where the assistant begins to answer.

        Raises:
            RequestRejected: the template refuses the messages, or breaks on them.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # whatever somebody else's program may raise
            raise RequestRejected(f"the model's chat template refuses this: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.now().astimezone().strftime(style)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own escapes HTML, which would put entities into the prompt."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
