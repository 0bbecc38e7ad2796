"""Work on what is long, in a thread: whoever leaves does not wait for it.

What a thread refuses with leaves no traceback behind. That would keep the whole request alive until
the garbage collector comes by, and a body may have tens of megabytes. Knows nothing of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

from dpkit.errors import RequestRejected, bare
from dpkit.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

T = TypeVar("T")

Refusal = ApiError | RequestRejected


async def in_thread(
    work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
) -> T:
    """Call `work` in a thread. It is let go of by a cancellation, and its turn kept.

    Raises:
        What `work` raises; a refusal without where it was raised.
    """
    done = await trio.to_thread.run_sync(
        _attempt, work, arguments, abandon_on_cancel=True, limiter=limiter
    )
    if isinstance(done, Refusal):
        raise bare(done)  # the thread may hold the other one for a moment
    return done


def _attempt(work: Callable[..., T], arguments: tuple[Any, ...]) -> T | Refusal:
    try:
        return work(*arguments)
    except (ApiError, RequestRejected) as error:
        return bare(error)
