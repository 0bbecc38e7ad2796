"""A model around a model, and how a config names a model that exists already.

What faulty, recording and failing models are made of. Knows nothing of what they do.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpkit.abc import Model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dpkit.abc import Tokenizer
    from dpkit.messages import Batch, StepResult

_numbers = itertools.count(1)


class ModelWrapper(Model):
    """Passes everything on; override what is to be different."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.spec = model.spec
        vars(self)["inline"] = model.inline  # a fact of the class for others, of `model` for us

    @property
    def threads_per_engine(self) -> int:
        """The wrapped model's, which a cluster sets through this."""
        return self.model.threads_per_engine

    @threads_per_engine.setter
    def threads_per_engine(self, threads: int) -> None:
        self.model.threads_per_engine = threads

    def tokenizer(self) -> Tokenizer:
        """The wrapped model's."""
        return self.model.tokenizer()

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        """Make the wrapped model's cache."""
        return self.model.allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Let the wrapped model compute the step."""
        return self.model.execute(batch, cache)

    def execute_dummy(self, cache: Any) -> None:
        """Let the wrapped model take part in a step of other ranks."""
        self.model.execute_dummy(cache)


class ModelOfEach(ModelWrapper):
    """A model for each engine, for clusters whose engines are to behave differently.

    A cluster has one model, and a model is not told who uses it; so engines are told apart by the
    size of their caches (``kv.num_blocks``), which must differ.

    Args:
        models: By number of blocks.
    """

    def __init__(self, models: Mapping[int, Model]) -> None:
        super().__init__(next(iter(models.values())))
        self._models = models

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        """Make the cache of the engine that has so many blocks, with its own model."""
        model = self._models[num_blocks]
        return model, model.allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Let the engine's own model compute the step."""
        model, inner = cache
        result: StepResult = model.execute(batch, inner)
        return result

    def execute_dummy(self, cache: Any) -> None:
        """Let the engine's own model take part in a step of other ranks."""
        model, inner = cache
        model.execute_dummy(inner)


@contextmanager
def named(model: Model) -> Iterator[str]:
    """Give a model that exists a name by which a config finds it, while the block lasts.

    The name goes where a config says ``model = ``; the model's arguments may so be anything that a
    test has at hand.
    """
    name = f"model_{next(_numbers)}"
    module = sys.modules[__name__]
    members = {"__new__": lambda _: model, "inline": model.inline, "spec": model.spec}
    setattr(module, name, type(name, (Model,), members))
    try:
        yield f"{__name__}:{name}"
    finally:
        delattr(module, name)
