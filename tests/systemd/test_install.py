"""systemd/install.sh, with a Python and a pip that only take notes: what lands where, and what is never touched."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "systemd/install.sh"

# In place of Python: `-m venv` makes an environment whose pip copies the shared files, as the wheel does.
PYTHON = """#!/bin/sh
echo "$@" >>"{log}"
case $1 in
  -c) echo "{real}" ;;
  -m)
    mkdir -p "$3/bin"
    echo home >"$3/pyvenv.cfg"
    printf '#!%s/bin/python\\n' "$3" >"$3/bin/colibrid"
    cat >"$3/bin/python" <<'PIP'
#!/bin/sh
echo "pip $@" >>"{log}"
home=$(dirname "$(dirname "$0")")
mkdir -p "$home/share/colibrid"
cp conf/*.yaml conf/colibrid.schema.json "$home/share/colibrid/"
PIP
    chmod +x "$3/bin/python"
    ;;
esac
"""


class Installation:
    """A copy of what the script needs, and a DESTDIR."""

    def __init__(self, folder: Path, real: str = "/usr/bin/python3") -> None:
        self.source, self.destdir, self.log = folder / "source", folder / "root", folder / "log"
        for name in ("conf", "systemd"):
            shutil.copytree(ROOT / name, self.source / name)
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(log=self.log, real=real))
        self.python.chmod(0o755)

    def run(self, what: str, **given: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "DESTDIR": str(self.destdir), "PYTHON": str(self.python), **given}
        return subprocess.run(
            [str(self.source / SCRIPT), what], env=environment, capture_output=True, text=True, check=False
        )

    def good(self, what: str, **given: str) -> str:
        done = self.run(what, **given)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def files(self) -> set[str]:
        return {str(path.relative_to(self.destdir)) for path in self.destdir.rglob("*") if not path.is_dir()}

    def read(self, name: str) -> str:
        return (self.destdir / name).read_text()


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def test_what_lands_where(installation: Installation) -> None:
    """Environment, link, units and configuration are below PREFIX and /etc/colibrid, and nothing names DESTDIR."""
    said = installation.good("install")
    shared = {
        f"usr/local/lib/colibrid/share/colibrid/{path.name}" for path in (ROOT / "conf").iterdir() if path.is_file()
    }
    configured = {f"etc/colibrid/{path.name}" for path in (ROOT / "conf").iterdir() if path.is_file()}
    assert installation.files() == shared | configured | {
        "etc/colibrid/keys", "usr/local/bin/colibrid", "usr/local/lib/colibrid/bin/colibrid",
        "usr/local/lib/colibrid/bin/python", "usr/local/lib/colibrid/pyvenv.cfg",
        "usr/local/lib/systemd/system/colibrid.service", "usr/local/lib/systemd/system/colibrid@.service",
        "usr/local/lib/systemd/system/colibrid.socket",
    }  # fmt: skip
    assert stat.S_IMODE((installation.destdir / "etc/colibrid/keys").stat().st_mode) == 0o600
    assert stat.S_IMODE((installation.destdir / "etc/colibrid/colibrid.yaml").stat().st_mode) == 0o644
    assert installation.read("usr/local/lib/colibrid/bin/colibrid") == "#!/usr/local/lib/colibrid/bin/python\n"
    assert os.readlink(installation.destdir / "usr/local/bin/colibrid") == "../lib/colibrid/bin/colibrid"
    assert (installation.destdir / "var/lib/colibrid/huggingface").is_dir()
    assert "colibrid keys add NAME --file /etc/colibrid/keys" in said
    notes = installation.log.read_text()
    assert "--require-hashes -r requirements.lock\n" in notes
    assert "--no-deps --force-reinstall -Csetup-args=-Dcubins=auto ." in notes


def test_units_name_the_prefix(installation: Installation) -> None:
    """With another PREFIX the units start the program that lies there; UNITDIR says where they go."""
    installation.good("install", PREFIX="/opt/ai", UNITDIR="/etc/systemd/system")
    for name, config in (("colibrid.service", "colibrid"), ("colibrid@.service", "%i")):
        unit = installation.read(f"etc/systemd/system/{name}")
        assert f"\nExecStart=/opt/ai/lib/colibrid/bin/colibrid serve --config /etc/colibrid/{config}.yaml\n" in unit
        assert "/usr/local" not in unit
    assert (installation.destdir / "opt/ai/lib/colibrid/pyvenv.cfg").exists()


def test_gpu(installation: Installation) -> None:
    """GPU=yes takes the packages of CUDA and puts the drop-in beside both units."""
    installation.good("install", GPU="yes", CUBINS="enabled")
    units = installation.destdir / "usr/local/lib/systemd/system"
    for name in ("colibrid.service.d", "colibrid@.service.d"):
        assert (units / name / "gpu.conf").read_text() == (ROOT / "systemd/gpu.conf").read_text()
    notes = installation.log.read_text()
    assert "-r requirements-cuda.lock\n" in notes
    assert "-Dcubins=enabled" in notes
    installation.good("uninstall")
    assert not list(units.iterdir())


def test_again(installation: Installation) -> None:
    """An edited configuration and the keys stay; one that nobody has edited follows the new version."""
    installation.good("install")
    etc = installation.destdir / "etc/colibrid"
    (etc / "colibrid.yaml").write_text("server: {port: 9000}\n")
    (etc / "keys").write_text("alice sha256:00\n")
    for name in ("colibrid.yaml", "cpu.yaml"):
        (installation.source / "conf" / name).write_text("# of the next version\n")
    said = installation.good("install")
    assert (etc / "colibrid.yaml").read_text() == "server: {port: 9000}\n"
    assert (etc / "cpu.yaml").read_text() == "# of the next version\n"
    assert (etc / "keys").read_text() == "alice sha256:00\n"
    assert "kept as edited: /etc/colibrid/colibrid.yaml" in said
    assert said.count("kept as edited") == 1
    assert installation.good("install").count("kept as edited") == 1, "the third time as the second"


def test_uninstall_keeps_what_is_not_ours(installation: Installation) -> None:
    """Programs, link and units go; configuration, keys and models stay, and a second time is no error."""
    installation.good("install")
    (installation.destdir / "usr/local/bin/other").write_text("")
    before = installation.files()
    said = installation.good("uninstall")
    kept = {name for name in before if name.startswith("etc/colibrid/")} | {"usr/local/bin/other"}
    assert installation.files() == kept
    assert "kept: /etc/colibrid" in said
    installation.good("uninstall")


@pytest.mark.parametrize(
    ("given", "told"),
    [({"PREFIX": "usr"}, "usr is no absolute path"), ({"PREFIX": "/a b"}, "/a b has other characters"),
     ({"PREFIX": "/a#b"}, "other characters"), ({"GPU": "1"}, "GPU is '1'; write GPU=yes or GPU=no"),
     ({"PYTHON": "/no/python"}, "/no/python is no Python 3.11")],
)  # fmt: skip
def test_wrong_values(installation: Installation, given: dict[str, str], told: str) -> None:
    """What cannot work is refused before anything is written."""
    done = installation.run("install", **given)
    assert done.returncode == 1
    assert told in done.stderr
    assert not installation.destdir.exists()


def test_a_foreign_folder_is_not_taken(installation: Installation) -> None:
    """A folder that is no virtual environment is neither installed into nor removed."""
    theirs = installation.destdir / "usr/local/lib/colibrid/data"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    for what in ("install", "uninstall"):
        done = installation.run(what)
        assert done.returncode == 1
        assert "no virtual environment of colibrid" in done.stderr
    assert theirs.read_text() == "precious"


def test_python_of_a_home_folder_is_refused(tmp_path: Path) -> None:
    """The units hide home folders, so a Python there would be none; for a package, built elsewhere, it may be."""
    installation = Installation(tmp_path, real="/home/me/python/bin/python3")
    done = installation.run("install", DESTDIR="", PREFIX=str(tmp_path / "prefix"))
    assert done.returncode == 1
    assert "lies in a home folder" in done.stderr
    assert not (tmp_path / "prefix").exists()
