"""The house keeps its own rules: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
import importlib
import statistics
from pathlib import Path

import pytest

import dpkit

ROOT = Path(dpkit.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# From the inside out: a module may import its own layer and those before it. Packages of one layer
# that do not know each other are listed in STRANGERS.
LAYERS = [
    [
        "dpkit.names",
        "dpkit.hashing",
        "dpkit.pages",
        "dpkit.imports",
        "dpkit.costmodel",
        "dpkit.sampling",
        "dpkit.logs",
    ],
    ["dpkit.messages"],
    ["dpkit.errors"],
    ["dpkit.abc"],
    ["dpkit.text", "dpkit.checkpoint", "dpkit.traces"],
    [
        "dpkit.config",
        "dpkit.engine",
        "dpkit.balancer",
        "dpkit.wire.tensors",
        "dpkit.wire.structs",
        "dpkit.wire.codec",
        "dpkit.wire.logprobs",
        "dpkit.wire.convert",
        "dpkit.wire.foreign",
        "dpkit.wire.reports",
    ],
    [
        "dpkit.nursery.alarms",
        "dpkit.nursery.context",
        "dpkit.nursery.limits",
        "dpkit.nursery.meter",
        "dpkit.nursery.services",
        "dpkit.nursery.supervisor",
        "dpkit.nursery.events",
        "dpkit.nursery.filewriter",
        "dpkit.nursery.eventwriter",
        "dpkit.nursery.steplog",
        "dpkit.nursery.fanin",
        "dpkit.nursery.bell",
        "dpkit.nursery.mailbox",
        "dpkit.nursery.inbox",
    ],
    ["dpkit.wire"],
    [
        "dpkit.link",
        "dpkit.nursery.life",
        "dpkit.nursery.runner",
        "dpkit.nursery.handout",
        "dpkit.nursery.lockstep",
        "dpkit.nursery.busyloop",
    ],
    ["dpkit.launch"],
    [
        "dpkit.nursery.coordinator",
        "dpkit.nursery.prompts",
        "dpkit.nursery.requests",
        "dpkit.nursery.flight",
        "dpkit.nursery.line",
        "dpkit.nursery.guided",
        "dpkit.nursery.arbiter",
        "dpkit.nursery.arbitration",
        "dpkit.nursery.rescue",
        "dpkit.nursery.flights",
        "dpkit.nursery.membership",
        "dpkit.nursery.gathering",
        "dpkit.nursery.logfiles",
        "dpkit.nursery.slot",
        "dpkit.nursery.standing",
        "dpkit.nursery.hosts",
        "dpkit.nursery.launchers",
        "dpkit.nursery.sharedcontext",
        "dpkit.nursery.desks",
        "dpkit.nursery.wirelife",
        "dpkit.nursery.remote",
        "dpkit.nursery.joined",
        "dpkit.nursery.scribe",
        "dpkit.nursery.stream",
        "dpkit.nursery.submission",
        "dpkit.nursery.client",
        "dpkit.nursery.build",
        "dpkit.nursery.audit",
        "dpkit.nursery.roster",
        "dpkit.nursery.dump",
        "dpkit.nursery.reload",
        "dpkit.nursery.cluster",
    ],
    ["dpkit.serve", "dpkit.bench"],
    ["dpkit.observe"],
    ["dpkit.cli", "dpkit.simulate", "dpkit.testing", "dpkit._trio"],
]
STRANGERS = {"dpkit.config", "dpkit.engine", "dpkit.balancer"}
SANS_IO = (
    "dpkit.config",
    "dpkit.engine",
    "dpkit.balancer",
    "dpkit.text",
    "dpkit.checkpoint",
    "dpkit.wire.tensors",
    "dpkit.wire.structs",
    "dpkit.wire.codec",
    "dpkit.wire.logprobs",
    "dpkit.wire.convert",
    "dpkit.wire.foreign",
    "dpkit.wire.reports",
)
TORCH_HOMES = ("dpkit.engine.models.torch", "dpkit.link.gloo")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file; type-checking imports count too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(node.module or "")
    return found


def layer_of(module: str) -> tuple[int, str] | None:
    for number, names in enumerate(LAYERS):
        for name in names:
            if module == name or module.startswith(name + "."):
                return number, name
    return None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_inner_layers(path: Path) -> None:
    module = name_of(path)
    if module in {"dpkit", "dpkit.__main__", "dpkit.nursery"}:
        return
    own = layer_of(module)
    assert own is not None, f"{module} has no layer: add it to LAYERS"
    for imported in imports_of(path):
        if not imported.startswith("dpkit."):
            continue
        other = layer_of(imported)
        assert other is not None, f"{module} imports {imported}, which has no layer"
        assert other[0] <= own[0], f"{module} may not import {imported}, a layer further out"
        if own[1] in STRANGERS and other[1] in STRANGERS:
            assert own[1] == other[1], f"{module} may not know {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_sans_io_modules_know_no_io(path: Path) -> None:
    module = name_of(path)
    roots = {name.partition(".")[0] for name in imports_of(path)}
    if module.startswith(SANS_IO):
        assert not roots & {"trio", "zmq", "socket", "asyncio"}
    if not module.startswith(TORCH_HOMES):
        assert "torch" not in roots


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: the docstring is documentation, not length."""
    body = node.body
    documented = ast.get_docstring(node) is not None and len(body) > 1
    first = body[1] if documented else body[0]
    return (node.end_lineno or node.lineno) - first.lineno + 1


def test_the_size_table() -> None:
    """Median module at most 180 lines, none over 400; median function at most 10, none over 60."""
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    lengths = {
        f"{name_of(path)}.{node.name}": length(node)
        for path in MODULES
        for node in functions(ast.parse(path.read_text()))
    }
    for module in sorted(sizes, key=sizes.__getitem__, reverse=True):
        print(f"{sizes[module]:5d}  {module}")
    for function in sorted(lengths, key=lengths.__getitem__, reverse=True)[:10]:
        print(f"{lengths[function]:5d}  {function}()")
    assert statistics.median(sizes.values()) <= 180
    assert max(sizes.values()) <= 400
    assert statistics.median(lengths.values()) <= 10
    assert max(lengths.values()) <= 60


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_begins_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", dpkit.__all__)
def test_every_public_name_is_exported_lazily_and_for_type_checkers(name: str) -> None:
    assert getattr(dpkit, name) is not None
    if name == "__version__":
        return
    home = importlib.import_module(getattr(dpkit, name).__module__)
    assert getattr(home, name) is getattr(dpkit, name)
    assert f"import {name} as {name}\n" in (ROOT / "__init__.py").read_text()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'engine_room'"):
        _ = dpkit.engine_room
