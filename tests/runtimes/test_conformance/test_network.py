"""What every runtime promises of the network."""

from __future__ import annotations

import threading

import pytest

from polar.errors import UnsupportedSpec
from tests.runtimes.conftest import until
from tests.runtimes.test_conformance.common import FETCH, get, host_addresses


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
