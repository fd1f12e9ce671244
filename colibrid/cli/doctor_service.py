"""Checks of what settings name: GPU, model, cache folder, addresses, keys. Nothing is loaded, converted or kept."""

from __future__ import annotations

import http.client
import os
import resource
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from colibrid.cli.access import check_access, check_hosts, has_keys, keys_file
from colibrid.cli.finding import Finding, error, ok, refused, warning
from colibrid.cli.listen import AddressTakenError, bind_path, host_of, open_sockets
from colibrid.cli.models import cache_options
from colibrid.cli.plan import find_model, make_plan, settle
from colibrid.config.sizes import format_bytes
from colibrid.engine.cubins import DeviceError, choose_images, read_image, read_manifest
from colibrid.engine.library import CUBIN_FOLDER, Library
from colibrid.engine.replicas import device_indexes
from colibrid.errors import ColibridError
from colibrid.model.cache import locate, must_convert
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.cli.doctor_host import Host
    from colibrid.cli.plan import Found
    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.engine.device_cuda import DeviceInfo

_ASK_S = 1.0  # for whoever has our address to answer


def service_findings(settings: Settings, model: str | None, environment: Environment, host: Host) -> Iterator[Finding]:
    """All of this module."""
    yield from check_gpus(settings, host)
    yield from check_model(settings, model, environment)
    yield from check_addresses(settings, environment)
    yield from check_keys(settings, environment)


# ---------------------------------------------------------------- GPU


def check_gpus(settings: Settings, host: Host, cubins: Path = CUBIN_FOLDER) -> Iterator[Finding]:
    """Driver, devices, and kernels for each of them."""
    wanted = settings.engine.device
    if wanted == "cpu":
        yield ok("gpu", "not asked for: engine.device is cpu")
        return
    # Imported here: a CPU host does without.
    from colibrid.engine.gpu import find_gpu  # noqa: PLC0415

    version = host.read(host.proc / "driver" / "nvidia" / "version")
    found: list[DeviceInfo] = []
    try:
        found.extend(find_gpu(index, cubins) for index in device_indexes(settings.engine))
    except ColibridError as reason:
        hint = _driver_hint(version)
        if wanted == "auto":
            yield ok("gpu", f"none that can serve, so the CPU does: {reason}")
        else:
            finding = refused("gpu", reason)
            yield finding if hint is None else msgspec.structs.replace(finding, fix=f"{hint}; {finding.fix}")
        return
    for info in found:
        capability = ".".join(map(str, info.capability))
        yield ok("gpu", f"{info.index}: {info.name}, {capability}, {format_bytes(info.total_bytes)}")
    yield from _check_cubins(cubins, found)


def _driver_hint(version: str | None) -> str | None:
    """What is wrong beneath CUDA, if something is."""
    if version is None:
        return "the NVIDIA driver is not loaded (no /proc/driver/nvidia): install it, or modprobe nvidia"
    closed = [path for path in ("/dev/nvidiactl", "/dev/nvidia0") if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return f"this user may not open {closed[0]}: add it to the group of that file, or (systemd) allow the device"
    return None


def _check_cubins(cubins: Path, found: list[DeviceInfo]) -> Iterator[Finding]:
    try:
        _, images = read_manifest(cubins)
        for info in found:
            chosen, fallback = choose_images(images, info.capability)
            for image in chosen:
                read_image(cubins, image)
            if fallback:
                yield warning(
                    "cubins",
                    f"none for {info.name}: the driver compiles PTX when an engine starts, and kernels are slower",
                    "build them where nvcc 13 is installed: make cubins",
                )
            else:
                yield ok("cubins", f"{len(chosen)} for {info.name}, as built")
    except DeviceError as reason:
        yield refused("cubins", reason)


# ---------------------------------------------------------------- model


def check_model(settings: Settings, model: str | None, environment: Environment) -> Iterator[Finding]:
    """It is here, its files are whole, its engine fits the memory, and there is room for its conversion."""
    try:
        library = Library()
    except ColibridError:
        return  # told by the check of the installation
    try:
        # A GPU that is asked for and cannot serve is told by its own check.
        settings = settle(settings, model, environment, library, absent_gpu=settings.engine.device == "cuda")
        found = find_model(settings, model, environment)
        located = locate(model if model is not None else settings.model.path, environment.hugging_face_hub)
        if located.is_pack:
            open_pack(located.path, check_files=settings.model.weights == "files")
    except ColibridError as reason:
        yield refused("model", reason)
        return
    yield ok("model", f"{found.manifest.name}: {found.folder}")
    yield from _check_memory(settings, found, library)
    options = cache_options(settings, environment)
    if must_convert(located, options) and settings.model.weights == "files":
        yield _check_room(options.cache_dir, sum(file.bytes for file in found.manifest.files))
    else:
        yield ok("cache", "no conversion is needed")


def _check_memory(settings: Settings, found: Found, library: Library) -> Iterator[Finding]:
    try:
        plan = make_plan(settings, found, library, None)
    except ColibridError as reason:
        yield refused("memory", reason)
        return
    spec = plan.specs[0]
    free = "" if plan.available is None else f" of {format_bytes(plan.available)} that are free"
    yield ok(
        "memory",
        f"{format_bytes(plan.memory.total)}{free}; {spec.slots} slots, KV of {plan.memory.kv_tokens} tokens",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if plan.memory.pinned and locked != resource.RLIM_INFINITY and locked < plan.memory.pinned:
        yield warning(
            "locked memory",
            f"the limit is {format_bytes(locked)}, and an engine page-locks {format_bytes(plan.memory.pinned)}; some "
            "drivers count it",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        )


def _check_room(cache: Path, needed: int) -> Finding:
    """Whether the pack can be written."""
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return error(
            "cache",
            f"the model must be converted, and {place} is not writable",
            "set model.cache_dir to a folder that this user can write (systemd: CacheDirectory=colibrid)",
        )
    free = shutil.disk_usage(place).free
    if free < needed:
        return error(
            "cache",
            f"the converted model takes {format_bytes(needed)}, and {place} has {format_bytes(free)} free",
            "free some, or set model.cache_dir to a folder on another disk",
        )
    return ok("cache", f"{format_bytes(needed)} will be written to {cache}, which has {format_bytes(free)} free")


# ---------------------------------------------------------------- addresses and keys


def check_addresses(settings: Settings, environment: Environment) -> Iterator[Finding]:
    """Each can be bound, or colibrid itself already answers there; and nobody gets in without a key from elsewhere."""
    server = settings.server
    with_keys = _keys_are_set(settings, environment)
    entries = [None] if server.listen is None else [[entry] for entry in server.listen]
    for entry in entries:
        name = f"{server.host}:{server.port}" if entry is None else entry[0]
        with ExitStack() as stack:
            try:
                opened = open_sockets(msgspec.structs.replace(server, listen=entry), (), stack)
                check_hosts(map(host_of, opened), with_keys=with_keys)
                finding = ok("address", f"{name} can be bound")
            except AddressTakenError as reason:
                finding = _taken(name, reason, with_keys=with_keys)
            except ColibridError as reason:
                finding = refused("address", reason)
        yield finding
    if server.admin_socket is not None:
        try:
            with bind_path(server.admin_socket, "server.admin_socket"):
                yield ok("admin socket", f"{server.admin_socket} can be made")
        except AddressTakenError:
            yield ok("admin socket", f"{server.admin_socket}: a daemon listens there")
        except ColibridError as reason:
            yield refused("admin socket", reason)


def _keys_are_set(settings: Settings, environment: Environment) -> bool:
    """True also where two names of the file contradict: the check of the keys tells."""
    try:
        return has_keys(settings, environment, ())
    except ColibridError:
        return True


def _taken(name: str, reason: ColibridError, *, with_keys: bool) -> Finding:
    host, _, port = name.rpartition(":")
    answer = None
    if port.isdecimal():
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_ASK_S)
        try:
            connection.request("GET", "/livez")
            answer = connection.getresponse().getheader("Server")
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
    if answer == "colibrid":
        try:
            check_hosts([host.strip("[]")], with_keys=with_keys)
        except ColibridError as exposed:
            return refused("address", exposed)
        return ok("address", f"{name}: colibrid answers there already")
    finding = refused("address", reason)
    seen = f"{finding.fix}; `ss -ltnp` tells which process has it"
    return msgspec.structs.replace(finding, fix=seen)


def check_keys(settings: Settings, environment: Environment) -> Iterator[Finding]:
    """Keys, hosts and certificates can be read, and nobody else can read what is secret."""
    try:
        check_access(settings, environment, ())
        file = keys_file(settings, environment)
    except ColibridError as reason:
        yield refused("keys", reason)
        return
    secrets = [path for path in (None if file is None else str(file[0]), settings.server.tls_key_file) if path]
    if not secrets:
        yield ok("keys", "none: whoever reaches the address may ask")
    for path in secrets:
        try:
            mode = os.stat(path).st_mode & 0o777  # noqa: PTH116 - a path from the settings, as it is
        except OSError as reason:
            yield error("keys", f"{path} cannot be read: {reason.strerror}", "correct the path, or its rights")
            continue
        if mode & 0o077:
            yield warning("keys", f"{path} is open to other users (mode {mode:04o})", f"chmod 600 {path}")
        else:
            yield ok("keys", f"{path}, mode {mode:04o}")
