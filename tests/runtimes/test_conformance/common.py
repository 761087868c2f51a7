"""What several of these tests try from inside a sandbox."""

from __future__ import annotations

import subprocess

from polar.sandbox import Sandbox

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


def host_addresses() -> list[str]:
    out = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return [a for a in out if ":" not in a]
