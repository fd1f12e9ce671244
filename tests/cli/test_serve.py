"""`colibrid serve` as users and service managers see it: a child process, real signals, real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon_process import DEADLINE_S, DaemonProcess, wait_for

from colibrid.cli import main as front

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.pack import Pack

NORWAY = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0}
TLS = Path(__file__).parents[1] / "data" / "tls"
# So many choices of so many tokens take seconds, whatever keeps a test from going on meanwhile.
LONG = {"prompt": "Once", "max_tokens": 1500, "n": 8, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(bundled_pack: Pack) -> str:
    return str(bundled_pack.path)


@pytest.fixture(scope="module")
def daemon(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for the tests that only ask."""
    with DaemonProcess(tmp_path_factory.mktemp("serve"), model) as started:
        yield started.wait_ready()


def run(*arguments: str, timeout: float = DEADLINE_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """`colibrid serve` that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "colibrid.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a user error prints."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("colibrid: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_answers_and_shows_how_to_ask(daemon: DaemonProcess) -> None:
    """The banner names model, device, slots, context, bill, URL and curl, then the time; the question is answered."""
    for part in (
        "colibrid 0.",
        "hummingbird-13m",
        "cpu",
        "2048 tokens",
        "weights      26.0 MiB",
        "/v1",
        "curl -s http://",
    ):
        assert part in daemon.stdout
    assert daemon.stdout.splitlines()[-1].startswith("ready in ")
    status, answer = daemon.request("POST", "/v1/chat/completions", NORWAY)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "The capital of Norway is Oslo.")


def test_log_is_one_object_a_line_without_prompts(daemon: DaemonProcess) -> None:
    """Everything on stderr is JSON, a request is one event, and neither prompt nor answer is in it."""
    daemon.request("POST", "/v1/chat/completions", NORWAY)
    wait_for(lambda: any(event["event"] == "request" for event in daemon.events))
    assert [line for line in daemon.stderr.splitlines() if not line.startswith("{")] == []
    assert "Norway" not in daemon.stderr
    assert "Oslo" not in daemon.stderr


def test_serving_loads_no_numerics(daemon: DaemonProcess) -> None:
    """Neither daemon nor engine process maps numpy or torch: start-up and memory stay small."""
    engine = daemon.wait_event("engine_ready")["pid"]
    for pid in (daemon.process.pid, engine):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libcolibri.so" in maps
        assert "numpy" not in maps
        assert "torch" not in maps


def test_drains_on_sigterm(model: str, tmp_path: Path) -> None:
    """A running stream ends complete, new requests get 503, and the exit code is 0."""
    with DaemonProcess(tmp_path, model) as daemon:
        with daemon.wait_ready().open("POST", "/v1/completions", LONG) as response:
            assert response.readline().startswith(b"data: ")
            daemon.signal(signal.SIGTERM)
            daemon.wait_event("draining")
            status, body = daemon.request("POST", "/v1/completions", {"prompt": "x"})
            assert (status, body["error"]["code"]) == (503, "draining")
            assert daemon.request("GET", "/livez")[0] == 200
            assert daemon.request("GET", "/readyz")[0] == 503
            rest = response.read().decode()
        assert rest.rstrip().endswith("data: [DONE]")
        assert rest.count('"finish_reason":"length"') == 8
        assert daemon.wait() == 0
        assert daemon.wait_event("drained")["complete"] is True
        totals = daemon.wait_event("engine_totals")
        assert (totals["requests_done"], totals["allocations_after_open"]) == (8, 0)
        assert totals["tokens_decode"] == 8 * 1499  # the first token comes from the prompt's step


def test_drain_has_an_end(model: str, tmp_path: Path) -> None:
    """A request that outlives server.drain_timeout_s is ended with an error, not with a finish reason; exit code 0."""
    with DaemonProcess(tmp_path, model, "--set", "server.drain_timeout_s=0.2") as daemon:
        with daemon.wait_ready().open("POST", "/v1/completions", LONG) as response:
            response.readline()
            daemon.signal(signal.SIGTERM)
            rest = response.read().decode()
        assert '"error"' in rest
        assert "[DONE]" not in rest
        assert daemon.wait() == 0


def test_second_signal_stops_now(model: str, tmp_path: Path) -> None:
    """The second SIGTERM does not wait for running requests."""
    with DaemonProcess(tmp_path, model, "--set", "server.drain_timeout_s=3600") as daemon:
        with daemon.wait_ready().open("POST", "/v1/completions", LONG) as response:
            response.readline()
            daemon.signal(signal.SIGTERM)
            daemon.wait_event("draining")
            daemon.signal(signal.SIGTERM)
            assert b"[DONE]" not in response.read()
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.stderr


def test_interrupt_drains_too(model: str, tmp_path: Path) -> None:
    """Ctrl-C on an idle daemon ends it with 0 and no traceback."""
    with DaemonProcess(tmp_path, model) as daemon:
        daemon.wait_ready().signal(signal.SIGINT)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.stderr


def test_signal_while_loading_is_obeyed(model: str, tmp_path: Path) -> None:
    """SIGTERM before ready ends the daemon without a traceback."""
    with DaemonProcess(tmp_path, model) as daemon:
        daemon.wait_event("engine_started")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.stderr


def test_closed_standard_streams_are_survived(model: str, tmp_path: Path) -> None:
    """With 0, 1 and 2 closed, no socket takes their numbers: serving works and nothing is printed into it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"exec {sys.executable} -m colibrid.cli serve {model} --port {port} <&- >&- 2>&-"
    with subprocess.Popen(["/bin/sh", "-c", command]) as process:
        try:
            wait_for(lambda: _is_ready(port) or process.poll() is not None)
            assert process.poll() is None
            links = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
            assert links == ["/dev/null"] * 3
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_hangup_reloads(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGHUP takes live keys over, names those that need a restart, and refuses a bad file with line and column."""
    config = tmp_path / "c.yaml"
    keys = tmp_path / "keys"
    config.write_text("limits: {max_tokens_default: 3}\n")
    admin = str(tmp_path / "admin")
    with DaemonProcess(tmp_path, model, "--config", str(config), "--set", f"server.admin_socket={admin}") as daemon:
        status, answer = daemon.wait_ready().request("POST", "/v1/chat/completions", NORWAY)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)

        config.write_text("limits: {max_tokens_default: 5}\nbatch: {slots: 3, window_ms: x}\n")
        daemon.signal(signal.SIGHUP)
        refused = daemon.wait_event("reload_refused")
        assert refused["errors"] == [f"{config}:2:30: batch.window_ms must be a number from 0 to 1000 (given: 'x')"]
        assert daemon.request("POST", "/v1/chat/completions", NORWAY)[1]["usage"]["completion_tokens"] == 3

        keys.write_text("a-secret-of-mine\n")
        config.write_text(f"server: {{api_key_file: {keys}}}\nlimits: {{max_tokens_default: 4}}\nbatch: {{slots: 3}}\n")
        daemon.signal(signal.SIGHUP)
        assert daemon.wait_event("reload_needs_restart")["keys"] == ["batch.slots"]
        assert daemon.wait_event("reloaded")["changed"] == ["server.api_key_file", "limits.max_tokens_default"]
        assert daemon.request("POST", "/v1/chat/completions", NORWAY)[0] == 401
        bearer = {"Authorization": "Bearer a-secret-of-mine"}
        status, answer = daemon.request("POST", "/v1/chat/completions", NORWAY, bearer)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)

        capsys.readouterr()
        config.write_text(config.read_text().replace("default: 4", "default: 6"))
        assert front.run(["config", "reload", "--admin-socket", admin]) == 0
        assert capsys.readouterr().out == ("changed: limits.max_tokens_default\nafter a restart only: batch.slots\n")
        config.write_text("limits: {queue: x}\n")
        assert front.run(["config", "reload", "--admin-socket", admin]) == 1
        assert f"{config}:1:17: limits.queue must be" in capsys.readouterr().err
        assert daemon.request("POST", "/v1/chat/completions", NORWAY, bearer)[1]["usage"]["completion_tokens"] == 6


def test_engine_death_is_survived(model: str, tmp_path: Path) -> None:
    """kill -9 of the engine ends the running request with an error; then a new engine serves, and exit is 0."""
    with DaemonProcess(tmp_path, model) as daemon:
        engine = daemon.wait_ready().wait_event("engine_ready")["pid"]
        with daemon.open("POST", "/v1/completions", LONG) as response:
            response.readline()
            os.kill(engine, signal.SIGKILL)
            rest = response.read().decode()
        assert '"error"' in rest
        assert 'finish_reason":"stop' not in rest
        wait_for(lambda: daemon.request("GET", "/readyz")[0] == 200, daemon)
        assert daemon.request("POST", "/v1/chat/completions", NORWAY)[1]["choices"][0]["message"]["content"] == (
            "The capital of Norway is Oslo."
        )
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_engine_that_keeps_dying_ends_the_daemon(model: str, tmp_path: Path) -> None:
    """Five engines that die before a request end the daemon with 1 and the reason."""
    with DaemonProcess(tmp_path, model) as daemon:
        daemon.wait_ready()
        killed = set[int]()
        while daemon.process.poll() is None:
            for event in daemon.events:
                if event["event"] == "engine_started" and event["pid"] not in killed:
                    killed.add(event["pid"])
                    try:
                        os.kill(event["pid"], signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            time.sleep(0.01)
        assert daemon.wait() == 1
        assert len(killed) == 5
        assert "5 engines died" in daemon.stderr
        assert "Traceback" not in daemon.stderr


def test_service_manager_is_told(model: str, tmp_path: Path) -> None:
    """With NOTIFY_SOCKET set, the manager sees READY, watchdog pings and STOPPING, in this order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        with DaemonProcess(tmp_path, model, environment=environment) as daemon:
            seen = ""
            while "READY=1" not in seen:
                seen += manager.recv(4096).decode() + "\n"
            assert "EXTEND_TIMEOUT_USEC=" in seen
            assert "STATUS=serving hummingbird-13m" in seen
            assert daemon.request("GET", "/readyz")[0] == 200
            seen = ""
            while seen.count("WATCHDOG=1") < 3:
                seen += manager.recv(4096).decode() + "\n"
            daemon.signal(signal.SIGTERM)
            while "STOPPING=1" not in seen:
                seen += manager.recv(4096).decode() + "\n"
            assert daemon.wait() == 0


def test_watchdog_pings_stop_when_the_loop_stands(model: str, tmp_path: Path) -> None:
    """A daemon that cannot turn its loop sends no more pings, so that the manager can act."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        with DaemonProcess(tmp_path, model, environment=environment) as daemon:
            while "WATCHDOG=1" not in manager.recv(4096).decode():
                pass
            daemon.signal(signal.SIGSTOP)
            wait_for(lambda: _stands(daemon.process.pid))
            manager.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # what was sent before
                while manager.recv(4096):
                    pass
            manager.settimeout(1.5)  # fifteen pings
            with pytest.raises(TimeoutError):
                manager.recv(4096)


def _stands(pid: int) -> bool:
    """All threads of the process are stopped: the signal reaches them after the call that sends it has returned."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def test_occupied_port_is_one_line(daemon: DaemonProcess, model: str) -> None:
    """The port of another process is told in one line, with exit code 1, before the model is loaded."""
    done = run(model, "--port", str(daemon.port))
    assert done.returncode == 1
    assert only_line(done) == (
        f"colibrid: 127.0.0.1:{daemon.port} is in use by another process; stop it, or choose another --port"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--host", "0.0.0.0"], "no API key is set"),
     (["--host", "192.0.2.1", "--api-key", "long-enough-key"], "is not an address of this machine"),
     (["--host", "no such host", "--api-key", "long-enough-key"], "is not an address or a known name"),
     (["--device", "cuda"], "engine.device is cuda, but"),
     (["--num-layers", "7"], "--num-layers is 7, but hummingbird-13m has 6"),
     (["--num-experts", "16"], "--num-experts is 16, but hummingbird-13m has 8"),
     (["--max-seq-len", "4096"], "model.max_seq_len is 4096"),
     (["--expert-capacity", "3"], "experts.per_token is 3"),
     (["--api-key", "short"], "shorter than 8"),
     (["--api-key-file", "/no/such/file"], "auth.keys_file /no/such/file cannot be read")],
)  # fmt: skip
def test_settings_that_cannot_work_exit_with_78(model: str, arguments: list[str], text: str) -> None:
    """What a restart cannot cure is told in one line with exit code 78."""
    done = run(model, "--port", "0", *arguments)
    assert done.returncode == 78, done.stderr
    assert text in only_line(done)


def test_older_style_is_accepted(model: str, tmp_path: Path) -> None:
    """--model-path, --num-layers and --num-experts start the model that they describe."""
    with DaemonProcess(tmp_path, "--model-path", model, "--num-layers", "6", "--num-experts", "8") as daemon:
        assert daemon.wait_ready().request("GET", "/readyz")[0] == 200


def test_familiar_aliases_are_obeyed(model: str, tmp_path: Path) -> None:
    """--served-model-name, --max-model-len, --max-batch-size and --api-key do what other servers do."""
    arguments = (
        "--served-model-name",
        "m",
        "--max-model-len",
        "512",
        "--max-batch-size",
        "2",
        "--api-key",
        "a-long-key",
    )
    with DaemonProcess(tmp_path, model, *arguments) as daemon:
        assert daemon.wait_ready().request("GET", "/v1/models")[0] == 401
        status, listed = daemon.request("GET", "/v1/models", headers={"authorization": "Bearer a-long-key"})
        assert (status, listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (200, "m", 512)
        assert "Bearer YOUR_KEY" in daemon.stdout
        assert "a-long-key" not in daemon.stdout + daemon.stderr


def test_key_file_opens_other_addresses(model: str, tmp_path: Path) -> None:
    """With keys in a file, the daemon may listen everywhere, and asks for one."""
    keys = tmp_path / "keys"
    keys.write_text("first-long-key\nsecond-long-key\n")
    with DaemonProcess(tmp_path, model, "--host", "0.0.0.0", "--api-key-file", str(keys)) as daemon:
        assert daemon.wait_ready().request("POST", "/v1/chat/completions", NORWAY)[0] == 401
        headers = {"authorization": "Bearer second-long-key"}
        assert daemon.request("POST", "/v1/chat/completions", NORWAY, headers)[0] == 200


def test_bundled_model_is_converted_once(tmp_path: Path) -> None:
    """Without MODEL the bundled one is converted into the cache folder; the second start finds it there."""
    for first in (True, False):
        with DaemonProcess(tmp_path) as daemon:
            answer = daemon.wait_ready().request("POST", "/v1/chat/completions", NORWAY)[1]
            assert answer["model"] == "hummingbird-13m"
            assert ("converting" in daemon.stderr) is first
    (pack,) = (tmp_path / "cache" / "colibrid").glob("*.colibri")
    assert (pack / "colibri.json").is_file()


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error that names the setting."""
    (tmp_path / "file").write_text("")
    done = run("--port", "0", CACHE_DIRECTORY=str(tmp_path / "file" / "cache"))
    assert done.returncode == 78
    assert "model.cache_dir" in only_line(done)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _unshape(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["files"][0]["sections"][0]["shape"][0] += 1
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "damage"),
    [("expert_2_3.bin", _flip), ("dense.bin", _truncate), ("expert_0_0.bin", Path.unlink), ("colibri.json", _unshape),
     ("colibri.json", _truncate), ("tokenizer.json", _truncate)],
)  # fmt: skip
def test_damaged_packs_are_refused(model: str, tmp_path: Path, name: str, damage: object) -> None:
    """A flipped bit, a truncated or missing file and a wrong shape end with 78 and name the file, before ready."""
    broken = tmp_path / "broken.colibri"
    shutil.copytree(model, broken)
    assert callable(damage)
    damage(broken / name)
    done = run(str(broken), "--port", "0")
    assert done.returncode == 78, done.stderr
    assert name in only_line(done)
    assert "ready in" not in done.stdout


def test_unknown_model_names_the_remedy() -> None:
    """A name that is not in the local cache says the command that fetches it."""
    done = run("someone/some-model", "--port", "0", HF_HOME="/nonexistent")
    assert done.returncode == 78
    assert "hf download someone/some-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_many_clients_at_once(daemon: DaemonProcess) -> None:
    """Sixteen clients get the same answer at the same time."""
    answers: list[str] = []

    def ask() -> None:
        answers.append(daemon.request("POST", "/v1/chat/completions", NORWAY)[1]["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["The capital of Norway is Oslo."] * 16


def test_many_ways_in(model: str, tmp_path: Path) -> None:
    """One daemon answers over TLS, on a path, and on a socket that the service manager passes."""
    api = tmp_path / "api"
    arguments = ["--set", f"server.listen=127.0.0.1:0,unix:{api}"]
    arguments += [
        "--set",
        f"server.tls_cert_file={TLS / 'first.pem'}",
        "--set",
        f"server.tls_key_file={TLS / 'first.key'}",
    ]
    with DaemonProcess(tmp_path, model, *arguments) as daemon:
        daemon.wait_ready()
        assert str(api) in daemon.stdout
        trusting = ssl.create_default_context(cafile=str(TLS / "first.pem"))
        secure = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=DEADLINE_S, context=trusting)
        secure.request("GET", "/readyz")
        with secure.getresponse() as response:
            assert response.status == 200
        secure.close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(api))
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not api.exists()


def test_socket_activation(model: str, tmp_path: Path) -> None:
    """A socket that was opened before the daemon started is served: who connects early waits."""
    program = (
        "import os, sys; os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); os.dup2(int(sys.argv[1]), 3)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'colibrid.cli', 'serve', *sys.argv[2:]])"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        early = socket.create_connection(listening.getsockname(), timeout=DEADLINE_S)
        early.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(listening.fileno()), model],
            pass_fds=[listening.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )
        try:
            assert early.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0, process.communicate()[1]
        finally:
            process.kill()
            process.communicate()
            early.close()


def test_keys_and_certificates_rotate(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After `colibrid keys` and SIGHUP the new key opens and the old one does not; new connections get the new certificate."""
    keys, cert, secret = tmp_path / "keys", tmp_path / "cert.pem", tmp_path / "cert.key"

    def key_of(name: str) -> str:
        assert front.run(["keys", "add", name, "--file", str(keys), "--tokens-per-day", "100"]) == 0
        return capsys.readouterr().out.strip()

    def use(name: str) -> None:
        shutil.copy(TLS / f"{name}.pem", cert)
        shutil.copy(TLS / f"{name}.key", secret)

    def status(key: str, name: str) -> int:
        trusting = ssl.create_default_context(cafile=str(TLS / f"{name}.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=DEADLINE_S, context=trusting)
        body = json.dumps({"prompt": "Hi", "max_tokens": 1})
        connection.request(
            "POST", "/v1/completions", body, {"authorization": f"Bearer {key}", "content-type": "application/json"}
        )
        with connection.getresponse() as response:
            found = response.status
        connection.close()
        return found

    use("first")
    old = key_of("old")
    arguments = ["--host", "0.0.0.0", "--api-key-file", str(keys)]
    arguments += ["--set", f"server.tls_cert_file={cert}", "--set", f"server.tls_key_file={secret}"]
    with DaemonProcess(tmp_path, model, *arguments) as daemon:
        daemon.wait_ready()
        assert status(old, "first") == 200
        assert status("clb_nobody-has-this-one", "first") == 401
        new = key_of("new")
        assert front.run(["keys", "revoke", "old", "--file", str(keys)]) == 0
        assert status(old, "first") == 200
        use("second")
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reloaded")
        assert daemon.wait_event("keys_in_force")["count"] == 1
        assert [status(old, "second"), status(new, "second")] == [401, 200]
        with pytest.raises(ssl.SSLCertVerificationError):
            status(new, "first")
        keys.write_text("")
        daemon.signal(signal.SIGHUP)
        assert "holds no key" in daemon.wait_event("reload_refused")["errors"][0]
        assert status(new, "second") == 200
        assert old not in daemon.stderr
        assert new not in daemon.stderr
