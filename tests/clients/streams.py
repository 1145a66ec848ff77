#!/usr/bin/python3
"""A client of exec, attach and port-forward for every version of their protocols, including those that kubectl no longer uses.

    streams.py websocket SUBPROTOCOL PATH     channels in a WebSocket; "-" names no subprotocol
    streams.py spdy SUBPROTOCOL PATH          exec or attach over SPDY/3.1
    streams.py forward PATH                   port-forward over a WebSocket: channels 0 and 1
    streams.py tunnel PORT PATH               port-forward over SPDY/3.1 in a WebSocket
    streams.py raw PORT PATH                  port-forward over SPDY/3.1
    streams.py garbage PROTOCOL SUBPROTOCOL PATH   negotiates a protocol ("websocket" or "spdy"), and then sends random bytes

Sends standard input, and prints a report as JSON: the HTTP `status`, the negotiated `protocol`, and the received text of each
stream. PATH is a path of the API server, or with --kubelet NODE of that kubelet. --token TOKEN authenticates by a token instead of the
certificate in $KUBECONFIG; --idle sends nothing and leaves the input open; --get requests SPDY/3.1 by GET instead of POST.

Needs only the standard library, and shares no code with the server, so that both agree only if they follow the protocol.
"""

import argparse
import base64
import json
import os
import select
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import zlib

TIMEOUT_SECONDS = 50


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubelet")
    parser.add_argument("--token")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--get", action="store_true")
    parser.add_argument("kind", choices=["websocket", "spdy", "forward", "tunnel", "raw", "garbage"])
    parser.add_argument("args", nargs="+")
    options = parser.parse_args()
    args = options.args
    start = time.monotonic()
    connection = Connection(options.kubelet, options.token)
    connection.spdy_method = "GET" if options.get else "POST"
    exchange = Exchange(None if options.idle else sys.stdin.buffer.read())
    if options.kind == "websocket":
        websocket(connection, args[0], args[1], exchange)
    elif options.kind == "forward":
        websocket(connection, "v4.channel.k8s.io", args[0], exchange)
    elif options.kind == "spdy":
        spdy(connection, args[0], args[1], exchange)
    elif options.kind == "tunnel":
        tunnel(connection, args[0], args[1], exchange)
    elif options.kind == "raw":
        raw(connection, args[0], args[1], exchange)
    else:
        garbage(connection, *args, exchange)
    exchange.report["seconds"] = int(time.monotonic() - start)
    json.dump(exchange.report, sys.stdout)


class Exchange:
    """The input to send, and the report of what was received."""

    def __init__(self, stdin):
        self.stdin = stdin
        self.report = {}
        self.streams = {}

    def receive(self, stream, data):
        self.streams[stream] = self.streams.get(stream, b"") + data

    def finish(self):
        for stream, data in self.streams.items():
            self.report[str(stream)] = data.decode("utf-8", "replace")


class Connection:
    """TLS to the API server or to a kubelet, and one request over it."""

    def __init__(self, kubelet, token):
        config = json.loads(subprocess.check_output(["kubectl", "config", "view", "--raw", "--output=json"]))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context()
        if kubelet:
            node = json.loads(subprocess.check_output(["kubectl", "get", "node", kubelet, "--output=json"]))["status"]
            self.host = next(a["address"] for a in node["addresses"] if a["type"] == "InternalIP")
            port = node["daemonEndpoints"]["kubeletEndpoint"]["Port"]
            # Only the API server has the CA of kubelets.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        else:
            server = urllib.parse.urlsplit(cluster["server"])
            self.host, port = server.hostname, server.port
            context.load_verify_locations(cadata=text_of(cluster, "certificate-authority"))
        if token is None:
            with tempfile.NamedTemporaryFile("w") as pem:
                pem.write(text_of(user, "client-certificate") + "\n" + text_of(user, "client-key"))
                pem.flush()
                context.load_cert_chain(pem.name)
        self.token = token
        raw = socket.create_connection((self.host, port), timeout=TIMEOUT_SECONDS)
        self.socket = context.wrap_socket(raw, server_hostname=self.host)
        self.socket.setblocking(False)
        # Two threads use the socket, but OpenSSL is not thread-safe.
        self.lock, self.sending = threading.Lock(), threading.Lock()
        self.buffer = b""

    def upgrade(self, method, path, headers, exchange):
        """Whether the server switches protocols."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        lines += [f"{name}: {value}" for name, value in headers]
        self.send("\r\n".join(lines + ["", ""]).encode())
        while b"\r\n\r\n" not in self.buffer:
            self.more()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        first, *rest = head.decode().split("\r\n")
        response_headers = {}
        for line in rest:
            name, value = line.split(":", 1)
            response_headers.setdefault(name.lower(), value.strip())
        exchange.report["status"] = int(first.split()[1])
        for name in ("sec-websocket-protocol", "x-stream-protocol-version"):
            if name in response_headers:
                exchange.report["protocol"] = response_headers[name]
        if exchange.report["status"] == 101:
            return True
        exchange.report["body"] = self.body(response_headers).decode("utf-8", "replace").strip()
        return False

    def body(self, headers):
        if "content-length" in headers:
            return self.take(int(headers["content-length"]))
        # Read until the end: errors are short, and the framing of chunks is ignored.
        try:
            while True:
                self.more()
        except (EOFError, OSError):
            return self.buffer

    def send(self, data):
        rest = memoryview(data)
        # Frames of two threads must not be interleaved.
        with self.sending:
            while rest:
                rest = rest[self.retry(lambda: self.socket.send(rest[:65536])) :]

    def more(self):
        data = self.retry(lambda: self.socket.recv(65536))
        if not data:
            raise EOFError
        self.buffer += data

    def retry(self, operation):
        while True:
            try:
                with self.lock:
                    return operation()
            except ssl.SSLWantReadError:
                ready = select.select([self.socket], [], [], TIMEOUT_SECONDS)
            except ssl.SSLWantWriteError:
                ready = select.select([], [self.socket], [], TIMEOUT_SECONDS)
            except ssl.SSLZeroReturnError:
                return b""
            if not any(ready):
                raise TimeoutError

    def take(self, count):
        while len(self.buffer) < count:
            self.more()
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data


def text_of(config, name):
    if name + "-data" in config:
        return base64.b64decode(config[name + "-data"]).decode()
    with open(config[name], encoding="ascii") as file:
        return file.read()


# --- WebSocket ---------------------------------------------------------------------------------------------------------------


def websocket_upgrade(connection, subprotocol, path, exchange):
    headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", base64.b64encode(os.urandom(16)).decode()),
    ]
    if subprotocol != "-":
        headers.append(("Sec-WebSocket-Protocol", subprotocol))
    return connection.upgrade("GET", path, headers, exchange)


def frame(operation, payload):
    """A frame of a client: not fragmented, and masked."""
    mask = os.urandom(4)
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", 0x80 | operation, 0x80 | length)
    elif length < 65536:
        head = struct.pack("!BBH", 0x80 | operation, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", 0x80 | operation, 0x80 | 127, length)
    repeated = (mask * (length // 4 + 1))[:length]
    masked = int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")
    return head + mask + masked.to_bytes(length, "big")


def messages(connection, exchange):
    """Yields the payload of every message until the server closes."""
    message = b""
    while True:
        try:
            first, length = connection.take(2)
            if length == 126:
                (length,) = struct.unpack("!H", connection.take(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", connection.take(8))
            payload = connection.take(length)
        except (EOFError, OSError):
            exchange.report["close"] = "none"
            return
        operation = first & 0x0F
        if operation == 8:
            exchange.report["close"] = struct.unpack("!H", payload[:2])[0] if payload else "empty"
            return
        if operation == 9:
            connection.send(frame(10, payload))
        elif operation in (0, 1, 2):
            message += payload
            if first & 0x80:
                yield message
                message = b""


def websocket(connection, subprotocol, path, exchange):
    if not websocket_upgrade(connection, subprotocol, path, exchange):
        return
    is_base64 = "base64" in subprotocol

    def send():
        for at in range(0, len(exchange.stdin or b""), 32768):
            part = exchange.stdin[at : at + 32768]
            if is_base64:
                connection.send(frame(1, b"0" + base64.b64encode(part)))
            else:
                connection.send(frame(2, b"\0" + part))
        if exchange.stdin is not None and subprotocol.startswith("v5."):
            connection.send(frame(2, b"\xff\0"))

    in_background(send)
    for message in messages(connection, exchange):
        if message:
            data = base64.b64decode(message[1:]) if is_base64 else message[1:]
            exchange.receive(chr(message[0]) if is_base64 else message[0], data)
    exchange.finish()


# --- SPDY/3.1 ----------------------------------------------------------------------------------------------------------------


class Spdy:
    """SPDY frames over functions that send and receive bytes. Header blocks are compressed without the protocol's dictionary, which
    is optional in a zlib stream."""

    def __init__(self, send, take):
        self.send, self.take = send, take
        self.compressor = zlib.compressobj()
        self.next = 1

    def control(self, kind, flags, payload):
        self.send(struct.pack("!HHI", 0x8003, kind, flags << 24 | len(payload)) + payload)

    def open(self, headers):
        stream, self.next = self.next, self.next + 2
        plain = struct.pack("!I", len(headers))
        for text in (text for header in headers for text in header):
            plain += struct.pack("!I", len(text)) + text.encode()
        block = self.compressor.compress(plain) + self.compressor.flush(zlib.Z_SYNC_FLUSH)
        self.control(1, 0, struct.pack("!IIH", stream, 0, 0) + block)
        return stream

    def data(self, stream, data, last=False):
        self.send(struct.pack("!II", stream, (1 << 24 if last else 0) | len(data)) + data)

    def frames(self):
        """Yields stream, data and end-of-stream flag of every data frame; (stream, None, True) for a reset stream."""
        while True:
            try:
                first, second = struct.unpack("!II", self.take(8))
                payload = self.take(second & 0xFFFFFF)
            except (EOFError, OSError):
                return
            flags = second >> 24
            if not first >> 31:
                yield first, payload, bool(flags & 1)
                continue
            kind = first & 0xFFFF
            if kind == 6:
                self.control(6, 0, payload)
            elif kind == 7:
                return
            elif kind == 3:
                yield struct.unpack("!I", payload[:4])[0], None, True
            elif kind == 2 and flags & 1:
                yield struct.unpack("!I", payload[:4])[0], b"", True


def spdy_upgrade(connection, subprotocol, path, exchange):
    headers = [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("Content-Length", "0")]
    if subprotocol != "-":
        headers.append(("X-Stream-Protocol-Version", subprotocol))
    return connection.upgrade(connection.spdy_method, path, headers, exchange)


def spdy(connection, subprotocol, path, exchange):
    if not spdy_upgrade(connection, subprotocol, path, exchange):
        return
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
    wants = lambda *names: any(query.get(name, [""])[0] in ("1", "true") for name in names)
    types = ["error"]
    types += ["stdin"] if wants("stdin", "input") else []
    types += ["stdout"] if wants("stdout", "output") else []
    types += ["stderr"] if wants("stderr") or query.get("error") == ["1"] else []
    protocol = Spdy(connection.send, connection.take)
    streams = {protocol.open([("streamtype", kind)]): kind for kind in types}
    transfer(protocol, streams, exchange)


def transfer(protocol, streams, exchange):
    """Sends the input, and receives all other streams until they end."""
    inputs = [stream for stream, kind in streams.items() if kind in ("stdin", "data")]

    def send():
        for stream in inputs:
            for at in range(0, len(exchange.stdin or b""), 32768):
                protocol.data(stream, exchange.stdin[at : at + 32768])
            if exchange.stdin is not None:
                protocol.data(stream, b"", last=True)

    in_background(send)
    open_streams = {stream for stream, kind in streams.items() if kind != "stdin"}
    for stream, data, last in protocol.frames():
        if data:
            exchange.receive(streams[stream], data)
        if last:
            open_streams.discard(stream)
        if not open_streams:
            break
    exchange.report["open"] = sorted(streams[stream] for stream in open_streams)
    exchange.finish()


def tunnel(connection, port, path, exchange):
    if not websocket_upgrade(connection, "SPDY/3.1+portforward.k8s.io", path, exchange):
        return
    received = messages(connection, exchange)
    buffer = bytearray()

    def take(count):
        while len(buffer) < count:
            message = next(received, None)
            if message is None:
                raise EOFError
            buffer.extend(message)
        data = bytes(buffer[:count])
        del buffer[:count]
        return data

    forward(Spdy(lambda data: connection.send(frame(2, data)), take), port, exchange)


def raw(connection, port, path, exchange):
    if spdy_upgrade(connection, "portforward.k8s.io", path, exchange):
        forward(Spdy(connection.send, connection.take), port, exchange)


def forward(protocol, port, exchange):
    label = lambda kind: [("streamtype", kind), ("port", port), ("requestid", "0")]
    streams = {protocol.open(label(kind)): kind for kind in ("error", "data")}
    transfer(protocol, streams, exchange)


# --- Invalid data ----------------------------------------------------------------------------------------------------------------


def garbage(connection, protocol, subprotocol, path, exchange):
    upgrade = websocket_upgrade if protocol == "websocket" else spdy_upgrade
    if not upgrade(connection, subprotocol, path, exchange):
        return
    try:
        connection.send(os.urandom(100_000))
    except OSError:
        pass
    # The server must close the connection.
    try:
        while True:
            connection.buffer = b""
            connection.more()
    except EOFError:
        exchange.report["end"] = "closed"
    except OSError as error:
        exchange.report["end"] = type(error).__name__


def in_background(work):
    def quietly():
        try:
            work()
        except OSError:
            # The server has closed the connection, which the reader notices.
            pass

    threading.Thread(target=quietly, daemon=True).start()


main()
