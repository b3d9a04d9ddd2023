"""Another user of the machine, who tries every door of a running job. Run as a script by root: it becomes that user
once Python has what it needs, which may lie where only root can read. What it is to try comes as JSON on stdin, and
what came of each attempt goes as JSON to stdout; ``in`` is a door that should have been shut.
"""

import encodings.idna  # noqa: F401  # what Python would load later, when it may not any more
import http.client
import json
import os
import socket
import struct
import sys
import unittest  # noqa: F401
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy  # noqa: F401
import pyspark
import pyspark.sql.types
import pyspark.testing.utils
from pyspark.java_gateway import launch_gateway

SECONDS = 10.0
RPC_REQUEST, RPC_RESPONSE, RPC_FAILURE = 3, 4, 5
ENDPOINTS = (
    "Master",
    "Worker",
    "CoarseGrainedScheduler",
    "HeartbeatReceiver",
    "BlockManagerMaster",
    "MapOutputTracker",
)


def knock(port: int) -> str:
    """What a port of Spark's says to a message of its own protocol from somebody who has shown no secret."""
    body = b"let me in"
    frame = struct.pack(">BqI", RPC_REQUEST, 7, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(struct.pack(">q", len(frame) + 8) + frame)
        answer = b""
        try:
            while part := sock.recv(65_536):
                answer += part
        except TimeoutError:
            return "in: it waits for more" if not answer else said(answer)
        except ConnectionError:
            pass
    return said(answer)


def said(answer: bytes) -> str:
    """A Spark that authenticates takes whatever comes first for the beginning of that. Another one tries to read it."""
    if not answer:
        return "refused: closed"
    text = answer.decode(errors="replace")
    return "refused: no challenge" if "challenge message" in text else f"in: {text[:300]}"


def page(port: int, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
            return f"in: {answer.status}"
    except urllib.error.HTTPError as error:
        return f"refused: {error.code}" if error.code in (403, 404) else f"in: {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no page: {type(error).__name__}"


def python_gateway(port: int) -> str:
    """Ask Py4J's gateway for a class, as a driver does: ``r`` (reflection), ``u`` (unknown name)."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(b"r\nu\njava.lang.System\nrj\ne\n")
        try:
            answer = sock.recv(65_536)
        except (TimeoutError, ConnectionError):
            return "refused: closed"
    return "in" if answer.startswith(b"!y") else "refused"


def unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
    return "in"


def read(path: str) -> str:
    with open(path, "rb") as file:
        file.read(1)
    return "in"


def look(path: str) -> str:
    os.listdir(path)
    return "in"


def write(path: str) -> str:
    with open(os.path.join(path, "planted"), "wb"):
        pass
    return "in"


def attempt(door: Callable[..., str], *args: Any) -> str:
    try:
        return door(*args)
    except PermissionError:
        return "refused"
    except FileNotFoundError:
        return "gone"
    except OSError as error:
        return f"refused: {type(error).__name__}"


class Program:
    """A program with a JVM of Spark's own, such as somebody would submit."""

    def __init__(self) -> None:
        self.jvm: Any = launch_gateway().jvm

    def reach(self, ports: list[int], secret: str | None) -> dict[str, str]:
        """Which endpoints answer: the first thing that an application does with a master, and a worker, too."""
        jvm = self.jvm
        conf = jvm.SparkConf(False).set("spark.network.timeout", "5s").set("spark.rpc.lookupTimeout", "5s")
        conf.set("spark.rpc.numRetries", "1").set("spark.network.auth.rpcTimeout", "5s")
        if secret is not None:
            conf.set("spark.authenticate", "true").set("spark.authenticate.secret", secret)
            conf.set("spark.network.crypto.enabled", "true").set("spark.network.crypto.authEngineVersion", "2")
            conf.set("spark.network.crypto.cipher", "AES/GCM/NoPadding")
        default = "$lessinit$greater$default$"
        of = jvm.org.apache.spark.SecurityManager
        manager = of(conf, getattr(of, f"{default}2")(), getattr(of, f"{default}3")())
        env = jvm.org.apache.spark.rpc.RpcEnv.create("intruder", "127.0.0.1", 0, conf, manager, True)
        found = {}
        for port in ports:
            for name in ENDPOINTS if secret is None else ENDPOINTS[:1]:
                try:
                    env.setupEndpointRef(jvm.org.apache.spark.rpc.RpcAddress("127.0.0.1", port), name)
                    found[f"{name} at {port}"] = "in"
                except Exception:
                    found[f"{name} at {port}"] = "refused"
        env.shutdown()
        return found


NOBODY = 65_534


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ.update(HOME="/", SPARK_HOME=str(pyspark.__path__[0]))
    os.chdir("/")


def main() -> None:
    todo = json.load(sys.stdin)
    become(NOBODY)
    found: dict[str, str] = {}
    for port in todo["spark"]:
        found[f"port {port}"] = attempt(knock, port)
    for port in todo["pages"]:
        for path in ("/", "/json/", "/app/kill/", "/logPage/", "/metrics/json/", "/metrics/master/json/", "/static/a"):
            found[f"page {port}{path}"] = attempt(page, port, path)
    for port in todo["py4j"]:
        found[f"py4j {port}"] = attempt(python_gateway, port)
    for path in todo["sockets"]:
        found[f"socket {path}"] = attempt(unix, path)
    for path in todo["files"]:
        found[f"file {path}"] = attempt(read, path)
    for path in todo["directories"]:
        found[f"listing {path}"] = attempt(look, path)
        found[f"planting {path}"] = attempt(write, path)
    if todo["program"]:
        program = Program()
        found |= {f"no secret: {k}": v for k, v in program.reach(todo["program"], None).items()}
        found |= {f"a guess: {k}": v for k, v in program.reach(todo["program"], "guessed").items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
