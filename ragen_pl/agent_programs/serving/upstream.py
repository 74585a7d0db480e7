"""Requests for other models than the policy, which are passed on to the endpoints that a run names."""

from __future__ import annotations

from typing import Any

import aiohttp

from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.session import PassedOn, Session

_TIMEOUT = aiohttp.ClientTimeout(total=600.0)


async def passed_on(session: Session, model: str, body: dict[str, Any], path: str) -> PassedOn:
    """Return the answer of another model's endpoint to a request. The policy is not trained on it.

    Args:
        session: Session of the program.
        model: Name of the model.
        body: JSON of the request.
        path: Path of the request, which the endpoint answers too.

    Raises:
        RequestError: No endpoint is named for the model, or it does not answer.
    """
    target = session.upstream.get(model)
    if target is None:
        known = ", ".join([session.model, *session.upstream])
        raise RequestError(
            404,
            f"model={model!r}: known are {known}; name the endpoint of another model in env.kwargs.models",
            code="model_not_found",
        )
    session.count("upstream")
    headers = {"Authorization": f"Bearer {target['key']}"} if target.get("key") else {}
    url = target["url"].rstrip("/") + path.rpartition("/v1")[2]
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as client,
            client.post(
                url, json=body | {"model": target.get("model", model)}, headers=headers
            ) as answer,
        ):
            data = await answer.read()
            return PassedOn(status=answer.status, content_type=answer.content_type, body=data)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestError(
            503,
            f"model={model!r}: {target['url']} does not answer ({error})",
            code="upstream_failed",
        ) from error
