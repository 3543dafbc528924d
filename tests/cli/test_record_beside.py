"""``--record`` is refused at once where the recorder beside a daemon could not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamoth_cli import extras
from dynamoth_cli.main import main


@pytest.mark.parametrize("command", ["up", "demo", "balancer"])
def test_a_folder_that_cannot_be_recorded_into_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").touch()
    for given, said in ((str(file), "file is a file: give the folder of a recording"), ("", "not an empty one")):
        with pytest.raises(SystemExit, match="2"):
            main([command, "--record", given])
        assert said in capsys.readouterr().err
    monkeypatch.setitem(extras.EXTRAS, "record", ("no_such_package",))
    with pytest.raises(SystemExit, match="2"):
        main([command, "--record", str(tmp_path)])
    assert "a recorder needs no_such_package: install the extra 'record'" in capsys.readouterr().err
