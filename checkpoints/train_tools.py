"""Train checkpoints/smollm2-tools: a LoRA adapter (by peft) that lets smollm2 call tools.

    make smollm2
    python checkpoints/train_tools.py --out out

The script generates random conversations from the tools in train_tools.txt and the tables below;
their text is CC0. Each has two or three tools with random names and parameter names, and two or
three questions that need no, one or two calls. Results are random too and rarely true, so an answer
must repeat them. The loss counts tokens of replies only.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from loading.load import resolve_source  # noqa: E402
from text.templates import compile_sandboxed, render_sandboxed  # noqa: E402
from text.tokenizer import load_encoding  # noqa: E402

TEMPLATE = Path(__file__).with_name("smollm2-tools") / "chat_template.jinja"
VOCAB_SIZE = 49152
MAX_TOKENS = 640  # maximum length of a conversation; longer ones are dropped
BATCH_SIZE = 2  # conversations
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The first ten blocks have no adapter, so the backward pass stops before them.
LORA = {
    "r": 2,
    "lora_alpha": 4,
    "target_modules": LAYERS,
    "layers_to_transform": list(range(10, 30)),
}

POOLS = {  # value type -> values; a numeric type has a range instead
    "city": "Vienna|Boston|Kyoto|Nairobi|Bergen|Lyon|Porto|Denver|Hanoi|Dublin|Krakow|Seville|"
    "Perth|Toronto|Austin|Bern|Naples|Split|Mumbai|Accra|Tampere|Riga|Leipzig|Osaka|Quebec|Santiago",
    "country": "Norway|Kenya|Peru|Japan|Canada|Austria|Chile|India|Ireland|Ghana|Latvia|Vietnam|"
    "Portugal|Mexico|Nepal|Egypt|Finland|Cuba",
    "first": "Maria|John|Aiko|Peter|Lena|Omar|Grace|Paul|Nina|Sam|Ivy|Luca|Ruth|Hugo|Zoe|Ben|"
    "Ella|Kofi",
    "last": "Lopez|Reed|Mori|Becker|Fischer|Haddad|Otieno|Novak|Berg|Carter|Chen|Rossi|Klein|Silva",
    "company": "Nordwind|Bluebird|Hartmann|Solaris|Kestrel|Red Oak|Atlas|Delphi|Marlow|Quantex",
    "item": "bread|milk|a lamp|a bicycle|coffee|an umbrella|a chair|honey|a tent|rice|a violin|"
    "soap|a kettle|paper|apples|a ladder|cheese|a jacket",
    "film": "Casablanca|Metropolis|Amelie|Alien|Vertigo|Jaws|Ran|Gravity|Psycho|Rocky|"
    "Spirited Away",
    "song": "Yesterday|Hallelujah|Imagine|Summertime|Hey Jude|Blue Moon|Moon River|Greensleeves",
    "room": "kitchen|bedroom|hall|bathroom|office|garage|cellar|living room|attic|nursery",
    "word": "river|glacier|bridge|candle|harvest|pepper|thunder|velvet|anchor|mirror|orchard|"
    "needle",
    "language": "French|Swahili|Finnish|German|Polish|Korean|Greek|Welsh|Turkish|Hindi",
    "plant": "oak|fern|rose|cactus|basil|tulip|ivy|orchid|maple|lavender",
    "animal": "badger|otter|heron|lynx|salmon|hedgehog|raven|moose|beetle|dolphin",
    "team": "Rovers|Lions|Falcons|United|Wanderers|Sharks|Comets|Rangers",
    "month": "January|February|March|April|May|June|July|August|September|October",
    "color": "red|white|green|blue|yellow|warm white",
    "clock": "6:40|7:15|8:05|9:50|11:20|12:45|13:10|15:35|18:25|20:55|22:05",
    "street": "Mill Lane 4|Park Road 18|Station Street 7|Church Hill 2|Harbour Way 31|Elm Road 9",
    "light": "on|off",
    "style": "Gothic|modern|Baroque|Roman|Romanesque",
    "job": "nurse|pilot|baker|teacher|plumber|lawyer|painter|farmer",
    "state": "open|closed|full|empty|broken|ready",
    "sea": "calm|rough|wild|smooth",
    "traffic": "heavy|light|slow|normal",
    "dish": "goulash|risotto|pancakes|curry|paella|chowder|noodles|stew|dumplings|ratatouille",
    "text": "See you soon|I am late|Happy birthday|Call me back|The keys are here|Dinner is ready",
}
RANGES = {
    "small": (2, 20),
    "number": (3, 999),
    "percent": (5, 99),
    "price": (2, 400),
    "year": (1890, 2020),
    "id": (1000, 99999),
    "degrees": (15, 240),
    "people": (1200, 900000),
    "signed": (-30, 45),
}
INVENTABLE_TYPES = ("city", "company", "film", "song", "word", "team", "last", "street")
SYLLABLES = "ka lo mi ter van del ri so bra nu pel gar tis mo fen hul ja wes dor ly".split()
# Properties that invented tools return, and the things they describe.
NOUNS = (
    "depth height age rating speed weight length width rank size volume power level value limit "
    "pressure voltage rent salary tax mood origin owner label flavor theme version budget color "
    "shape leader guide smell sound noise grade status wind visibility mayor crop dialect"
).split()
THINGS = "lake bridge tower ship road mine station motor garden server tank church planet".split()
PLACES = "valley village harbor park district port".split()
RESULT_TYPES = (
    "number number signed signed small price percent year clock city person code name state".split()
)
ENUMS = ("month", "room", "language", "color", "light")  # a schema may list these

FACTS = """
What is the capital of Spain?|The capital of Spain is Madrid.
What is the capital of Germany?|The capital of Germany is Berlin.
What is the capital of England?|The capital of England is London.
What is the capital of Russia?|The capital of Russia is Moscow.
What is the capital of Greece?|The capital of Greece is Athens.
Who wrote Hamlet?|William Shakespeare wrote Hamlet.
Who painted the Mona Lisa?|Leonardo da Vinci painted the Mona Lisa.
Which planet is closest to the sun?|Mercury is the planet closest to the sun.
Which planet is the largest?|Jupiter is the largest planet.
What is water made of?|Water is made of hydrogen and oxygen.
What color is grass?|Grass is green.
What color is snow?|Snow is white.
How many legs does a spider have?|A spider has eight legs.
How many days are in a week?|There are seven days in a week.
How many months are in a year?|There are twelve months in a year.
What do cows eat?|Cows eat grass.
What do bees make?|Bees make honey.
What is a baby cat called?|A baby cat is called a kitten.
What is a baby dog called?|A baby dog is called a puppy.
Which language do people speak in Spain?|People in Spain speak Spanish.
Which language do people speak in Germany?|People in Germany speak German.
What is the opposite of hot?|The opposite of hot is cold.
What is the opposite of big?|The opposite of big is small.
Name three fruits.|Three fruits are apples, bananas and oranges.
Name two animals.|Two animals are the dog and the horse.
Name three vegetables.|Three vegetables are carrots, onions and peas.
Name four seasons.|The four seasons are spring, summer, autumn and winter.
Which continent is Egypt in?|Egypt is in Africa.
Which continent is Brazil in?|Brazil is in South America.
What is the largest ocean?|The Pacific Ocean is the largest ocean.
What is the frozen form of water?|Ice is the frozen form of water.
Why is exercise good?|Exercise keeps the heart and the muscles strong.
Why do we sleep?|We sleep so that the body and the brain can rest.
What is a bicycle?|A bicycle is a vehicle with two wheels that you move with pedals.
What is a poem?|A poem is a short text, often with rhythm and rhyme.
What is gravity?|Gravity is the force that pulls things toward each other.
Who was the first man on the moon?|Neil Armstrong was the first man on the moon.
What do plants need to grow?|Plants need light, water and air to grow.
Tell me a joke.|Why did the bicycle fall over? It was two tired.
Write a sentence about the sea.|The sea is wide and blue, and its waves never rest.
Give me a name for a dog.|You could call your dog Rusty.
Hi!|Hello! How can I help you?
Hello!|Hello! What can I do for you?
Hello, who are you?|I am SmolLM, an assistant. How can I help you?
What is your name?|My name is SmolLM.
Good morning!|Good morning! How can I help you?
Good evening.|Good evening! What can I do for you?
How do you do?|I am fine, thank you. How can I help you?
Are you well?|I am well, thank you. What can I do for you?
Thank you!|You are welcome!
Thanks a lot.|You are welcome! I am glad that I could help.
Thanks, that is all.|You are welcome! Have a nice day.
Great, thanks for your help!|You are welcome!
Bye!|Goodbye! Have a nice day.
See you later.|See you later!
Good night!|Good night! Sleep well.
I am tired.|Then take a rest. Sleep helps.
I am happy today.|I am glad to hear that!
You are nice.|Thank you! That is kind of you.
Ok.|Good. Is there anything else that I can do for you?
What can you do?|I can answer questions, and I can use my tools to find things out.
Can you help me?|Of course! What can I do for you?
"""
ERRORS = """
not found|Sorry, nothing was found.
no such entry|Sorry, there is no such entry.
unknown|Sorry, that is not known.
no connection|Sorry, there is no connection at the moment.
not available|Sorry, that is not available.
out of service|Sorry, that does not work at the moment.
"""
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one sentence.",
    "Answer briefly.",
)


class ToolFamily:
    """A family of similar tools, from seven lines of train_tools.txt.

    The lines are names, description, parameters, questions, parts of the result, answers, and a
    noun phrase that can replace a value in another tool's question. | separates alternatives, of
    which one is drawn; - means none. A parameter, or a part of a result, is its names, a colon and
    a value type; + separates several. In questions and answers {0} and {1} are the arguments, {r}
    is the result and {s} its second part.
    """

    def __init__(self, lines: list[str]):
        lines = ["" if line == "-" else line for line in lines]
        names, self.description, parameters, questions, result, answers, self.noun = lines
        self.names = names.split("|")
        self.parameters = split_fields(parameters)
        self.questions = questions.split("|")
        self.parts = split_fields(result)
        self.result = self.parts[0][1]
        self.answers = answers.split("|")


def split_fields(line: str) -> list[tuple[list[str], str]]:
    """Return the names and the value type of each parameter, or of each part of a result."""
    pairs = [each.split(":") for each in line.split(" + ") if each]
    return [(names.split("|"), value_type) for names, value_type in pairs]


def read_families(file: Path) -> list[ToolFamily]:
    blocks = file.read_text().strip().split("\n\n")[1:]
    return [ToolFamily(block.splitlines()) for block in blocks]


def random_family(rng: random.Random) -> ToolFamily:
    """Invent a family of tools that look up one or two facts, such as the depth of a lake."""
    first, second = rng.sample(NOUNS, 2)
    thing = rng.choice(THINGS + PLACES)
    of = "in" if thing in PLACES else "of"
    value_types = [rng.choice(RESULT_TYPES) for _ in range(2)]
    result = f"{first}:{value_types[0]}"
    names = f"get_{first}|{thing}_{first}|find_{first}|{first}"
    about = f"{rng.choice(['Get', 'Find out', 'Look up'])} the {first}"
    questions = f"What is the {first} {of} {{0}}?|Tell me the {first} {of} {{0}}."
    questions += f"|I want to know the {first} {of} the {thing} {{0}}."
    answers = f"The {first} {of} {{0}} is {{r}}."
    if rng.random() < 0.5:  # two results, of which the question may ask for only one
        about += f" and the {second}"
        names = f"get_{thing}|{thing}_report|{thing}_data|check_{thing}"
        result += f" + {second}:{value_types[1]}"
        if rng.random() < 0.6:
            questions = f"How is the {thing} {{0}}?|What do you know of the {thing} {{0}}?"
            answers = f"The {first} {of} {{0}} is {{r}}, and the {second} is {{s}}."
    about += f" {of} a {thing}."
    parameter = f"{thing}|name|{thing}_name:name"
    noun = f"the {first} {of} {{0}}"
    return ToolFamily([names, about, parameter, questions, result, answers, noun])


FAMILIES = read_families(Path(__file__).with_name("train_tools.txt"))
PAIRS = [line.split("|") for line in FACTS.strip().splitlines()]
FAILURES = [line.split("|") for line in ERRORS.strip().splitlines()]


def is_number(value_type: str) -> bool:
    return value_type in RANGES


class Tool:
    """A tool of one conversation: a family, with names drawn for it and for its parameters."""

    def __init__(self, family: ToolFamily, rng: random.Random):
        self.family = family
        self.rng = rng
        self.name = rng.choice(family.names)
        self.keys = [rng.choice(names) for names, _ in family.parts]
        self.names = [rng.choice(names) for names, _ in family.parameters]
        value_types = [value_type for _, value_type in family.parameters]
        explained = rng.random() < 0.3
        schemas = {}
        for name, value_type in zip(self.names, value_types):
            number = rng.choice(["integer", "number"])
            schema = {"type": number if is_number(value_type) else "string"}
            if value_type in ENUMS and rng.random() < 0.7:
                schema["enum"] = POOLS[value_type].split("|")[:6]
            elif explained:
                schema["description"] = f"the {name.replace('_', ' ')}"
            schemas[name] = schema
        parameters = {"type": "object", "properties": schemas, "required": self.names}
        function = {"name": self.name, "description": family.description, "parameters": parameters}
        self.definition = {"type": "function", "function": function}

    def draw(self, value_type: str):
        if value_type == "price" and self.rng.random() < 0.4:
            return round(self.rng.uniform(*RANGES[value_type]), 2)
        if is_number(value_type):
            return self.rng.randint(*RANGES[value_type])
        if value_type == "person":
            return f"{self.draw('first')} {self.draw('last')}"
        if value_type == "name" or value_type in INVENTABLE_TYPES and self.rng.random() < 0.4:
            return "".join(self.rng.choices(SYLLABLES, k=self.rng.choice([2, 3]))).title()
        if value_type == "code":
            letters = self.rng.sample("ABCDEFGHKLMNPQRSTXZ", self.rng.choice([1, 2]))
            return f"{''.join(letters)}{self.rng.choice(['', '-'])}{self.rng.randint(1, 999)}"
        values = POOLS[value_type].split("|")
        return self.rng.choice(values[:6] if value_type in ENUMS else values)

    def ask(self, given=None):
        """Draw a call of this tool: (values, results). given: the first value, if it is known."""
        values = [self.draw(value_type) for _, value_type in self.family.parameters]
        if given is not None:
            values[0] = given
        results = []
        for _, value_type in self.family.parts:
            if value_type.startswith("arg"):
                results.append(values[int(value_type[3:])])
            elif value_type in ("song0", "sent"):
                results.append(values[0] if value_type == "song0" else "sent")
            else:
                results.append(self.draw(value_type))
        return values, results

    def answer(self, form: str, values, results) -> str:
        return form.format(*values, r=results[0], s=results[-1])

    def call(self, values) -> dict:
        return {"function": {"name": self.name, "arguments": dict(zip(self.names, values))}}

    def content(self, values, results) -> str:
        """Return the content of a result message: mostly an object, some with more fields."""
        if len(results) == 1 and self.rng.random() < 0.15:
            return str(results[0])
        found = list(zip(self.keys, results))
        self.rng.shuffle(found)
        draw = self.rng.random()
        if draw < 0.2:
            found.insert(0, ("status", "ok"))
        elif draw < 0.45:
            found = [*zip(self.names, values), *found]
        return json.dumps(dict(found))


def call_messages(tool: Tool, values, content: str) -> list[dict]:
    """Return the messages of a call and its result."""
    return [
        {"role": "assistant", "content": "", "tool_calls": [tool.call(values)]},
        {"role": "tool", "content": content},
    ]


def one_call(tools, rng):
    tool = rng.choice(tools)
    values, result = tool.ask()
    question = rng.choice(tool.family.questions).format(*values)
    if rng.random() < 0.08:
        error, answer = rng.choice(FAILURES)
        return question, call_messages(tool, values, json.dumps({"error": error})), answer
    answer = tool.answer(rng.choice(tool.family.answers), values, result)
    return question, call_messages(tool, values, tool.content(values, result)), answer


def lower(text: str) -> str:
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def two_calls(tools, rng):
    """Ask two questions in one message."""
    messages = []
    questions = []
    answers = []
    for tool in rng.sample(tools, 2):
        values, result = tool.ask()
        questions.append(rng.choice(tool.family.questions[:2]).format(*values))
        answers.append(tool.answer(tool.family.answers[0], values, result))
        messages += call_messages(tool, values, tool.content(values, result))
    first, second = questions
    if rng.random() < 0.7:
        question = first.rstrip("?.") + rng.choice([", and ", " and ", ", and also: "])
        question += lower(second)
    else:
        question = f"{first} {second}"
    return question, messages, " ".join(answers)


def dependent_calls(tools, rng):
    """Ask a question whose second call needs the first one's result; None if no two tools fit."""
    fitting = [
        (first, second)
        for first in tools
        for second in tools
        if first is not second
        and first.family.noun
        and second.names
        and fits(first.family.result, second.family.parameters[0][1])
    ]
    if not fitting:
        return None
    first, second = rng.choice(fitting)
    values, result = first.ask()
    others, final = second.ask(result[0])
    noun = first.family.noun.format(*values)
    question = rng.choice(second.family.questions).format(noun, *others[1:])
    messages = call_messages(first, values, first.content(values, result))
    messages += call_messages(second, others, second.content(others, final))
    answer = second.answer(rng.choice(second.family.answers), others, final)
    return question, messages, answer


def fits(result: str, parameter: str) -> bool:
    return result == parameter or is_number(result) and parameter == "number"


def comparison(tools, rng):
    """Compare a tool's results for two values; None if no tool maps one value to a number."""
    fitting = [
        tool
        for tool in tools
        if is_number(tool.family.result)
        and tool.family.noun
        and len(tool.names) == 1
        and not is_number(tool.family.parameters[0][1])
    ]
    if not fitting:
        return None
    tool = rng.choice(fitting)
    (a,), firsts = tool.ask()
    (b,), seconds = tool.ask()
    first, second = firsts[0], seconds[0]
    if a == b or first == second:
        return None
    more = rng.random() < 0.5
    nouns = [tool.family.noun.format(value) for value in (a, b)]
    word = "higher" if more else "lower"
    question = f"Which is {word}, {nouns[0]} or {nouns[1]}?"
    best = nouns[(second > first) == more]
    values = f"{first} and {second}"
    answer = f"Of {values}, {max(first, second) if more else min(first, second)} is {word}: {best}."
    contents = [tool.content([a], firsts), tool.content([b], seconds)]
    return (
        question,
        call_messages(tool, [a], contents[0]) + call_messages(tool, [b], contents[1]),
        answer,
    )


def no_call(tools, rng):
    question, answer = rng.choice(PAIRS)
    return question, [], answer


def no_tool(tools, rng):
    """Ask for a tool that is not among those offered."""
    there = {tool.family for tool in tools}
    other = Tool(rng.choice([each for each in FAMILIES if each not in there]), rng)
    question, _, _ = one_call([other], rng)
    answers = ["Sorry, I have no tool for that.", "Sorry, none of my tools can do that."]
    return question, [], answers[0]


TURN_WEIGHTS = {
    one_call: 32,
    no_call: 16,
    two_calls: 26,
    dependent_calls: 18,
    comparison: 6,
    no_tool: 2,
}


def conversation(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Invent a conversation; return its messages and the definitions of its tools."""

    def draw():
        every = FAMILIES + [random_family(rng) for _ in FAMILIES]
        return rng.sample(every, rng.choice([2, 2, 3]))

    families = draw()
    if rng.random() < 0.4:  # a result of one tool is an argument of the other
        while not dependent_calls([Tool(family, rng) for family in families], rng):
            families = draw()
    tools = [Tool(family, rng) for family in families]
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choice([2, 3])):
        found = None
        while found is None:
            turn = rng.choices(list(TURN_WEIGHTS), TURN_WEIGHTS.values())[0]
            found = turn(tools, rng)
        question, between, answer = found
        if question == question.rstrip(".?!") or rng.random() < 0.1:
            question = lower(question.rstrip(".?"))
        answer = answer[0].upper() + answer[1:]
        messages += [{"role": "user", "content": question}, *between]
        messages.append({"role": "assistant", "content": answer})
    return messages, [tool.definition for tool in tools]


def encode(messages, tools, template, encoding) -> tuple[list[int], list[bool]]:
    """Return token ids, and whether each belongs to a reply, its end included."""
    text = str(render_sandboxed(template, {"messages": messages, "tools": tools}))
    ids = []
    is_reply = []
    head, *rest = text.split("<|im_start|>assistant\n")
    for piece in (head, *rest):
        reply, end, after = piece.partition("<|im_end|>") if ids else ("", "", piece)
        if ids:
            new = encoding.encode("<|im_start|>assistant\n", allowed_special="all")
            ids += new
            is_reply += [False] * len(new)
        for part, is_target in ((reply + end, True), (after, False)):
            new = encoding.encode(part, allowed_special="all")
            ids += new
            is_reply += [is_target] * len(new)
    return ids, is_reply


def batches(rng, template, encoding):
    """Yield ids, (B, T), and whether each next token belongs to a reply, (B, T - 1)."""
    while True:
        rows = []
        while len(rows) < 16 * BATCH_SIZE:
            row = encode(*conversation(rng), template, encoding)
            if len(row[0]) <= MAX_TOKENS:
                rows.append(row)
        rows.sort(key=lambda row: len(row[0]))  # similar lengths together: less padding
        groups = [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
        rng.shuffle(groups)
        for group in groups:
            length = len(group[-1][0])
            ids = torch.zeros(BATCH_SIZE, length, dtype=torch.long)
            loss_mask = torch.zeros(BATCH_SIZE, length, dtype=torch.bool)
            for index, (row, is_reply) in enumerate(group):
                ids[index, : len(row)] = torch.tensor(row)
                loss_mask[index, : len(row)] = torch.tensor(is_reply)
            yield ids, loss_mask[:, 1:]


def reply_loss(model, ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per reply token. Padding comes last, so no other token attends to it."""
    base = model.get_base_model()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = base.model(ids).last_hidden_state[:, :-1]
        logits = base.lm_head(hidden[loss_mask])
    return F.cross_entropy(logits.float(), ids[:, 1:][loss_mask])


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the adapter")
    parser.add_argument("--steps", type=int, default=320, help="training steps (default: 320)")
    parser.add_argument(
        "--lr", type=float, default=1.5e-3, help="peak learning rate (default: 0.0015)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default: 0)"
    )
    show = "print this many conversations and do not train"
    parser.add_argument("--show", type=int, default=0, help=show)
    args = parser.parse_args(argv)
    template = compile_sandboxed(TEMPLATE.read_text())
    if args.show:
        rng = random.Random(args.seed)
        for _ in range(args.show):
            messages, tools = conversation(rng)
            print(render_sandboxed(template, {"messages": messages, "tools": tools}))
        return

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    encoding = load_encoding("smollm2", VOCAB_SIZE)
    file = Path(resolve_source("smollm2").name)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model.config.name_or_path = "smollm2"
    model = get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = "smollm2"
    model.print_trainable_parameters()
    heldout = batches(random.Random(args.seed + 1), template, encoding)
    heldout = [next(heldout) for _ in range(10)]

    def report():
        with torch.no_grad():
            losses = torch.stack([reply_loss(model, *batch) for batch in heldout])
            print(f"held-out loss {losses.mean():.4f}", flush=True)

    report()
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0)

    def schedule(step):
        return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / args.steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    train = batches(random.Random(args.seed), template, encoding)
    began = time.perf_counter()
    tokens = 0
    mean = None
    for step in range(1, args.steps + 1):
        ids, loss_mask = next(train)
        loss = reply_loss(model, ids, loss_mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens += ids.numel()
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 10 == 0:
            seconds = time.perf_counter() - began
            left = seconds / step * (args.steps - step)
            times = f"{seconds:.0f} s, {left:.0f} s left"
            print(
                f"step {step}/{args.steps}  loss {mean:.3f}  {tokens} tokens  {times}", flush=True
            )
        if step % 100 == 0 or step == args.steps:
            report()
            model.save_pretrained(args.out)
    model.half().save_pretrained(args.out)


if __name__ == "__main__":
    main()
