"""Models by name: the built-in ones, yours, and real weights. Imports torch only for the latter."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from dpkit.abc import Model
from dpkit.engine.foreign import call, name_of
from dpkit.errors import DpkitError, ModelNotFound, ModelUnsupported, describe
from dpkit.imports import INSTALL_TORCH, NotThere, find_named
from dpkit.messages import ModelSpec
from dpkit.names import Dtype, Quant
from dpkit.sampling import shown

if TYPE_CHECKING:
    from dpkit.abc import ModelFace, Tokenizer

_CLASS_PATH = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def load_model(
    name: str, *, dtype: Dtype = Dtype.AUTO, quant: Quant = Quant.NONE, device: str = "cpu"
) -> Model:
    """Load the model that a config names.

    Args:
        name: `echo`, `cost:PRESET`, `pkg.mod:Class`, a fetched model's name, a directory in Hugging
            Face layout, or a `.gguf` file.
        dtype: what a model of real weights computes in; nothing to the others.
        quant: how its weights are kept; likewise.
        device: where it computes, as torch calls it; likewise.

    Raises:
        ModelNotFound: there is no such model; the message says what there is or how to get it.
        ModelUnsupported: it is there but cannot be run.
    """
    if name == "echo":
        from dpkit.engine.models.echo import EchoModel  # noqa: PLC0415

        return EchoModel()
    if name.startswith("cost:"):
        from dpkit.engine.models.cost import CostModel  # noqa: PLC0415

        return CostModel(name.removeprefix("cost:"))
    if match := _CLASS_PATH.fullmatch(name):
        return _load_class(name, **match.groupdict())
    try:
        from dpkit.engine.models.torch import load_torch_model  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    return load_torch_model(name, dtype=dtype, quant=quant, device=device)


def load_face(
    name: str, *, dtype: Dtype = Dtype.AUTO, quant: Quant = Quant.NONE, device: str = "cpu"
) -> ModelFace:
    """Load what can be known of a model without its weights; arguments and errors as `load_model`.

    Imports no torch. A class of yours is made all the same, since only it knows its tokenizer: load
    in `allocate`, or in the first `execute`, what is heavy.
    """
    if name.startswith("__main__:"):
        raise ModelNotFound(
            f"loading model {name!r}: a class in __main__ cannot be found by an engine's process; "
            'move it to a module, "pkg.mod:Class"'
        )
    if name == "echo" or name.startswith("cost:") or _CLASS_PATH.fullmatch(name):
        return load_model(name)
    try:
        from dpkit.engine.models.torch.face import TorchFace  # noqa: PLC0415 - numpy, tokenizers
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    return TorchFace(name, dtype=dtype, quant=quant, device=device)


def load_served(name: str) -> ModelFace:
    """Load what must be known of a model that others serve; `name` as of `load_model`.

    Of real weights just their config and tokenizer are needed, whatever the architecture. Imports
    no torch.

    Raises:
        ModelNotFound, ModelUnsupported: it is not here, or its tokenizer cannot be read.
    """
    if name == "echo" or name.startswith("cost:") or _CLASS_PATH.fullmatch(name):
        return load_model(name)
    try:
        from dpkit.engine.models.served import ServedFace  # noqa: PLC0415 - numpy, tokenizers
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    return ServedFace(name)


def loads_at_once(name: str) -> bool:
    """Whether a model costs no time to load: it has no weights, and its code is imported already.

    True for `echo`, `cost:PRESET`, and inline classes of modules that are imported.
    """
    if name == "echo" or name.startswith("cost:"):
        return True
    match = _CLASS_PATH.fullmatch(name)
    found = match and getattr(sys.modules.get(match["module"]), match["name"], None)
    return isinstance(found, type) and issubclass(found, Model) and found.inline


def _missing(name: str, error: ModuleNotFoundError) -> ModelUnsupported:
    return ModelUnsupported(f"loading model {name!r}: {error.name} is missing; {INSTALL_TORCH}")


def load_tokenizer(model: ModelFace, name: str) -> Tokenizer:
    """Make the tokenizer of a model that a config calls `name`.

    Raises:
        ModelUnsupported: it cannot be made, or what was made is none.
    """
    doing = f"model {name!r}: {name_of(model, 'tokenizer')}"
    try:
        made = call(model, "tokenizer", model.tokenizer)
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(f"{doing} failed: {describe(error)}") from error
    for method in ("encode", "encode_chat", "decoder"):
        if not callable(getattr(made, method, None)):
            kind = type(made).__name__
            raise ModelUnsupported(f"{doing} returned no tokenizer: {kind} has no {method}()")
    return made


def _load_class(path: str, module: str, name: str) -> Model:
    doing = f"loading model {path!r}"
    try:
        found = _find_class(doing, module, name)
        model = found()
        spec: object = model.spec
    except DpkitError:
        raise
    except TypeError as error:
        raise ModelUnsupported(f"{doing}: it cannot be made without arguments: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: of a script that was written to be run
        raise ModelUnsupported(f"{doing}: {describe(error)}") from error
    if not isinstance(spec, ModelSpec):
        raise ModelUnsupported(f"{doing}: its spec must be a ModelSpec, not {shown(spec)}")
    return model


def _find_class(doing: str, module: str, name: str) -> type[Model]:
    try:
        found = find_named(module, name)
    except NotThere as error:
        raise ModelNotFound(f"{doing}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise ModelUnsupported(f"{doing}: it is not a subclass of dpkit.abc.Model")
    return found
