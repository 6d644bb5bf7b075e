"""The words of the course: what each means here, and the lesson that brings it."""

import re
from collections.abc import Callable
from typing import NamedTuple


class Word(NamedTuple):
    name: str
    meaning: str
    slug: str  # of the lesson that brings it
    forms: str | None = None  # a pattern of what is linked; None: the name and its plural; "": none
    elsewhere: tuple[str, ...] = ()  # slugs of lessons in which it means something else

    @property
    def id(self) -> str:
        """Of its place on the page of the glossary."""
        return self.name.split(",")[0].lower().replace(" ", "-")


WORDS = (
    Word(
        "acceptance",
        "Whether a draft stays: with chance min(1, p / q), where p is the target's probability of "
        "it and q the draft model's. So the text is drawn as if the target had written it alone.",
        "speculative-decoding",
        r"accept(?:ance|ed|s)?",
        elsewhere=("request-fields",),
    ),
    Word(
        "attention",
        "How a position takes something from itself and from those before it: its query is "
        "compared with their keys, and the better they fit, the more of their values it takes.",
        "init",
        "attention",
    ),
    Word(
        "batch",
        "Several texts that are computed in the same passes.",
        "greedy-decoding",
        "batch(?:es)?",
    ),
    Word("beam", "One of the texts that a search goes on with.", "beam-search"),
    Word(
        "block",
        "Another word for a layer. Not block_size, which is how many positions the model has, "
        "and so the length of its window.",
        "init",
        "",
    ),
    Word(
        "BOS, EOS",
        "Tokens for the beginning and the end of a text. The model writes EOS as any other "
        "token, and then the text is over.",
        "eos-handling",
        "BOS|EOS",
    ),
    Word(
        "budget",
        "How many tokens the engine computes in a step, at most.",
        "chunked-prefill",
    ),
    Word(
        "cache",
        "The keys and values of past positions, kept so that no pass computes them again.",
        "kv-cache-dynamic",
    ),
    Word(
        "chat template",
        "The pattern by which a checkpoint wants messages written as one text, with control "
        "tokens between them.",
        "chat",
        "template",
    ),
    Word(
        "checkpoint",
        "What training leaves behind: the weights, the tokenizer, and the shape of the model.",
        "init",
    ),
    Word(
        "chunk",
        "A part of a prompt that one step computes.",
        "chunked-prefill",
        elsewhere=("request-fields", "streaming"),  # those of HTTP
    ),
    Word(
        "closed loop, open loop",
        "Two kinds of load on a server: each client waits for its answer before it asks again; "
        "requests come when they are due, however many still wait.",
        "closed-loop",
        "(?:closed|open)[ -]loops?",
    ),
    Word(
        "control token",
        "A token that no text can spell, such as the one that begins a message. A user's text "
        "must never become one.",
        "chat",
    ),
    Word(
        "decode, prefill",
        "To compute the newest token of each text; to compute a whole prompt, all positions "
        "at once.",
        "kv-cache-dynamic",
        "prefill|decode|decoding step",
    ),
    Word(
        "draft",
        "A guess at a next token, which the target accepts or refuses.",
        "speculative-decoding",
    ),
    Word(
        "draw",
        "To choose a token by chance, each as often as its probability says; and the token "
        "chosen so.",
        "multinomial",
        "draws?|drawn",
        elsewhere=("page",),
    ),
    Word(
        "embedding",
        "The table with a row of numbers, a vector, for each token.",
        "init",
    ),
    Word(
        "engine",
        "The loop that computes many requests at once: a scheduler says what each step computes, "
        "the model computes it, and each text gets its token.",
        "continuous-batching",
    ),
    Word(
        "gamma",
        "How many tokens are drafted for each pass of the target, at most.",
        "speculative-decoding",
        "gamma",
    ),
    Word("greedy", "Always the most likely token.", "greedy-decoding", "greedy|greedily"),
    Word(
        "head",
        "One of several attentions side by side in a layer; and the last matrix, which makes "
        "logits of a vector.",
        "init",
    ),
    Word(
        "hop",
        "A move of the window by a whole stride. What stays in it is computed anew.",
        "kv-cache-fix",
    ),
    Word(
        "id",
        "The number of a token, from 0 to the size of the vocabulary less one.",
        "init",
        elsewhere=("server", "live"),
    ),
    Word(
        "key, query, value",
        "Three vectors that a head makes of each position: what it is found by, what it "
        "looks for, and what it gives.",
        "init",
        "keys and values|quer(?:y|ies)|keys",
        elsewhere=("keys-and-origins", "page"),
    ),
    Word(
        "lane",
        "One of the numbers that a processor computes with in one instruction.",
        "native-int8",
    ),
    Word(
        "layer",
        "One of the steps of a pass that are built alike: attention, then a small network for "
        "each position alone.",
        "init",
    ),
    Word(
        "log-probability",
        "The logarithm of a probability: 0 is certain, and the smaller it is, the less likely. "
        "Those of a text's tokens are added where probabilities are multiplied.",
        "beam-search",
        "log-probabilit(?:y|ies)|logprobs?",
    ),
    Word(
        "logit",
        "A score for a token that could come next. The softmax makes probabilities of all of them.",
        "init",
    ),
    Word(
        "mask",
        "What keeps a position from seeing others: those after it, and padding.",
        "init",
        "mask(?:s|ed)?",
    ),
    Word(
        "merge",
        "A pair of pieces that the tokenizer puts together to one. A word begins as bytes, and "
        "merges, in a fixed order, make tokens of them.",
        "init",
    ),
    Word(
        "noise",
        "The random numbers of a draw, one for each token that could come next. Here they depend "
        "on the seed, the position and the token alone.",
        "request-seeds",
        "noise",
    ),
    Word(
        "padding",
        "Places in a batch that belong to no text, because the texts differ in length.",
        "greedy-decoding",
        "padding|padded",
    ),
    Word(
        "page, pool, table",
        "A page is room for the keys and values of some positions; all pages are a pool; a "
        "table says on which pages a text lies.",
        "paged-cache",
        "pages?|pools?|page tables?",
        elsewhere=("early-ends", "completions", "keys-and-origins", "page"),
    ),
    Word(
        "panel",
        "Some rows of a weight matrix, stored in the order in which a product reads them.",
        "packed-weights",
    ),
    Word(
        "pass",
        "One call of the model: numbers of all tokens in, a vector for each position out.",
        "init",
        "(?<=the )pass|(?<=one )pass|(?<=a )pass|(?<=forward )pass(?:es)?|(?<=each )pass"
        "|(?<=first )pass|(?<=whole )pass",
    ),
    Word(
        "penalty",
        "What makes a token that the text has already less likely.",
        "presence-penalty",
        "penalt(?:y|ies)",
    ),
    Word(
        "position",
        "A token's place in its text, or in the window on it, from 0.",
        "init",
    ),
    Word(
        "preemption",
        "Taking the pages of a request away, because there are too few; it is computed again "
        "later.",
        "preemption",
        "preempt(?:ion|ions|ed|s)?",
    ),
    Word(
        "prefix",
        "The beginning of a prompt. Where several have the same one, its pages are shared.",
        "prefix-sharing",
        "prefix(?:es)?",
    ),
    Word("prompt", "The text that the model is to go on with.", "init"),
    Word(
        "queue",
        "The requests that wait for a row.",
        "continuous-batching",
        elsewhere=("engine-thread", "early-ends", "closed-loop"),
    ),
    Word(
        "race",
        "A way to draw: each token gets a random time, the shorter the likelier it is, and the "
        "first one wins.",
        "top-p-without-sorting",
    ),
    Word(
        "request",
        "A prompt, and how it is to be continued, as the engine knows it.",
        "continuous-batching",
    ),
    Word(
        "residual",
        "What is left of the target's distribution where drafts were refused: max(0, p - q), made "
        "to add up to 1. The token in a refused draft's place is drawn from it.",
        "speculative-decoding",
    ),
    Word(
        "roofline",
        "The best speed that a machine allows: a step cannot be faster than the memory that it "
        "reads, or than the products that it computes.",
        "benchmark-speculative",
    ),
    Word(
        "rotary positions",
        "Instead of a vector for the place, queries and keys are turned by an angle that grows "
        "with the position. Also called RoPE.",
        "llama",
        "rotary positions?|rotations?|RoPE",
    ),
    Word(
        "row",
        "One text of a batch.",
        "greedy-decoding",
        elsewhere=(
            "benchmark-speculative",
            "benchmark-kv-cache",
            "int8-weights",
            "native-int8",
            "native-linear",
            "native-step",
            "fast-draws",
            "packed-weights",
            "packed-int8",
            "token-tables",
            "chat-completions",
        ),
    ),
    Word(
        "sampling",
        "Choosing the next token from the logits: with or without chance, among all or some.",
        "multinomial",
        "sampl(?:ing|ed)",
    ),
    Word(
        "scale",
        "The number that a row of int8 weights is multiplied with, so that they are about what "
        "they were.",
        "int8-weights",
    ),
    Word(
        "scheduler",
        "The part of the engine that says which tokens of which requests a step computes.",
        "continuous-batching",
    ),
    Word("seed", "A number that decides all draws of a text.", "multinomial"),
    Word(
        "softmax",
        "Turns logits into probabilities: exp of each, divided by the sum of all.",
        "init",
        "softmax",
    ),
    Word(
        "span",
        "The tokens of one text that a pass computes, and the pages of that text.",
        "paged-cache",
    ),
    Word(
        "step",
        "One turn of the loop around the model. It adds one token to each text, or several if "
        "drafts are accepted; in the engine also none, to a text whose prompt is not finished.",
        "greedy-decoding",
        elsewhere=("llama", "llama-3-tokenizer", "full-queue"),
    ),
    Word(
        "stop string",
        "What ends a text when it appears. It is left out, however tokens cut it.",
        "stop-strings",
    ),
    Word("stride", "How many tokens the window moves by.", "kv-cache-fix"),
    Word(
        "target",
        "The model whose text it is, where another one drafts.",
        "speculative-decoding",
        "target|target model",
    ),
    Word(
        "temperature",
        "What logits are divided by before the softmax. Below 1 the likely tokens gain, above "
        "1 the others.",
        "temperature",
    ),
    Word(
        "time to first token",
        "How long a client waits until it sees the first token of an answer; TTFT for short.",
        "benchmark-kv-cache",
        "time to (?:the )?first token|TTFT",
    ),
    Word(
        "token",
        "A piece of text: a word with the space before it, a part of a word, a sign.",
        "init",
    ),
    Word(
        "top-k, top-p",
        "Draws among the k most likely tokens only; or among the fewest likely ones that have "
        "at least probability p together.",
        "top-k",
        "top-[kp]",
    ),
    Word("vocabulary", "All tokens that a model knows: 4,096 of the embedded ones.", "init"),
    Word("weights", "The numbers of a model that training found.", "init", "weights"),
    Word("window", "The part of a text that the model sees in a step.", "context-window"),
    Word(
        "work",
        "What a step computes of one request: which tokens, and whether their last one gives the "
        "text its next.",
        "continuous-batching",
        "(?<=a )work|(?<=each )work|(?<=one )work|works(?= of)",
    ),
)
# A word in these is no prose.
CLOSED = ("a", "code", "pre", "h1", "h2", "h3", "h4", "summary", "q")


def pattern(word: Word) -> str:
    return rf"{re.escape(word.name)}s?" if word.forms is None else word.forms


def linker(id: str, ids: dict[str, str]) -> Callable[[str], str]:
    """A function that links words where they first fall on the page of a lesson, HTML -> HTML.

    It remembers which it has linked. Words that a later lesson brings are none yet. ids: of all
    lessons, by slug.
    """
    names = {}  # of a group of the pattern -> word
    for number, word in enumerate(WORDS):
        brought = word.slug in ids and ids[word.slug] <= id
        if pattern(word) and brought and id.partition("-")[2] not in word.elsewhere:
            names[f"w{number}"] = word
    if not names:
        return lambda text: text
    parts = "|".join(f"(?P<{name}>{pattern(word)})" for name, word in names.items())
    words = re.compile(rf"(?<![\w-])(?:{parts})(?![\w/-])", re.IGNORECASE)
    seen = set()

    def link(found: re.Match) -> str:
        word = names[found.lastgroup]
        if word in seen:
            return found[0]
        seen.add(word)
        return f'<a class="word" href="glossary.html#{word.id}">{found[0]}</a>'

    def linked(text: str) -> str:
        shown = []
        inside = []  # elements whose words stay as they are
        for piece in re.split(r"(<[^>]*>)", text):
            tag = re.match(r"<(/?)(\w+)", piece)
            if tag and tag[2] in CLOSED:
                inside = inside[:-1] if tag[1] else [*inside, tag[2]]
            shown.append(piece if tag or inside else words.sub(link, piece))
        return "".join(shown)

    return linked
