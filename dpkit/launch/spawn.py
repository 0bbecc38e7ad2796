"""Workers without a zygote: each a fresh interpreter that prepares for itself.

For what survives no fork, as CUDA does not. Slower to start and nothing is shared; otherwise as
`dpkit.launch.zygote`, whose face it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from dpkit.imports import refuse_while_importing
from dpkit.launch.notes import Job, encode_job
from dpkit.launch.process import Worker
from dpkit.launch.start import start_keeper
from dpkit.launch.tether import open_tether
from dpkit.nursery.context import protected_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dpkit.launch.tether import Ends, Tether


@frozen
class Spawner:
    """Starts workers afresh; made by `open_spawner`."""

    _prepare: str
    _args: Mapping[str, Any]
    _env: Mapping[str, str]

    @protected_context
    async def open_worker(
        self, work: str, args: Mapping[str, Any] | None = None, *, name: str, grace: float = 5.0
    ) -> AsyncIterator[Worker]:
        """Start a process that prepares and then runs ``work(state, **args)``.

        Args, Resource handling and Error handling: as for `dpkit.launch.zygote.Zygote.open_worker`;
        the errors of preparing come out of here as well.
        """
        job = Job(name, self._prepare, dict(self._args), work, dict(args or {}))
        note = encode_job(job)

        async def launch(tether: Tether, ends: Ends) -> None:
            start_keeper(note, tether, ends, env=self._env)

        async with open_tether(name, launch, grace=grace) as tether:
            yield Worker(tether)


@protected_context
async def open_spawner(
    prepare: str,
    args: Mapping[str, Any] | None = None,
    *,
    name: str,  # noqa: ARG001 - a zygote has one
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Spawner]:
    """Open a launcher whose workers prepare for themselves, each in a fresh interpreter.

    Args are those of `dpkit.launch.zygote.open_zygote`. There is nothing to hold and nothing is
    prepared yet.
    """
    refuse_while_importing("open_spawner was called")
    yield Spawner(prepare, args or {}, env or {})
