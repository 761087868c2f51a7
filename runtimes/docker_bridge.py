"""Bringing the proxy into a container, by one of two ways.

`namespace`: this process opens the listener inside the container's network itself. Needs root on the engine's own
machine, and nothing in the image. Only while a command runs: every process that runs one opens its own.
`relay`: the folder of the proxy's socket is mounted read-only and a small program inside carries connections to it.
Needs python3 or socat in the image.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections.abc import Iterator

from polar.errors import InfraError
from polar.sandbox import ProxyEndpoint
from runtimes import answers, listeners, netns
from runtimes.forward import PORT

MOUNT = "/run/polar-proxy"
NAMESPACE, RELAY = "namespace", "relay"


def may_enter() -> bool:
    return os.geteuid() == 0


@contextlib.contextmanager
def opened(container: str, pid: int, proxy: ProxyEndpoint) -> Iterator[None]:
    """The `namespace` way, for as long as the context lasts. `pid` is the container's first process."""

    def listen() -> socket.socket:
        if not netns.is_container(pid, container):
            raise InfraError("the container's processes can't be seen from here", code="exec_failed")
        return netns.listen(pid, PORT)

    with listeners.opened((container, pid), listen, proxy):
        yield


# Behind the text of `answers`. Starts the relay, or finds it running; ends when connections are accepted. It waits for a
# proxy that is being restarted. A thread that reads holds a socket open, so it is woken before that is closed.
_PYTHON = """
import os,socket,struct,sys,threading,time
s=socket.socket();s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)
try:s.bind(("127.0.0.1",%(port)d))
except OSError:sys.exit(0)
s.listen(128)
if os.fork():os._exit(0)
os.setsid()
n=os.open(os.devnull,os.O_RDWR)
for fd in 0,1,2:os.dup2(n,fd)
def end(x,how):
 try:x.shutdown(how)
 except OSError:pass
def pump(a,b,seen):
 while 1:
  d=a.recv(65536)
  if not d:return
  seen(d);b.sendall(d)
def ask(c,u,answers):
 try:pump(c,u,answers.asked);end(u,socket.SHUT_WR)
 except OSError:end(u,socket.SHUT_RDWR)
def carry(c,u):
 answers=Answers();t=threading.Thread(target=ask,args=(c,u,answers),daemon=True);t.start()
 try:pump(u,c,answers.feed);whole=answers.whole()
 except OSError:whole=False
 if whole:end(c,socket.SHUT_WR)
 else:c.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack("ii",1,0))
 end(c,socket.SHUT_RD);end(u,socket.SHUT_RDWR);t.join()
def serve(c):
 deadline=time.monotonic()+20
 while 1:
  u=socket.socket(socket.AF_UNIX)
  try:u.connect("%(path)s");break
  except OSError:
   u.close()
   if time.monotonic()>deadline:c.close();return
   time.sleep(.2)
 try:carry(c,u)
 except (OSError,RuntimeError):pass
 finally:c.close();u.close()
while 1:
 c,_=s.accept();threading.Thread(target=serve,args=(c,),daemon=True).start()
"""


def relay(port: int, path: str) -> str:
    """The relay's program, from a port of the loopback to a Unix socket."""
    return inspect.getsource(answers) + _PYTHON % {"port": port, "path": path}


def socat(port: int, path: str) -> str:
    """The same by socat, in sh. It knows no HTTP, so every end of the proxy's side is a reset for the agent."""
    return (
        f"socat TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr,linger=0,shut-close UNIX-CONNECT:{path} "
        "</dev/null >/dev/null 2>&1 & "
        f"i=0; while [ $i -lt 50 ] && ! socat -u OPEN:/dev/null TCP:127.0.0.1:{port} 2>/dev/null; "
        "do sleep 0.1; i=$((i+1)); done"
    )


def relay_command(socket_path: str) -> list[str]:
    """Run inside, it leaves a relay behind. Exit code 3: the image has nothing to make one of."""
    path = f"{MOUNT}/{os.path.basename(socket_path)}"
    script = (
        'if command -v python3 >/dev/null; then exec python3 -I -S -c "$0"; '
        f"elif command -v socat >/dev/null; then {socat(PORT, path)}; else exit 3; fi"
    )
    return ["sh", "-c", script, relay(PORT, path)]
