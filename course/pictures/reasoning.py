"""Thinking budgets: where a reasoning block ends, and what its constrained answer costs."""

from collections import Counter
from types import SimpleNamespace as Record

from constraints.compiler import make_matcher
from infer import generate
from pictures import runs, scene
from pictures.scene import times, word
from sampling import Reasoning, SamplingParams
from text.reasoning import ReasoningParser

NAME = "stories-llama"
CHOICES = ("Yes.", "No.")
BUDGETS = (0, 4, 8, None)
LENGTH = 24  # tokens of a reply


def record_reply(prompt: list[int], budget: int | None) -> Record:
    """Record the tokens of a reply, each with the part it belongs to, and its message."""
    model = runs.load(NAME)
    encoding = runs.encoding()
    params = SamplingParams(
        LENGTH,
        choices=CHOICES,
        reasoning=Reasoning("<think>", "</think>", is_open=True),
        thinking_token_budget=budget,
    )
    counts = Counter()
    steps = generate(model, [prompt], params, encoding=encoding, counts=counts)
    output = [id for (id,) in steps]
    matcher = make_matcher(params, encoding, model.config)
    parser = ReasoningParser(params, encoding)
    message = Record(reasoning=[], content=[])  # pieces, as they are streamed
    tokens = []
    texts = runs.token_texts(output)
    for at, (id, text) in enumerate(zip(output, texts)):
        allowed = int(matcher.token_mask(output[:at]).sum())
        state, _ = matcher.advance(output[:at])
        part = "answer" if state.in_answer else "reasoning"
        tokens.append(Record(text=text, part=part, allowed=allowed))
        ends = id in model.config.eos_token_ids
        reasoning, content = parser.add("" if ends else text, is_last=at == len(output) - 1)
        message.reasoning += [reasoning] * bool(reasoning)
        message.content += [content] * bool(content)
    return Record(
        budget=budget,
        ids=output,
        tokens=tokens,
        passes=counts["passes"],
        reasoning_tokens=matcher.advance(output)[0].num_tokens,
        message=message,
        finish_reason="stop" if ends else "length",
    )


def record_budgets(prompt: str) -> Record:
    ids = runs.encode(f"<think> {prompt}", 40)
    return Record(prompt=ids, replies=[record_reply(ids, budget) for budget in BUDGETS])


def kind_of(token: Record) -> str:
    """Return the kind of a token: forced, of the constrained answer, or of the reasoning."""
    if token.allowed == 1:
        return "second"
    return "third" if token.part == "answer" else "good"


def name_of(reply: Record) -> str:
    return "no budget" if reply.budget is None else f"budget {reply.budget}"


def draw_budgets(record: Record) -> scene.Scene:
    prompt = [scene.Token(text, "kept") for text in runs.token_texts(record.prompt)]
    lines = [scene.Line(prompt, "prompt")]
    bars = []
    for reply in record.replies:
        shown = [
            scene.Token(
                token.text, kind_of(token), str(token.allowed) if kind_of(token) == "third" else ""
            )
            for token in reply.tokens
        ]
        lines.append(scene.Line(shown, name_of(reply)))
        kinds = Counter(map(kind_of, reply.tokens))
        parts = [(kinds[kind], kind) for kind in ("good", "second", "third")]
        bars.append(scene.Bar(name_of(reply), parts, times(reply.passes, "pass", "passes")))
    *_, reply, free = record.replies
    choices = " or ".join(map(word, CHOICES))
    forced = sum(kind_of(token) == "second" for token in reply.tokens)
    message = [
        scene.Line(list(map(scene.Token, reply.message.reasoning)), "reasoning_content"),
        scene.Line(list(map(scene.Token, reply.message.content)), "content"),
        scene.Line([scene.Token(str(reply.reasoning_tokens))], "reasoning_tokens"),
        scene.Line([scene.Token(reply.finish_reason)], "finish_reason"),
    ]
    return scene.Scene(
        f"After {times(reply.reasoning_tokens, 'token')} of reasoning the budget forces "
        f"{word('</think>')}, and then the answer follows its constraint: "
        f"{times(len(reply.tokens), 'token')} in {times(reply.passes, 'pass', 'passes')}, as "
        f"{forced} are forced. Without a budget {free.reasoning_tokens} of "
        f"{len(free.tokens)} tokens are reasoning.",
        scene.Panel(
            f"Replies of at most {LENGTH} tokens whose answer is {choices}",
            scene.Tokens(lines),
            "Below a token of the answer: how many the constraint allows there.",
            {
                "kept": "prompt, which opens the block",
                "good": "reasoning: all tokens are allowed, but not EOS",
                "second": "forced: the only allowed token, which needs no pass",
                "third": "chosen by the model among the allowed tokens",
            },
            wide=True,
        ),
        scene.Panel(
            "Tokens of each reply",
            scene.Bars(bars),
            key={"good": "reasoning", "second": "forced", "third": "chosen"},
        ),
        scene.Panel(
            f"Message with {name_of(reply)}",
            scene.Tokens(message),
            "A box of a text is a piece that ReasoningParser found with one token.",
        ),
    )


PICTURES = {"thinking-budget": scene.Picture("Lily saw a dog.", record_budgets, draw_budgets)}
