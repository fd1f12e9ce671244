"""What a real daemon tells of itself while it serves: metrics, heat map, slots, and how it is drained."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daemon_process import DaemonProcess, wait_for
from prometheus_client.parser import text_string_to_metric_families

from colibrid.cli.admin_client import AdminClient

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack

LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
ASK = {"prompt": "The capital of Norway is", "max_tokens": 8, "ignore_eos": True}


def total(daemon: DaemonProcess, name: str, **labels: str) -> float:
    """The sum over all engines."""
    with daemon.open("GET", "/metrics") as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"colibrid_{name}" and labels.items() <= sample.labels.items()
    )


def test_a_daemon_tells_what_it_does(bundled_pack: Pack, tmp_path: Path) -> None:
    """Metrics and the heat map of two engines add up to what answers say; slots show who is served; a drain ends it."""
    path = str(tmp_path / "admin.sock")
    arguments = ("--device", "cpu", "--set", "engine.replicas=2", "--set", f"server.admin_socket={path}")
    with DaemonProcess(tmp_path, str(bundled_pack.path), *arguments) as daemon:
        admin = AdminClient(path)
        daemon.wait_ready()
        wait_for(lambda: total(daemon, "engine_up") == 2, daemon)
        before = total(daemon, "generation_tokens_total")
        answers = [daemon.request("POST", "/v1/completions", ASK | {"prompt": f"{n} birds"})[1] for n in range(6)]
        usages = [answer["usage"] for answer in answers]
        assert total(daemon, "generation_tokens_total") - before == 48
        assert total(daemon, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert total(daemon, "prefix_cache_hits_total") == cached
        assert total(daemon, "request_success_total", finished_reason="length") == 6
        assert total(daemon, "time_to_first_token_seconds_count") == 6
        assert total(daemon, "inter_token_latency_seconds_count") <= 6 * 7
        assert total(daemon, "engine_allocations_after_ready_total") == 0
        assert total(daemon, "engine_step_weight_bytes_total") > 0
        assigned = sum(usage["experts"]["assignments"] for usage in usages)
        load = admin.get("/admin/experts")["load"]
        assert [row["layer"] for row in load] == [
            layer for layer, one in enumerate(bundled_pack.manifest.layers) if one.experts
        ]
        assert sum(sum(row["assignments"]) for row in load) == assigned == total(daemon, "expert_assignments_total")
        _drain(daemon, admin)
        assert admin.post("/admin/drain", {"exit": True})["exit"]
        assert daemon.wait() == 0


def _drain(daemon: DaemonProcess, admin: AdminClient) -> None:
    with daemon.open("POST", "/v1/completions", LONG) as response:
        response.readline()
        busy = [
            slot for engine in admin.get("/admin/slots")["engines"] for slot in engine["slots"] if slot["request_id"]
        ]
        assert [(slot["state"], slot["max_tokens"]) for slot in busy] == [("running", 1500)]
        answer: dict[str, Any] = {}
        draining = threading.Thread(target=lambda: answer.update(admin.post("/admin/drain", {"timeout_s": 50})))
        draining.start()
        wait_for(lambda: daemon.request("GET", "/readyz")[0] == 503, daemon)
        status, refused = daemon.request("POST", "/v1/completions", ASK)
        assert (status, refused["error"]["code"]) == (503, "draining")
        assert b"[DONE]" in response.read()
        draining.join()
    assert answer == {"draining": True, "complete": True, "exit": False}
    assert total(daemon, "refusals_total", reason="draining") == 1
