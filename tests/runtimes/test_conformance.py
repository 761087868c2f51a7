"""What every runtime promises, checked on each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from polar.codec import to_json
from polar.errors import InfraError, NotFound, UnsupportedSpec
from polar.sandbox import Runtime, Sandbox
from polar.task import Volume
from tests.runtimes.conftest import REPOSITORY, running, unique, until

FETCH = "import sys,urllib.request;print(urllib.request.urlopen(sys.argv[1],timeout=5).read().decode())"
# Children that take to their heels: a new session, deaf to TERM, adopted by init, without environment.
RUNAWAYS = """
setsid sh -c 'trap "" TERM HUP INT; sleep {0} & sleep {0}; :' </dev/null >/dev/null 2>&1 &
(setsid sh -c '(trap "" TERM; exec sleep {0}) & exit' </dev/null >/dev/null 2>&1 &)
env -i sleep {0} </dev/null >/dev/null 2>&1 &
sleep {0}
"""


def get(box: Sandbox, path: str = "/x") -> str:
    r = box.exec(["python3", "-c", FETCH, box.ref.proxy_url + path], timeout=30)
    assert r.exit_code == 0, r.output
    return r.output.decode().strip()


# -- commands


def test_it_is_a_runtime(backend, box):
    assert isinstance(backend.runtime, Runtime) and isinstance(box, Sandbox)
    ok, text = backend.runtime.available()
    assert ok and text


def test_a_command_runs_in_the_working_directory(box):
    r = box.exec("pwd; echo err >&2; exit 3", timeout=30)
    assert (r.exit_code, r.timed_out, r.cancelled) == (3, False, False)
    assert r.output.decode().split() == [box.ref.workdir, "err"]
    assert r.output_bytes == len(r.output) and 0 < r.seconds < 30


def test_argv_runs_without_a_shell(box):
    assert box.exec(["printf", "%s|", "a b", "$HOME", "*"], timeout=30).output == b"a b|$HOME|*|"


def test_environment(make):
    box = make(env={"FROM_SPEC": "1", "BOTH": "spec"})
    r = box.exec(
        "echo $FROM_SPEC $BOTH $ONLY; echo $HOME; test -w $HOME && echo writable",
        env={"BOTH": "exec", "ONLY": "x y"},
        timeout=30,
    )
    assert r.output.decode().splitlines() == ["1 exec x y", box.ref.state["home"], "writable"]


def test_host_secrets_stay_outside(backend, make, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-host-s-secret")
    box = make()
    out = box.exec("env; cat /proc/self/environ; cat /proc/$PPID/environ", timeout=30).output
    assert b"the-host-s-secret" not in out and b"HOME=" in out
    if backend.boxed:
        data = backend.settings.data_dir
        r = box.exec(
            f"cat /etc/shadow; ls {data} {os.path.expanduser('~')}/.ssh {REPOSITORY}/pyproject.toml", timeout=30
        )
        assert r.exit_code != 0
        assert b"root:" not in r.output and b"sandboxes" not in r.output.replace(data.encode(), b"")


def test_cwd(box):
    assert box.exec("mkdir -p cwd/b", timeout=30).exit_code == 0
    for cwd in ("cwd/b", f"{box.ref.workdir}/cwd/b"):
        assert box.exec("pwd", cwd=cwd, timeout=30).output.decode().strip() == f"{box.ref.workdir}/cwd/b"
    assert box.exec("pwd", cwd="no/such", timeout=30).exit_code == 126


def test_stdin_comes_whole_and_ends(box):
    data = os.urandom(300_000)
    r = box.exec("cat | wc -c; cat | wc -c", stdin=data, timeout=30)
    assert r.output.split() == [b"300000", b"0"]
    assert box.exec("wc -c", timeout=30).output.split() == [b"0"]
    assert box.exec("exec 0<&-; echo deaf", stdin=data, timeout=30).output == b"deaf\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        (["/no/such/program"], 127),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_exit_codes(box, command, code):
    r = box.exec(command, timeout=30)
    assert r.exit_code == code and not r.timed_out


def test_what_a_command_prints_is_no_failure_of_the_engine(box):
    r = box.exec("printf 'OCI runtime exec failed: unable to start'; exit 126", timeout=30)
    assert r.exit_code == 126


def test_output_is_bounded_and_logged(box, tmp_path):
    log = tmp_path / "logs" / "out.log"
    r = box.exec(
        "i=0; while [ $i -lt 30000 ]; do echo line $i; i=$((i+1)); done; echo end >&2",
        timeout=60,
        log=log,
        output_limit=1000,
        log_limit=50_000,
    )
    assert r.exit_code == 0 and len(r.output) == 1000 and r.output.endswith(b"line 29999\nend\n")
    assert log.stat().st_size == 50_000 and log.read_bytes().startswith(b"line 0\nline 1\n")
    assert r.output_bytes == sum(len(f"line {i}\n") for i in range(30_000)) + 4


def test_output_arrives_while_the_command_runs(box, tmp_path):
    log = tmp_path / "log"
    seen = []

    def cancelled() -> bool:
        seen.append(log.read_bytes())
        return b"begun\n" in seen[-1]

    assert box.exec("echo begun; sleep 60", timeout=60, log=log, cancelled=cancelled).cancelled


# -- the end of commands


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_the_whole_tree_is_killed(make, how):
    box, word = make(), unique()
    started = time.monotonic()
    if how == "deadline":
        r = box.exec(RUNAWAYS.format(word), timeout=2)
        assert r.timed_out and not r.cancelled
    else:
        r = box.exec(RUNAWAYS.format(word), timeout=60, cancelled=lambda: running(word) >= 5)
        assert r.cancelled and not r.timed_out
    assert r.exit_code is None and time.monotonic() - started < 15
    assert running(word) == 0
    assert box.exec("echo alive", timeout=30).output == b"alive\n"


@pytest.mark.parametrize("first", ["older", "younger"])
def test_one_command_s_end_is_not_another_s(make, first):
    box, word, brief = make(), unique(), unique()
    over, results = threading.Event(), {}

    def run(name: str, **how) -> threading.Thread:
        t = threading.Thread(target=lambda: results.update({name: box.exec(how.pop("command"), **how)}))
        t.start()
        return t

    long = {"command": f"sleep {word} & wait", "timeout": 60, "cancelled": over.is_set}
    if first == "older":
        t = run("long", **long)
        until(lambda: running(word))
        assert box.exec(f"sleep {brief}", timeout=0.5).timed_out
    else:
        ender = threading.Event()
        other = run("brief", command=f"sleep {brief}", timeout=60, cancelled=ender.is_set)
        until(lambda: running(brief))
        t = run("long", **long)
        until(lambda: running(word))
        ender.set()
        other.join()
        assert results["brief"].cancelled
    assert (running(word), running(brief)) == (1, 0)
    over.set()
    t.join()
    assert results["long"].cancelled and running(word) == 0


def test_what_an_earlier_command_left_running(backend, make):
    """It goes on (inside bubblewrap it ends with its command), through another's deadline, until the sandbox is stopped."""
    box, word = make(), unique()
    assert (
        box.exec(
            f"env -i sleep {word} </dev/null >/dev/null 2>&1 & setsid sleep {word} </dev/null >/dev/null 2>&1 &",
            timeout=30,
        ).exit_code
        == 0
    )
    left = 0 if backend.id == "local-bwrap" else 2
    until(lambda: running(word) == left)
    assert box.exec("sleep 100", timeout=0.5).timed_out
    assert running(word) == left


def test_stop_kills_everything_and_keeps_the_files(backend, make, tmp_path):
    box, word = make(), unique()
    t = threading.Thread(target=lambda: box.exec("echo kept > kept;" + RUNAWAYS.format(word), timeout=60))
    t.start()
    until(lambda: running(word) >= 5)
    backend.runtime.attach(box.ref).stop()
    assert running(word) == 0
    t.join(20)
    assert not t.is_alive()
    box.stop()
    assert not box.download("kept", tmp_path / "kept", limit=100)
    assert (tmp_path / "kept").read_bytes() == b"kept\n"
    assert box.exec("cat kept", timeout=30).output == b"kept\n"


def test_cancelled_that_raises_leaves_nothing(make):
    box, word = make(), unique()

    def cancelled() -> bool:
        if running(word) >= 5:
            raise RuntimeError("the caller's own")
        return False

    with pytest.raises(RuntimeError):
        box.exec(RUNAWAYS.format(word), timeout=60, cancelled=cancelled)
    assert running(word) == 0


# -- files


def test_upload_and_download(box, tmp_path):
    src = tmp_path / "src"
    (src / "deep" / "er").mkdir(parents=True)
    (src / "deep" / "er" / "x.bin").write_bytes(bytes(range(256)) * 100)
    (src / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (src / "run.sh").chmod(0o755)
    (src / "link").symlink_to("deep/er/x.bin")
    box.upload(src, "up/tree")
    assert box.exec("up/tree/run.sh; wc -c < up/tree/link", timeout=30).output.split() == [b"ran", b"25600"]
    box.upload(src / "run.sh", f"{box.ref.workdir}/up/one/file", mode=0o600)
    assert box.exec("stat -c %a up/one/file", timeout=30).output == b"600\n"
    box.upload(src, "up/tree")  # again, into what is there
    assert box.download("up", tmp_path / "out", limit=1 << 20) is False
    out = tmp_path / "out"
    assert (out / "tree/deep/er/x.bin").read_bytes() == (src / "deep/er/x.bin").read_bytes()
    assert os.readlink(out / "tree/link") == "deep/er/x.bin" and os.access(out / "tree/run.sh", os.X_OK)
    assert (out / "one/file").read_bytes() == (src / "run.sh").read_bytes()


def test_write(box):
    box.write("w/a b/ü.txt", b"\x00data", mode=0o640)
    box.write("w/a b/ü.txt", b"\x00other", mode=0o640)
    assert box.exec("stat -c %a w/*/ü.txt; cat w/*/ü.txt", timeout=30).output == b"640\n\x00other"
    box.write("~/.conf/x", b"at home")
    assert box.exec("cat ~/.conf/x", timeout=30).output == b"at home"


def test_download_of_what_is_not_there(box, tmp_path):
    for path in ("nope", "no/pe", f"{box.ref.workdir}/nope", "dangling"):
        box.exec("ln -sf /no/such dangling", timeout=30)
        with pytest.raises(NotFound):
            box.download(path, tmp_path / "x", limit=10)
    assert not (tmp_path / "x").exists()


def test_download_is_bounded(box, tmp_path):
    box.exec(
        "mkdir -p big/d; head -c 5000 /dev/zero > big/f; truncate -s 1T big/d/sparse; "
        "for i in 1 2 3 4; do head -c 4000 /dev/zero > big/d/$i; done",
        timeout=30,
    )
    assert box.download("big/f", tmp_path / "f", limit=1000) is True
    assert (tmp_path / "f").stat().st_size == 1000
    assert box.download("big/f", tmp_path / "g", limit=5000) is False
    assert box.download("big", tmp_path / "t", limit=10_000) is True
    assert sum(p.stat().st_size for p in (tmp_path / "t").rglob("*") if p.is_file()) <= 10_000


def test_download_follows_no_link_out(backend, box, tmp_path):
    secret = tmp_path / "host-secret"
    secret.write_text("the host's")
    box.exec(
        f"mkdir -p trick/in; cd trick; echo own > in/own; ln -s {secret} a; ln -s / b; ln -s ../../../../../..{secret} c; "
        "ln -s in d; ln -s d/../../../x e; ln in/own hard; mkfifo pipe",
        timeout=30,
    )
    out = tmp_path / "out"
    assert box.download("trick", out, limit=1 << 20) in (False, True)
    kept = {p.name for p in out.rglob("*")}
    assert kept == {"in", "own", "d", "hard"}
    assert (out / "hard").read_text() == (out / "d" / "own").read_text() == "own\n"
    for path in ("trick/a", f"trick/b{secret}", "trick/c"):
        with pytest.raises(NotFound):
            box.download(path, tmp_path / "x", limit=100)
    box.exec("ln -s in/own trick/f; ln -s trick/in/own ./g", timeout=30)
    for path in ("trick/f", "g"):
        assert box.download(path, tmp_path / f"y-{path[-1]}", limit=100) is False
        assert (tmp_path / f"y-{path[-1]}").read_text() == "own\n"


def test_upload_follows_no_link_out(backend, box, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "f").write_text("x")
    box.exec(f"ln -sfn {outside} door; ln -sfn {outside}/file filedoor", timeout=30)
    for target in ("door/a", "filedoor", "door/deep/er/b"):
        try:
            box.write(target, b"x")
            box.upload(tmp_path / "f", target)
        except InfraError as e:
            assert e.code == "upload_failed"
    assert list(outside.iterdir()) == []


# -- finding, attaching, removing


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


# -- network


def test_the_proxy_is_reached(make, proxy):
    box = make(proxy.endpoint)
    assert get(box, "/one") == "proxy saw /one"
    assert get(box, "/two") == "proxy saw /two"


def test_a_restarted_proxy_is_reached_again(backend, make, proxy):
    if not backend.boxed:
        pytest.skip("plain processes use the proxy's own port")
    box = make(proxy.endpoint)
    script = f"{FETCH};import time,os\nopen('ready','w')\nwhile not os.path.exists('go'): time.sleep(.02)\n{FETCH}"
    results = []
    t = threading.Thread(
        target=lambda: results.append(box.exec(["python3", "-c", script, box.ref.proxy_url], timeout=60))
    )
    t.start()
    until(lambda: box.exec("test -e ready", timeout=30).exit_code == 0, 30)
    proxy.stop_unix()
    box.write("go", b"")  # now it asks again, while there is no proxy
    proxy.start_unix()
    t.join()
    assert results[0].output.decode().split("\n")[:2] == ["proxy saw /", "proxy saw /"], results


def test_nothing_else_is_reached(backend, make, proxy, host_listener):
    if not backend.boxed:
        pytest.skip("plain processes have the host's network, and say so")
    box = make(proxy.endpoint)
    addresses = [
        ("127.0.0.1", host_listener),
        ("127.0.0.1", proxy.port),
        *((ip, host_listener) for ip in host_addresses()),
    ]
    probe = (
        "import socket,sys\nfor a in sys.argv[1:]:\n h,p=a.split('|')\n"
        " try: socket.create_connection((h,int(p)),2); print('REACHED',a)\n except OSError as e: print('no',a,e)"
    )
    r = box.exec(["python3", "-c", probe, *(f"{h}|{p}" for h, p in addresses), "203.0.113.1|80"], timeout=60)
    assert r.exit_code == 0 and b"REACHED" not in r.output, r.output
    names = box.exec("cat /proc/net/dev", timeout=30).output.decode().splitlines()[2:]
    assert [n.split(":")[0].strip() for n in names] == ["lo"]


def host_addresses() -> list[str]:
    out = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return [a for a in out if ":" not in a]


def test_network_none_reaches_not_even_the_proxy(backend, make, proxy):
    if not backend.boxed:
        with pytest.raises(UnsupportedSpec, match=r"runtime\.network"):
            backend.runtime.check(backend.spec(network="none"))
        return
    box = make(proxy.endpoint, network="none")
    assert box.ref.proxy_url == ""
    assert box.exec(["python3", "-c", FETCH, "http://127.0.0.1:3128/"], timeout=30).exit_code == 1


def test_without_a_proxy_nothing_is_reached(backend, make):
    box = make()
    assert box.ref.proxy_url == ""
    if backend.boxed:
        assert box.exec(["python3", "-c", FETCH, "http://127.0.0.1:3128/"], timeout=30).exit_code == 1


def test_internet_still_reaches_the_proxy(make, proxy):
    assert get(make(proxy.endpoint, network="internet"), "/net") == "proxy saw /net"


# -- what is asked for


def test_unknown_options_are_refused(backend):
    with pytest.raises(UnsupportedSpec, match=r"runtime.options.colour.*allowed: "):
        backend.runtime.check(backend.spec(options={"colour": "red"}))


def test_volumes(backend, make, public):
    (public / "data").mkdir()
    (public / "data" / "f").write_text("from the host")
    volumes = [Volume(source=str(public / "data"), target="/data/set")]
    if not backend.boxed:
        with pytest.raises(UnsupportedSpec, match=r"runtime.volumes\[0\]"):
            backend.runtime.check(backend.spec(volumes=volumes))
        return
    r = make(volumes=volumes).exec("cat /data/set/f; echo x > /data/set/f", timeout=30)
    assert r.output.startswith(b"from the host") and r.exit_code != 0
    assert (public / "data" / "f").read_text() == "from the host"


@pytest.mark.parametrize(
    "source", ["/", "/run/docker.sock", "/var/run", "/proc", "relative", "/a/../etc", "DATA", "DATA/sandboxes"]
)
def test_dangerous_volumes_are_refused(backend, source):
    source = source.replace("DATA", backend.settings.data_dir)
    with pytest.raises(UnsupportedSpec, match=r"runtime.volumes\[0\].source"):
        backend.runtime.check(backend.spec(volumes=[Volume(source=source, target="/v")]))


def test_workdir(backend, make):
    if not backend.boxed:
        with pytest.raises(UnsupportedSpec, match=r"runtime\.workdir"):
            backend.runtime.check(backend.spec(workdir="/testbed"))
        return
    box = make(workdir="/testbed/repo")
    box.write("f", b"x")
    assert box.exec("pwd; ls; touch new && echo ok", timeout=30).output.split() == [b"/testbed/repo", b"f", b"ok"]
    box.write("/tests/hidden/t.py", b"judge")
    assert box.exec("cat /tests/hidden/t.py", timeout=30).output == b"judge"


def test_what_a_back_end_can_t_do_is_refused(backend):
    impossible = {
        "local-plain": {"image": "x", "gpus": 1, "user": "0", "workdir": "/x", "network": "none"},
        "local-bwrap": {"image": "x", "gpus": 1, "user": "somebody"},
        "apptainer": {"image": "", "user": "somebody", "workdir": "/a/../b"},
        "docker": {"image": "", "workdir": "/a/../b"},
    }[backend.id]
    for name, value in impossible.items():
        with pytest.raises(UnsupportedSpec, match=rf"runtime\.{name}"):
            backend.runtime.check(backend.spec(**{name: value}))


def test_no_rights_are_held_or_gained(backend, make):
    if not backend.boxed:
        pytest.skip("plain processes have the worker's rights, and say so")
    status = make().exec("grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status", timeout=30).output.split()
    assert status[1:6:2] == [b"0" * 16] * 3 and status[7] == b"1" and status[9] == b"2"


def test_user(backend, make):
    wished = {"local-bwrap": "1234:1235", "apptainer": "root", "docker": "1000:1000"}.get(backend.id)
    if wished is None:
        pytest.skip("refused, as another test says")
    box = make(user=wished)
    r = box.exec("id -u; touch mine && echo ok; touch ~/mine && echo ok", timeout=30)
    assert r.output.split() == [{"root": "0"}.get(wished, wished.split(":")[0]).encode(), b"ok", b"ok"]
    box.write("up", b"x", mode=0o600)
    assert box.exec("cat up; rm up mine && echo gone", timeout=30).output == b"xgone\n"


def test_a_sandbox_that_is_gone_says_nothing_about_the_agent(make, tmp_path):
    """Not that its files are missing: somebody else's clean-up may have taken it."""
    box = make()
    box.write("answer", b"42")
    box.destroy()
    for call in (
        lambda: box.download("answer", tmp_path / "answer", limit=1000),
        lambda: box.changes(tmp_path / "c.tar", under=".", baseline=b"", limit=1000),
        lambda: box.baseline("."),
        lambda: box.exec("true", timeout=10),
    ):
        with pytest.raises(InfraError):
            call()
