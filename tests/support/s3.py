"""A local S3 server, in this process or, as `python -m tests.support.s3 PORT_FILE`, in one of its own."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

#: What a user of the server sets; accounts do not count there.
KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "sesame", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server that holds a bucket called `bucket`, until the block ends."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
