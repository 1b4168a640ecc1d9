import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ems.bench.completions import ServerError, base_url
from ems.bench.ttft import measure
from ems.bench.ttft_report import Plan
from ems.errors import ConfigError
from tests.bench.openai_server import Behaviour, OpenAIServer

PLAN = Plan(requests=6, concurrency=3, input_tokens=32, output_tokens=4, seed=1)


async def test_who_gets_which_prompts_in_which_order() -> None:
    async with OpenAIServer() as first, OpenAIServer() as second:
        await measure((first.url, second.url), PLAN)

    a = {tuple(prompt) for prompt in PLAN.prompts("A")}
    b = {tuple(prompt) for prompt in PLAN.prompts("B")}
    assert set(first.prompts[-18:-12]) == a
    assert set(first.prompts[-12:-6]) == b
    assert set(first.prompts[-6:]) == a
    assert set(second.prompts[-6:]) == a
    warm_up = first.prompts[:-18]
    assert not (a | b) & set(warm_up), "a prompt that was sent before is not cold"
    assert max(len(prompt) for prompt in warm_up) == PLAN.input_tokens


async def test_requests_are_greedy_streams_of_exactly_so_many_tokens() -> None:
    async with OpenAIServer() as first, OpenAIServer() as second:
        await measure((first.url, second.url), PLAN)

    body = first.bodies[-1]
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "ignore_eos", "stream")} == {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def test_as_many_at_once_as_asked_and_no_more() -> None:
    plan = Plan(requests=20, concurrency=5, input_tokens=8, output_tokens=8, seed=1)
    async with OpenAIServer() as first, OpenAIServer() as second:
        await measure((first.url, second.url), plan)

    assert first.most_running == 5


async def test_report() -> None:
    told: list[tuple[str, int, int]] = []
    async with OpenAIServer() as first, OpenAIServer() as second:
        report = await measure((first.url, second.url), PLAN, progress=lambda *news: told.append(news))

    assert report.model == "tiny"
    assert [step.same_text for step in report.steps] == [6, 6, 6]
    assert [step.url for step in report.steps] == [first.url, first.url, second.url]
    assert all(0 < step.ttft.mean <= step.seconds for step in report.steps)
    assert report.failed == 0
    assert ("3  A to server 2", 6, 6) in told


async def test_failed_requests_are_counted_and_do_not_stop_the_rest() -> None:
    bad = tuple(PLAN.prompts("A")[2])
    async with OpenAIServer() as first, OpenAIServer(Behaviour(fail_prompts=frozenset({bad}))) as second:
        report = await measure((first.url, second.url), PLAN)

    assert [step.failed for step in report.steps] == [0, 0, 1]
    assert report.steps[2].same_text == 5


async def test_one_server_may_stand_for_both() -> None:
    async with OpenAIServer() as server:
        report = await measure((server.url, server.url), PLAN)

    assert report.steps[2].same_text == 6


async def test_the_key_is_sent() -> None:
    async with OpenAIServer() as server:
        await measure((server.url, server.url), PLAN, api_key="s3cret")

    assert set(server.authorizations) == {"Bearer s3cret"}


async def test_dead_server() -> None:
    async with OpenAIServer() as first:
        pass
    with pytest.raises(ServerError, match=f"{first.url} does not answer: connection refused"):
        await measure((first.url, first.url), PLAN)


async def test_no_openai_server() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>It works!</html>", content_type="text/html")

    application = web.Application()
    application.router.add_get("/v1/models", page)
    server = TestServer(application)
    await server.start_server()
    try:
        with pytest.raises(ServerError, match="no list of models, expected an OpenAI-compatible server"):
            await measure((f"http://{server.host}:{server.port}", "http://unused"), PLAN)
    finally:
        await server.close()


async def test_unknown_model_and_no_model() -> None:
    async with OpenAIServer() as first, OpenAIServer(Behaviour(models=("other",))) as second:
        with pytest.raises(ConfigError, match="offers tiny and not huge"):
            await measure((first.url, first.url), PLAN, model="huge")
        with pytest.raises(ConfigError, match="offers other and not tiny"):
            await measure((first.url, second.url), PLAN)
        second.behaviour.models = ()
        with pytest.raises(ServerError, match="offers no model"):
            await measure((second.url, second.url), PLAN)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(status=503), 'refuses a completion with status 503: {"error": {"message": "not today"}}'),
        (Behaviour(error_after=0), "engine is gone"),
        (Behaviour(error_after=2), "engine is gone"),
        (Behaviour(cut_after=1), "broke off a completion"),
    ],
    ids=["refuses", "error at once", "error later", "cut"],
)
async def test_broken_answers(behaviour: Behaviour, message: str) -> None:
    async with OpenAIServer(behaviour) as server:
        with pytest.raises(ServerError) as caught:
            await measure((server.url, server.url), PLAN)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("h:8000", "http://h:8000"),
        ("https://h/prefix/v1", "https://h/prefix"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert base_url("URL1", text) == url


@pytest.mark.parametrize("text", ["", "ftp://h", "http://", "http://h:port", "not a url"])
def test_no_urls(text: str) -> None:
    with pytest.raises(ConfigError, match=r"URL1 is .*, expected something like"):
        base_url("URL1", text)
