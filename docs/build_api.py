"""Writes the API reference, `docs/api/`, from the docstrings of the package.

    python docs/build_api.py            # or: make docs
    python docs/build_api.py --check    # exit code 1 where a page is not what it would write

The source is parsed, never imported: nothing needs to be installed, and what comes out does not
depend on what is. A name is public where a module below lists it in `__all__` (a module without
that: every name that does not start with an underscore). A string below a field or a constant is
its docstring. Each name is described once, on the first page that has it, and linked elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
OUT = ROOT / "docs" / "api"
MODULES = (
    "veca",
    "veca.attention",
    "veca.images",
    "veca.weights",
    "veca.features",
    "veca.embed",
    "veca.viz",
    "veca.probe",
    "veca.probe.datasets",
    "veca.probe.protocol",
    "veca.probe.metrics",
    "veca.teachers",
    "veca.data",
    "veca.distill",
    "veca.distill.config",
    "veca.export",
    "veca.integrations.transformers",
    "veca.integrations.timm",
    "veca.cost",
    "veca.bench",
    "veca.quickstart",
    "veca.errors",
)
COMMANDS = "commands"
NOTE = "<!-- Made by docs/build_api.py from the docstrings; edit those. -->"
_WIDTH = 88
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    text: str
    tree: ast.Module

    @functools.cached_property
    def lines(self) -> list[bytes]:
        return self.text.encode().splitlines()

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The source of a node. (`ast.get_source_segment` splits the file for every call.)"""
        end = node.end_lineno or node.lineno
        lines = self.lines[node.lineno - 1 : end]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The same on one line."""
        found = self.source(node)
        return re.sub(r"([\[(]) | (?=[\])])|,(?= ?[\])])", r"\1", " ".join(found.split()))


@dataclass(frozen=True)
class Name:
    """A public name: where it is defined, and what it is there."""

    name: str
    module: Module
    node: ast.AST | None
    """None: the name is a module itself."""
    doc: str

    @property
    def kind(self) -> str:
        if self.node is None:
            return "module"
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "function" if isinstance(self.node, Function) else "constant"

    @property
    def home(self) -> tuple[str, str]:
        return self.module.name, self.name


# ---------------------------------------------------------------------------------------- finding


@functools.cache
def read(name: str) -> Module | None:
    """The module of that name, if the package has it."""
    path = SOURCE.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return Module(name, text, ast.parse(text))
    return None


def statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """The statements of a body, each with the string that stands below it, if one does."""
    for here, below in zip(body, [*body[1:], None], strict=True):
        yield here, _string(below)


def _string(node: ast.AST | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return inspect.cleandoc(value.value)
    return ""


def target(node: ast.AST) -> str | None:
    """The name that an assignment gives a value to."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def public(module: Module) -> list[str]:
    """`__all__`, or what is defined here without an underscore."""
    for node in module.tree.body:
        if target(node) == "__all__" and isinstance(node, ast.Assign):
            return [str(name) for name in ast.literal_eval(node.value)]
    defined = (
        getattr(node, "name", None) or target(node) or ""
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef | ast.Assign | ast.AnnAssign)
    )
    return [name for name in defined if name and not name.startswith("_")]


def resolve(module: Module, name: str) -> Name:
    """Follow a name through imports to its definition."""
    for node, below in statements(module.tree.body):
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return Name(name, module, node, ast.get_docstring(node) or "")
        if target(node) == name:
            return Name(name, module, node, below)
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _imported(node.module or "", alias.name)
    raise SystemExit(f"{module.name} lists {name!r} but neither defines nor imports it")


def _imported(source: str, name: str) -> Name:
    inner = read(f"{source}.{name}")
    if inner is not None:
        return Name(name, inner, None, ast.get_docstring(inner.tree) or "")
    found = read(source)
    if found is None:
        raise SystemExit(f"{source} is not a module of this package")
    return resolve(found, name)


# ---------------------------------------------------------------------------------------- writing


def markdown(doc: str) -> str:
    """A docstring as Markdown: sections become lists, examples become code."""
    lines, out = doc.splitlines(), []
    i = 0
    while i < len(lines):
        line = lines[i]
        section = _SECTION.match(line)
        if section:
            end = i + 1
            while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
                end += 1
            out += [f"**{section[1]}**", "", *_items(lines[i + 1 : end]), ""]
            i = end
        elif line.startswith("veca "):  # an example of the command line
            out.append(f"    {line}")
            i += 1
        elif line.startswith(">>>"):
            end = i
            while end < len(lines) and lines[end]:
                end += 1
            out += ["```pycon", *lines[i:end], "```"]
            i = end
        else:
            out.append(line)
            i += 1
    return "\n".join(out).strip()


def _items(lines: list[str]) -> list[str]:
    """`name: text` with its continuation lines, as list items."""
    body = inspect.cleandoc("\n".join(lines)).splitlines()
    items: list[str] = []
    for line in body:
        if not line:
            continue
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif re.match(r"[\w*, .\[\]]+: ", line):
            names, _, text = line.partition(": ")
            quoted = ", ".join(f"`{name}`" for name in names.split(", "))
            items.append(f"- {quoted}: {text}")
        elif items:
            items[-1] += f" {line}"
        else:
            items.append(f"- {line}")
    return items


def cell(text: str) -> str:
    """Text inside a table."""
    return " ".join(text.split()).replace("|", "\\|")


def summary(doc: str) -> str:
    """The first sentence or paragraph of a docstring."""
    return cell(doc.split("\n\n")[0])


def signature(module: Module, node: Function, name: str, *, method: bool = False) -> str:
    """`name(a, b=1, *, c) -> X`, on one line or an argument a line."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    words = [_argument(module, arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if a.posonlyargs:
        words.insert(len(a.posonlyargs), "/")
    if method and not _decorated(node, "staticmethod"):
        words = words[1:]
    if a.vararg:
        words.append(f"*{_argument(module, a.vararg, None)}")
    elif a.kwonlyargs:
        words.append("*")
    words += [
        _argument(module, arg, default)
        for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        words.append(f"**{_argument(module, a.kwarg, None)}")
    returns = f" -> {module.segment(node.returns)}" if node.returns else ""
    return _call(name, words, "" if node.name == "__init__" else returns)


def _argument(module: Module, arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg + (f": {module.segment(arg.annotation)}" if arg.annotation else "")
    if default is None:
        return text
    return text + (" = " if arg.annotation else "=") + module.segment(default)


def _call(name: str, words: list[str], returns: str = "") -> str:
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])


def _decorated(node: Function | ast.ClassDef, *names: str) -> bool:
    found = set()
    for decorator in node.decorator_list:
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        found.add(inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", ""))
    return bool(found & set(names))


def class_text(name: Name) -> str:
    """Signature, docstring, fields and public methods of a class."""
    module, node = name.module, name.node
    assert isinstance(node, ast.ClassDef)
    methods = [m for m in node.body if isinstance(m, Function)]
    start = next((m for m in methods if m.name == "__init__"), None)
    bases = [module.segment(base) for base in node.bases]
    is_record = _decorated(node, "dataclass") or "NamedTuple" in bases
    fields = [
        (target(part) or "", part, below)
        for part, below in statements(node.body)
        if isinstance(part, ast.AnnAssign) and not (target(part) or "_").startswith("_")
    ]
    if start is not None:
        head = signature(module, start, name.name, method=True)
    elif is_record:
        head = _call(name.name, [_field(module, part) for _, part, _ in fields])
    else:
        head = f"class {name.name}({', '.join(bases)})" if bases else f"class {name.name}"
    parts = [f"```python\n{head}\n```"]
    if bases and not head.startswith("class") and not set(bases) <= {"NamedTuple", "Protocol"}:
        parts.append(f"A {', '.join(f'`{base}`' for base in bases)}.")
    parts.append(markdown(name.doc))
    if start is not None and ast.get_docstring(start):
        parts.append(markdown(ast.get_docstring(start) or ""))
    described = [(field, part, below) for field, part, below in fields if below]
    if described:
        rows = [
            f"| `{field}` | `{cell(module.segment(part.annotation))}` | {cell(below)} |"
            for field, part, below in described
            if isinstance(part, ast.AnnAssign)
        ]
        parts.append("\n".join(["| field | type | |", "|---|---|---|", *rows]))
    parts += [_method_text(module, node, m) for m in methods if _is_shown(m)]
    return "\n\n".join(part for part in parts if part)


def _is_shown(method: Function) -> bool:
    if _decorated(method, "setter", "overload"):
        return False
    # One without a docstring does what the base class says.
    shown = not method.name.startswith("_") or method.name in ("__call__", "__len__", "__iter__")
    return shown and ast.get_docstring(method) is not None


def _field(module: Module, part: ast.AST) -> str:
    assert isinstance(part, ast.AnnAssign)
    text = f"{target(part)}: {module.segment(part.annotation)}"
    if part.value is None:
        return text
    value = re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", module.segment(part.value))
    return f"{text} = {value}"


def _method_text(module: Module, node: ast.ClassDef, method: Function) -> str:
    doc = markdown(ast.get_docstring(method) or "")
    if _decorated(method, "property", "cached_property"):
        kind = f": `{module.segment(method.returns)}`" if method.returns else ""
        return f"**`.{method.name}`**{kind}\n\n{doc}".strip()
    owner = node.name if _decorated(method, "classmethod", "staticmethod") else ""
    head = signature(module, method, f"{owner}.{method.name}", method=True)
    return f"```python\n{head}\n```\n\n{doc}".strip()


def constant_text(name: Name) -> str:
    assert isinstance(name.node, ast.Assign | ast.AnnAssign)
    value = name.node.value
    head = f"{name.name} = {name.module.segment(value)}" if value is not None else name.name
    if value is not None and len(head) > _WIDTH:  # as it stands in the source, unless it is long
        source = name.module.source(name.node)
        head = source if source.count("\n") < 12 else f"{name.name} = ..."
    return f"```python\n{head}\n```\n\n{markdown(name.doc)}".strip()


def text_of(name: Name) -> str:
    if name.kind == "class":
        return class_text(name)
    if name.kind == "constant":
        return constant_text(name)
    assert isinstance(name.node, Function)
    head = signature(name.module, name.node, name.name)
    return f"```python\n{head}\n```\n\n{markdown(name.doc)}".strip()


def module_page(module: Module, names: list[Name], homes: dict[tuple[str, str], str]) -> str:
    """A page: what the module is, its names in a table, then each of them that lives here."""
    rows, sections = [], []
    for name in names:
        page = homes.get(name.home)
        if name.kind == "module":
            link = f"[`{name.name}`]({name.module.name}.md)"
        elif page == module.name:
            link = f"[`{name.name}`](#{name.name.lower()})"
            sections.append(f"## {name.name}\n\n{text_of(name)}")
        else:
            link = f"[`{name.name}`]({page}.md#{name.name.lower()})"
        rows.append(f"| {link} | {name.kind} | {summary(name.doc)} |")
    table = "\n".join(["| name | | |", "|---|---|---|", *rows])
    doc = markdown(ast.get_docstring(module.tree) or "")
    return "\n\n".join([NOTE, f"# Module {module.name}", doc, table, *sections]) + "\n"


# --------------------------------------------------------------------------------------- commands


def command_page() -> str:
    """Every command of the command line, with its arguments and options."""
    main = read("veca.cli.main")
    assert main is not None
    order = [
        part.id
        for node in ast.walk(main.tree)
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple)
        for part in ast.walk(node.iter)
        if isinstance(part, ast.Name)
    ]
    sections = []
    for name in order:
        found = resolve(main, name)
        assert isinstance(found.node, Function)
        sections.append(_command_text(found.module, found.node))
    intro = "`veca COMMAND --help` prints the same. Bad input is one line and exit code 2."
    return "\n\n".join([NOTE, "# The command line", intro, *sections]) + "\n"


def _command_text(module: Module, node: Function) -> str:
    plain = node.args.args
    defaults = [None] * (len(plain) - len(node.args.defaults)) + list(node.args.defaults)
    words, rows = [], []
    for arg, default in zip(plain, defaults, strict=True):
        kind, help_, flags, shown = _option(module, arg)
        name = arg.arg.strip("_").replace("_", "-")
        if kind == "Argument":
            words.append(name.upper() if default is None else f"[{name.upper()}]")
        name = name.upper() if kind == "Argument" else f"{flags or f'--{name}'}"
        if default is None:
            shown = "needed"
        elif not shown:
            value = module.segment(default).strip('()"')
            value = value.removeprefix('Path("')
            if re.fullmatch(r"[A-Z]\w+\.\w+", value):  # of an Enum
                value = value.partition(".")[2].replace("_", "-")
            shown = "" if value in ("None", "False", "True") else f"`{value}`"
        rows.append(f"| `{name}` | {cell(help_)} | {cell(shown)} |")
    table = "\n".join(["| | | default |", "|---|---|---|", *rows])
    title = f"veca {node.name.rstrip('_')}"
    usage = " ".join([title, *words])
    doc = markdown(ast.get_docstring(node) or "")
    return f"## {title}\n\n`{usage} [OPTIONS]`\n\n{doc}\n\n{table}"


def _option(module: Module, arg: ast.arg) -> tuple[str, str, str, str]:
    """(Argument or Option, help, its flags where they are not the name, default in words)."""
    call = _typer_call(module, arg.annotation)
    if call is None:
        return "Option", "", "", ""
    words = {k.arg: k.value for k in call.keywords}
    help_ = ast.literal_eval(words["help"]) if "help" in words else ""
    flags = " ".join(ast.literal_eval(part) for part in call.args)
    default = words.get("show_default")
    shown = ast.literal_eval(default) if default is not None else ""
    kind = call.func.attr if isinstance(call.func, ast.Attribute) else "Option"
    return kind, help_, flags, shown if isinstance(shown, str) else ""


def _typer_call(module: Module, annotation: ast.AST | None) -> ast.Call | None:
    """The `typer.Option(...)` inside an annotation, or inside the alias that it is."""
    if isinstance(annotation, ast.Name):
        alias = resolve(module, annotation.id)
        return _typer_call(alias.module, getattr(alias.node, "value", None))
    calls = [part for part in ast.walk(annotation or ast.Pass()) if isinstance(part, ast.Call)]
    return calls[0] if calls else None


# ------------------------------------------------------------------------------------- the folder


def build() -> dict[str, str]:
    """File name -> content of every page."""
    modules = [module for module in map(read, MODULES) if module is not None]
    listed = {module.name: [resolve(module, n) for n in public(module)] for module in modules}
    homes: dict[tuple[str, str], str] = {}
    for page, names in listed.items():
        for name in names:
            homes.setdefault(name.home, page)
    written = {f"{m.name}.md": module_page(m, listed[m.name], homes) for m in modules}
    written[f"{COMMANDS}.md"] = command_page()
    rows = [
        f"| [`{m.name}`]({m.name}.md) | {summary(ast.get_docstring(m.tree) or '')} |"
        for m in modules
    ]
    rows.append(f"| [the command line]({COMMANDS}.md) | every command and its options |")
    index = "\n".join(["| module | |", "|---|---|", *rows])
    intro = (
        "Made from the docstrings by `make docs`; a test checks that it is not stale. Shapes: B "
        "images, N patches (h x w), C active cores (the budget), D width, L layers."
    )
    written["README.md"] = f"{NOTE}\n\n# API reference\n\n{intro}\n\n{index}\n"
    return written


def stale(wanted: dict[str, str]) -> list[str]:
    """Files in `docs/api` that are missing, different or no longer wanted."""
    there = {path.name: path.read_text(encoding="utf-8") for path in OUT.glob("*.md")}
    return sorted(n for n in {*wanted, *there} if wanted.get(n) != there.get(n))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell what is stale")
    args = parser.parse_args()
    wanted = build()
    changed = stale(wanted)
    if args.check:
        print(f"stale, run `make docs`: {', '.join(changed)}" if changed else "up to date")
        return 1 if changed else 0
    OUT.mkdir(exist_ok=True)
    for name in changed:
        if name in wanted:
            (OUT / name).write_text(wanted[name], encoding="utf-8")
        else:
            (OUT / name).unlink()
    print(f"{len(wanted)} pages in {OUT.relative_to(ROOT)}, {len(changed)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
