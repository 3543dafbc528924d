"""Files that users name: what is no small text is refused at once, or within a bound, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamoth.errors import ConfigError
from dynamoth_cli import text_files
from dynamoth_cli.text_files import SETTINGS_BYTES_MAX, UnreadableFile, read_text_file
from tests.cli.test_cluster_access import reached


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text in ("", "süß\n", "x" * SETTINGS_BYTES_MAX):
        file.write_text(text)
        assert read_text_file(file) == text
    assert read_text_file("/dev/null") == ""


def test_a_pipe_is_read_to_its_end_although_its_writer_begins_later(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    late = "import sys; file = open(sys.argv[1], 'w'); file.write('a'); file.flush(); file.write('b')"
    with subprocess.Popen([sys.executable, "-c", late, str(pipe)]):
        assert read_text_file(pipe) == "ab"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "No such file or directory"),
        ("folder", "Is a directory"),
        ("huge", "more than 1000000 bytes"),
        ("/dev/zero", "more than 1000000 bytes"),
        ("pipe", "nobody has written it to its end within 0.2 s"),
        ("binary", "it is no UTF-8 text"),
        ("null\0", "null"),
    ],
)
def test_what_is_no_small_text_is_refused(name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "WAIT_S_MAX", 0.2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "huge").write_bytes(b"x" * (SETTINGS_BYTES_MAX + 1))
    (tmp_path / "binary").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    file = str(tmp_path / name)
    with pytest.raises(UnreadableFile, match=why):
        read_text_file(file)
    with pytest.raises(ConfigError, match=rf"link\.password_file: a text file .*{why}.*flag --password-file"):
        reached("--url", "redis://a", "--password-file", file)


def test_certificates_are_files(tmp_path: Path) -> None:
    for name in ("/dev/zero", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"link\.tls_ca_file: a file that can be read .*flag --tls-ca-file"):
            reached("--url", "rediss://a", "--tls-ca-file", name)
