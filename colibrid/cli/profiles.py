"""Profiles that a daemon serves with: the one of its command line, and those that requests may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.batch.request import ExpertPolicy
from colibrid.config.profile import read_profile
from colibrid.engine.spec import check_per_token, most_experts
from colibrid.errors import ConfigError
from colibrid.model.identity import pack_identity
from colibrid.model.pack import open_pack
from colibrid.paths import user_path

if TYPE_CHECKING:
    from colibrid.config.profile import Profile
    from colibrid.config.settings import Settings
    from colibrid.model.cache import Resolved
    from colibrid.model.manifest import Manifest


def check_profile(file: str | None, resolved: Resolved, settings: Settings) -> None:
    """ConfigError: the file of --profile is for another pack. Before anything else of it is held against this one."""
    if file is not None:
        check_named(file, open_pack(resolved.path, check_files=settings.model.weights == "files").manifest)


def check_named(file: str | None, manifest: Manifest) -> None:
    """The same of a pack that is open."""
    if file is not None:
        check_pack(read_profile(user_path(file)), manifest)


def read_profiles(settings: Settings, manifest: Manifest, *, same_pack: bool = True) -> dict[str, ExpertPolicy]:
    """Those of experts.profiles. ConfigError: a line for each that cannot be read, or is not for this pack.

    same_pack=False: the manifest is of a pack that is not there yet, so nobody knows what it will hold.
    """
    allowed = settings.experts.max_per_token or 0
    most = [most_experts(layer, allowed) for layer in manifest.layers]
    found: dict[str, ExpertPolicy] = {}
    errors: list[str] = []
    for name, file in settings.experts.profiles.items():
        try:
            profile = read_profile(user_path(file))
            if same_pack:
                check_pack(profile, manifest)
            policy = request_policy(profile, manifest)
            check_per_token(f"{file}: experts.per_token", policy.per_token, most)
        except ConfigError as error:
            errors += [f"experts.profiles.{name}: {line}" for line in str(error).splitlines()]
        else:
            found[name] = policy
    if errors:
        raise ConfigError("\n".join(errors))
    return found


def check_pack(profile: Profile, manifest: Manifest) -> None:
    """ConfigError: the profile was made for another pack."""
    own = pack_identity(manifest)
    if profile.pack.rpartition("@")[2] != own.rpartition("@")[2]:
        raise ConfigError(
            f"{profile.source}: made for the pack {profile.pack}, but the model is {own}; run `colibrid tune` on this one "
            "(a pack for the CPU, for a GPU, or of another precision is another pack), or leave the profile out"
        )


def request_policy(profile: Profile, manifest: Manifest) -> ExpertPolicy:
    """What a request that names the profile uses: all of it is said, so that no other setting shows through."""
    asked = profile.experts.per_token
    if asked is None:
        asked = [layer.experts_per_token for layer in manifest.layers]
    per_token = tuple(asked) if isinstance(asked, list) else asked
    return ExpertPolicy(per_token=per_token, threshold=profile.experts.threshold)
