"""Tool-calling agent that runs the tools a reply calls, and asks again until none is called.

    make smollm2
    pip install openai
    python serve.py --model smollm2 --adapter checkpoints/smollm2-tools \\
        --chat-template checkpoints/smollm2-tools/chat_template.jinja &
    until curl -s -f -o /dev/null http://127.0.0.1:8000/health; do sleep 0.1; done
    python examples/agent.py "What is the weather in Rome?" "And what is 17 times 23?"
"""

import json
import sys
from pathlib import Path

from openai import OpenAI

WEATHER = {"rome": {"sky": "sunny", "celsius": 24}, "oslo": {"sky": "snow", "celsius": -3}}
FUNCTIONS = {
    "get_weather": lambda city: WEATHER.get(city.lower(), {"error": f"no weather for {city}"}),
    "multiply": lambda a, b: {"product": a * b},
}
TOOLS = json.loads(Path(__file__).with_name("tools.json").read_text())


def answer(client: OpenAI, messages: list[dict], max_replies: int = 8) -> str:
    """Return the model's final reply. Appends all replies and tool results to `messages`."""
    for _ in range(max_replies):
        request = {"model": client.models.list().data[0].id, "messages": messages, "tools": TOOLS}
        reply = client.chat.completions.create(**request, temperature=0, max_tokens=100)
        message = reply.choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or []:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"  {call.function.name}({call.function.arguments}) -> {json.dumps(result)}")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
        if not message.tool_calls:
            return message.content
    return f"(still calling tools after {max_replies} replies)"


def main(questions: list[str], url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    messages = []
    for question in questions:
        print(question)
        messages.append({"role": "user", "content": question})
        print(answer(client, messages))


if __name__ == "__main__":
    main(sys.argv[1:])
