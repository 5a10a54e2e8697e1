"""A private attribute is its class's own: no class reads another's, neither as a base that only says what it would like
to find in the class below it, nor through an object that it holds.

Reads the sources, runs none of them, so it sees what the text tells: names, not types.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import tritonllm

PACKAGE = Path(tritonllm.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
RECORDS = ("NamedTuple", "Protocol", "Struct", "TypedDict")  # bases of classes whose annotations are their fields
PLAIN = ("ABC", "Generic", "NamedTuple", "Protocol", "object")  # bases from outside that have no private attributes
OF_TUPLES = ("_asdict", "_fields", "_make", "_replace")  # public, of NamedTuple
# The first three mean another library's attribute, which is called as one of the package is.
ALLOWED = {
    ("dist/connect.py", "_timeout"),  # of torch's process groups
    ("engine/text/detokenizer.py", "_decode"),  # of a transformers tokenizer
    ("teach/tutorial/lab.py", "_runner"),  # lessons show the cache's tensors, which an engine keeps to itself
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES


def classes_of(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def is_record(node: ast.ClassDef) -> bool:
    decorators, bases = (" ".join(map(ast.unparse, parts)) for parts in (node.decorator_list, node.bases))
    return "dataclass" in decorators or any(record in bases for record in RECORDS)


def only_declared(node: ast.ClassDef) -> list[str]:
    """Private attributes whose type a class says and whose value it leaves to another."""
    lines = [line for line in node.body if isinstance(line, ast.AnnAssign) and line.value is None]
    names = [line.target.id for line in lines if isinstance(line.target, ast.Name) and not is_record(node)]
    return [name for name in names if is_private(name)]


def own_names(node: ast.ClassDef) -> set[str]:
    """Methods and attributes that a class defines or sets itself."""
    found: set[str] = set()
    for line in node.body:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(line.name)
        elif isinstance(line, ast.Assign) or (isinstance(line, ast.AnnAssign) and (line.value or is_record(node))):
            found |= {part.id for part in ast.walk(line) if isinstance(part, ast.Name) and is_stored(part)}
    attributes = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return found | {part.attr for part in attributes if is_stored(part) and is_itself(part.value)}


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_itself(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()", "type(self)")


def missing(node: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> set[str]:
    """Private attributes of ``self`` that a class reads and neither it nor a base of it sets; none, if a base is from
    outside and may have them."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and is_private(part.attr) and is_itself(part.value)
    }
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        seen.add(one.name)
        found -= own_names(one)
        for base in one.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name in known:
                waiting += [known[name]] if name not in seen else []
            elif name not in PLAIN:
                return set()
    return found


def foreign_names(tree: ast.AST) -> set[str]:
    """What a module imports from outside the package."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("tritonllm")
        ):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def reaches(tree: ast.AST, private: set[str]) -> list[tuple[int, str]]:
    """Line and name of each use of a ``private`` attribute of something else than ``self`` and other libraries'
    modules, outside the classes that have one of that name themselves."""
    foreign = foreign_names(tree)

    def inside(node: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.ClassDef):
            own = own | own_names(node)
        if isinstance(node, ast.Attribute) and node.attr in private - own:
            owner = ast.unparse(node.value)
            if not is_itself(node.value) and owner.partition(".")[0] not in foreign:
                yield node.lineno, node.attr
        for child in ast.iter_child_nodes(node):
            yield from inside(child, own)

    return list(inside(tree, set()))


CLASSES = {node.name: node for tree in TREES.values() for node in classes_of(tree)}
PRIVATE = {name for node in CLASSES.values() for name in own_names(node) if is_private(name)}


def test_no_class_leaves_its_private_attributes_to_another():
    found = {name: only_declared(node) for name, node in CLASSES.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_each_class_has_the_private_attributes_that_it_reads():
    found = {name: missing(node, CLASSES) for name, node in CLASSES.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_no_private_attribute_of_another_class_is_read():
    found = [(path, line, name) for path, tree in TREES.items() for line, name in reaches(tree, PRIVATE)]
    assert [one for one in found if (one[0], one[2]) not in ALLOWED] == []
    assert {(path, name) for path, _, name in found} == ALLOWED, "no such read any more: take it out of ALLOWED"


MIXIN = "class Mixin:\n    _part: int\n    def f(self):\n        return self._part\n"
A = "class A:\n    def __init__(self):\n        self._x = 1\n"
NOTHING: tuple[set[str], set[str], list[str]] = set(), set(), []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (MIXIN, ({"_part"}, {"_part"}, [])),
        (MIXIN.replace("    _part: int\n", ""), (set(), {"_part"}, [])),
        (MIXIN.replace("Mixin", "Mixin(Thread)"), ({"_part"}, set(), [])),
        (MIXIN.replace("int", "int = 0"), NOTHING),
        (MIXIN.replace("Mixin", "Mixin(NamedTuple)"), NOTHING),
        (f"@dataclass\n{MIXIN}", NOTHING),
        (f"{A}class B(A):\n    x = lambda self: self._x", NOTHING),
        (f"{A}    def same(self, other):\n        return other._x", NOTHING),
        (f"{A}class B:\n    def f(self, a):\n        return a._x", (set(), set(), ["_x"])),
        (f"{A}class B:\n    def f(self):\n        return self.a._x", (set(), set(), ["_x"])),
        (f"{A}class B:\n    def f(self, a):\n        a._x = 1", (set(), set(), ["_x"])),
        (f"{A}def f(a):\n    return a._x, a._replace()", (set(), set(), ["_x"])),
        (f"import torch\n{A}torch.cuda._x()", NOTHING),
        (f"from tritonllm.a import a\n{A}a._x", (set(), set(), ["_x"])),
    ],
)
def test_finds(source, found):
    tree = ast.parse(source)
    known = {node.name: node for node in classes_of(tree)}
    private = {name for node in known.values() for name in own_names(node) if is_private(name)}
    declared = {name for node in known.values() for name in only_declared(node)}
    missed = {name for node in known.values() for name in missing(node, known)}
    assert (declared, missed, [name for _, name in reaches(tree, private)]) == found
