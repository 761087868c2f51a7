"""The process that owns a local sandbox's mounts: an overlay's upper folder may be mounted once only, so the commands of a
sandbox join one mount namespace (a worker that isn't root needs a user namespace for it).

It does nothing but wait, outside of what the sandbox's processes see, and holds no state: it is made anew from the folders
on disk. Any worker of the node finds it by its pid file, and a janitor by its environment.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from polar.errors import InfraError
from runtimes import procs

MARK = "POLAR_ROOT"  # in the environment of the holder of the sandbox in the folder that is its value
IMPOSSIBLE = 3  # exit code: this machine can't do it
TIMEOUT = 60.0
END_TIMEOUT = 10.0

# Arguments: the sandbox's folder, a descriptor that is closed once all is mounted, what to become, then triples: "overlay", place, lower
# folders; "bind" (read-only, with what is mounted below), place, source. Places are relative to the sandbox's root.
_PROGRAM = r"""
import ctypes,errno,os,stat,sys
folder,lock,sleep=sys.argv[1],int(sys.argv[2]),sys.argv[3]
libc=ctypes.CDLL(None,use_errno=True)
def check(r,what):
    if r: n=ctypes.get_errno();raise OSError(n,what+": "+os.strerror(n))
def mount(source,at,kind,flags,data=None):
    check(libc.mount(source.encode(),at.encode(),kind and kind.encode(),ctypes.c_ulong(flags),data and data.encode()),"mount of "+source)
def clear(fd,name):
    # What an agent put where a mount goes: links are not followed.
    if stat.S_ISDIR(os.stat(name,dir_fd=fd,follow_symlinks=False).st_mode):
        os.rename(name,"%s~%s"%(name,os.urandom(6).hex()),src_dir_fd=fd,dst_dir_fd=fd)
    else:os.unlink(name,dir_fd=fd)
def place(path,is_folder=True):
    fd=os.dup(root);parts=path.split("/")
    for i,part in enumerate(parts):
        inner=is_folder or i<len(parts)-1
        try:
            info=os.stat(part,dir_fd=fd,follow_symlinks=False)
            if (stat.S_ISDIR if inner else stat.S_ISREG)(info.st_mode):made=True
            else:clear(fd,part);made=False
        except FileNotFoundError:made=False
        if not made:
            if inner:os.mkdir(part,0o755,dir_fd=fd)
            else:os.close(os.open(part,os.O_WRONLY|os.O_CREAT|os.O_EXCL,0o644,dir_fd=fd))
        new=os.open(part,os.O_PATH|os.O_NOFOLLOW|(os.O_DIRECTORY if inner else 0),dir_fd=fd)
        os.close(fd);fd=new
    return fd
r,w=os.pipe();up,told=os.pipe()
child=os.fork()
if child:
    os.close(r);os.close(told)
    first=os.read(up,1)
    try:
        if first==b"u":
            proc="/proc/%d/"%child
            if os.geteuid():
                with open(proc+"setgroups","w") as f:f.write("deny")
                maps=["%d %d 1"%(n,n) for n in (os.geteuid(),os.getegid())]
            else:
                # Files of every user can be copied up: all that is known here is known there.
                known=[[l.split() for l in open("/proc/self/"+n)] for n in ("uid_map","gid_map")]
                maps=["\n".join("%s %s %s"%(l[0],l[0],l[2]) for l in lines) for lines in known]
            for name,text in zip(("uid_map","gid_map"),maps):
                with open(proc+name,"w") as f:f.write(text)
    except OSError as e:
        print("user namespace:",e);sys.stdout.flush();os.kill(child,9);os._exit(3)
    if first==b"u":os.write(w,b"m")
    os.close(w)
    error=b"" if first in (b"u",b"-") else first or b"f"
    while data:=os.read(up,4096):error+=data
    if error:
        print(error[1:].decode("utf-8","replace"));sys.stdout.flush();os._exit(3 if error[:1]==b"m" else 1)
    os._exit(0)
os.close(up);os.close(w);os.set_inheritable(lock,False)
kind=b"m"
try:
    # Root's needs no user namespace of its own; in one, what is mounted inside a folder forbids an overlay over it.
    if os.geteuid() or libc.unshare(0x20000):
        check(libc.unshare(0x10000000|0x20000),"user and mount namespace")
        os.write(told,b"u")
        if not os.read(r,1):os._exit(1)
    else:os.write(told,b"-")
    os.close(r)
    mount("none","/",None,(1<<14)|(1<<19))
    kind=b"f"
    os.chdir(folder)
    mount("fs","fs",None,1<<12)
    root=os.open("fs",os.O_PATH|os.O_DIRECTORY|os.O_NOFOLLOW)
    todo=sys.argv[4:]
    for how,path,source in zip(todo[::3],todo[1::3],todo[2::3]):
        fd=place(path,how=="overlay" or os.path.isdir(source));at="/proc/self/fd/%d"%fd
        if how=="overlay":
            kind=b"m"
            os.setxattr("upper/"+path,"user.polar",b"")
            # "volatile": nothing is synced at its end or for an agent. The kernel's mark of that forbids a second time, for
            # the machine may have crashed; but no sandbox outlives that.
            for gone,left in (os.unlink,"volatile/dirty"),(os.rmdir,"volatile"),(os.rmdir,""):
                try:gone("work/%s/work/incompat/%s"%(path,left))
                except FileNotFoundError:pass
            mount("overlay",at,"overlay",6,"volatile,userxattr,lowerdir=%s,upperdir=upper/%s,workdir=work/%s"%(source,path,path))
            kind=b"f"
        else:
            mount(source,at,None,(1<<12)|(1<<14))
            top=place(path,os.path.isdir(source))
            attr=(ctypes.c_uint64*4)(1|2|4,0,0,0)
            kind=b"m"
            check(libc.syscall(442,top,b"",0x1000|0x8000,ctypes.byref(attr),32),"read-only "+source)
            kind=b"f";os.close(top)
        os.close(fd)
    start=open("/proc/self/stat","rb").read().rpartition(b") ")[2].split()[19].decode()
    with open("holder.new","w") as f:f.write("%d %s"%(os.getpid(),start))
    os.rename("holder.new","holder")
    os.chdir("/")
    null=os.open("/dev/null",os.O_RDWR)
    for n in 0,1,2:os.dup2(null,n)
    # A week: nothing that is forgotten by everybody stays for ever.
    os.execve(sleep,["sleep","604800"],dict(os.environ))
except BaseException as e:
    never=("EPERM","EACCES","EINVAL","ENODEV","ENOSYS","EOPNOTSUPP","ELOOP")
    if getattr(e,"errno",None) not in [getattr(errno,n) for n in never]:kind=b"f"
    os.write(told,kind+str(getattr(e,"strerror",None) or e).encode()[:1000]);os._exit(1)
"""

# Arguments: paths of the user (empty: none) and the mount namespace, the channel's descriptor, port, then what to become. With a
# channel there is a network of its own, whose listener on the port goes through the channel: nothing that lies in the
# sandbox has a part in that.
_ENTER = r"""
import os,sys
user,mnt=[os.open(p,os.O_RDONLY) if p else -1 for p in sys.argv[1:3]]
channel,port=map(int,sys.argv[3:5])
if hasattr(os,"setns"):setns,unshare=os.setns,os.unshare
else:
    import ctypes
    libc=ctypes.CDLL(None,use_errno=True)
    def call(f,*a):
        if f(*a): n=ctypes.get_errno();raise OSError(n,os.strerror(n))
    setns=lambda *a:call(libc.setns,*a)
    unshare=lambda *a:call(libc.unshare,*a)
if user>=0:setns(user,0x10000000);os.close(user)
setns(mnt,0x20000);os.close(mnt)
if channel>=0:
    import _socket,array,fcntl,struct
    unshare(0x40000000)
    s=_socket.socket(_socket.AF_INET,_socket.SOCK_STREAM)
    fcntl.ioctl(s.fileno(),0x8914,struct.pack("16sH14x",b"lo",1))
    s.setsockopt(_socket.SOL_SOCKET,_socket.SO_REUSEADDR,1)
    s.bind(("127.0.0.1",port));s.listen(128)
    c=_socket.socket(fileno=channel)
    c.sendmsg([b"x"],[(_socket.SOL_SOCKET,_socket.SCM_RIGHTS,array.array("i",[s.fileno()]))])
    s.close();c.close()
os.execv(sys.argv[5],sys.argv[5:])
"""


class Mount(NamedTuple):
    """`place` is relative to the sandbox's root. `source`: a path, or (`overlay`) lower folders, the uppermost first,
    separated by colons."""

    place: str
    source: str
    overlay: bool = False


class Impossible(Exception):
    """This machine, or the file system of the sandbox's folder, can't do it."""


def python() -> str:
    return os.path.realpath(sys.executable)


def find(folder: Path) -> procs.Proc | None:
    """The living holder of the sandbox in `folder`."""
    try:
        pid, start = map(int, (folder / "holder").read_text().split())
    except (OSError, ValueError):
        return None
    p = procs.read(pid)
    return p if p and p.start == start and is_of(pid, folder) else None


def is_of(pid: int, folder: Path) -> bool:
    """Is `pid` the holder of the sandbox in `folder`, or about to be?"""
    return procs.environ_has(pid, f"{MARK}={folder}".encode())


def start(folder: Path, mounts: list[Mount], lock: int) -> procs.Proc:
    """To be called with the descriptor of the sandbox's lock, which is held until all is mounted, whatever becomes of the
    caller. Raises Impossible, InfraError."""
    sleep = shutil.which("sleep")
    if sleep is None:
        raise Impossible("no program 'sleep'")
    triples = [word for m in mounts for word in ("overlay" if m.overlay else "bind", m.place, m.source)]
    try:
        done = subprocess.run(
            [python(), "-I", "-S", "-c", _PROGRAM, str(folder), str(lock), sleep, *triples],
            env={MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise InfraError(f"the sandbox's mounts can't be made: {e}", code="exec_failed") from e
    found = find(folder) if done.returncode == 0 else None
    if found:
        return found
    text = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-300:] or f"exit code {done.returncode}"
    if done.returncode == IMPOSSIBLE:
        raise Impossible(text)
    raise InfraError(f"the sandbox's mounts can't be made: {text}", code="exec_failed")


def end(holder: procs.Proc) -> None:
    """Kill it and wait until its mounts are gone, for some seconds."""
    try:
        fd = os.pidfd_open(holder.pid)
    except OSError:
        return
    try:
        now = procs.read(holder.pid)
        if now and now.start == holder.start:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            ended = select.poll()  # knows no highest descriptor
            ended.register(fd, select.POLLIN)
            ended.poll(END_TIMEOUT * 1000)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def entering(holder: procs.Proc, channel: int, port: int, argv: list[str]) -> tuple[list[str], list[int]]:
    """What to start, to become `argv` over its mounts, and descriptors that are to stay open here, and not to be inherited,
    until that has begun. Raises OSError.

    The namespaces are opened and then checked to be this holder's. Behind its number may be an agent's process meanwhile, in
    whose mounts `argv[0]` would be the agent's program, with the worker's rights."""
    own = procs.namespace("self", "user")
    kinds = ["mnt"] if procs.namespace(holder.pid, "user") == own else ["mnt", "user"]
    fds: list[int] = []
    try:
        for kind in kinds:
            fds.append(os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        now = procs.read(holder.pid)
        if now is None or now.start != holder.start:
            raise ProcessLookupError(errno.ESRCH, "the sandbox's holder is gone")
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    mnt, user = [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds] + [""] * (2 - len(fds))
    if channel < 0 and (quick := shutil.which("nsenter")):
        # A small program, where nothing is to be done on the way.
        return [
            quick,
            *([f"--user={user}", "--preserve-credentials"] if user else []),
            f"--mount={mnt}",
            "--",
            *argv,
        ], fds
    return [python(), "-I", "-S", "-c", _ENTER, user, mnt, str(channel), str(port), *argv], fds
