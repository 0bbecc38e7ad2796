"""The words of every error that dpkit makes, found in its source, each of which can be blanked.

A text is what is literal in the message of one error, made in one place: in a ``raise``, in a call
of an error's class, or in a variable of the same function that goes into either. Alternatives (`a
if x else b`, a variable with two values) are texts of their own. What only passes on the words of
others has no text.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Sequence

    Heard = Callable[[tuple[str, ...], str], str]

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "dpkit").rglob("*.py"))

GAP = "{}"
"""Stands for what is not literal."""

_HEARD = "__heard__"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """The literal words of one error."""

    key: str  # file, function and words, as the table of readers has it
    literals: tuple[ast.Constant, ...]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _errors() -> frozenset[str]:
    """Names of all classes of errors: Python's and dpkit's."""
    bases = {
        node.name: {_name(base) for base in node.bases}
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    while new := {name for name, above in bases.items() if above & found} - found:
        found |= new
    return frozenset(found)


ERRORS = _errors()


def texts_of(source: Path, tree: ast.Module) -> list[Text]:
    """Every text of a module, in order."""
    place = source.relative_to(ROOT).as_posix()
    found: list[Text] = []
    seen: Counter[str] = Counter()
    for name, function in _functions(tree, ""):
        for words, literals in _texts_in(function, name):
            key = f"{place} {name}: {words}"
            seen[key] += 1
            number = f" ({seen[key]})" if seen[key] > 1 else ""
            found.append(Text(key + number, literals))
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, _Function | ast.ClassDef):
            name = f"{prefix}.{child.name}".lstrip(".")
        if isinstance(child, _Function):
            yield name, child
        yield from _functions(child, name)


def _texts_in(function: _Function, of: str) -> Iterator[tuple[str, tuple[ast.Constant, ...]]]:
    own = list(_own_nodes(function))
    values: dict[str, list[ast.expr]] = {}
    for node in own:
        for target, value in _assignments(node):
            values.setdefault(target, []).append(value)
    calls = [node for node in own if isinstance(node, ast.Call) and _makes_error(node, of)]
    raised = [node.exc for node in own if isinstance(node, ast.Raise)]
    calls += [node for node in raised if isinstance(node, ast.Call)]
    done: set[int] = set()
    parts = [part for call in sorted(calls, key=_place) for part in _arguments(call)]
    while parts:
        part = parts.pop(0)
        if id(part) in done:
            continue
        done.add(id(part))
        for branch in _branches(part):
            if literals := tuple(_literals(branch)):
                yield _words(branch), literals
            names = {node.id for node in _outside_calls(branch) if isinstance(node, ast.Name)}
            parts += [value for name in sorted(names) for value in values.get(name, ())]


def _makes_error(call: ast.Call, of: str) -> bool:
    """Whether a call, in the function of this name, makes an error, or is how its class does."""
    owner, _, function = of.rpartition(".")
    if function == "__init__" and owner in ERRORS:
        return ast.unparse(call.func) == "super().__init__"
    return _name(call.func) in ERRORS


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=parts)):
            for target, part in zip(targets, parts, strict=True):
                if isinstance(target, ast.Name):
                    yield target.id, part
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name, value
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            yield name, value


def _place(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _branches(node: ast.expr) -> Iterator[ast.expr]:
    """The alternatives of an expression that is one as a whole."""
    match node:
        case ast.IfExp(body=one, orelse=other):
            yield from _branches(one)
            yield from _branches(other)
        case ast.List(elts=[only]):
            yield from _branches(only)
        case _:
            yield node


def _outside_calls(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what is in a call's arguments, or tells how to format."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_format = isinstance(node, ast.FormattedValue) and child is node.format_spec
        if not isinstance(child, ast.Call) and not is_format:
            yield from _outside_calls(child)


def _literals(node: ast.expr) -> Iterator[ast.Constant]:
    """The constants that are words: all of an f-string, elsewhere what is no mere name."""
    if isinstance(node, ast.Call):
        return
    formatted = {
        id(value)
        for each in _outside_calls(node)
        if isinstance(each, ast.JoinedStr)
        for value in each.values
    }
    for each in _outside_calls(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            is_text = any(map(str.isalpha, each.value))
            if is_text and (id(each) in formatted or " " in each.value):
                yield each


def _words(node: ast.expr) -> str:
    parts = (
        value.value if isinstance(value, ast.Constant) else GAP
        for value in ([node] if not isinstance(node, ast.JoinedStr) else node.values)
    )
    text = " ".join("".join(map(str, parts)).split())
    if text == GAP:  # such as the sum of two strings
        text = GAP.join(str(each.value) for each in _literals(node))
    return text if len(text) <= 70 else f"{text[:69]}…"


# The other half: dpkit, compiled so that it says each text through one function.


class _Speaker(ast.NodeTransformer):
    """Sends literals through `_HEARD`, with the keys of the texts that they belong to."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._keys: dict[int, list[str]] = {}
        for text in texts:
            for literal in text.literals:
                self._keys.setdefault(id(literal), []).append(text.key)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if (keys := self._keys.get(id(node))) is None:
            return node
        heard = ast.Name(_HEARD, ast.Load())
        arguments: list[ast.expr] = [ast.Tuple([ast.Constant(k) for k in keys], ast.Load()), node]
        return ast.copy_location(ast.Call(heard, arguments, []), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        node.values = [
            ast.FormattedValue(value, -1) if isinstance(value, ast.Call) else value
            for value in node.values
        ]
        return node


class _Loader(SourceFileLoader):
    """Loads a module of dpkit whose texts go through `heard`."""

    heard: Heard

    def get_code(self, fullname: str) -> types.CodeType:  # noqa: ARG002 - never from a cache
        path = Path(self.get_filename())
        tree = ast.parse(path.read_bytes())
        _Speaker(texts_of(path, tree)).visit(tree)
        code: types.CodeType = compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True
        )
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[_HEARD] = self.heard
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds dpkit's modules and has their texts go through `heard`: keys and text in, text out."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "dpkit":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
            spec.loader.heard = self._heard
        return spec
