"""colibrid.cli.config, plan and model_values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.config.documents import SCHEMA_FILE, default_file, schema
from colibrid.config.load import load
from colibrid.config.settings import Settings

CONF = Path(__file__).parents[2] / "conf"
READY_MADE = [
    ("cpu.yaml", "qwen3-30b-a3b", "30GiB", 1),
    ("gpu-24gb.yaml", "olmoe-1b-7b", "23GiB", 1),
    ("gpu-80gb.yaml", "qwen3-30b-a3b", "79GiB", 1),
    ("gpus.yaml", "qwen3-30b-a3b", "79GiB", 4),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller's own environment does not count."""
    monkeypatch.delenv("COLIBRID_CONFIG", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(("name", "shape", "memory", "engines"), READY_MADE)
def test_ready_made_files_fit_the_machines_that_they_name(
    name: str, shape: str, memory: str, engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file in conf/ has no mistakes, and the model of its comment fits a device with the memory of its comment."""
    path = CONF / name
    comment = " ".join(path.read_text().replace("#", " ").split())
    assert f"colibrid config check {name} --shape {shape} --device-memory {memory}" in comment
    assert run(["config", "check", str(path), "--shape", shape, "--device-memory", memory]) == 0
    output = capsys.readouterr().out
    assert f"{path}: no mistakes" in output
    formats = "int4-g64, bf16" if "precision: experts=int4" in path.read_text() else "bf16"
    assert f"model    {shape}, {formats}\n" in output
    assert f"of {memory[:-3]}.0 GiB free as given" in output
    assert ("each as follows" in output) == (engines > 1)


def test_every_file_is_checked() -> None:
    """No file of conf/ is left out above."""
    assert {path.name for path in CONF.glob("*.yaml")} == {"colibrid.yaml", *(name for name, *_ in READY_MADE)}


def test_check_tells_all_mistakes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistakes of YAML and of keys come together with their places, and the exit code is 78."""
    path = tmp_path / "c.yaml"
    path.write_text("server:\n  port: 1\n  port: 2\nbatch: {slots: 65, slot: 3}\nlogging: {level: &a loud}\n")
    assert run(["config", "check", str(path)]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"colibrid: {path}:3:3: key 'port' is already set in line 2; keep one of them",
        f"colibrid: {path}:5:18: anchor &a is not allowed; write the value where it is used",
        f"colibrid: {path}:4:16: batch.slots must be a whole number from 1 to 64 (given: '65')",
        f"colibrid: {path}:4:20: unknown key 'batch.slot' (given: '3'); did you mean batch.slots?",
        f"colibrid: {path}:5:18: logging.level must be debug, error, info or warning (given: 'loud')",
    ]


def test_check_plans_this_hosts_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --device-memory the bundled model is planned for the CPU of this host, and what does not fit is 78."""
    path = tmp_path / "c.yaml"
    path.write_text("engine: {device: cpu, threads: 2}\nbatch: {slots: 2}\nkv: {precision: fp16}\n")
    assert run(["config", "check", str(path)]) == 0
    output = capsys.readouterr().out
    assert "no mistakes, 4 keys are set" in output
    assert "model    hummingbird-13m, bf16" in output
    assert "free now" in output
    assert "context  2048 tokens, 2 slots, KV of 4373 tokens (fp16)" in output
    assert run(["config", "check", str(path), "--device-memory", "20MiB"]) == 78
    assert "the engine needs" in capsys.readouterr().err
    assert run(["config", "check", str(path), "--set", "model.precision=experts=int8"]) == 0
    assert "model    hummingbird-13m, int8, bf16\n" in capsys.readouterr().out
    assert run(["config", "check", str(path), "--device-memory", "20 gigs"]) == 78
    assert "--device-memory: '20 gigs' is not a size" in capsys.readouterr().err


def test_check_refuses_what_does_not_fit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that no bound can refuse are checked against the model; a model that is not here is named."""
    path = tmp_path / "c.yaml"
    path.write_text("model: {max_seq_len: 4096}\n")
    assert run(["config", "check", str(path), "--set", "engine.device=cpu"]) == 78
    assert "model.max_seq_len is 4096, but the model was made for 2048" in capsys.readouterr().err
    path.write_text("model: {path: org/absent}\n")
    assert run(["config", "check", str(path), "--set", "engine.device=cpu"]) == 78
    assert "org/absent is not in the Hugging Face cache" in capsys.readouterr().err


def test_check_plans_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """model.precision counts for the bill of a model that is not converted yet, and is checked against the model."""
    path = tmp_path / "c.yaml"
    path.write_text("engine: {device: cpu}\n")
    weights = {}
    for precision in ("null", "experts=int8", "experts=int4"):
        assert run(["config", "check", str(path), "--set", f"model.precision={precision}"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if " weights " in line)
        weights[precision] = float(line.split()[1])
    assert weights["null"] > weights["experts=int8"] > weights["experts=int4"] > 0
    assert run(["config", "check", str(path), "--set", "model.precision=layer 99=int4"]) == 78
    assert "model.precision" in capsys.readouterr().err


def test_check_warns_of_what_is_wrong_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key file that this host does not have is a warning: the file may be for another host."""
    path = tmp_path / "c.yaml"
    path.write_text("engine: {device: cpu}\nauth: {keys_file: /nonexistent/keys}\n")
    assert run(["config", "check", str(path)]) == 0
    assert "warning  here it would not start: auth.keys_file /nonexistent/keys" in capsys.readouterr().out
    path.write_text("engine: {device: cpu}\nserver: {host: 0.0.0.0}\n")
    assert run(["config", "check", str(path)]) == 0
    assert (
        "would not start: 0.0.0.0 can be reached from other machines, and no API key is set" in capsys.readouterr().out
    )


def test_show_says_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command line, environment, file, model and built-in defaults all stand beside the values that they gave."""
    path = tmp_path / "c.yaml"
    path.write_text("limits: {queue: 7}\nsampling: {top_p: 0.5}\n")
    monkeypatch.setenv("COLIBRID_BATCH__SLOTS", "3")
    arguments = ["config", "show", "--config", str(path), "--set", "model.aliases=a,b/c", "--device", "cpu"]
    assert run([*arguments, "--origin"]) == 0
    shown = [line.partition(":") for line in capsys.readouterr().out.splitlines()]
    lines = {name.strip(): value.strip() for name, _, value in shown}
    assert lines["queue"].split(maxsplit=1) == ["7", f"# {path}:1:17"]
    assert lines["slots"].endswith("# environment COLIBRID_BATCH__SLOTS")
    assert lines["aliases"].startswith("[a, b/c]")
    assert lines["aliases"].endswith("# --set")
    assert lines["device"].endswith("# --device")
    assert lines["top_p"].startswith("0.5")
    assert lines["temperature"].startswith("0.7 ")
    assert lines["temperature"].endswith("# model hummingbird-13m")
    assert lines["max_seq_len"].startswith("2048 ")
    assert lines["port"].endswith("# built-in default")


def test_what_is_shown_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output is a file with the same settings, the model's values written out."""
    first = tmp_path / "first.yaml"
    first.write_text('server: {listen: ["[::1]:80", "unix:/run/x y"]}\nmemory: {tiers: {kv: {bytes: 4GiB}}}\n')
    assert run(["config", "show", "--config", str(first)]) == 0
    second = tmp_path / "second.yaml"
    second.write_text(capsys.readouterr().out)
    one, two = load(first).settings, load(second).settings
    assert (one.server, one.memory) == (two.server, two.memory)
    assert (two.model.max_seq_len, two.experts.per_token, two.sampling.top_p) == (2048, 2, 0.9)


def test_show_does_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the model is not here, the settings are shown and its absence is told."""
    assert run(["config", "show", "--model", "org/absent"]) == 0
    shown = capsys.readouterr()
    assert "  temperature: null\n" in shown.out
    assert "the model's own values are left out: org/absent is not in" in shown.err


def test_schema_and_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`schema` prints the JSON Schema; `init` prints or writes the documented file, never over another one."""
    assert run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(schema())
    assert run(["config", "init"]) == 0
    assert capsys.readouterr().out == default_file()
    path = tmp_path / "new.yaml"
    assert run(["config", "init", str(path)]) == 0
    assert load(path).settings == Settings()
    assert (tmp_path / SCHEMA_FILE).read_text() == schema()
    path.write_text("server: {port: 1}\n")
    assert run(["config", "init", str(path)]) == 78
    assert path.read_text() == "server: {port: 1}\n"
    assert run(["config", "init", str(tmp_path / "none" / "x.yaml")]) == 78
    assert "No such file or directory" in capsys.readouterr().err
