"""colibrid.cli.doctor, doctor_host and doctor_service: each check finds what it is for, and says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.cli import doctor_host, doctor_service
from colibrid.cli.doctor_host import Host
from colibrid.cli.main import run
from colibrid.config.environment import read_environment
from colibrid.config.settings import Settings
from colibrid.engine import gpu
from colibrid.engine.cubins import DeviceError
from colibrid.engine.device_cuda import DeviceInfo
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from colibrid.cli.finding import Finding
    from colibrid.model.pack import Pack

GPU = DeviceInfo(0, "Test GPU", (9, 0), 13000, 80 << 30, 132, 232448)
NOWHERE = Host(Path("/nonexistent"), Path("/nonexistent"), Path("/nonexistent"))


def _settings(**sections: Any) -> Settings:
    return msgspec.convert(sections, Settings)


def _levels(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def _only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    assert (finding.fix is None) == (finding.level == "ok")
    return finding


@pytest.fixture
def host(tmp_path: Path) -> Callable[[dict[str, str]], Host]:
    """A machine with these files."""

    def make(files: dict[str, str]) -> Host:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Host(tmp_path / "proc", tmp_path / "sys", tmp_path / "run")

    return make


# ---------------------------------------------------------------- the command


def test_a_host_that_can_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model on the CPU every check passes, and the last line counts them."""
    arguments = ["doctor", "--device", "cpu", "--port", "0", "--set", f"model.cache_dir={tmp_path / 'cache'}"]
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    checks = [line.split()[1] for line in lines[:-1] if not line.startswith(" ")]
    for name in ("configuration", "kernel", "installation", "clock", "model", "memory", "cache", "address", "keys"):
        assert name in checks
    assert f"{len(checks)} checks: 0 errors" in lines[-1]
    assert not (tmp_path / "cache").exists()


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with a fix for each finding that is not ok."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["doctor", "--device", "cpu", "--port", str(port), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    wrong = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert [finding["check"] for finding in wrong] == ["address"]
    assert all(finding["fix"] for finding in document["findings"] if finding["level"] != "ok")


def test_a_wrong_configuration_is_told_beside_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake is a finding, the host is looked at all the same, and the exit code is 78."""
    path = tmp_path / "c.yaml"
    path.write_text("server: {prot: 1}\nbatch: {slots: 0}\n")
    assert run(["doctor", "--config", str(path)]) == 78
    output = capsys.readouterr().out
    assert output.count("error    configuration") == 2
    assert "fix: did you mean server.port?" in output
    assert " kernel " in output


# ---------------------------------------------------------------- host


def test_missing_system_calls_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel or a container refuses pidfd_open, no daemon can run."""

    def refuse(_pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert doctor_host.check_kernel().level == "ok"
    monkeypatch.setattr(os, "pidfd_open", refuse)
    finding = doctor_host.check_kernel()
    assert finding.level == "error"
    assert "pidfd_open failed (Operation not permitted)" in finding.text


def test_a_damaged_installation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not there is found with the command that builds it."""
    assert doctor_host.check_installation().level == "ok"
    missing = doctor_host.Library

    def absent() -> doctor_host.Library:
        return missing(Path("/nonexistent"))

    monkeypatch.setattr(doctor_host, "Library", absent)
    assert doctor_host.check_installation().level == "error"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="instructions of x86")
def test_cpus(host: Callable[[dict[str, str]], Host]) -> None:
    """A CPU without AVX2 and a quota below one CPU are warnings."""
    good = host({"proc/cpuinfo": "flags\t\t: sse2 avx2 avx512f\n"})
    assert _levels(doctor_host.check_cpus(good)) == {"instructions": "ok", "cpus": "ok"}
    files = {
        "proc/cpuinfo": "flags\t\t: sse2\n",
        "proc/self/cgroup": "0::/x\n",
        "sys/fs/cgroup/x/cpu.max": "50000 100000\n",
    }
    assert _levels(doctor_host.check_cpus(host(files))) == {"instructions": "warning", "cpus": "warning"}


def test_huge_pages(host: Callable[[dict[str, str]], Host]) -> None:
    """Transparent ones that are off are a warning; required ones that are not reserved an error."""
    enabled = "sys/kernel/mm/transparent_hugepage/enabled"
    free = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    plain = _settings()
    assert _only(doctor_host.check_huge_pages(plain, NOWHERE)).level == "warning"
    off = host({enabled: "always madvise [never]\n"})
    assert _only(doctor_host.check_huge_pages(plain, off)).level == "warning"
    on = host({enabled: "always [madvise] never\n", free: "0\n"})
    assert _only(doctor_host.check_huge_pages(plain, on)).text == "transparent: madvise"
    every = {name: {"huge_pages": "require"} for name in ("weights", "kv", "temp")}
    required = _settings(memory={"tiers": every})
    assert _only(doctor_host.check_huge_pages(required, on)).level == "error"
    assert _only(doctor_host.check_huge_pages(required, host({free: "512\n"}))).level == "ok"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer descriptors than connections, and core dumps, are warnings with the limit to set."""

    def limits(files: int, core: int) -> None:
        table = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_CORE: core}
        monkeypatch.setattr(resource, "getrlimit", lambda which: (table[which], table[which]))

    settings = _settings(limits={"connections": 1000})
    limits(1064, 0)
    assert _levels(doctor_host.check_limits(settings)) == {"open files": "ok", "core dumps": "ok"}
    limits(1063, resource.RLIM_INFINITY)
    files, core = doctor_host.check_limits(settings)
    assert (files.level, core.level) == ("warning", "warning")
    assert "LimitNOFILE=1064" in str(files.fix)


def test_clock(host: Callable[[dict[str, str]], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock before the installation is an error; a slow source and one never synchronised are warnings."""
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert doctor_host.check_clock(host({source: "tsc\n"})).level == "ok"
    assert doctor_host.check_clock(host({source: "hpet\n"})).level == "warning"
    assert doctor_host.check_clock(host({source: "tsc\n", "run/systemd/timesync/x": ""})).level == "warning"
    assert doctor_host.check_clock(host({"run/systemd/timesync/synchronized": ""})).level == "ok"
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert doctor_host.check_clock(NOWHERE).level == "error"


def test_user() -> None:
    """Root is a warning."""
    assert (doctor_host.check_user(0).level, doctor_host.check_user(1000).level) == ("warning", "ok")


# ---------------------------------------------------------------- GPU


def _cubins(folder: Path, *, kind: str = "cubin") -> Path:
    (folder / "router.bin").write_bytes(b"code")
    digest = hashlib.sha256(b"code").hexdigest()
    image = {
        "file": "router.bin",
        "source": "router.cu",
        "arch": "sm_90a",
        "kind": kind,
        "sha256": digest,
        "kernels": [],
    }
    (folder / "manifest.json").write_text(json.dumps({"abi_version": 1, "images": [image]}))
    return folder


def test_gpus_and_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with cubins as built is fine; PTX is a warning, a changed file an error."""
    monkeypatch.setattr(gpu, "find_gpu", lambda _index, _cubins: GPU)
    settings = _settings(engine={"device": "cuda"})
    findings = list(doctor_service.check_gpus(settings, NOWHERE, _cubins(tmp_path)))
    assert _levels(findings) == {"gpu": "ok", "cubins": "ok"}
    assert "Test GPU, 9.0, 80.0 GiB" in findings[0].text
    fallback = doctor_service.check_gpus(settings, NOWHERE, _cubins(tmp_path, kind="ptx"))
    assert _levels(fallback)["cubins"] == "warning"
    _cubins(tmp_path)
    (tmp_path / "router.bin").write_bytes(b"other")
    assert _levels(doctor_service.check_gpus(settings, NOWHERE, tmp_path))["cubins"] == "error"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, host: Callable[[dict[str, str]], Host]) -> None:
    """Without a driver cuda is an error that says so, auto is not, and cpu does not look."""

    def none(_index: int, _cubins: Path) -> DeviceInfo:
        raise DeviceError("no GPU: no driver; install one")

    monkeypatch.setattr(gpu, "find_gpu", none)
    wanted = {name: _settings(engine={"device": name}) for name in ("cuda", "auto", "cpu")}
    cuda = _only(doctor_service.check_gpus(wanted["cuda"], NOWHERE))
    assert (cuda.level, cuda.configuration) == ("error", False)
    assert "driver is not loaded" in str(cuda.fix)
    assert _only(doctor_service.check_gpus(wanted["auto"], NOWHERE)).level == "ok"
    assert _only(doctor_service.check_gpus(wanted["cpu"], NOWHERE)).level == "ok"
    monkeypatch.setattr(os, "access", lambda *_: False)
    loaded = host({"proc/driver/nvidia/version": "NVRM version: 580\n"})
    assert "may not open /dev/nvidiactl" in str(_only(doctor_service.check_gpus(wanted["cuda"], loaded)).fix)


# ---------------------------------------------------------------- model, disk, memory


def _model(settings: Settings, model: str | None = None) -> dict[str, Finding]:
    return {finding.check: finding for finding in doctor_service.check_model(settings, model, read_environment({}))}


def test_model_that_must_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder needs room and rights for the pack; a full disk is an error with both numbers."""
    settings = _settings(engine={"device": "cpu"}, model={"cache_dir": str(tmp_path / "a" / "b")})
    assert {name: finding.level for name, finding in _model(settings).items()} == dict.fromkeys(
        ("model", "memory", "cache"), "ok"
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    full = _model(settings)["cache"]
    assert full.level == "error"
    assert "1.00 MiB free" in full.text
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "is not writable" in _model(settings)["cache"].text


def test_pack(bundled_pack: Pack, tmp_path: Path) -> None:
    """A pack needs no conversion; one with a missing file is an error of the model."""
    settings = _settings(engine={"device": "cpu"})
    assert _model(settings, str(bundled_pack.path))["cache"].text == "no conversion is needed"
    damaged = tmp_path / "damaged.colibri"
    shutil.copytree(bundled_pack.path, damaged)
    (damaged / "expert_3_1.bin").unlink()
    finding = _only(_model(settings, str(damaged)).values())
    assert (finding.level, finding.configuration) == ("error", True)
    assert "expert_3_1.bin" in finding.text


def test_model_and_settings_that_do_not_fit() -> None:
    """A model that is not here, and an engine that is larger than the memory, are errors."""
    absent = _only(_model(_settings(engine={"device": "cpu"}), "org/absent").values())
    assert (absent.level, absent.configuration) == ("error", True)
    large = _settings(engine={"device": "cpu"}, memory={"tiers": {"kv": {"bytes": "900TiB"}}})
    assert _model(large)["memory"].level == "error"


# ---------------------------------------------------------------- addresses and keys


def _addresses(settings: Settings) -> list[Finding]:
    return list(doctor_service.check_addresses(settings, read_environment({})))


def test_open_addresses_need_keys(tmp_path: Path) -> None:
    """An address that other machines reach is an error of the configuration without keys."""
    exposed = _only(_addresses(_settings(server={"host": "0.0.0.0", "port": 0})))
    assert (exposed.level, exposed.configuration) == ("error", True)
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")
    with_keys = _settings(server={"host": "0.0.0.0", "port": 0}, auth={"keys_file": str(keys)})
    assert _only(_addresses(with_keys)).level == "ok"


def test_addresses(tmp_path: Path) -> None:
    """Free ones are fine, taken ones are errors, and a path is left as it was."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "api"
        server = _settings(server={"listen": [f"127.0.0.1:{port}", "127.0.0.1:0", f"unix:{path}", "nonsense"]})
        findings = _addresses(server)
    assert [finding.level for finding in findings] == ["error", "ok", "ok", "error"]
    assert "ss -ltnp" in str(findings[0].fix)
    assert [finding.configuration for finding in findings] == [False, False, False, True]
    assert not path.exists()


def test_a_colibrid_that_runs_is_no_error() -> None:
    """The address is taken by colibrid itself."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def version_string(self) -> str:
            return "colibrid"

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as other:
        thread = Thread(target=other.handle_request)
        thread.start()
        finding = _only(_addresses(_settings(server={"port": other.server_port})))
        thread.join()
        thread = Thread(target=other.handle_request)
        thread.start()
        exposed = _only(_addresses(_settings(server={"host": "0.0.0.0", "port": other.server_port})))
        thread.join()
    assert finding.level == "ok"
    assert "colibrid answers there already" in finding.text
    assert (exposed.level, "no API key is set" in exposed.text) == ("error", True)


def test_admin_socket(tmp_path: Path) -> None:
    """It can be made, a daemon has it, or its folder is missing."""
    path = tmp_path / "admin"

    def check(place: Path) -> Finding:
        findings = _addresses(_settings(server={"port": 0, "admin_socket": str(place)}))
        return next(finding for finding in findings if finding.check == "admin socket")

    assert "can be made" in check(path).text
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert "a daemon listens there" in check(path).text
    assert check(tmp_path / "none" / "admin").level == "error"


def test_keys(tmp_path: Path) -> None:
    """Readable for others is a warning, for nobody else fine, a file that is not there an error."""
    environment = read_environment({})
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")

    def check(**sections: Any) -> Finding:
        return _only(doctor_service.check_keys(_settings(**sections), environment))

    keys.chmod(0o644)
    assert "chmod 600" in str(check(auth={"keys_file": str(keys)}).fix)
    keys.chmod(0o600)
    assert check(auth={"keys_file": str(keys)}).level == "ok"
    assert check().level == "ok"
    assert check(auth={"keys_file": str(tmp_path / "none")}).level == "error"


def test_errors_of_settings_are_told_apart() -> None:
    """What the configuration says wrongly exits with 78, what the host lacks with 1."""
    from colibrid.cli.doctor import _exit_code
    from colibrid.cli.finding import error, ok, refused, warning

    assert _exit_code([ok("a", "x"), warning("b", "x", "y")]) == 0
    assert _exit_code([error("a", "x", "y")]) == 1
    assert _exit_code([error("a", "x", "y"), refused("b", ConfigError("x"))]) == 78


def test_doctor_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is made anywhere under the home and cache folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(["doctor", "--device", "cpu", "--port", "0"]) == 0
    assert list(tmp_path.iterdir()) == []
