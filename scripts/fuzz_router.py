#!/usr/bin/env python3
"""Sends the router what its pages are for, and what they are not for: ``python scripts/fuzz_router.py``.

Schemathesis makes requests, sound and broken ones, from a description of the router's pages, for real ``ems router``
processes in front of stub engines that work: an open one, one with keys, one with keys and tokens, one of two workers
and one with Kthena's manifests.

What must hold: no answer has a status from 500 on, since nothing behind the router is broken, but for a 502 of
``/reset_prefix_cache``, which names the instances that the run itself adds and nobody listens at; each answer is one
that the description knows, with its content type and, where it is an error, in OpenAI's form; who shows no key gets
401; the log has no stack trace; each router is still there at the end, and ends with status 0.

Needs schemathesis (``pip install schemathesis``, best into an environment of its own), which is no dependency of
anything else.  The same ``--seed`` makes the same requests; ``--examples`` is how many each page gets of either kind.
Progress goes to stderr, the result to stdout; the exit status is 1 when anything was found, 2 when the usage was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import secrets
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from joserfc.jwk import ECKey

if __package__ in (None, ""):  # run as a program
    sys.path.insert(0, str(Path(__file__).parent.parent))

from ems.bench.router.stub import Engine
from ems.tables import Table
from tests.kit.process import ServerProcess, free_port

try:
    import schemathesis
    from schemathesis.cli import schemathesis as command_line
except ImportError:
    sys.exit("error: schemathesis is not installed, install it with 'pip install schemathesis'")

KEY, ADMINISTRATOR = (f"ems-{secrets.token_hex(16)}" for _ in range(2))
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
UNREACHABLE = ("/reset_prefix_cache", 502)
"""When an instance was added that nobody listens at."""
TROUBLE = ("Traceback", "defect", "Task exception", "was never retrieved")
"""What a log does not have unless something is wrong."""
MANIFESTS = """
{{kind: Pod, apiVersion: v1, metadata: {{name: p, labels: {{app: kimi, role: prefill, group: a}},
  annotations: {{ems.router/port: "{prefill}"}}}}, status: {{podIP: 127.0.0.1}}}}
---
{{kind: Pod, apiVersion: v1, metadata: {{name: d, labels: {{app: kimi, role: decode, group: a}},
  annotations: {{ems.router/port: "{decode}"}}}}, status: {{podIP: 127.0.0.1}}}}
---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {{name: kimi}}
spec:
  model: stub
  inferenceEngine: vLLM
  workloadPort: {{port: 7100}}
  workloadSelector:
    matchLabels: {{app: kimi}}
    pdGroup: {{groupKey: group, prefillLabels: {{role: prefill}}, decodeLabels: {{role: decode}}}}
---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {{name: kimi}}
spec:
  modelName: stub
  rules:
  - modelMatch: {{headers: {{X-Session-Id: {{regex: "^[a-f]"}}}}}}
    targetModels: [{{modelServerName: kimi}}]
  - targetModels: [{{modelServerName: kimi, weight: 30}}]
"""


class Stubs(NamedTuple):
    """Ports of engines that work."""

    prefill: int
    decode: int
    spare: int
    """Of one that no router knows at its start."""


class Router(ServerProcess):
    """One that tells how it ended."""

    def end(self) -> int | None:
        """Ask it to stop, and return its exit status; None when it goes on."""
        self.ask_to_stop()
        return self._pause(20.0)


class Face(NamedTuple):
    """A router as it is started."""

    name: str
    flags: list[str]
    key: str = ""
    """What requests have, unless they try without."""
    draws_keys: bool = False
    """Whether requests have a key of their own, which may count or not."""


# ------------------------------------------------------------------------------------------------------ the description


def _schema(*kinds: str, **more: Any) -> dict[str, Any]:
    return {"type": list(kinds), **more}


TEXT = _schema("string")
IDS = _schema("array", items=_schema("integer", minimum=0))
ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {"message": TEXT, "type": TEXT, "param": _schema("string", "null"), "code": TEXT},
        }
    },
}
CONTENT = {
    "anyOf": [
        TEXT,
        _schema(
            "array", items=_schema("object", properties={"type": TEXT, "text": TEXT, "image_url": _schema("object")})
        ),
    ]
}
FIELDS: dict[str, Any] = {
    "model": {"enum": ["stub", "other"]},
    "max_tokens": _schema("integer", "null"),
    "max_completion_tokens": _schema("integer"),
    "min_tokens": _schema("integer"),
    "stream": _schema("boolean", "null"),
    "stream_options": _schema("object", "null", properties={"include_usage": _schema("boolean")}),
    "temperature": _schema("number"),
    "n": _schema("integer", "null"),
    "best_of": _schema("integer"),
    "use_beam_search": _schema("boolean"),
    "logprobs": _schema("integer", "boolean"),
    "stop": {"anyOf": [TEXT, _schema("array", items=TEXT)]},
    "priority": _schema("integer"),
    "user": TEXT,
    "cache_salt": TEXT,
    "response_format": _schema("object"),
    "kv_transfer_params": _schema("object", "null"),
    "ec_transfer_params": _schema("object"),
    "vllm_xargs": _schema("object"),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": {"anyOf": [TEXT, IDS, _schema("array", items=TEXT), _schema("array", items=IDS)]},
        "prompt_embeds": {"anyOf": [TEXT, _schema("array", items=TEXT)]},
    },
    "/v1/chat/completions": {
        "messages": _schema("array", items=_schema("object", properties={"role": TEXT, "content": CONTENT})),
        "tools": _schema("array", items=_schema("object")),
    },
    "/v1/responses": {
        "input": {"anyOf": [TEXT, _schema("array", items=_schema("object", properties={"content": CONTENT}))]},
        "instructions": TEXT,
        "max_output_tokens": _schema("integer"),
    },
    "/v1/embeddings": {"input": {"anyOf": [TEXT, IDS, _schema("array", items=TEXT), _schema("array", items=IDS)]}},
    "/tokenize": {"prompt": TEXT, "messages": _schema("array", items=_schema("object")), "add_special_tokens": {}},
}
READABLE = ("/health", "/healthz", "/livez", "/readyz", "/version", "/metrics", "/healthcheck")
NAMES = ("a", "a.", "a.-", "_", "0", "x" * 63, "x" * 64, ".".join("x" * 120))
"""Parts of names that nobody has, and of which some cannot be."""
ID = {"anyOf": [{"const": "request-1"}, TEXT]}
HEADERS = {"X-Session-Id": TEXT, "X-Request-Id": ID, "traceparent": TEXT, "Accept-Encoding": TEXT}
IN_PATHS: dict[str, Any] = {
    "id": ID,
    "kind": {"enum": ["modelroutes", "modelservers", "pods"]},
    "namespace": {"anyOf": [{"const": "default"}, TEXT]},
    "name": {"anyOf": [{"enum": ["p", "d"]}, TEXT]},
}
EXPLAINING = (
    "/v1/models",
    "/debug/requests",
    "/debug/requests/{id}",
    "/debug/config_dump/{kind}",
    "/debug/config_dump/namespaces/{namespace}/pods/{name}",
)


def describe(face: Face, stubs: Stubs) -> dict[str, Any]:
    """The router's pages in OpenAPI; what clients are told of them stands in docs/guides/router.md."""

    def operation(
        *kinds: str, body: dict[str, Any] | None = None, path: Sequence[str] = (), guarded: bool = True
    ) -> Any:
        refusals = ("400", "404", "405", "413", "429", "431", *(("401", "403") if guarded else ()))
        described: dict[str, Any] = {
            "parameters": [{"in": "header", "name": name, "schema": schema} for name, schema in HEADERS.items()],
            "responses": {
                **{one: _answer("application/json", schema=ERROR) for one in refusals},
                "200": _answer(*kinds),
            },
        }
        described["parameters"] += [
            {"in": "path", "name": name, "required": True, "schema": IN_PATHS[name]} for name in path
        ]
        if face.draws_keys:
            drawn = {
                "anyOf": [{"enum": [KEY, ADMINISTRATOR]}, {"type": "string", "pattern": r"^[\w-]+\.[\w-]+\.[\w-]*$"}]
            }
            described["parameters"].append({"in": "header", "name": "Api-Key", "required": True, "schema": drawn})
        if body is not None:
            described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        if guarded and face.key:
            described["security"] = [{"key": []}]
        return described

    def readable(kind: str) -> dict[str, Any]:
        return {"get": operation(kind, guarded=False), "head": operation(kind, guarded=False)}

    changed = [f"127.0.0.1:{stubs.spare}", f"127.0.0.1:{free_port()}", *(f"{one}.invalid:80" for one in NAMES)]
    one = {"anyOf": [{"enum": changed}, TEXT]}
    instances = _schema(
        "object",
        required=["type", "instances"],
        properties={
            "type": {"enum": ["prefill", "decode"]},
            "instances": {"anyOf": [one, _schema("array", items=one)]},
        },
    )
    paths: dict[str, Any] = {
        path: {
            "post": operation(
                "application/json",
                "text/event-stream",
                body=_schema("object", required=["model"], properties={**FIELDS, **prompts}),
            )
        }
        for path, prompts in PROMPTS.items()
    }
    kinds = {"/metrics": "text/plain", "/livez": "text/plain", "/healthz": "text/plain", "/readyz": "text/plain"}
    paths |= {path: readable(kinds.get(path, "application/json")) for path in READABLE}
    paths |= {
        path: {"post": operation("application/json", body=instances)}
        for path in ("/instances/add", "/instances/remove")
    }
    paths |= {
        path: {"get": operation("application/json", path=[part[1:-1] for part in path.split("/") if part[:1] == "{"])}
        for path in EXPLAINING
    }
    page, status = UNREACHABLE
    paths[page] = {"post": operation("application/json")}
    paths[page]["post"]["responses"][str(status)] = _answer("application/json")
    for described in paths["/health"].values():
        del described["responses"]["200"]["content"]
    return {
        "openapi": "3.1.0",
        "info": {"title": "ems router", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _answer(*kinds: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": "", "content": {kind: {"schema": schema or {}} for kind in kinds}}


# -------------------------------------------------------------------------------------------------------------- the run


def faces(folder: Path, stubs: Stubs) -> list[Face]:
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in (KEY, ADMINISTRATOR)}
    user = {"id": "user", "sha256": hashes[KEY], "models": ["stub", "o*"], "priority": 3}
    operator = {"id": "operator", "sha256": hashes[ADMINISTRATOR], "administers": True}
    limit = {"inputTokensPerUnit": 200, "outputTokensPerUnit": 2000, "unit": "second"}
    keys, limited = folder / "keys.json", folder / "limited.json"
    for file, known in ((keys, user), (limited, {**user, "limit": limit})):
        file.touch(0o600)
        file.write_text(json.dumps({"keys": [known, operator]}))
    tokens = folder / "jwks.json"
    signs = ECKey.generate_key("P-256", {"kid": "k1", "use": "sig", "alg": "ES256"}, private=True)
    tokens.write_text(json.dumps({"keys": [signs.as_dict(private=False)]}))
    manifests = folder / "manifests.yaml"
    manifests.write_text(MANIFESTS.format(**stubs._asdict()))
    pair = ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(stubs.prefill)]
    pair += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(stubs.decode)]
    queue = ["--max-running", "2", "--session-boost", "5", "--prefill-above", "16", "--max-body-mib", "1"]
    log = ["--access-log", "json", "--access-log-output", str(folder / "access.log"), "--debug-requests", "64"]
    issuer = ["--jwt-issuer", "https://issuer", "--jwt-key-set", str(tokens), "--jwt-models-claim", "models"]
    events = ["--kv-events", f"127.0.0.1:{stubs.decode}=tcp://127.0.0.1:{free_port()}", "--tokenize-within", "0.5"]
    limits = ["--input-tokens-per-unit", "100000000", "--output-tokens-per-unit", "100000000"]
    return [
        Face("open", [*pair, *queue, *log]),
        Face("keys", [*pair, *queue, *log, *limits, *events, "--api-keys", str(limited)], ADMINISTRATOR),
        Face("tokens", [*pair, *issuer, "--api-keys", str(limited), "--forward-credentials"], draws_keys=True),
        Face("workers", [*pair, *queue, *log, "--workers", "2", "--api-keys", str(keys)], ADMINISTRATOR),
        Face("kthena", ["--manifests", str(manifests), *queue, *log]),
    ]


@contextlib.contextmanager
def running_stubs() -> Iterator[Stubs]:
    loop = asyncio.new_event_loop()
    engines = [Engine(3, 0.001) for _ in Stubs._fields]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Stubs(*(asyncio.run_coroutine_threadsafe(one.start(), loop).result() for one in engines))
    finally:
        for one in engines:
            loop.call_soon_threadsafe(one.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def fuzz(
    face: Face, stubs: Stubs, folder: Path, options: argparse.Namespace
) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Return how often each page answered with which status, and what was wrong."""
    answers.clear()
    described = folder / f"{face.name}.openapi.json"
    described.write_text(json.dumps(describe(face, stubs)))
    port, wrong = free_port(), []
    command = [sys.executable, "-m", "ems.cli", "router", "--port", str(port), *face.flags]
    router = Router(command, name=f"router {face.name}", port=port, log=folder / f"{face.name}.log")
    asked = ["run", str(described), "--url", router.url, "--seed", str(options.seed), "--mode", "all", "--no-color"]
    asked += ["--phases", "coverage,fuzzing", "--max-examples", str(options.examples), "--checks", ",".join(CHECKS)]
    asked += ["--workers", "2", "--continue-on-failure", "--generation-database", "none", "--warnings", "off"]
    asked += ["--header", f"Authorization: Bearer {face.key}"] if face.key else []
    with router, contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
        try:
            command_line.main(asked, standalone_mode=False)
        except SystemExit as ended:
            if ended.code:
                wrong.append(f"{face.name}: schemathesis ended with status {ended.code}, its report says why")
        if not router.is_healthy():
            wrong.append(f"{face.name}: the router is gone, or does not answer any more")
        if status := router.end():
            wrong.append(f"{face.name}: the router ended with status {status}")
    log = router.log.read_text(errors="replace")
    wrong += [f"{face.name}: the log has {word!r}" for word in TROUBLE if word in log]
    wrong += [
        f"{face.name}: {page} answered {status}"
        for page, status in answers
        if status >= 500 and (page.partition(" ")[2], status) != UNREACHABLE
    ]
    return answers.copy(), wrong


answers: Counter[tuple[str, int]] = Counter()


def after_call(_context: Any, case: Any, response: Any) -> None:
    answers[case.operation.label, response.status_code] += 1


schemathesis.hook(after_call)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--examples", type=int, default=100, help="of each page, sound and broken ones each (default 100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faces", nargs="+", metavar="NAME", help="open, keys, tokens, workers, kthena (default all)")
    parser.add_argument(
        "--logs", type=Path, help="folder that keeps descriptions and logs; without it they are removed"
    )
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ems-fuzz-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        stubs = stack.enter_context(running_stubs())
        every = faces(folder, stubs)
        known = [one.name for one in every]
        if unknown := set(options.faces or ()) - set(known):
            parser.error(f"--faces {min(unknown)}: expected some of {', '.join(known)}")
        rows: list[tuple[str, ...]] = []
        wrong: list[str] = []
        for face in every:
            if options.faces and face.name not in options.faces:
                continue
            counted, found = fuzz(face, stubs, folder, options)
            wrong += found
            for page in sorted({page for page, _ in counted}):
                statuses = {status: count for (one, status), count in sorted(counted.items()) if one == page}
                shown = ", ".join(f"{status}: {count}" for status, count in statuses.items())
                rows.append((face.name, page, str(sum(statuses.values())), shown))
    print("\n".join(Table(("Router", "Page", "Requests", "Statuses"), rows).lines(None)))
    print(f"{sum(int(row[2]) for row in rows)} requests; {'; '.join(wrong) or 'nothing was found'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
