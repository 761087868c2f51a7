"""Bringing the proxy into a container, by one of two ways.

`namespace`: this process opens the listener inside the container's network itself. Needs root on the engine's own
machine, and nothing in the image. Only while a command runs: every process that runs one opens its own.
`relay`: the folder of the proxy's socket is mounted read-only and a small program inside carries connections to it.
Needs python3 or socat in the image.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from polar.errors import InfraError
from polar.sandbox import ProxyEndpoint
from runtimes import listeners, netns
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


# Starts the relay, or finds it running; ends when connections are accepted. It waits for a proxy that is being restarted.
_PYTHON = """
import os,socket,sys,threading,time
s=socket.socket();s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)
try:s.bind(("127.0.0.1",%(port)d))
except OSError:sys.exit(0)
s.listen(128)
if os.fork():os._exit(0)
os.setsid()
n=os.open(os.devnull,os.O_RDWR)
for fd in 0,1,2:os.dup2(n,fd)
def pump(a,b):
 try:
  while 1:
   d=a.recv(65536)
   if not d:break
   b.sendall(d)
  b.shutdown(socket.SHUT_WR)
 except OSError:
  for x in a,b:
   try:x.shutdown(socket.SHUT_RDWR)
   except OSError:pass
def serve(c):
 end=time.monotonic()+20
 while 1:
  u=socket.socket(socket.AF_UNIX)
  try:u.connect("%(path)s");break
  except OSError:
   u.close()
   if time.monotonic()>end:c.close();return
   time.sleep(.2)
 try:
  t=threading.Thread(target=pump,args=(c,u),daemon=True);t.start();pump(u,c)
 except OSError:pass
 finally:c.close();u.close()
while 1:
 c,_=s.accept();threading.Thread(target=serve,args=(c,),daemon=True).start()
"""
_SOCAT = (
    "socat TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr UNIX-CONNECT:{path} </dev/null >/dev/null 2>&1 & "
    "i=0; while [ $i -lt 50 ] && ! socat -u OPEN:/dev/null TCP:127.0.0.1:{port} 2>/dev/null; "
    "do sleep 0.1; i=$((i+1)); done"
)


def relay_command(socket_path: str) -> list[str]:
    """Run inside, it leaves a relay behind. Exit code 3: the image has nothing to make one of."""
    path = f"{MOUNT}/{os.path.basename(socket_path)}"
    python = _PYTHON % {"port": PORT, "path": path}
    script = (
        'if command -v python3 >/dev/null; then exec python3 -I -S -c "$0"; '
        f"elif command -v socat >/dev/null; then {_SOCAT.format(port=PORT, path=path)}; else exit 3; fi"
    )
    return ["sh", "-c", script, python]
