"""colibrid.cli.experts: a real daemon's expert is replaced from the command line."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess

from colibrid.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"server: {{admin_socket: {tmp_path}/admin}}\n"
        f"experts: {{swap_slots: 1, swap_folders: [{tmp_path}/experts]}}\n"
        "batch: {slots: 2}\n"
        "logging: {format: json}\n"
    )
    return path


def test_an_expert_is_replaced(
    bundled_pack: Pack, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`experts swap` says what serves now, `experts list` shows it, and the text and the fingerprint change; a damaged
    file, one from elsewhere and a layer that is not there are one clear line, and the daemon serves on."""
    folder = tmp_path / "experts"
    shutil.copytree(bundled_pack.path, folder)
    file = folder / bundled_pack.manifest.layers[2].expert_files[1]
    asked = {"prompt": "The river", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def swap(*arguments: object) -> tuple[int, str]:
        code = run(["experts", "swap", *map(str, arguments), "--config", str(config)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    with DaemonProcess(tmp_path, str(bundled_pack.path), "--config", str(config)) as daemon:
        daemon.wait_ready()
        before = daemon.request("POST", "/v1/completions", asked)[1]
        assert "weights_generation" not in before["usage"]["experts"]
        code, text = swap(2, 0, file)
        assert code == 0, text
        assert f"layer 2 expert 0: version 1, {file.name} (bf16" in text
        assert "free swap slots: 1" in text
        after = daemon.request("POST", "/v1/completions", asked)[1]
        assert after["choices"][0]["text"] != before["choices"][0]["text"]
        assert after["usage"]["experts"]["weights_generation"] == 1
        assert after["usage"]["experts"]["switches"] == []
        assert after["system_fingerprint"] != before["system_fingerprint"]
        assert run(["experts", "list", "--config", str(config)]) == 0
        listed = capsys.readouterr().out
        assert "weights generation 1, swap slots 1" in listed
        assert "layer 2 expert 0" in listed
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
        for arguments, said in (
            ((2, 0, file), "sha256 is"),
            ((2, 0, bundled_pack.path / file.name), "experts.swap_folders"),
            ((99, 0, file), "the model has 0 to"),
            ((2, 0), "Neither file nor module"),
            ((2, 0, "--module", "gelu"), "no kernel module gelu"),
        ):
            code, text = swap(*arguments)
            assert code == 1
            assert said in text
        assert daemon.request("POST", "/v1/completions", asked)[1]["choices"] == after["choices"]
        own = bundled_pack.manifest.layers[2].expert_files[0]
        assert swap(2, 0, folder / own)[0] == 0
        back = daemon.request("POST", "/v1/completions", asked)[1]
        assert back["choices"][0]["text"] == before["choices"][0]["text"]
        assert back["system_fingerprint"] == before["system_fingerprint"]
