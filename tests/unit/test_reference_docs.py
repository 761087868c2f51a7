"""The reference pages and the code say the same: nothing without a line, no line without the thing."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
import yaml
from msgspec import Meta, Struct, structs

import api
from api import compat_models, metrics
from api.capture import CaptureRequest
from api.wire import STATUS
from harness_adapters.shell import Shell
from polar import client
from polar.codec import convert
from polar.config import Settings, load
from polar.errors import InvalidConfig
from polar.launch import Endpoint
from polar.result import SessionResult, Termination, Verdict
from polar.session import STATES
from polar.store.capture import RETENTION
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, TaskRequest
from proxy.admin import Admin
from runtimes import apptainer_cli
from submission import validate
from tests.unit.reference_pages import ROOT, blocks, first_column, names, page, table, tables

PAGES = ("tasks", "settings", "api", "client")
ROOMS = (
    "polar", "submission", "cli", "workers", "proxy", "api", "engine", "runtimes", "harness_adapters", "evaluators",
    "reconstruction",
)  # fmt: skip


@cache
def sources() -> dict[Path, str]:
    paths = (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")))
    return {p.relative_to(ROOT): p.read_text(encoding="utf-8") for p in paths}


def constant(name: str, text: str) -> set[str]:
    """Values of NAME = "text" in this source, else wherever it may be imported from."""
    defined = re.compile(rf'^{name} = "(\w+)"', re.M)
    return set(defined.findall(text)) or {v for other in sources().values() for v in defined.findall(other)}


def raised_codes() -> set[str]:
    """Error codes of results and of the control plane: `code="…"`, or a class's own."""
    out: set[str] = set()
    for path, text in sources().items():
        if path.parts[0] not in ("cli", "proxy", "engine"):  # of commands; in the dialects' envelopes
            for expression in re.findall(r"\bcode=[^,)\n]+|^    code = \"\w+\"$", text, re.M):
                out |= set(re.findall(r'"([a-z_]+)"', expression))
                out |= {v for n in re.findall(r"\b[A-Z_]{2,}\b", expression) for v in constant(n, text)}
    return out


ASKED = re.compile(
    r"""(?:\benviron\.get\(|\bgetenv\(|\benviron\[|\benvvar=|(?<![\w.])env\.get\((?="POLAR_))\s*("?)([\w.]+)"""
    r"""|(")(\w+)" (?:not )?in os\.environ"""
)


def read_variables() -> set[str]:
    """Environment variables that the code asks for by name."""
    out = set(apptainer_cli._PASSED)
    for path, text in sources().items():
        for quote, asked, quote2, asked2 in ASKED.findall(text):
            name = asked or asked2
            if quote or quote2:
                out.add(name)
            elif name.isupper():
                values = constant(name, text)
                assert values, f"{path}: {name}"
                out |= values
            else:  # a setting names it; `k` goes over _PASSED
                assert name.endswith("_env") or name in ("variable", "k"), f"{path}: which variable is {name}?"
    return out


def leaves(typ: Any) -> Iterator[Any]:
    """The parts of a type: classes, Meta, and values of Literals."""
    origin, args = get_origin(typ), get_args(typ)
    if origin is Annotated:
        yield from leaves(args[0])
        yield from (a for a in args[1:] if isinstance(a, Meta))
    elif origin is Literal:
        yield from args
    elif origin in (Union, types.UnionType, list, dict):
        for a in args:
            yield from leaves(a)
    else:
        yield typ


def structs_of(root: type[Struct]) -> dict[str, type[Struct]]:
    found: dict[str, type[Struct]] = {}
    todo = [root]
    while todo:
        s = todo.pop()
        found[s.__name__] = s
        inner = (x for f in structs.fields(s) for x in leaves(f.type))
        todo += [x for x in inner if isinstance(x, type) and issubclass(x, Struct) and x.__name__ not in found]
    return found


def rows_of_structs(name: str) -> dict[str, dict[str, dict[str, str]]]:
    """struct -> field -> column -> cell, of the tables whose headings end in names of structs."""
    out: dict[str, dict[str, dict[str, str]]] = {}
    for t in tables(name):
        for struct in re.findall(r"\b[A-Z][A-Za-z]+\b", t.heading.rpartition(": ")[2]) if ": " in t.heading else []:
            for row in t.rows:
                for field in names(row[0]):
                    out.setdefault(struct, {})[field] = dict(zip(t.header, row, strict=True))
    return out


def shown(value: Any) -> str:
    """A default as the pages write it."""
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "–", True: "true", False: "false"}[value]
    return f"`{value}`" if isinstance(value, str) else f"{value:.15g}"


def default_of(f: structs.FieldInfo) -> str:
    if f.default_factory is not msgspec.NODEFAULT:
        value, other = f.default_factory(), f.default_factory()
        return "made" if value != other else "defaults" if isinstance(value, Struct) else str(value)
    if f.default == "":
        return "empty"
    return shown(inspect.Parameter.empty if f.required else f.default)


def type_words(typ: Any) -> list[str]:
    """What the column of types must say."""
    out = []
    for x in leaves(typ):
        if isinstance(x, Meta):
            low, high = (x.ge, x.gt), x.le
            if low != (None, None):
                bound = f"≥ {x.ge:g}" if x.ge is not None else f"> {x.gt:g}"
                full = f"{x.ge:g} to {high}" if x.ge is not None else f"{bound}, ≤ {high}"
                out.append(bound if high is None else full)
        elif isinstance(x, str):
            out.append(f"`{x}`")
        elif x in (int, float, bool):
            out.append({int: "integer", float: "number", bool: "boolean"}[x])
        elif isinstance(x, int):
            out.append(str(x))
    return out


@pytest.mark.parametrize(("name", "root"), [("tasks", TaskRequest), ("settings", Settings)])
def test_every_field_has_its_line(name, root):
    told, real = rows_of_structs(name), structs_of(root)
    assert set(told) == set(real)
    for struct, typ in real.items():
        tag = [typ.__struct_config__.tag_field] if typ.__struct_config__.tag_field else []
        assert set(told[struct]) == {*typ.__struct_fields__, *tag}, struct
        for t in tag:
            assert f"`{typ.__struct_config__.tag}`" in told[struct][t]["type"]
        for f in structs.fields(typ):
            row, where = told[struct][f.name], f"{struct}.{f.name}"
            assert row["default"] == default_of(f), where
            for word in type_words(f.type):
                assert word in row["type"], f"{where}: '{word}' is not in '{row['type']}'"


def test_the_example_is_a_whole_task_that_would_be_taken(tmp_path):
    (text,) = blocks("tasks", "yaml")
    data = yaml.safe_load(text)
    assert set(data) == set(TaskRequest.__struct_fields__) - {"schema_version"}
    task = convert(data, TaskRequest, "example")
    assert validate(task, Settings(data_dir=str(tmp_path), volume_roots=["/opt/polar"])) == "docker"
    assert {type(step).__name__ for step in task.runtime.prepare} == {"UploadFile", "UploadDir", "Exec"}
    assert 0o755 in {getattr(step, "mode", None) for step in task.runtime.prepare}


def test_every_end_and_every_error_code():
    assert first_column(table("tasks", "`termination`")) == list(get_args(Termination))
    assert first_column(table("tasks", "`verdict`")) == list(get_args(Verdict))
    assert set(first_column(table("tasks", "code"))) == raised_codes()


def test_the_result():
    assert set(rows_of_structs("client")["SessionResult"]) == set(SessionResult.__struct_fields__)


@pytest.mark.parametrize("f", structs.fields(Settings), ids=lambda f: f.name)
def test_every_settings_variable(f, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no polar.toml
    variable = rows_of_structs("settings")["Settings"][f.name]["variable"]
    text, value = {
        bool: ("false", False),
        float: ("7", 7.0),
        int: ("7", 7),
        str: ("x", "x"),
        list: ("a,b", ["a", "b"]),
    }[type(getattr(Settings(), f.name)) if f.name != "models" else str]
    env = {f"POLAR_{f.name.upper()}": text}
    if variable != "–":
        assert names(variable) == list(env)
        assert getattr(load(env=env), f.name) == value
        return
    with pytest.raises(InvalidConfig, match=next(iter(env))):
        load(env=env)


def test_every_other_variable():
    told = set(first_column(table("settings", "variable")))
    read = read_variables() - {f"POLAR_{f.upper()}" for f in Settings.__struct_fields__}
    assert not {*read, Settings().api_token_env} - told, "without a line"
    everything = "\n".join(sources().values())
    assert [n for n in told if f'"{n.rstrip("…")}' not in everything] == [], "nothing reads it"


def test_what_a_shell_agent_finds():
    endpoint = Endpoint(base_url="http://p", api_key="k", model="m", context_length=1)
    plan = Shell().plan(AgentSpec(harness="shell", command="true"), "do", endpoint)
    assert set(first_column(table("settings", "in the sandbox"))) == set(plan.env)


def test_what_stays_in_redis():
    text = page("settings").partition("## What stays in Redis")[2]
    assert f"{RETENTION // 86400} days" in text
    kept = re.search(r":events', 'MAXLEN', '~', (\d+)", (ROOT / "polar/store/lua/lib.lua").read_text())
    assert kept and f"{int(kept[1]):,}" in text


def test_every_route_and_its_query():
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(api.__path__):
        if info.name != "__main__":
            routes = getattr(importlib.import_module(f"api.{info.name}"), "routes", list)
            found |= {f"{r.method} {r.path}": r.handler for r in routes()}
    rows = {names(row[0])[0]: row[1] for row in table("api", "route").rows}
    assert set(rows) == set(found)
    for route, handler in found.items():
        call = re.search(r"query\(request, ([^)]*)\)", inspect.getsource(handler))
        wanted = set(re.findall(r'"(\w+)"', call[1])) if call else set()
        assert wanted <= {n.partition("=")[0] for n in names(rows[route])}, route


def test_every_admin_route_of_the_proxy():
    routes = Admin(None, "", "", False).app().router.routes()  # type: ignore[arg-type]
    real = {f"{r.method} {r.resource.canonical}" for r in routes if r.method != "HEAD" and r.resource}
    assert set(first_column(table("api", "admin route"))) == real


def test_every_status():
    told = {code: int(row[0]) for row in table("api", "status").rows for code in names(row[1])}
    assert told == STATUS


def test_fields_of_other_requests():
    section = page("api").partition("CaptureRequest:")[2].partition("\n\n")[0]
    assert names(section) == list(CaptureRequest.__struct_fields__)
    assert f"`timeout_seconds` ({CaptureRequest().timeout_seconds:g})" in section
    theirs = {f for s in structs_of(compat_models.Task).values() for f in s.__struct_fields__}
    theirs |= set(compat_models.SessionResult.__struct_fields__) | {"agent_timeout", "volumes"}
    assert {part for n in first_column(table("api", "theirs")) for part in n.split(".")} <= theirs


class _Snapshot:
    def read(self) -> dict[str, Any]:
        node = dict.fromkeys(
            ("beat", "slots", "ready_places", "ready", "running", "draining", "init_failures", "alive"), 1
        )
        parts = {n: {"x": 1} for n in ("terminations", "verdicts", "backlog")}
        return parts | {"states": dict.fromkeys(STATES, 1), "nodes": {"n": node | {"backends": []}}}


def test_every_metric():
    registry, seconds = metrics.make(_Snapshot())  # type: ignore[arg-type]
    seconds.labels("/", "GET", "200").observe(1)
    real = set()
    for m in registry.collect():
        labels = next(s.labels for s in m.samples if "le" not in s.labels)
        real.add(f"{m.name}{'_total' * (m.type == 'counter')}{{{','.join(labels)}}}")
    assert set(first_column(table("api", "metric"))) == real


def test_the_consumer_and_its_deliveries():
    parameters = inspect.signature(client.ResultsConsumer).parameters.values()
    told = {names(row[0])[0]: row[1] for row in table("client", "parameter").rows}
    assert told == {p.name: shown(p.default) for p in parameters}
    (of_deliveries,) = (t for t in tables("client") if t.heading == "Delivery and GroupDelivery")
    methods, parts = first_column(table("client", "method")), first_column(of_deliveries)
    made = vars(client.GroupDelivery(None, "1-0", False)).keys()  # type: ignore[arg-type]
    own = {*vars(client.Delivery), *made}.union(*(inspect.get_annotations(c) for c in client.GroupDelivery.__mro__[:2]))
    assert {p.partition("(")[0] for p in parts} == {n for n in own if not n.startswith("_")}
    public = {n for n, f in vars(client.ResultsConsumer).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert {m.partition("(")[0] for m in methods} == public
    for method in (m for m in methods + parts if "(" in m):
        name, _, arguments = method.rstrip(")").partition("(")
        function = getattr(client.ResultsConsumer, name, None) or getattr(client.Delivery, name)
        assert ["self", *filter(None, arguments.split(", "))] == list(inspect.signature(function).parameters), method
    (dead,) = (row[1] for row in table("client", "method").rows if row[0] == "`dead()`")
    assert set(client.Dead.__struct_fields__) <= set(names(dead))


@pytest.mark.parametrize("text", blocks("client", "python"), ids=["consume", "submit"])
def test_the_snippets_use_what_is_there(text):
    """Imports exist, no name is unknown, and calls fit the signatures of what they call."""
    tree = ast.parse(text)
    known: dict[str, Any] = {"train": None} | vars(builtins)
    owners = {"consumer": client.ResultsConsumer, "delivery": client.GroupDelivery, "store": SessionStore}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {a.name: getattr(importlib.import_module(str(node.module)), a.name) for a in node.names}
        elif isinstance(node, ast.ExceptHandler):
            known[str(node.name)] = None
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    assert {n.id for n in used} <= {*known, *(n.id for n in used if isinstance(n.ctx, ast.Store))}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Attribute):
            function = getattr(owners[ast.unparse(call.func.value)], call.func.attr).__get__(object())
        else:
            function = known[ast.unparse(call.func)]
        if getattr(function, "__module__", "builtins") != "builtins":
            inspect.signature(function).bind(*call.args, **{str(k.arg): None for k in call.keywords})


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", page(name)):
        file, _, anchor = target.partition("#")
        path = ROOT / "docs" / (file or f"{name}.md")
        assert path.is_file(), target
        assert not anchor or anchor in _anchors(path), target
    assert f"(docs/{name}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
