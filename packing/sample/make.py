"""Writes the embedded sample: `python -m packing.sample.make`.

Each chat is put together from the phrases below by a seeded generator: small talk about sums, units,
clocks, colours, kitchens and trains, some of it with a system prompt, some with functions to call. It
is small enough for a tiny model to learn within a minute, and varied enough that packing has
something to do: from one short turn to eight, several languages, tool calls, an emoji.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packing.sample import CHATS, TOKENIZER

SEED = 20260
CHAT_COUNT = 420
VOCABULARY = 1024  # tokens at most, the control tokens included
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Message = dict[str, Any]
Turns = list[Message]

NAMES = ["Ada", "Bao", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana", "Imre", "Jun", "Kofi", "Lena"]
TOWNS = ["Oslo", "Lagos", "Kyoto", "Lima", "Tunis", "Porto", "Riga", "Hanoi", "Quito", "Bergen"]
SYSTEMS = [
    "You answer in one or two short sentences.",
    "You are a patient tutor. Show how you get to a result.",
    "You help at the counter of a small bakery.",
    "You work for the station office and know the trains.",
    "Be brief. Say when you are not sure.",
]
PAINT = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("black", "white"): "grey",
    ("red", "white"): "pink",
}
PLURALS = {
    "loaf": "loaves",
    "mouse": "mice",
    "city": "cities",
    "child": "children",
    "box": "boxes",
    "leaf": "leaves",
}
GREETINGS = {
    "German": "Guten Morgen, wie geht es dir?",
    "French": "Bonjour, comment vas-tu ?",
    "Spanish": "Buenos días, ¿cómo estás?",
    "Japanese": "おはようございます。お元気ですか。",
    "Chinese": "早上好，你好吗？",
    "Greek": "Καλημέρα, τι κάνεις;",
}
OPENINGS = ["", "", "", "Quick question: ", "Please help me. ", "One more thing: ", "Hello! "]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town now.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Starts a timer.",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}},
            "required": ["minutes"],
        },
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def sums(rng: random.Random) -> Turns:
    a, b = rng.randint(2, 60), rng.randint(2, 40)
    kind = rng.choice(["plus", "minus", "times"])
    result = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    return [user(f"What is {a} {kind} {b}?"), assistant(f"{a} {kind} {b} is {result}.")]


def units(rng: random.Random) -> Turns:
    n = rng.randint(2, 90)
    big, small, factor = rng.choice(
        [
            ("kilometres", "metres", 1000),
            ("hours", "minutes", 60),
            ("metres", "centimetres", 100),
            ("weeks", "days", 7),
        ]
    )
    return [
        user(f"How many {small} are {n} {big}?"),
        assistant(f"One of the {big} has {factor} {small}, so {n} {big} are {n * factor} {small}."),
    ]


def clock(rng: random.Random) -> Turns:
    hour, wait = rng.randint(0, 23), rng.randint(1, 11)
    name = rng.choice(NAMES)
    return [
        user(f"{name} arrives {wait} hours after {hour:02d}:00. When is that?"),
        assistant(
            f"{wait} hours after {hour:02d}:00 it is {(hour + wait) % 24:02d}:00, so {name} arrives then."
        ),
    ]


def paint(rng: random.Random) -> Turns:
    (one, other), mixed = rng.choice(list(PAINT.items()))
    return [
        user(f"Which colour do {one} and {other} make?"),
        assistant(f"{one.title()} and {other} make {mixed}."),
    ]


def plural(rng: random.Random) -> Turns:
    word, many = rng.choice(list(PLURALS.items()))
    return [
        user(f'What is the plural of "{word}"?'),
        assistant(f'One {word}, two {many}: the plural is "{many}".'),
    ]


def greeting(rng: random.Random) -> Turns:
    language, words = rng.choice(list(GREETINGS.items()))
    return [
        user(f"How do I say “Good morning, how are you?” in {language}?"),
        assistant(f"In {language} you say: {words}"),
    ]


def train(rng: random.Random) -> Turns:
    here, there = rng.sample(TOWNS, 2)
    platform = rng.randint(1, 9)
    return [
        user(f"From which platform does the train from {here} to {there} leave?"),
        assistant(
            f"The train from {here} to {there} leaves from platform {platform}. Please be there early."
        ),
        user("And the next one?"),
        assistant(f"The next one to {there} leaves one hour later, from platform {platform} too."),
    ]


def order(rng: random.Random) -> Turns:
    names = rng.sample(NAMES, rng.randint(3, 7))
    listed = "\n".join(f"{i}. {name}" for i, name in enumerate(sorted(names), 1))
    return [user(f"Sort these names: {', '.join(names)}."), assistant(f"In alphabetical order:\n\n{listed}")]


def bread(rng: random.Random) -> Turns:
    loaves, price = rng.randint(2, 9), rng.randint(2, 6)
    return [
        user(f"I want {loaves} loaves at {price} coins each. What do I pay?"),
        assistant(f"{loaves} loaves at {price} coins are {loaves * price} coins. Shall I wrap them? 🍞"),
        user(rng.choice(["Yes, please.", "No, thank you."])),
        assistant("Done. Have a good day!"),
    ]


def code(rng: random.Random) -> Turns:
    name, factor = rng.choice(["double", "scale", "grow"]), rng.randint(2, 9)
    body = f"def {name}(x):\n    return {factor} * x"
    return [
        user(f"Write a Python function `{name}` that multiplies its argument by {factor}."),
        assistant(f"```python\n{body}\n```\n\n`{name}(10)` gives {factor * 10}."),
    ]


def call(name: str, arguments: dict[str, Any], text: str = "") -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}


def weather(rng: random.Random) -> Turns:
    town, degrees, sky = rng.choice(TOWNS), rng.randint(-5, 33), rng.choice(["clear", "cloudy", "rainy"])
    report = json.dumps({"town": town, "degrees": degrees, "sky": sky})
    return [
        user(f"What is the weather like in {town}?"),
        call("get_weather", {"town": town}),
        {"role": "tool", "content": report},
        assistant(f"It is {sky} in {town}, at {degrees} degrees."),
    ]


def timer(rng: random.Random) -> Turns:
    minutes, dish = rng.randint(2, 50), rng.choice(["eggs", "rice", "bread", "tea"])
    return [
        user(f"Set a timer of {minutes} minutes for the {dish}."),
        call("set_timer", {"minutes": minutes, "label": dish}, "I start it now."),
        {"role": "tool", "content": '{"started": true}'},
        assistant(f"The timer for the {dish} runs: {minutes} minutes."),
    ]


TALK: list[Callable[[random.Random], Turns]] = [
    sums, units, clock, paint, plural, greeting, train, order, bread, code,
]  # fmt: skip


def chats() -> Iterator[dict[str, Any]]:
    """The sample's records, the same ones on every machine."""
    rng = random.Random(SEED)
    for number in range(CHAT_COUNT):
        with_tools = number % 6 == 0
        messages: Turns = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.4 else []
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
            turns = rng.choice([weather, timer] if with_tools else TALK)(rng)
            turns[0]["content"] = rng.choice(OPENINGS) + turns[0]["content"]
            messages += turns
        yield {"messages": messages, "tools": [WEATHER, TIMER]} if with_tools else {"messages": messages}


def train_tokenizer(corpus: Iterator[str], *, folder: Path) -> None:
    """Trains a byte-level BPE tokenizer on the text and writes it to the folder.

    All 256 bytes are in its vocabulary, so it spells any text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'(?:s|t|re|ve|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": Path(__file__).with_name("chatml.jinja").read_text("utf-8"),
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


def main() -> None:
    records = list(chats())
    CHATS.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    texts = (message["content"] for record in records for message in record["messages"])
    schemas = [json.dumps(tool) for tool in (WEATHER, TIMER)] * 40
    train_tokenizer(
        iter([*texts, *schemas, *(f"{role}\n" for role in ["system", "user", "assistant", "tool"] * 200)]),
        folder=TOKENIZER,
    )


if __name__ == "__main__":
    main()
