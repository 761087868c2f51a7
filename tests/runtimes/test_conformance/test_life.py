"""What every runtime promises of finding, attaching to and removing its sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from polar.codec import to_json
from polar.errors import InfraError
from tests.runtimes.conftest import REPOSITORY, running, unique, until
from tests.runtimes.test_conformance.common import FETCH, RUNAWAYS


def test_list_and_destroy(backend, make):
    a, b = make(labels={"polar.attempt": "one", "k": "v"}), make(labels={"polar.attempt": "two", "k": "v"})
    handles = lambda **labels: {r.handle for r in backend.runtime.list(labels)}  # noqa: E731
    assert handles(**{"polar.attempt": "one"}) == {a.ref.handle}
    assert handles(k="v") == {a.ref.handle, b.ref.handle} <= handles()
    assert handles(k="v", **{"polar.attempt": "none"}) == set()
    found = backend.runtime.list({"polar.attempt": "one"})[0]
    assert found == a.ref
    word = unique()
    t = threading.Thread(target=lambda: _ignore(lambda: a.exec(RUNAWAYS.format(word), timeout=60)))
    t.start()
    until(lambda: running(word) >= 5)
    backend.runtime.attach(found).destroy()
    assert running(word) == 0 and handles(k="v") == {b.ref.handle}
    t.join(20)
    a.destroy()
    a.stop()
    with pytest.raises(InfraError) as e:
        a.exec("true", timeout=5)
    assert e.value.code == "exec_failed"
    with pytest.raises(InfraError) as e:
        a.write("x", b"")
    assert e.value.code == "upload_failed"


def _ignore(call):
    try:
        call()
    except InfraError:
        pass


def test_a_hostile_tree_is_removed(backend, make):
    box = make()
    box.exec(
        "mkdir -p locked/a/b; touch locked/a/b/c; chmod 000 locked/a/b locked/a; "
        "i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || exit; i=$((i+1)); done",
        timeout=60,
    )
    box.destroy()
    assert box.ref.handle not in {r.handle for r in backend.runtime.list({})}


IN_ANOTHER_PROCESS = """
import json, sys
from polar.codec import from_json
from polar.config import Settings
from polar.sandbox import SandboxRef
from runtimes.registry import load_runtime
ref = from_json(sys.argv[2], SandboxRef)
box = load_runtime(ref.backend, Settings(data_dir=sys.argv[1])).attach(ref)
r = box.exec(sys.argv[3], timeout=30)
print(json.dumps([r.exit_code, r.output.decode()]))
"""


def test_another_process_attaches(backend, make, proxy):
    box = make(proxy.endpoint, env={"SPEC": "kept"})
    box.write("left", b"by the first")
    command = f'cat left; echo " $SPEC"; python3 -c "{FETCH}" {box.ref.proxy_url}/two'
    # Beside this process, which has its own listener open.
    over, word = threading.Event(), unique()
    t = threading.Thread(target=lambda: box.exec(f"sleep {word}", timeout=60, cancelled=over.is_set))
    t.start()
    until(lambda: running(word))
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, backend.settings.data_dir, to_json(box.ref).decode(), command],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=60,
    )  # fmt: skip
    over.set()
    t.join()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, "by the first kept\nproxy saw /two\n"]


KILLED = """
import sys
from polar.config import Settings
from polar.sandbox import SandboxRef
from polar.task import RuntimeSpec
from polar.codec import from_json
from runtimes.registry import load_runtime
spec = from_json(sys.argv[3], RuntimeSpec)
runtime = load_runtime(sys.argv[2], Settings(data_dir=sys.argv[1]))
box = runtime.create(spec, labels={"polar.attempt": sys.argv[4]}, proxy=None, timeout=60)
print("made", flush=True)
box.exec(sys.argv[5], timeout=600)
"""


def test_a_killed_worker_s_sandbox_is_found_and_cleaned(backend):
    word, label = unique(), f"killed-{unique()}"
    argv = [sys.executable, "-c", KILLED, backend.settings.data_dir, backend.runtime.name]
    worker = subprocess.Popen(
        [*argv, to_json(backend.spec()).decode(), label, RUNAWAYS.format(word)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        until(lambda: running(word) >= 5, 30)
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    refs = backend.runtime.list({"polar.attempt": label})
    assert len(refs) == 1
    box = backend.runtime.attach(refs[0])
    box.stop()
    assert running(word) == 0
    box.destroy()
    assert backend.runtime.list({"polar.attempt": label}) == []
