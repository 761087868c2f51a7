"""What an agent may try against its sandbox, its host and its neighbours, on each back-end."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from polar.errors import InfraError, NotFound, UnsupportedSpec
from runtimes import cgroups, procs
from tests.runtimes.conftest import running, sleeping, unique, until
from tests.runtimes.test_conformance.common import host_addresses


@pytest.fixture
def limited(backend, make):
    """A sandbox with limits; skipped where this machine can't keep them, which is said at submission."""

    def create(**fields):
        try:
            backend.runtime.check(backend.spec(**fields))
        except UnsupportedSpec as e:
            pytest.skip(e.message)
        return make(**fields)

    return create


@pytest.fixture
def boxed(backend):
    if not backend.boxed:
        pytest.skip("plain processes are not sandboxed, and say so")


# -- using up the machine


def test_fork_bomb(limited):
    box, word = limited(pids=40), unique()
    script = f"import os,time\nn=0\nwhile 1:\n try:\n  if os.fork()==0: os.execvp('sleep',['sleep','{word}'])\n  n+=1\n"
    script += " except OSError:\n  print('refused after',n,flush=True);time.sleep(60)"
    assert box.exec(["python3", "-c", script], timeout=60, cancelled=lambda: running(word) >= 20).cancelled
    assert running(word) == 0
    box.exec("b() { b | b & }; b; sleep 60", timeout=3)
    until(lambda: box.exec("echo alive", timeout=30).output == b"alive\n", 30)
    box.stop()


def test_forks_are_refused_in_the_end(limited):
    box = limited(pids=40)
    script = (
        "import os,time\nn=0\ntry:\n while n<200:\n  if os.fork()==0: time.sleep(30);os._exit(0)\n  n+=1\n"
        "except OSError: pass\nprint(n,flush=True)\nos.kill(0,9)"
    )
    r = box.exec(["python3", "-c", script + "\n"], timeout=60)
    assert 0 < int(r.output.split()[0]) < 40


def test_memory_hog(limited):
    box = limited(memory_mb=64)
    r = box.exec(["python3", "-c", "x = b'1' * (300 << 20)\nprint('got it')"], timeout=60)
    assert r.exit_code in (137, 1) and b"got it" not in r.output
    # All processes together, not each by itself.
    each = 'python3 -c \'x = b"1" * (40 << 20); print("got it"); import time; time.sleep(5)\' & '
    r = box.exec(each * 3 + "wait", timeout=60)
    assert r.output.count(b"got it") < 3
    assert box.exec("echo alive", timeout=30).output == b"alive\n"


def test_cpu_hog(limited):
    box = limited(cpus=0.2)
    script = "import time\nb=time.process_time();e=time.monotonic()+2\nwhile time.monotonic()<e: pass\nprint(time.process_time()-b)"
    r = box.exec(["python3", "-c", script], timeout=60)
    assert float(r.output) < 1.2  # of two seconds; unlimited it would be near two


def test_disk_filler(limited, tmp_path):
    box = limited(disk_mb=30)
    started = time.monotonic()
    r = box.exec(
        "i=0; while true; do head -c 1000000 /dev/zero >fill$i || exit 9; i=$((i+1)); sleep 0.01; done", timeout=90
    )
    assert r.exit_code in (137, 9) and time.monotonic() - started < 60
    assert box.exec("head -c 80000000 /dev/zero >one", timeout=60).exit_code != 0
    box.stop()
    assert not box.download("fill0", tmp_path / "f", limit=1 << 21)


def test_open_files(limited):
    box = limited(open_files=50)
    script = "import os\nn=0\ntry:\n while n<500: os.open('/dev/null',os.O_RDONLY);n+=1\nexcept OSError: pass\nprint(n)"
    assert 30 < int(box.exec(["python3", "-c", script], timeout=30).output) < 50


def test_output_flood(make, tmp_path):
    box, log = make(), tmp_path / "log"
    before = _resident()
    r = box.exec("yes", timeout=3, log=log, output_limit=1000, log_limit=100_000)
    assert r.timed_out and len(r.output) == 1000 and log.stat().st_size == 100_000
    assert r.output_bytes > 1_000_000 and _resident() - before < 200 << 20
    assert box.exec("echo alive", timeout=30).output == b"alive\n"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- getting out


def test_device_nodes(boxed, make):
    script = (
        "import os,stat\nfor kind,dev in ((stat.S_IFBLK,os.makedev(254,0)),(stat.S_IFCHR,os.makedev(1,1))):\n"
        " try: os.mknod('node',kind|0o666,dev);open('node','rb').read(1);print('READ')\n except OSError: print('no')"
    )
    assert make().exec(["python3", "-c", script], timeout=30).output.split() == [b"no", b"no"]


def test_set_id_files(boxed, make, tmp_path):
    """They give nothing inside, and don't leave it."""
    box = make()
    r = box.exec(
        "cp /bin/sh s; chmod 6755 s 2>/dev/null; ./s -c 'grep -E \"Uid|CapEff\" /proc/self/status'; id -u", timeout=30
    )
    lines = r.output.decode().splitlines()
    assert lines[0].split()[2] == lines[2] and lines[1].split()[1] == "0" * 16
    box.download(".", tmp_path / "out", limit=1 << 24)
    assert (tmp_path / "out" / "s").stat().st_size > 1000 and (tmp_path / "out" / "s").stat().st_mode & 0o7000 == 0


@pytest.mark.parametrize("flags", ["-Ur", "-Um", "-Urpf", "-UrmC", "-n"])
def test_nested_namespaces(boxed, make, flags):
    assert make().exec(f"unshare {flags} true && echo NESTED", timeout=30).output.find(b"NESTED") == -1


CALLS = """
import ctypes,os,sys
l=ctypes.CDLL(None,use_errno=True)
# mount, unshare, setns, keyctl, bpf, userfaultfd, perf_event_open, kexec_load, clone3, ptrace ATTACH 1, open_by_handle_at
for n,*a in ((165,b"t",b"/tmp",b"tmpfs",0,0),(272,0x10000000),(308,0,0),(250,0,0),(321,0,0,0),(323,0),(298,0,0,-1,-1,0),
             (246,0,0,0,0),(101,16,1,0,0),(304,-1,0,0)):
    r=l.syscall(n,*a)
    if r>=0 or ctypes.get_errno() not in (1,38): print("ALLOWED",n,r,ctypes.get_errno())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are this machine's")
def test_system_calls_that_no_agent_needs(boxed, backend, make):
    r = make().exec(["python3", "-c", CALLS], timeout=30)
    allowed = {int(line.split()[1]) for line in r.output.decode().splitlines() if line.startswith("ALLOWED")}
    assert r.exit_code == 0 and allowed <= ({101} if backend.id == "docker" else set())


def test_the_first_process_is_out_of_reach(boxed, backend, make, tmp_path):
    """Or ends the sandbox with it, and nothing else: the files stay, the next command runs."""
    box = make()
    box.exec("echo here >f; kill -9 1; kill -STOP 1; kill -TERM 1; (echo x >/proc/1/mem) 2>/dev/null; true", timeout=30)
    assert box.exec("cat f", timeout=30).output == b"here\n"
    r = box.exec("kill -9 -1; sleep 2", timeout=30)
    assert r.exit_code in (0, 1, 137, 143) or r.exit_code is None
    assert box.exec("cat f", timeout=30).output == b"here\n"


def test_a_sandbox_s_tools_are_not_the_host_s(boxed, backend, make, tmp_path):
    """What an agent puts in place of programs is run by nobody but the agent, also when the sandbox is started anew. (A
    container of an engine has its own `sleep` as first process: it may not start again. Its files are there all the same.)"""
    box = make()
    script = "printf '#!/bin/sh\\necho evil >/work/ran\\n' >evil; chmod 755 evil; "
    script += "for f in env sleep tar cat; do rm -f /usr/bin/$f 2>/dev/null; cp evil /usr/bin/$f 2>/dev/null; done; "
    script += "cp evil /.singularity.d/env/99.sh; cp evil /.singularity.d/startscript; mv /.singularity.d /x; true"
    box.exec(script, timeout=30)
    box.stop()
    if backend.id != "docker":
        assert box.exec("cmp evil /usr/bin/sleep && echo replaced", timeout=30).output == b"replaced\n"
        with pytest.raises(NotFound):
            box.download("/work/ran", tmp_path / "ran", limit=10)
    assert not box.download("/work/evil", tmp_path / "evil", limit=1000)
    assert (tmp_path / "evil").read_text().startswith("#!/bin/sh")


LEAVE = """
import os
def told(*what): print(*what,flush=True)
mounts=[line.split()[1:3] for line in open("/proc/self/mounts")]
for top in [where for where,kind in mounts if kind.startswith("cgroup")]:
    if not os.path.exists(top): continue  # something lies over it
    if not os.statvfs(top).f_flag&os.ST_RDONLY: told("WRITABLE",top)
    try: os.mkdir(top+"/polar-mine"); told("MADE",top)
    except OSError: pass
    for at,_,files in os.walk(top):
        for f in {"cgroup.procs","tasks"}&set(files):
            try: open(at+"/"+f,"w").write(str(os.getpid())); told("MOVED",at)
            except OSError: pass
os.execvp("sleep",["sleep","WORD"])
"""


def test_no_way_out_of_its_control_group(boxed, make):
    """The groups are out of sight, or read-only, also where the agent has the user whose they are."""
    box, over = make(), threading.Event()
    results, groups = [], []
    for script in ("import os;os.execvp('sleep',['sleep','WORD'])", LEAVE):
        word = unique()
        command = ["python3", "-c", script.replace("WORD", word)]
        over.clear()
        t = threading.Thread(
            target=lambda c=command: results.append(box.exec(c, timeout=60, cancelled=over.is_set)),
        )
        t.start()
        (pid,) = until(lambda w=word: sleeping(w), 30)
        groups.append(Path(f"/proc/{pid}/cgroup").read_text())
        over.set()
        t.join()
    assert results[1].output == b"" and groups[0] == groups[1]


OPEN = """
import os,sys
for f in sys.argv[1:]:
    try: os.close(os.open(f,os.O_WRONLY)); print("WRITABLE",f)
    except OSError: pass
for f in ("/proc/kcore","/dev/mem","/dev/kmsg","/dev/vda","/proc/kmsg","/proc/1/mem"):
    try:
        if open(f,"rb",buffering=0).read(1): print("READ",f)
    except OSError: pass
"""
# Only opened: what is found open must not be made use of.
KERNEL = (
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
    "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname", "/proc/irq/default_smp_affinity", "/proc/mtrr",
    "/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/cgroup.procs", "/sys/power/state",
)  # fmt: skip


def test_the_kernel_s_files(boxed, make, tmp_path):
    box = make()
    r = box.exec(["python3", "-c", OPEN, *KERNEL], timeout=30)
    assert (r.exit_code, r.output) == (0, b"")
    box.exec("ln -s /proc/kcore core; ln -s /proc/1/environ environ; ln -s /dev/vda disk", timeout=30)
    for name in ("core", "environ", "disk"):
        try:
            box.download(name, tmp_path / name, limit=100)
        except (NotFound, InfraError):
            continue
        assert not (tmp_path / name).is_file() or (tmp_path / name).stat().st_size == 0


@pytest.mark.parametrize("path", ["../../../../../../../../{}", "/work/../../../../../..{}", "up/{}"])
def test_dotted_paths(boxed, make, tmp_path, path):
    """They end at the sandbox's own root."""
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    box = make()
    box.exec("ln -s ../../../../../../.. up", timeout=30)
    inner = path.format(secret)
    with pytest.raises(NotFound):
        box.download(inner, tmp_path / "x", limit=100)
    try:
        box.write(inner, b"overwritten")
    except InfraError:
        pass
    assert secret.read_text() == "the host's"


# -- reaching others


PROBE = """
import socket,sys
for a in sys.argv[1:]:
    h,p=a.rsplit('|',1)
    try: socket.create_connection((h,int(p)),1.5); print('REACHED',a)
    except OSError: pass
for n in ('example.com','metadata.google.internal','localhost.localdomain.invalid'):
    try: print('RESOLVED',n,socket.getaddrinfo(n,80))
    except OSError: pass
for name in ('\\0/tmp/.X11-unix/X0','\\0polar-test-abstract','/run/docker.sock','/var/run/docker.sock','/run/dbus/system_bus_socket'):
    s=socket.socket(socket.AF_UNIX)
    try: s.connect(name); print('REACHED',name)
    except OSError: pass
"""


def test_nobody_but_the_proxy(boxed, make, proxy, host_listener):
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0polar-test-abstract")
    abstract.listen()
    neighbour, word = make(proxy.endpoint), unique()
    box = make(proxy.endpoint)
    serving = f"import socket,subprocess\ns=socket.create_server(('',7777));subprocess.run(['sleep','{word}'])"
    t = threading.Thread(target=lambda: neighbour.exec(["python3", "-c", serving], timeout=60))
    t.start()
    until(lambda: running(word))
    addresses = [
        f"{ip}|{port}" for ip in ("127.0.0.1", *host_addresses()) for port in (host_listener, proxy.port, 7777)
    ]
    addresses += ["169.254.169.254|80", "172.17.0.1|22", "172.17.0.2|7777", "8.8.8.8|53", "1.1.1.1|443", "::1|7777"]
    r = box.exec(["python3", "-c", PROBE, *addresses], timeout=90)
    neighbour.stop()
    t.join()
    abstract.close()
    assert (r.exit_code, r.output) == (0, b"")


def test_neighbours_don_t_see_each_other(boxed, make):
    a, b, word = make(env={"TOKEN": "s3cret-of-a"}), make(), unique()
    a.write("mine", b"secret of a")
    t = threading.Thread(target=lambda: a.exec(f"echo x >/dev/shm/a; sleep {word}", timeout=60))
    t.start()
    until(lambda: running(word))
    r = b.exec(
        "cat mine; cat /proc/*/environ /proc/*/cmdline | tr '\\0' ' '; ls /dev/shm; kill -9 $(ls /proc | grep '^[0-9]') 2>/dev/null",
        timeout=30,
    )
    assert b"s3cret" not in r.output and word.encode() not in r.output and b"secret of a" not in r.output
    assert running(word) == 1
    a.stop()
    t.join()


# -- staying


def test_renamed_and_deaf_processes_end(backend, make):
    if not backend.boxed and isinstance(why := cgroups.find(), str):
        pytest.skip(f"plain processes that hide are only found by a control group: {why}")
    box, word = make(), unique()
    script = (
        "import ctypes,os,signal\nfor s in range(1,65):\n"
        " try: signal.signal(s,signal.SIG_IGN)\n except (OSError,ValueError): pass\n"
        "ctypes.CDLL(None).prctl(15,b'kworker/0:1',0,0,0)\n"
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        f"os.chdir('/')\nos.execve('/usr/bin/env',['env','-i','sleep','{word}'],{{}})"
    )
    r = box.exec(["sh", "-c", 'python3 -c "$0"; exec sleep 100', script], timeout=3)
    assert r.timed_out and running(word) == 0
    box.exec(["sh", "-c", 'python3 -c "$0" & sleep 100', script], timeout=60, cancelled=lambda: running(word) > 0)
    box.stop()
    assert running(word) == 0


def test_nothing_of_the_host_s_is_left_changed(backend):
    """After all of the above: no mounts, no control groups, no instances of what was made and removed."""
    backend.clear()
    assert backend.runtime.list({"polar.test": "1"}) == [] or backend.id == "docker"
    mounts = Path("/proc/self/mountinfo").read_text()
    assert backend.settings.data_dir not in mounts
    if backend.id == "apptainer":
        assert list(backend.runtime.boxes.iterdir()) == [] and list(backend.runtime.records.iterdir()) == []
    if isinstance(groups := cgroups.find(), cgroups.Cgroups) and backend.id != "docker":
        assert not {r.ref.handle for r in backend.gone} & groups.names()
    mine = backend.settings.data_dir.encode()
    assert not [p for p in procs.scan() if procs.environ_contains(p, mine) or procs.argv_contains(p, mine)]
