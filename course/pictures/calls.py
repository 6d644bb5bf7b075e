"""A round of a tool call: the request, the constrained call, the tool's result, the reply."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Record

import torch

from command_line.options import STORIES
from constraints.compiler import make_matcher
from infer import generate
from pictures import runs, scene
from pictures.scene import times, word
from sampling import SamplingParams
from server.protocol import ChatRequest
from server.served import ServedModel
from text.chat import Chat
from text.tools import ToolCallParser

NAME = "stories-llama"  # writes stories and has never seen a tool
TOYS = {"house": "doll", "park": "ball", "shop": "car"}  # what the tool knows
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_toy",
            "parameters": {
                "type": "object",
                "properties": {
                    "child": {"enum": ["Lily", "Tim", "Tom"]},
                    "place": {"enum": list(TOYS)},
                },
                "required": ["child", "place"],
            },
        },
    }
]


def find_toy(child: str, place: str) -> str:
    """Run the tool, as the client does."""
    return f"{child} has a {TOYS[place]}"


# The template with tools, calls and results. A result stands where the words of a story stand.
TEMPLATE = """{{- bos_token }}
{%- for tool in tools or [] %}
    {{- 'Tool: ' + tool.function.name }}
    {{- '(' + (tool.function.parameters.properties | join(', ')) + ')\\n\\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- 'Words: ' + message.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
"""
STORY = 40  # tokens of the reply that are shown


def load_chat() -> Chat:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "chat_template.jinja")
        file.write_text(TEMPLATE)
        return Chat(str(STORIES.with_name(NAME)), file)


@torch.inference_mode()
def record_reply(served: ServedModel, max_new_tokens: int, **fields) -> Record:
    """Record the tokens of a reply, each with what decided it. fields: of the request."""
    chat = served.prepare_chat(ChatRequest(model="m", tools=TOOLS, **fields))
    model = runs.load(NAME)
    params = SamplingParams(max_new_tokens, tool_grammar=chat.tool_grammar)
    counts = Counter()
    steps = generate(model, [chat.tokens], params, encoding=runs.encoding(), counts=counts)
    output = [id for (id,) in steps]
    matcher = make_matcher(params, runs.encoding(), model.config)
    best = model(torch.tensor([chat.tokens + output]))[0, len(chat.tokens) - 1 : -1].argmax(-1)
    parser = ToolCallParser(chat.tool_format)
    tokens = []
    calls = []
    for at, (id, wanted) in enumerate(zip(output, best.tolist())):
        text = runs.token_text(id)
        allowed = int(matcher.token_mask(output[:at]).sum())
        calls += parser.add("" if id in model.config.eos_token_ids else text)[1]
        tokens.append(Record(id=id, text=text, allowed=allowed, wanted=runs.token_text(wanted)))
    return Record(
        prompt=chat.tokens,
        tokens=tokens,
        passes=counts["passes"],
        calls=calls,
        complete=parser.is_complete,
    )


def record_round(prompt: str) -> Record:
    """Record the request, the call, the result of the tool and the reply."""
    asked = runs.encode(prompt, 40)
    backend = Record(encoding=runs.encoding(), config=runs.load(NAME).config)
    served = ServedModel(backend, NAME, NAME, load_chat())
    messages = [{"role": "user", "content": prompt}]
    call = record_reply(
        served, 150, messages=messages, tool_choice="required", parallel_tool_calls=False
    )
    name = "".join(part.name or "" for part in call.calls)
    arguments = "".join(part.arguments for part in call.calls)
    result = find_toy(**json.loads(arguments))
    function = {"name": name, "arguments": arguments}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": result},
    ]
    reply = record_reply(served, STORY, messages=messages)
    return Record(
        asked=asked,
        call=call,
        name=name,
        arguments=json.loads(arguments),
        result=result,
        found=runs.encode(result, 60),
        reply=reply,
    )


def kind_of(token: Record) -> str:
    """Return the kind of a token: jump-forward, constrained or the model's choice."""
    if token.allowed == 1:
        return "second"
    return "good" if token.wanted == token.text else "third"


def draw_round(record: Record) -> scene.Scene:
    call, reply = record.call, record.reply
    kinds = Counter(map(kind_of, call.tokens))
    called = [
        scene.Token(each.text, kind_of(each), f"{each.allowed:,}" if each.allowed > 1 else "")
        for each in call.tokens
    ]
    told = [scene.Token(each.text, kind_of(each)) for each in reply.tokens]
    asked = [scene.Token(text, "kept") for text in runs.token_texts(record.asked)]
    found = [scene.Token(text, "kept") for text in runs.token_texts(record.found)]
    run = [scene.Token(f"{key} = {value}", "first") for key, value in record.arguments.items()]
    lines = [
        scene.Line(asked, "1 user"),
        scene.Line(called, "2 call"),
        scene.Line([scene.Token(record.name, "first"), *run], "3 client"),
        scene.Line(found, "4 tool"),
        scene.Line(told, "5 reply"),
    ]
    pieces = [scene.Token(part.arguments) for part in call.calls if part.arguments]
    message = [
        scene.Line([scene.Token("null")], "content"),
        scene.Line([scene.Token(record.name)], "name"),
        scene.Line(pieces, "arguments"),
        scene.Line([scene.Token("tool_calls" if call.complete else "length")], "finish_reason"),
    ]
    return scene.Scene(
        f"The grammar makes a story model call a tool: of {times(len(called), 'token')} "
        f"jump-forward writes {kinds['second']}, the grammar decides {kinds['third']} and the "
        f"model {kinds['good']}, in {times(call.passes, 'pass', 'passes')}. The client sends the "
        f"result, {word(record.result)}, and the reply takes "
        f"{times(reply.passes, 'pass', 'passes')} for {times(len(told), 'token')}.",
        scene.Panel(
            "A round of a tool call",
            scene.Tokens(lines),
            "The model writes 2 and 5; 1 and 4 are messages of the requests. Below a token of "
            "the call: how many the grammar allows there.",
            {
                "second": "jump-forward: the only allowed token",
                "third": "the model's likeliest token was not allowed",
                "good": "the model's likeliest token",
                "first": "run by the client",
                "kept": "content of a message",
            },
            wide=True,
        ),
        scene.Panel(
            "Message that the client gets in step 2",
            scene.Tokens(message),
            "A box of the arguments is a piece that ToolCallParser found with one token.",
        ),
        scene.Panel(
            "Tokens of the two prompts",
            scene.Bars(
                [
                    scene.Bar(
                        f"before step {step}", [(len(each.prompt), "kept")], str(len(each.prompt))
                    )
                    for step, each in ((2, call), (5, reply))
                ]
            ),
            "The second has the tools and the question again, the call and the result.",
        ),
    )


PICTURES = {"tool-calls": scene.Picture("Write about Tom.", record_round, draw_round)}
