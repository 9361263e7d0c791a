"""URIs of file systems as text: recognition, known schemes, and forbidden parts."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

#: Schemes of the file systems that pyarrow knows.
SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")

#: A user with a password. Secret keys hold slashes, so the last @ of the word ends it.
_USER = re.compile(r"(://)[^\s'\"@?]*:[^\s'\"]*@")

#: A value of a query whose name says that it is secret.
_QUERY = re.compile(
    r"([?&][^=&\s]*(?:secret|password|token|key|credential|signature)[^=&\s]*=)[^&\s'\"]+", re.IGNORECASE
)


def is_uri(place: str) -> bool:
    """Whether a place is a URI rather than a folder."""
    return "://" in place


def masked(text: str) -> str:
    """The text with *** in the place of credentials in URIs."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


def joined(place: str, name: str) -> str:
    """The place of a name below a URI; its query stays at the end."""
    base, mark, query = place.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def uri_fault(uri: str) -> str:
    """Return the fault of a URI, with the remedy; empty if no fault is visible without asking the file system."""
    scheme, text = uri.partition("://")[0], unquote(uri)
    if scheme not in SCHEMES:
        return f"unknown scheme {scheme!r} in {masked(text)}; known: {', '.join(SCHEMES)}"
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        return f"{masked(text)} is not a URI ({error}); write {scheme}://BUCKET/FOLDER"
    if parts.password is not None or _QUERY.search(text) or (_USER.search(text) and scheme not in ("hdfs", "viewfs")):
        remedy = "remove the credentials and set the environment (S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        return f"{masked(text)} has credentials, which would be kept with every run; {remedy}"
    if scheme == "file":
        return "" if parts.path and not parts.netloc else f"{uri} is not absolute; write file:///FOLDER"
    is_whole = parts.netloc or scheme in ("hdfs", "viewfs")
    return "" if is_whole else f"{uri} names no bucket; write {scheme}://BUCKET/FOLDER"
