"""The program that plays a seat of a `verifiers` environment where none is chosen: a conversation with tools.

`verifiers` starts its own programs as processes, each with an environment of `uv`'s. This one is awaited in the
worker's process, as the library allows. It asks the endpoint of the rollout, which is the library's, and calls the
tools of the task; it runs no code and sees neither tokens nor rewards.
"""

import contextlib
import json
import sys

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from jaxrl_async.tasks.task import CUT

ID = "jaxrl_async_chat"  # A harness's id is a module's name without a dot.
__all__ = ["Chat"]

sys.modules.setdefault(ID, sys.modules[__name__])


class Config(vf.HarnessConfig):
    """No setting of its own."""


class Chat(vf.Harness[Config]):
    """Asks until an answer calls no tool, or no token is left."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment of the conversation, as `verifiers.v1.Harness.launch`."""
        config = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with contextlib.AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, timeout=None
            )
            await stack.enter_async_context(client)
            tools, names, servers = await connect_mcp({"mcpServers": config}, stack)
            given = {"tools": tools} if tools else {}
            messages = self._begin(data)
            while True:
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **given
                    )
                except openai.BadRequestError as error:
                    if CUT in str(error):
                        break  # The episode is scored as it is.
                    raise
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    content = await call_mcp(servers, names, call.function.name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _begin(self, data: vf.TaskData) -> list[dict]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]
