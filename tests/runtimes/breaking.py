"""A proxy that ends as it is told, and an agent that looks how its connection ended; both need nothing but Python.

`python breaking.py serve FD` accepts on a listener; `python breaking.py ask PORT ORDERS` prints what came of each order.
An order is `{"method", "pieces": [text], "ending": "close" | "abort" | "kill"}`. Pieces are sent one by one, and the
end comes when the agent has them all: so nothing depends on time.
"""

import json
import os
import signal
import socket
import struct
import sys


def serve(listener):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            answer(connection)
            os._exit(0)
        connection.close()


def answer(connection):
    file = connection.makefile("rb")
    file.readline()
    order = json.loads(file.readline().decode())
    for piece in order["pieces"]:
        connection.sendall(piece.encode())
        if file.read(1) != b".":
            return
    if order["ending"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if order["ending"] == "abort":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    file.close()
    connection.close()


def ask(port, order):
    """`end` or `reset`. Raises if what came wasn't what was ordered."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        line = "{} / HTTP/1.1\r\n{}\n".format(order.get("method", "POST"), json.dumps(order))
        connection.sendall(line.encode())
        for piece in order["pieces"]:
            got = b""
            while len(got) < len(piece):
                more = connection.recv(len(piece) - len(got))
                assert more, "the connection ended early"
                got += more
            assert got == piece.encode(), got
            connection.sendall(b".")
        try:
            rest = connection.recv(100)
        except ConnectionResetError:
            return "reset"
        assert rest == b"", rest
        return "end"


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        print(json.dumps([ask(int(sys.argv[2]), order) for order in json.loads(sys.argv[3])]))
