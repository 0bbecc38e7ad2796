"""Chat templates run as Hugging Face runs them, and cannot do harm."""

from __future__ import annotations

import pytest

from dpkit.errors import RequestRejected
from dpkit.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "yes"}]


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(MESSAGES)


def test_messages_and_special_tokens_are_there() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
    assert render(source, bos_token="<s>") == "<s>user:a < b;assistant:yes;"  # noqa: S106


def test_the_assistants_turn_is_opened() -> None:
    assert render("{% if add_generation_prompt %}assistant:{% endif %}") == "assistant:"


def test_lines_that_hold_only_a_tag_leave_nothing() -> None:
    assert (
        render("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n") == "user\nassistant\n"
    )


def test_loops_may_be_left() -> None:
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "a < b"}'


def test_the_date_is_there_for_those_who_ask() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_refusal_of_the_template_is_the_requests_fault() -> None:
    with pytest.raises(RequestRejected, match="refuses this: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ nothing.there }}",
        "{{ messages[0] + 1 }}",
    ],
)
def test_a_template_that_reaches_out_or_breaks_is_refused(source: str) -> None:
    with pytest.raises(RequestRejected, match="the model's chat template refuses this"):
        render(source)
