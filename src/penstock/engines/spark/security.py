"""Nobody but its owner reaches a job's Spark: secrets, encryption, and places that others cannot enter.

Other users of a machine reach whatever listens on its loopback address. With ``local-cluster`` that is a master, which
would run anybody's program as the owner of the job; with every master it is the driver and the executors, which would
hand out data and take orders. So on one machine each session has a random secret, and every connection of Spark's must
prove that it knows the secret (``spark.authenticate``) and is encrypted with a key that is agreed on with its help.
Pages want a signed token that nobody has. Sockets of Python workers, which know no secrets, lie in a directory of the
owner's. On a cluster of somebody else's the secret is the cluster's: ``docs/security.md`` says what is to be set there.

Everybody can read the command lines of all processes. No secret is ever on one: the driver's JVM is told its secrets
when it runs, and Spark hands them to executors in their environment, which only their owner can read.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from penstock.engines.spark import place

AUTHENTICATE = "spark.authenticate"
SECRET = "spark.authenticate.secret"
SOCKETS = "spark.python.unix.domain.socket.dir"
PAGES_FILTER = "org.apache.spark.ui.JWSFilter"
PAGES_KEY = f"spark.{PAGES_FILTER}.param.secretKey"

PRIVATE_UMASK = 0o077
"""Files of the JVMs are for their owner alone: shuffle files, logs of executors, what is shipped to them."""
KEY_BYTES = 32

_SECRET = re.compile(r"secret|password|token|access[.-]?key|credential", re.IGNORECASE)

ENCRYPTION = {
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    # An older protocol that would be taken instead, without encryption.
    "spark.network.crypto.saslFallback": "false",
}


def protection(master: str) -> dict[str, str]:
    """Settings that keep other users out of a Spark on this machine, with fresh secrets."""
    found = {
        AUTHENTICATE: "true",
        **ENCRYPTION,
        # The pages of the embedded master and its workers cannot be left out. A button there ends applications.
        "spark.ui.killEnabled": "false",
        "spark.ui.filters": PAGES_FILTER,
        PAGES_KEY: base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode(),
        SOCKETS: str(place.place()),
    }
    if master.startswith("local-cluster"):
        found[SECRET] = secrets.token_hex(KEY_BYTES)
    return found


def is_secret(setting: str) -> bool:
    """Does a setting's name say that its value is not for everybody?"""
    return _SECRET.search(setting) is not None


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """What may be on a command line."""
    return {name: value for name, value in settings.items() if not is_secret(name)}


def umask() -> int:
    """This process's, without a moment in which it is another."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^Umask:\s*([0-7]+)", status, re.MULTILINE)[1], 8)  # type: ignore[index]
    except (OSError, TypeError):  # no Linux: there is no way to ask but to set it
        found = os.umask(0o022)
        os.umask(found)
        return found


def is_private(directory: str | os.PathLike[str]) -> bool:
    """Is it ours, and can nobody else put anything into it?"""
    try:
        found = os.stat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
