"""Bugs on purpose, each with the test that must find it. `python -m tests.faults.mutants [NAME...]` plants them one
after the other in a copy of the package and runs that test, which has to fail.

Also what docs/reliability.md lists; tests/faults/test_mutants.py keeps both true.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIMEOUT = 240  # seconds; a test that hangs has found its mutant


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file` and becomes `new`; `test` (path::name) then fails."""

    name: str
    file: str
    old: str
    new: str
    test: str


DEATH = "tests/faults/test_engine_death.py::"
SIGNALS = "tests/faults/test_signals.py::"
CONNECTION = "tests/api/test_connection.py::"
SECURITY = "tests/api/test_security.py::"
ISOLATION = "tests/faults/test_isolation.py::test_nobody_sees_a_token_of_another"
CORE = "tests/engine/test_core_faults.py::"

MUTANTS = (
    Mutant(
        "a stream is resumed without the tokens it already had",
        "jaxserve/client/sequence_sender.py",
        "resumed_token_ids=list(sequence.text.output_token_ids),",
        "resumed_token_ids=[],",
        DEATH + "test_a_killed_engine_loses_nothing",
    ),
    Mutant(
        "live requests are not sent to the new engine",
        "jaxserve/client/sequence_sender.py",
        "            sequence.is_sent = False\n        self._forget_ended()\n",
        "        self._forget_ended()\n",
        DEATH + "test_a_killed_engine_loses_nothing",
    ),
    Mutant(
        "a death leaves the status at ready",
        "jaxserve/client/supervisor.py",
        'self._show(EngineStatus("restarting", "the engine died"))',
        "pass",
        DEATH + "test_health_tells_of_the_death_at_once",
    ),
    Mutant(
        "a heartbeat that always beats",
        "jaxserve/client/supervisor.py",
        "self.silent = self.silent + gap if pulse.beats == last.beats else 0.0",
        "self.silent = 0.0",
        DEATH + "test_a_stopped_engine_that_goes_on_in_time_loses_nothing",
    ),
    Mutant(
        "a watchdog that only barks",
        "jaxserve/client/supervisor.py",
        "                self._link.kill()\n",
        "",
        DEATH + "test_a_stuck_engine_is_replaced_by_the_watchdog",
    ),
    Mutant(
        "a rebuild keeps the pages of the lost cache",
        "jaxserve/scheduler/scheduler.py",
        "        self.kv.recover()\n        self.kv.retire(self._step)\n",
        "        self.kv.retire(self._step)\n",
        CORE + "test_a_step_that_fails_changes_no_output",
    ),
    Mutant(
        "a rebuild leaves the device as it is",
        "jaxserve/engine/core.py",
        "        self.runner.rebuild()\n",
        "",
        "tests/faults/test_failed_step.py::test_where_no_rebuild_helps_a_new_process_does",
    ),
    Mutant(
        "a failed step is not caught",
        "jaxserve/engine/server.py",
        "        except StepError as error:\n            self._rebuild(error)\n            return []\n",
        "        finally:\n            pass\n",
        "tests/faults/test_failed_step.py::test_a_failed_step_changes_no_answer",
    ),
    Mutant(
        "who fails the device is never found",
        "jaxserve/types/fault_isolator.py",
        "            culprit, rows = units.pop(), []\n",
        "            culprit = None\n",
        "tests/engine/test_server.py::test_requests_that_always_fail_do_not_end_the_engine",
    ),
    Mutant(
        "all requests run while the failing one is searched for",
        "jaxserve/scheduler/waiting_queue.py",
        "iter(requests) if only is None else (request for request in requests if request.request_id in only)",
        "iter(requests)",
        CORE + "test_requests_that_always_fail_end_alone",
    ),
    Mutant(
        "a request is blamed where nothing passed",
        "jaxserve/types/fault_isolator.py",
        "if len(units) == 1 and (self.has_passed or not (absent or self._groups)):",
        "if len(units) == 1:",
        CORE + "test_a_device_that_fails_for_all_ends_nobody",
    ),
    Mutant(
        "a row that is not finite is taken for a good one",
        "jaxserve/scheduler/scheduler.py",
        "elif status[i] != fine:",
        "elif False:",
        "tests/scheduler/test_ends.py::test_a_row_that_is_not_finite_ends_its_request_only_and_caches_nothing",
    ),
    Mutant(
        "everything runs while what kills the process is looked for",
        "jaxserve/client/sequence_sender.py",
        "return self.is_up and not self._leaving and (quarantined is None or sequence.key in quarantined)",
        "return self.is_up and (quarantined is None or bool(sequence.key))",
        "tests/client/test_sequence_sender.py::test_one_among_many_is_found_in_few_deaths",
    ),
    Mutant(
        "a step is not written down before it is dispatched",
        "jaxserve/transport/shared_state.py",
        "            self._record.dispatching(ids)\n",
        "            pass\n",
        "tests/transport/test_work_record.py::test_a_step_is_written_down_before_it_is_dispatched",
    ),
    Mutant(
        "what comes once comes again after a death",
        "jaxserve/scheduler/step_builder.py",
        "    if request.is_answered:\n        return\n    if request.params.prompt_logprobs",
        "    if request.params.prompt_logprobs",
        "tests/client/test_replay.py::test_an_answered_request_reads_the_prefix_cache",
    ),
    Mutant(
        "a drain is forgotten when the engine dies",
        "jaxserve/client/supervisor.py",
        'if self._is_draining and status.phase != "dead":',
        "if False:",
        "tests/client/test_supervisor.py::test_a_drain_outlasts_the_death_of_the_engine",
    ),
    Mutant(
        "a pause of all processes counts as silence",
        "jaxserve/client/supervisor.py",
        "        if gap > MAX_GAP:\n",
        "        if False:\n",
        "tests/client/test_watchdog.py::test_a_pause_of_all_processes_does_not_count",
    ),
    Mutant(
        "an HTTP server that fails is an end that was asked for",
        "jaxserve/cli/launch.py",
        "        if not self._server.should_exit:\n",
        "        if False:\n",
        "tests/cli/test_launch_end.py::test_an_http_server_that_ends_by_itself",
    ),
    Mutant(
        "an orphaned engine goes on",
        "jaxserve/transport/child.py",
        "    os._exit(1)\n\n",
        "\n",
        SIGNALS + "test_a_killed_server_leaves_nothing_behind",
    ),
    Mutant(
        "a drain that waits for nobody",
        "jaxserve/client/async_engine.py",
        "while (self._live or others()) and time.monotonic() < deadline:",
        "while False:",
        SIGNALS + "test_sigterm_drains",
    ),
    Mutant(
        "a drain that takes new work",
        "jaxserve/client/async_engine.py",
        "self._replicas.drain()",
        "pass",
        SIGNALS + "test_sigterm_drains",
    ),
    Mutant(
        "a drain without a limit",
        "jaxserve/client/async_engine.py",
        "while (self._live or others()) and time.monotonic() < deadline:",
        "while self._live:",
        SIGNALS + "test_a_drain_has_a_limit",
    ),
    Mutant(
        "a second signal is ignored",
        "jaxserve/cli/launch.py",
        "if self._signals > 1:",
        "if self._signals > 99:",
        SIGNALS + "test_a_second_signal_ends_at_once",
    ),
    Mutant(
        "an abort is dropped",
        "jaxserve/engine/server.py",
        "                return self._core.abort(request_ids)\n",
        "                return []\n",
        "tests/faults/test_disconnects.py::test_clients_cut_at_random_phases_leave_nothing",
    ),
    Mutant(
        "an abort while the grammar is compiled is dropped",
        "jaxserve/engine/core.py",
        "record = self._compiling.remove(request_id)",
        "record = None",
        "tests/engine/test_server.py::test_an_abort_of_a_request_whose_grammar_is_compiled_is_answered",
    ),
    Mutant(
        "a grammar that nobody waits for is compiled to its end",
        "jaxserve/grammar/checker.py",
        "process.stdin.write(frame(Cancel(check_id)))",
        "pass",
        "tests/grammar/test_checker.py::test_a_check_that_nobody_waits_for_is_ended",
    ),
    Mutant(
        "a queue without an end",
        "jaxserve/client/async_engine.py",
        "    if n > limit - load.num_live:\n",
        "    if False:\n",
        "tests/faults/test_overload.py::test_ten_times_overload",
    ),
    Mutant(
        "an ended request keeps its pages",
        "jaxserve/kv/kv_manager.py",
        "        self.pool.free(request.page_ids[node.depth :])\n",
        "",
        "tests/faults/test_soak.py::test_mixed_traffic_leaves_nothing_behind",
    ),
    Mutant(
        "a frame that is no message ends the engine",
        "jaxserve/engine/child.py",
        "            except MessageError as error:\n",
        "            except ZeroDivisionError as error:\n",
        "tests/faults/test_frames.py::test_random_frames_harm_nobody",
    ),
    Mutant(
        "numbers of a frame are not checked",
        "jaxserve/types/bounds.py",
        "Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]",
        "Count = int",
        "tests/types/test_messages.py::test_numbers_that_no_array_takes_are_refused",
    ),
    Mutant(
        "pages are freed while a step still writes to them",
        "jaxserve/kv/kv_manager.py",
        "if request.last_step > last_step_read:",
        "if False:",
        ISOLATION,
    ),
    Mutant(
        "a page is shared before its last token is computed",
        "jaxserve/kv/kv_manager.py",
        "self.commit(request, request.num_tokens - 1)",
        "self.commit(request, request.num_tokens + self.page_size - 1)",
        ISOLATION,
    ),
    Mutant(
        "an id is matched by its prefix",
        "jaxserve/client/sequences.py",
        "return list(self._of_client.get(client_id, {}).values())",
        "return [each for each in self if each.request.client_id.startswith(client_id)]",
        "tests/faults/test_isolation.py::test_an_abort_ends_exactly_one",
    ),
    Mutant(
        "a retracted request loses its output",
        "jaxserve/scheduler/scheduler.py",
        "        request.num_preemptions += 1\n",
        "        request.num_preemptions += 1\n        request.output_token_ids.clear()\n",
        ISOLATION,
    ),
    Mutant(
        "headers may take for ever",
        "jaxserve/api/http/connection.py",
        '            self._refuse(408, "The request\'s headers did not arrive in time.")\n',
        "            pass\n",
        CONNECTION + "test_headers_that_do_not_come",
    ),
    Mutant(
        "trailers have no limit",
        "jaxserve/api/http/connection.py",
        "if self._idle_bytes > MAX_IDLE_BYTES:",
        "if False:",
        CONNECTION + "test_trailers_without_an_end",
    ),
    Mutant(
        "a client that does not read is waited for",
        "jaxserve/api/http/connection.py",
        "self._send_timer = self.loop.call_later(self.send_timeout, self._cut)",
        "pass",
        CONNECTION + "test_a_client_that_stops_reading_is_cut_and_its_request_ends",
    ),
    Mutant(
        "a body may take for ever",
        "jaxserve/api/http/middleware.py",
        "asyncio.timeout(self._timeout + self._received / SLOWEST_BYTES - self._waited)",
        "asyncio.timeout(None)",
        CONNECTION + "test_a_body_that_does_not_come",
    ),
    Mutant(
        "only the last of several pipelined requests learns that its client left",
        "jaxserve/api/http/connection.py",
        "        self._tell_request()\n        super().connection_lost(exc)\n",
        "        super().connection_lost(exc)\n",
        CONNECTION + "test_a_client_that_pipelines_and_leaves_ends_its_request",
    ),
    Mutant(
        "a body is evaluated",
        "jaxserve/api/http/body.py",
        "        body = model.model_validate_json(raw)\n",
        '        body = eval("model.model_validate_json(raw)")\n',
        "tests/api/test_openapi.py::test_answers_have_the_documented_shape",
    ),
    Mutant(
        "a prefix of the key is enough",
        "jaxserve/api/keys.py",
        "if hmac.compare_digest(given, digest):",
        "if hmac.compare_digest(given, digest) or key:",
        SECURITY + "test_every_route_asks_for_the_key",
    ),
    Mutant(
        "keys are compared byte by byte",
        "jaxserve/api/keys.py",
        "if hmac.compare_digest(given, digest):",
        "if given == digest:",
        SECURITY + "test_keys_are_compared_in_constant_time",
    ),
    Mutant(
        "an admin route is open to every key",
        "jaxserve/api/http/middleware.py",
        "allowed = caller is not None and caller.admin",
        "allowed = caller is not None",
        SECURITY + "test_admin_routes_need_the_admin_key",
    ),
    Mutant(
        "an answer is not as documented",
        "jaxserve/api/sglang/routes.py",
        '"count"',
        '"number"',
        "tests/api/test_schema_fuzz.py::test_every_answer_is_as_documented",
    ),
)


def planted(mutant: Mutant, directory: Path) -> None:
    """A copy of the project with the mutant in it. Files are linked but for the one that changes."""
    for name in ("jaxserve", "benchmarks", "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, directory / name, copy_function=os.link, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", directory)
    path = directory / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, (
        f"{mutant.name}: {mutant.old!r} is in {mutant.file} {text.count(mutant.old)} times"
    )
    path.unlink()
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def is_killed(mutant: Mutant) -> bool:
    """Whether the mutant's test fails with it."""
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=ROOT.parent) as name:
        directory = Path(name)
        planted(mutant, directory)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
        environment = os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return True
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    names = parser.parse_args().names
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    alive = 0
    for mutant in chosen:
        killed = is_killed(mutant)
        alive += not killed
        print(f"{'killed' if killed else 'ALIVE '}  {mutant.name}: {mutant.test}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
