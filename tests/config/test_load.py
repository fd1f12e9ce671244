"""colibrid.config.load."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from colibrid.config import load as config
from colibrid.config import reader
from colibrid.config.load import Override, load
from colibrid.config.settings import Settings
from colibrid.config.tree import Key
from colibrid.errors import ConfigError

DOCUMENTED = Path(__file__).parents[2] / "conf" / "colibrid.yaml"


def _file(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _errors(path: Path | None = None, environment: dict[str, str] | None = None, *overrides: Override) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, environment, overrides)
    return str(caught.value).split("\n")


def test_documented_file_equals_the_defaults() -> None:
    """conf/colibrid.yaml changes nothing."""
    assert load(DOCUMENTED).settings == Settings()


def test_documented_file_names_every_key() -> None:
    """Each setting stands in conf/colibrid.yaml, in the order of its declaration."""
    origins = load(DOCUMENTED).origins
    assert [key for key, origin in origins.items() if origin == config.BUILT_IN] == []
    lines = [int(origin.removeprefix(f"{DOCUMENTED}:").partition(":")[0]) for origin in origins.values()]
    assert lines == sorted(lines)


def test_nothing_given_is_the_default() -> None:
    """Without file, environment and options every value is the built-in one."""
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {config.BUILT_IN}


def test_precedence_and_origins(tmp_path: Path) -> None:
    """Command line beats environment beats file beats default, and each value says where it came from."""
    path = _file(tmp_path, "server: {port: 1, host: h1}\nbatch:\n  slots: 4\n  window_ms: 2\n")
    environment = {"COLIBRID_SERVER__PORT": "2", "COLIBRID_BATCH__SLOTS": "5"}
    loaded = load(path, environment, [Override("server.port", "3", "--port")])
    settings = loaded.settings
    assert (settings.server.port, settings.batch.slots, settings.batch.window_ms) == (3, 5, 2.0)
    assert settings.server.host == "h1"
    assert loaded.origins["server.port"] == "--port"
    assert loaded.origins["batch.slots"] == "environment COLIBRID_BATCH__SLOTS"
    assert loaded.origins["batch.window_ms"] == f"{path}:4:14"
    assert loaded.origins["limits.queue"] == config.BUILT_IN


def test_text_from_the_environment_follows_the_type() -> None:
    """Names that look like numbers stay text, sizes become numbers, null unsets, exponents are whole numbers."""
    settings = load(
        None,
        {
            "COLIBRID_MODEL__SERVED_NAME": "123",
            "COLIBRID_MODEL__PATH": "null",
            "COLIBRID_MEMORY__TIERS__KV__BYTES": "4GiB",
            "COLIBRID_MEMORY__TIERS__TEMP__BYTES": "4096",
            "COLIBRID_LIMITS__QUEUE": "1e3",
            "COLIBRID_SERVER__STRICT": "true",
        },
    ).settings
    assert settings.model.served_name == "123"
    assert settings.model.path is None
    assert (settings.memory.tiers.kv.bytes, settings.memory.tiers.temp.bytes) == ("4GiB", 4096)
    assert settings.limits.queue == 1000
    assert settings.server.strict is True


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    """A file with several mistakes, the environment and an option are reported together, one line each."""
    path = _file(tmp_path, "server:\n  prot: 1\n  port: 70000\nbatch: {slots: many}\nnonsense: 1\n"
                 "memory: {tiers: {kv: {bytes: 4 gigs}}}\n")  # fmt: skip
    errors = _errors(path, {"COLIBRID_SERVER_PORT": "1"}, Override("model.max_seq_len", "0", "--max-seq-len"))
    assert errors == [
        f"{path}:2:3: unknown key 'server.prot' (given: '1'); did you mean server.port?",
        f"{path}:3:9: server.port must be a whole number from 0 to 65535 (given: '70000')",
        f"{path}:4:16: batch.slots must be a whole number from 1 to 64 (given: 'many')",
        f"{path}:5:1: unknown key 'nonsense' (given: '1'); conf/colibrid.yaml lists all keys",
        f"{path}:6:30: memory.tiers.kv.bytes must be a size such as 64KiB, 2MiB or 1.5GiB, or auto (given: '4 gigs')",
        "environment COLIBRID_SERVER_PORT: no such setting (given: '1'); did you mean COLIBRID_SERVER__PORT?",
        "--max-seq-len: model.max_seq_len must be a whole number of at least 1 or null (given: '0')",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("server: {strict: yes}", "server.strict must be true or false (given: 'yes')"),
     ("server: {strict: 1}", "server.strict must be true or false (given: '1')"),
     ("server: {port: true}", "server.port must be a whole number from 0 to 65535 (given: 'true')"),
     ("server: {port: 80.5}", "server.port must be a whole number from 0 to 65535 (given: '80.5')"),
     ("server: {host: 127}", "server.host must be text"),
     ("server: {host: ''}", "not empty"),
     ('server: {host: "a\\nb"}', "without control characters"),
     ("server: 5", "server is a section"),
     ("server: [1]", "server is a section"),
     ("server: {port: [1]}", "server.port must be a whole number from 0 to 65535 (given: a list)"),
     ("server: {port: {a: 1}}", "(given: a section)"),
     ("- 1", "expected sections"),
     ("engine: {device: gpu}", "engine.device must be auto, cpu or cuda (given: 'gpu')"),
     ("engine: {threads: 0}", "engine.threads must be auto or a whole number from 1 to 256 (given: '0')"),
     ("engine: {threads: all}", "engine.threads must be auto or a whole number from 1 to 256 (given: 'all')"),
     ("experts: {threshold: 1.5}", "experts.threshold must be a number from 0 to 1 (given: '1.5')"),
     ("server: {sse_ping_s: 0}", "server.sse_ping_s must be a number above 0 and at most 3600 (given: '0')"),
     ("batch: {prefill_chunk: 128, prefill_tokens: 64}", "batch.prefill_chunk (128) must not exceed"),
     ("memory: {tiers: {kv: {bytes: 4gib}}}", "memory.tiers.kv.bytes must be a size such as 64KiB, 2MiB or 1.5GiB, or auto (given: '4gib')"),
     ("memory: {tiers: {kv: {page_size: 5000}}}", "memory.tiers.kv.page_size must be a power of two from 4KiB to 1GiB such as"),
     ("slots: 3", "did you mean batch.slots?")],
)  # fmt: skip
def test_each_mistake_says_what_is_allowed(tmp_path: Path, text: str, expected: str) -> None:
    """Wrong types, bounds, relations and places are refused with the bound and the given text."""
    errors = _errors(_file(tmp_path, text))
    assert len(errors) == 1
    assert expected in errors[0]
    assert f"{tmp_path / 'c.yaml'}:1:" in errors[0]


def test_a_section_without_keys_is_allowed(tmp_path: Path) -> None:
    """Commenting out every key of a section leaves a valid file."""
    assert load(_file(tmp_path, "server:\n  # port: 1\nbatch:\n")).settings == Settings()


def test_given_text_cannot_forge_lines() -> None:
    """A value with a line break or a terminal escape is quoted and shortened."""
    (error,) = _errors(None, {"COLIBRID_SERVER__PORT": "1\n\x1b[31mfake: all is well" + "x" * 200})
    assert "\x1b" not in error
    assert len(error) < 200


def test_bounds_are_never_wider_than_the_reader() -> None:
    """Every default can be written in YAML and read back as itself."""
    for key in config.keys().values():
        if isinstance(key, Key) and key.default not in ((), msgspec.NODEFAULT):
            text = "null" if key.default is None else str(key.default).replace("True", "true").replace("False", "false")
            assert reader.plain_value(text) == key.default


def test_experts_take_one_number_or_one_for_each_layer(tmp_path: Path) -> None:
    """A YAML list, and numbers with commas in the environment and on the command line; anything else is explained."""
    path = _file(tmp_path, "experts: {per_token: [2, 0, 1], embed: {per_token: 1}}\n")
    experts = load(path, {"COLIBRID_EXPERTS__SCORE__PER_TOKEN": "2,1"}).settings.experts
    assert (experts.per_token, experts.embed.per_token, experts.score.per_token) == ([2, 0, 1], 1, [2, 1])
    over = load(path, None, [Override("experts.per_token", "[1, 1, 2]", "--set")])
    assert over.settings.experts.per_token == [1, 1, 2]
    for text in ("[2, x]", "[2, [1]]", "[99]", "{a: 1}"):
        (error,) = _errors(_file(tmp_path, f"experts: {{per_token: {text}}}\n"))
        assert "experts.per_token must be" in error
        assert "list of at most 256 items, each a whole number from 0 to 16" in error


def test_many_mistakes_are_counted(tmp_path: Path) -> None:
    """A file of thousands of mistakes is told in a hundred lines and the number of the others, without delay."""
    errors = _errors(_file(tmp_path, "".join(f"nonsense{number}: {number}\n" for number in range(3000))))
    assert len(errors) == 101
    assert errors[-1] == "and 2900 more mistakes"


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_refused_or_read(tmp_path: Path, seed: int) -> None:
    """Whatever is cut out of, put into or exchanged in a valid file, the outcome is settings or a ConfigError."""
    chance = random.Random(seed)
    text = DOCUMENTED.read_text()
    pieces = ["\n", " ", ":", "- ", "{", "}", "[", "]", "&a ", "*a", "!!x ", "#", "'", '"', "|", ">", "---\n", "\t", "\x00",
              "1e999", "~", "é", "\ud7ff", "server:", "? "]  # fmt: skip
    for _ in range(25):
        damaged = text
        for _ in range(chance.randint(1, 4)):
            at, end = sorted(chance.randrange(len(damaged) + 1) for _ in range(2))
            end = min(end, at + chance.choice((0, 0, 1, 3, 40)))
            damaged = damaged[:at] + chance.choice(pieces) + damaged[end:]
        try:
            assert isinstance(load(_file(tmp_path, damaged)).settings, Settings)
        except ConfigError as error:
            assert all(str(tmp_path) in line or "more mistakes" in line for line in str(error).splitlines())
