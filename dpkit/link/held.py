"""A request that an engine on the wire has, and the tokens of it that nobody has been told of yet.

Knows nothing of sockets and messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from dpkit.messages import EngineOutput

if TYPE_CHECKING:
    from dpkit.link.wirelink import ZmqLink
    from dpkit.wire.structs import WireRequest


@define(eq=False)
class Held:
    """A request that the engine has."""

    request_id: str
    asked: WireRequest
    link: ZmqLink
    is_plain: bool
    """Whether it is the same in how many portions its tokens are told: nobody looks at each."""
    begun: bool = False
    """Whether it has given a token."""
    is_brief: bool = False
    """Whether what is new of it is tokens alone: it is plain, and has begun."""
    kept: tuple[int, ...] = ()
    """Tokens that have come, and are told with those that came right behind them."""

    def begin(self, token_ids: tuple[int, ...]) -> None:
        """Take note of its first tokens, unless these are none."""
        self.begun = bool(token_ids)
        self.is_brief = self.begun and self.is_plain

    def tell(self, token_ids: tuple[int, ...] = ()) -> None:
        """Have the client know of tokens, after those that were kept."""
        token_ids, self.kept = self.kept + token_ids, ()
        link = self.link
        link.deliver(link.engine, EngineOutput(request_id=self.request_id, token_ids=token_ids))

    def keep(self, token_ids: tuple[int, ...], kept: list[Held]) -> None:
        """Have tokens wait for those behind them; `kept` lists whoever has such."""
        if not self.kept:
            kept.append(self)
        self.kept += token_ids
