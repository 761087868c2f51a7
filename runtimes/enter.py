"""Running a command in the namespaces of a rootless container, as its owner may: no set-user-id program, no daemon.

The owner of a user namespace has every capability in it, so a small program of this host joins the container, forbids
further user namespaces, opens the proxy's listener in its network, gives everything up again and becomes the command.
"""

from __future__ import annotations

import os

from msgspec import Struct

from runtimes import seccomp

# Arguments: pid, its start, descriptors of the environment, the filter (-1: none) and the channel (-1: none), port,
# descriptor on which a failure before the command is told, limits, working directory, then the command. Without one only
# the listener is opened.
_PROGRAM = r"""
import _socket,array,ctypes,os,resource,signal,struct,sys,warnings
pid,start,envfd,filterfd,channel,port,statusfd=map(int,sys.argv[1:8])
limits,cwd,argv=sys.argv[8],sys.argv[9],sys.argv[10:]
libc=ctypes.CDLL(None,use_errno=True)
def check(r,what):
    if r: raise OSError(ctypes.get_errno(),what+": "+os.strerror(ctypes.get_errno()))
def give_up(e,code=125):
    os.write(statusfd,str(e).encode()[:500]);os._exit(code)
try:
    with os.fdopen(envfd,"rb") as f:f.seek(0);data=f.read()
    env=dict(e.split(b"=",1) for e in data.split(b"\0") if e)
    proc="/proc/%d/"%pid
    kinds=("user","net","ipc","uts","pid","mnt")
    fds=[os.open(proc+"ns/"+k,os.O_RDONLY) for k in kinds if os.readlink(proc+"ns/"+k)!=os.readlink("/proc/self/ns/"+k)]
    root=os.open(proc+"root",os.O_RDONLY|os.O_DIRECTORY)
    # Once all is open: its number may have become another process's meanwhile.
    stat=open(proc+"stat","rb").read().rpartition(b") ")[2].split()
    if int(stat[19])!=start or stat[0] in (b"Z",b"X"): raise OSError(3,"the container is gone")
    ready=False
    for fd in fds:
        check(libc.setns(fd,0),"can't join")
        if not ready:
            # The new user namespace's own limit: none below it, for anybody in it.
            with open("/proc/sys/user/max_user_namespaces","w") as f:f.write("0")
            ready=True
        os.close(fd)
    os.fchdir(root);os.chroot(".");os.close(root)
    if channel>=0:
        c=_socket.socket(fileno=channel)
        s=_socket.socket(_socket.AF_INET,_socket.SOCK_STREAM)
        s.setsockopt(_socket.SOL_SOCKET,_socket.SO_REUSEADDR,1)
        s.setsockopt(_socket.SOL_SOCKET,_socket.SO_REUSEPORT,1)
        s.bind(("127.0.0.1",port));s.listen(128)
        c.sendmsg([b"x"],[(_socket.SOL_SOCKET,_socket.SCM_RIGHTS,array.array("i",[s.fileno()]))])
        s.close();c.close()
    if not argv:os._exit(0)
    child=os.fork()
except BaseException as e: give_up(e)
if child:
    null=os.open("/dev/null",os.O_RDWR) if os.path.exists("/dev/null") else 0
    for fd in 0,1,2:os.dup2(null,fd)
    os.close(statusfd)
    _,status=os.waitpid(child,0)
    os._exit(128+os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
try:
    check(libc.prctl(1,signal.SIGKILL,0,0,0),"parent's death")
    os.setsid()
    try:
        with open("/proc/self/oom_score_adj","w") as f:f.write("500")
    except OSError:pass
    for entry in filter(None,limits.split(",")):
        name,value=entry.split("=");n=int(value)
        resource.setrlimit(getattr(resource,name),(n,n))
    for cap in range(64):
        if libc.prctl(24,cap,0,0,0):break
    libc.prctl(47,4,0,0,0)
    header=struct.pack("=IiIIIIII",0x20080522,0,0,0,0,0,0,0)
    check(libc.capset(ctypes.create_string_buffer(header[:8]),ctypes.create_string_buffer(header[8:])),"capabilities")
    check(libc.prctl(38,1,0,0,0),"no new privileges")
    signal.signal(signal.SIGPIPE,signal.SIG_DFL)
except BaseException as e: give_up(e)
try:os.chdir(cwd)
except OSError as e:
    os.write(2,("can't enter '%s': %s\n"%(cwd,e.strerror)).encode());os._exit(126)
try:
    if filterfd>=0:
        code=os.pread(filterfd,1<<16,0)
        buf=ctypes.create_string_buffer(code,len(code))
        prog=ctypes.create_string_buffer(struct.pack("HxxxxxxP",len(code)//8,ctypes.addressof(buf)))
        check(libc.prctl(22,2,prog,0,0),"filter")
except BaseException as e: give_up(e)
# Not even the descriptor that failures are told on is the command's.
os.set_inheritable(statusfd,False)
for fd in filterfd,:
    if fd>=0:os.close(fd)
try:os.execvpe(argv[0],argv,env)
except OSError as e:
    os.write(2,("%s: %s\n"%(argv[0],e.strerror)).encode());os._exit(127 if e.errno in (2,20) else 126)
"""


class Inside(Struct, frozen=True, kw_only=True):
    """Whose namespaces: a process of this host and its start in clock ticks. `limits` are POSIX resource limits by
    name (RLIMIT_…), set for the command alone."""

    pid: int
    start: int
    cwd: str
    limits: dict[str, int] = {}
    filtered: bool = True


def argv(
    python: str, inside: Inside, command: list[str], *, env: int, filter: int, channel: int, port: int, status: int
) -> list[str]:
    """What to start on this host, with the interpreter `python`. The numbers are descriptors that it inherits; -1 stands for none."""
    limits = ",".join(f"{name}={value}" for name, value in inside.limits.items())
    numbers = (inside.pid, inside.start, env, filter, channel, port, status)
    # -I and -S: nothing of an environment or a working directory is loaded.
    program = [python, "-I", "-S", "-c", _PROGRAM]
    return [*program, *map(str, numbers), limits, inside.cwd, *command]


def in_memory(name: str, data: bytes) -> int:
    """A descriptor of an anonymous file: environments don't show in process listings so."""
    fd = os.memfd_create(name)
    os.write(fd, data) if len(data) < 1 << 16 else _write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def filter_fd(filtered: bool) -> int:
    return in_memory("polar-filter", seccomp.program()) if filtered and seccomp.supported() else -1
