"""Which options of s3fs obstore can be given: those that both understand alike, so that both read the same objects.

s3fs also follows the environment and the files of AWS's tools. Where these say something that obstore would not follow,
s3fs has to read.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import fsspec

PLAIN_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]+(/[^?#:/]+)*/*")
"""URLs of S3 that s3fs and obstore understand in the same way."""

UNDERSTOOD = frozenset({"key", "secret", "token", "anon", "endpoint_url", "client_kwargs"})
UNDERSTOOD_OF_CLIENT = frozenset({"endpoint_url", "region_name"})
"""The options of s3fs, and of botocore's client, that can be given to obstore."""

HARMLESS = frozenset(
    {"AWS_DEFAULT_REGION", "AWS_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_EXECUTION_ENV", "AWS_PAGER"}
)
KEYS = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
"""Environment variables that both clients understand alike. With any other that begins with AWS_, s3fs is used."""

CONFIG_FILE, CREDENTIALS_FILE = "~/.aws/config", "~/.aws/credentials"
NOT_FOLLOWED = frozenset(
    {"output", "cli_auto_prompt", "cli_pager", "cli_timestamp_format"} | {name.lower() for name in KEYS.values()}
)
"""Settings in these files that matter to AWS's command alone, and keys: where obstore reads, there are others."""

HOST = r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]"
ENDPOINT = re.compile(rf"https?://({HOST})(:[0-9]{{1,4}}|:[1-6][0-9]{{4}})?(/[A-Za-z0-9._~-]+)*/*")
"""Endpoints that both clients understand. At some others obstore ends with a panic, and s3fs says what is wrong."""

HEADER = re.compile(r"[\x21-\x7e]+")
"""What a key, a token and a region may consist of to be sent."""


def options_of(urls: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return obstore's options for some URLs and options of s3fs; None where s3fs has to read them."""
    if not all(map(PLAIN_URL.fullmatch, urls)) or any({".", ".."} & set(url.split("/")) for url in urls):
        return None
    of_client = options.get("client_kwargs") or {}
    if not (
        options.keys() <= UNDERSTOOD and isinstance(of_client, Mapping) and of_client.keys() <= UNDERSTOOD_OF_CLIENT
    ):
        return None
    given = {name: options.get(name) for name in KEYS}
    endpoint = options.get("endpoint_url") or of_client.get("endpoint_url")
    present = {name for name in os.environ if name.startswith("AWS_")} - HARMLESS
    if endpoint and endpoint.startswith("http://"):
        present.discard("AWS_CA_BUNDLE")  # nothing is encrypted
    if options.get("anon"):
        access: dict[str, Any] = {"skip_signature": True}
    elif given["key"] and given["secret"]:
        access = {KEYS[name].lower(): value for name, value in given.items() if value}
    else:
        access = {name.lower(): os.environ[name] for name in KEYS.values() if name in present}
    named = {name.lower() for name in present}
    if fsspec.config.conf.get("s3") or not (access.keys() >= named and _is_complete(access, given)):
        return None
    region = of_client.get("region_name") or os.environ.get("AWS_DEFAULT_REGION")
    is_configured = _is_configured({*NOT_FOLLOWED, "region"} if region else NOT_FOLLOWED)
    region = region or (endpoint and "us-east-1")
    if is_configured or not region or not all(HEADER.fullmatch(str(each)) for each in (region, *access.values())):
        return None
    if endpoint and not ENDPOINT.fullmatch(endpoint):
        return None
    return {**access, "region": region, **({"endpoint": endpoint} if endpoint else {})}


def _is_configured(without: Collection[str]) -> bool:
    """Whether the files of AWS's tools have settings of the default profile, besides some. s3fs follows them."""
    for file in (CONFIG_FILE, CREDENTIALS_FILE):
        parser = configparser.RawConfigParser(default_section="", strict=False)
        try:
            parser.read(os.path.expanduser(file), encoding="utf-8")  # noqa: PTH111 - there may be no home
            sections = [parser[name] for name in parser.sections() if _is_default(name)]
        except (configparser.Error, OSError, ValueError):
            return True
        if any(set(section) - set(without) for section in sections):
            return True
    return False


def _is_default(section: str) -> bool:
    """Whether a section of these files has the settings of the default profile, as botocore reads its name."""
    return section == "default" or (section.startswith("profile") and shlex.split(section)[1:] == ["default"])


def _is_complete(access: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether requests are signed as s3fs would: not at all, or by the given key, or by that of the environment."""
    if "skip_signature" in access:
        return not any(given.values())
    return {"aws_access_key_id", "aws_secret_access_key"} <= access.keys()
