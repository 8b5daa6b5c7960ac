"""A real S3 server in a process of its own, which tests start, kill, and start again."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import boto3
import s3fs

from tests.end_to_end.run_process import free_port, wait_until

BUCKET = "bucket"
_START_TIMEOUT = 120.0
_ALLOW_ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'


class S3Server:
    """moto's server on a free port of this machine, with one bucket.

    With ``authenticates`` it refuses what is not signed with its one key; without, it takes any.
    """

    def __init__(self, authenticates: bool = False) -> None:
        self.port = free_port()
        self._authenticates = authenticates
        self.credentials = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any-secret"}
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to know in order to use the server, and nothing of the machine's own."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            **self.credentials,
        }

    def start(self) -> None:
        """Start it, empty, on the same port."""
        # The requests that make the one user need no signature.
        unsigned = {"INITIAL_NO_AUTH_ACTION_COUNT": "3"} if self._authenticates else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env={**os.environ, **unsigned},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, _START_TIMEOUT)
        if self._authenticates:
            self._make_user()
        self.client().create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/"):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _make_user(self) -> None:
        iam = self.client("iam")
        iam.create_user(UserName="trainer")
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=_ALLOW_ALL)
        names = {"AWS_ACCESS_KEY_ID": "AccessKeyId", "AWS_SECRET_ACCESS_KEY": "SecretAccessKey"}
        self.credentials = {variable: key[field] for variable, field in names.items()}

    def client(self, service: str = "s3") -> Any:
        """boto3's client, independent of fsspec."""
        return boto3.client(
            service,
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id=self.credentials["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.credentials["AWS_SECRET_ACCESS_KEY"],
        )

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects under a prefix."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def empty(self) -> None:
        """Delete all objects."""
        for key in self.names():
            self.client().delete_object(Bucket=BUCKET, Key=key)

    def read(self, key: str) -> bytes:
        """The content of an object."""
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        """Replace an object."""
        self.client().put_object(Bucket=BUCKET, Key=key, Body=content)

    def kill(self) -> None:
        """SIGKILL, as when its machine goes down."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """This process and those that it starts use the server."""
        with mock.patch.dict(os.environ, self.environment):
            # fsspec keeps file systems with the credentials that they were made with.
            s3fs.S3FileSystem.clear_instance_cache()
            yield
        s3fs.S3FileSystem.clear_instance_cache()
