#!/bin/sh
# Lays colibrid down on this host, or under DESTDIR for a package; `make install` and `make uninstall` call it.
#
#   PREFIX    /usr/local: the virtual environment lib/colibrid, the link bin/colibrid, the units lib/systemd/system
#   UNITDIR   where units go, if not there (systemd looks into /usr, /usr/local and /etc only)
#   DESTDIR   put before every path; nothing that is written knows of it
#   PYTHON    3.11 or later, for the environment; must not lie in a home folder, which the units hide
#   CUBINS    auto, enabled or disabled: as `make serve`
#   GPU       yes: the CUDA packages and the drop-in gpu.conf, too
#
# Again and again: programs and units are replaced; a configuration only while nobody has edited it; keys never.
set -eu
umask 022
cd "$(dirname "$0")/.."

prefix=${PREFIX:-/usr/local}
destdir=${DESTDIR:-}
units=${UNITDIR:-$prefix/lib/systemd/system}
home=$prefix/lib/colibrid
etc=/etc/colibrid
state=/var/lib/colibrid
unit_names="colibrid.service colibrid@.service colibrid.socket"
drop_ins="colibrid.service.d colibrid@.service.d"

unset DESTDIR PREFIX  # builds would take them for theirs

fail() { echo "install: $1" >&2; exit 1; }

check() {
  for path in "$prefix" "$units" "${destdir:-/}"; do
    case $path in /*) ;; *) fail "$path is no absolute path; write PREFIX=, UNITDIR= and DESTDIR= with a leading /" ;; esac
    case $path in *[!A-Za-z0-9/._+-]*) fail "$path has other characters than letters, digits and /._+-, which units cannot quote" ;; esac
  done
  [ ! -e "$destdir$home" ] || [ -f "$destdir$home/pyvenv.cfg" ] ||
    fail "$destdir$home is there and no virtual environment of colibrid; move it away, or choose another PREFIX"
}

check_python() {
  real=$("$PYTHON" -c 'import os, sys; assert sys.version_info >= (3, 11); print(os.path.realpath(sys.executable))') ||
    fail "$PYTHON is no Python 3.11 or later; write PYTHON=/usr/bin/python3.11"
  case $real in
    /home/* | /root/* | /run/user/*)
      [ -n "$destdir" ] || fail "$real lies in a home folder, which the units hide from the daemon; write PYTHON=/usr/bin/python3"
      ;;
  esac
}

environment() {
  lock=requirements.lock
  [ "$gpu" = no ] || lock=requirements-cuda.lock
  python=$destdir$home/bin/python
  mkdir -p "$destdir$prefix/lib" "$destdir$prefix/bin"
  "$PYTHON" -m venv "$destdir$home"
  "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    -Csetup-args=-Dcubins="${CUBINS:-auto}" .
  if [ -n "$destdir" ]; then  # what venv and pip write names the folder they wrote to
    grep -rlIF --exclude-dir=site-packages "$destdir$home" "$destdir$home" | while IFS= read -r file; do
      sed -i "s#$destdir$home#$home#g" "$file"
    done
  fi
  ln -sf ../lib/colibrid/bin/colibrid "$destdir$prefix/bin/colibrid"
}

# Ready-made configurations: before the environment is replaced, what it holds says which of them nobody has edited.
unedited() {
  for name in conf/*.yaml conf/colibrid.schema.json; do
    name=${name#conf/}
    if [ ! -e "$destdir$etc/$name" ] || cmp -s "$destdir$etc/$name" "$destdir$home/share/colibrid/$name"; then
      echo "$name"
    fi
  done
}

configuration() {
  mkdir -p "$destdir$etc" "$destdir$state/huggingface"
  for name in $1; do install -m 644 "conf/$name" "$destdir$etc/$name"; done
  for name in conf/*.yaml; do
    name=${name#conf/}
    cmp -s "conf/$name" "$destdir$etc/$name" || echo "kept as edited: $etc/$name; what is new in it: $home/share/colibrid/$name"
  done
  [ -e "$destdir$etc/keys" ] || (umask 077 && echo "# Written by: colibrid keys add NAME --file $etc/keys" >"$destdir$etc/keys")
}

lay_units() {
  mkdir -p "$destdir$units"
  for name in $unit_names; do
    sed "s#/usr/local/lib/colibrid/#$home/#" "systemd/$name" >"$destdir$units/$name"
    chmod 644 "$destdir$units/$name"
  done
  [ "$gpu" = no ] || for folder in $drop_ins; do
    mkdir -p "$destdir$units/$folder"
    install -m 644 systemd/gpu.conf "$destdir$units/$folder/gpu.conf"
  done
}

reload() {
  [ -n "$destdir" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload
}

install_all() {
  gpu=${GPU:-no}
  case $gpu in yes | no) ;; *) fail "GPU is '$gpu'; write GPU=yes or GPU=no" ;; esac
  PYTHON=${PYTHON:-python3}
  check_python
  fresh=$(unedited)
  environment
  configuration "$fresh"
  lay_units
  reload
  cat <<NEXT
installed: $home, $units/colibrid.service, $etc
next:      colibrid keys add NAME --file $etc/keys
           edit $etc/colibrid.yaml; colibrid doctor --config $etc/colibrid.yaml
           systemctl enable --now colibrid
NEXT
}

uninstall_all() {
  for name in $unit_names; do
    if [ -z "$destdir" ] && [ -d /run/systemd/system ] && [ -e "$units/$name" ]; then
      case $name in *@*) systemctl stop 'colibrid@*.service' ;; *) systemctl disable --now --quiet "$name" ;; esac
    fi
    rm -f "$destdir$units/$name"
  done
  for folder in $drop_ins; do
    rm -f "$destdir$units/$folder/gpu.conf"
    rmdir "$destdir$units/$folder" 2>/dev/null || true
  done
  rm -f "$destdir$prefix/bin/colibrid"
  rm -rf "$destdir$home"
  reload
  echo "removed: $home, units; kept: $etc (configuration, keys), $state (models), /var/cache/private/colibrid* (packs)"
}

check
case ${1:-} in
  install) install_all ;;
  uninstall) uninstall_all ;;
  *) fail "write install or uninstall" ;;
esac
