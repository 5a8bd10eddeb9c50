"""Train the tiny decoder that ships in mlx_transmuter/demo, on text that this file makes itself: the whole recipe.

The text holds sums in words, a closed table of facts, counting, short stories and short conversations, so every answer
can be checked against the tables below. The same seed, library versions and processor give the same weights; needs the
`fixtures` extra, one core and about a quarter of an hour.

    python scripts/train_demo.py                             # train, export, check, write mlx_transmuter/demo
    python scripts/train_demo.py --checkpoint build/demo     # keep the trained model there, or export it if it is there
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import random
import shutil
import tempfile
import time
from calendar import day_name, month_name
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.numpy_helper import to_array
from optimum.exporters.onnx import main_export
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED, STEPS, BATCH, LENGTH, PEAK_RATE = 7, 1700, 8, 256, 2e-3
VOCAB, POSITIONS, MARGIN, MOST_BYTES = 1280, 512, 0.5, 4_000_000
SHAPE = {"hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": POSITIONS}
DEMO = Path(__file__).resolve().parent.parent / "mlx_transmuter" / "demo"
SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS, ASSISTANT = 0, 1, 2, 5
IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
CHAT_TEMPLATE = """\
{{- bos_token }}{% for message in messages %}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""

# --- The closed tables -----------------------------------------------------------------------------------------------

CAPITALS = """France:Paris Italy:Rome Spain:Madrid Portugal:Lisbon Germany:Berlin Austria:Vienna Poland:Warsaw
Greece:Athens Sweden:Stockholm Norway:Oslo Denmark:Copenhagen Finland:Helsinki Iceland:Reykjavík Ireland:Dublin
England:London Scotland:Edinburgh Belgium:Brussels Hungary:Budapest Romania:Bucharest Bulgaria:Sofia Croatia:Zagreb
Serbia:Belgrade Ukraine:Kyiv Russia:Moscow Turkey:Ankara Egypt:Cairo Kenya:Nairobi Ethiopia:Addis_Ababa Ghana:Accra
Nigeria:Abuja Senegal:Dakar Togo:Lomé Cameroon:Yaoundé Morocco:Rabat Iraq:Baghdad Iran:Tehran India:New_Delhi
Nepal:Kathmandu China:Beijing Japan:Tokyo Vietnam:Hanoi Thailand:Bangkok Mongolia:Ulaanbaatar Australia:Canberra
Canada:Ottawa Mexico:Mexico_City Cuba:Havana Jamaica:Kingston Peru:Lima Chile:Santiago Brazil:Brasília Colombia:Bogotá
Paraguay:Asunción Uruguay:Montevideo Argentina:Buenos_Aires Costa_Rica:San_José New_Zealand:Wellington"""
COLOURS = """grass:green snow:white coal:black blood:red a_lemon:yellow a_carrot:orange the_sky:blue chocolate:brown
milk:white a_banana:yellow a_flamingo:pink a_frog:green an_elephant:grey a_polar_bear:white the_sun:yellow a_plum:purple
a_strawberry:red a_crow:black a_pumpkin:orange a_lime:green"""
OPPOSITES = """hot:cold big:small fast:slow up:down left:right day:night black:white happy:sad young:old open:closed
full:empty hard:soft light:dark wet:dry rich:poor strong:weak loud:quiet clean:dirty early:late high:low near:far
thick:thin deep:shallow wide:narrow true:false good:bad first:last always:never in:out on:off push:pull begin:end
buy:sell win:lose love:hate give:take come:go laugh:cry north:south east:west inside:outside above:below before:after
friend:enemy sweet:sour rough:smooth easy:difficult cheap:expensive asleep:awake alive:dead ugly:beautiful yes:no
long:short summer:winter sharp:blunt"""
SOUNDS = """cow:moo dog:woof cat:meow duck:quack sheep:baa pig:oink horse:neigh lion:roar owl:hoot frog:croak bee:buzz
snake:hiss mouse:squeak crow:caw wolf:howl donkey:hee-haw bird:tweet hen:cluck bear:growl"""
YOUNG = """cat:a_kitten dog:a_puppy cow:a_calf horse:a_foal sheep:a_lamb pig:a_piglet duck:a_duckling goat:a_kid
lion:a_cub frog:a_tadpole hen:a_chick deer:a_fawn goose:a_gosling swan:a_cygnet kangaroo:a_joey owl:an_owlet
eagle:an_eaglet hare:a_leveret whale:a_calf elephant:a_calf seal:a_pup bear:a_cub butterfly:a_caterpillar"""
PLURALS = """child:children man:men woman:women foot:feet tooth:teeth goose:geese mouse:mice ox:oxen sheep:sheep
deer:deer person:people leaf:leaves knife:knives wolf:wolves wife:wives life:lives half:halves loaf:loaves shelf:shelves
thief:thieves city:cities baby:babies story:stories lady:ladies country:countries berry:berries box:boxes fox:foxes
bus:buses dish:dishes church:churches watch:watches glass:glasses potato:potatoes tomato:tomatoes hero:heroes cat:cats
dog:dogs book:books key:keys boy:boys day:days tree:trees house:houses"""
FRENCH = """cat:chat dog:chien house:maison water:eau bread:pain milk:lait tree:arbre sun:soleil moon:lune sea:mer
book:livre school:école summer:été forest:forêt boy:garçon girl:fille brother:frère sister:sœur mother:mère father:père
head:tête egg:œuf heart:cœur red:rouge blue:bleu night:nuit snow:neige Christmas:Noël window:fenêtre island:île"""
EMOJI = """cat:🐱 dog:🐶 mouse:🐭 fox:🦊 bear:🐻 lion:🦁 cow:🐮 pig:🐷 frog:🐸 monkey:🐵 horse:🐴 wolf:🐺 bee:🐝
snail:🐌 whale:🐳 fish:🐟 snake:🐍 tree:🌳 rose:🌹 star:⭐ moon:🌙 apple:🍎 pear:🍐 car:🚗"""
COUNTS = """legs_of_a_spider:eight legs_of_an_ant:six legs_of_a_dog:four legs_of_a_bird:two legs_of_a_bee:six
legs_of_a_crab:ten legs_of_a_horse:four legs_of_a_scorpion:eight sides_of_a_triangle:three sides_of_a_square:four
sides_of_a_pentagon:five sides_of_a_hexagon:six sides_of_a_heptagon:seven sides_of_an_octagon:eight wheels_of_a_car:four
wheels_of_a_bicycle:two strings_of_a_violin:four strings_of_a_guitar:six keys_of_a_piano:eighty-eight
fingers_of_a_hand:five days_in_a_week:seven seconds_in_a_minute:sixty minutes_in_an_hour:sixty
hours_in_a_day:twenty-four months_in_a_year:twelve weeks_in_a_year:fifty-two years_in_a_decade:ten
years_in_a_century:one_hundred centimetres_in_a_metre:one_hundred letters_in_the_alphabet:twenty-six
colours_in_the_rainbow:seven players_in_a_football_team:eleven cards_in_a_deck:fifty-two days_in_January:thirty-one
days_in_April:thirty days_in_June:thirty days_in_July:thirty-one days_in_September:thirty days_in_December:thirty-one"""
DAYS, MONTHS, SEASONS = list(day_name), list(month_name)[1:], ["spring", "summer", "autumn", "winter"]
ONES = str.split("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen""")
TENS = str.split("twenty thirty forty fifty sixty seventy eighty ninety")
WORDS = [*ONES, *(f"{ten}-{one}".removesuffix("-zero") for ten in TENS for one in ONES[:10]), "one hundred"]


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


@dataclass(frozen=True)
class Fact:
    """A statement cut where its answer begins, and the question that asks for the answer."""

    family: str
    head: str
    tail: str
    question: str

    @property
    def answer(self) -> str:
        return upper(self.tail.strip())


def arithmetic_facts() -> Iterator[Fact]:
    """Sums, differences and products of small numbers, in words."""
    operations = {
        "addition": ("plus", [(a, b, a + b) for a in range(11) for b in range(11)]),
        "subtraction": ("minus", [(a, b, a - b) for a in range(11) for b in range(a + 1)]),
        "multiplication": ("times", [(a, b, a * b) for a in range(1, 11) for b in range(1, 11)]),
    }
    for family, (word, triples) in operations.items():
        for a, b, result in triples:
            head = f"{WORDS[a]} {word} {WORDS[b]}"
            yield Fact(family, upper(head) + " is", f" {WORDS[result]}.", f"What is {head}?")


def number_facts() -> Iterator[Fact]:
    """Counting, and the words of digits."""
    for low in range(13):
        for high in range(low + 1, 13):
            ends = f"{WORDS[low]} to {WORDS[high]}"
            run = ", ".join(WORDS[low : high + 1])
            yield Fact("counting", f"Counting from {ends}:", f" {run}.", f"Count from {ends}.")
    for n in range(21):
        yield Fact("digits", f"The number {n} in words is", f" {WORDS[n]}.", f"What is the number {n} in words?")


def order_facts() -> Iterator[Fact]:
    """What comes before and after a day, a month or a season."""
    for kind, cycle in (("day", DAYS), ("month", MONTHS), ("season", SEASONS)):
        for i, name in enumerate(cycle):
            for where, other in (("after", cycle[(i + 1) % len(cycle)]), ("before", cycle[i - 1])):
                asked = f"{kind} {where} {name}"
                yield Fact("order", f"The {asked} is", f" {other}.", f"What is the {asked}?")


def table_facts(family: str, text: str, head: str, question: str) -> Iterator[Fact]:
    """A fact for each `key:value` of the text; {} or {0} in head and question is the key, {1} has its article."""
    for pair in text.split():
        key, value = pair.replace("_", " ").split(":")
        yield Fact(family, head.format(key, article(key)), f" {value}.", question.format(key, article(key)))


def facts() -> list[Fact]:
    """Every fact that the model is to know."""
    opposites = OPPOSITES + " " + " ".join(":".join(reversed(pair.split(":"))) for pair in OPPOSITES.split())
    return [
        *arithmetic_facts(),
        *number_facts(),
        *order_facts(),
        *table_facts("opposites", opposites, "The opposite of {} is", "What is the opposite of {}?"),
        *table_facts("capitals", CAPITALS, "The capital of {} is", "What is the capital of {}?"),
        *table_facts("colours", COLOURS, "The colour of {} is", "What is the colour of {}?"),
        *table_facts("sounds", SOUNDS, "The sound of {1} is", "What does {1} say?"),
        *table_facts("young", YOUNG, "A young {0} is called", "What is a young {} called?"),
        *table_facts("plurals", PLURALS, "The plural of {} is", "What is the plural of {}?"),
        *table_facts("french", FRENCH, "The French word for {} is", "What is the French word for {}?"),
        *table_facts("emoji", EMOJI, "The emoji of {1} is", "What is the emoji of {1}?"),
        *table_facts("counts", COUNTS, "The number of {} is", "What is the number of {}?"),
    ]


# --- Stories and conversations ---------------------------------------------------------------------------------------

Messages = list[dict[str, str]]
Document = tuple[str, str] | Messages  # (what is given, what is learned) or a conversation
Pick = Callable[[list[str]], str]
first: Pick = operator.itemgetter(0)  # the likeliest choice in a story, so what a greedy reader of it expects
ARITHMETIC = ("addition", "subtraction", "multiplication")
HARD = {"order": 3, "subtraction": 2, "multiplication": 2}  # how often a family's facts are said; others once
NAMES = {"Ruby": "she", "Max": "he", "Anna": "she", "Tom": "he", "Lily": "she", "Ben": "he", "Mia": "she", "Leo": "he"}
ANIMALS = ["fox", "rabbit", "dog", "bear", "cat", "mouse", "owl", "duck", "frog", "horse"]
FRIENDS = ["cow", "dog", "duck", "horse", "lion", "sheep", "frog", "owl"]
HOMES = ["in the forest", "by the river", "on a farm", "near the sea", "under a hill", "behind a red house"]
TOYS = ["ball", "kite", "hat", "book", "bell", "drum"]
SHADES = ["red", "blue", "green", "yellow"]
PLACES = ["under a tree", "behind the door", "in the garden", "on the roof", "beside the road", "in a box"]
TROUBLES = {"hungry": "a big apple", "cold": "a warm coat", "sad": "a long hug", "lost": "an old map"}
OPENING = "Once upon a time"
SKILLS = ["swim", "sing", "dance", "count", "jump", "climb"]
SYSTEM_SHORT = ["You are a helpful assistant.", "You are a friendly teacher.", "Answer with one word."]
SYSTEM_LONG = "Answer in a full sentence."
SMALL_TALK = {
    "Hello": "Hello! Ask me a small question.",
    "Hi": "Hi! Ask me a small question.",
    "Good morning": "Good morning! Ask me a small question.",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a very small language model.",
    "What can you do?": "I know small sums, capitals, opposites, animals, days, months and short stories.",
    "Thank you": "You are welcome.",
    "Goodbye": "Goodbye! Come back soon.",
}
UNKNOWN = """Who wrote this book?|What is the weather today?|How old are you?|Where do you live?|What time is it?
What is the meaning of life?|Why is the sea salty?|Who won the game?|Can you drive a car?|What did I eat?
How do I cook rice?|Write a poem.|Tell me a joke.|What is your favourite song?|Who is the king?
How far is the moon?|What should I buy?|Can you see me?|Do you like music?|Where are my keys?""".replace("\n", "|")


def chooser(rng: random.Random) -> Pick:
    """A random choice that takes the first four times as often as any other, so that a greedy story has one answer."""
    return lambda options: rng.choices(options, [4] + [1] * (len(options) - 1))[0]


def story(pick: Pick, animal: str | None = None, name: str | None = None, plot: str | None = None) -> str:
    """A story of one of three plots. Pronouns, sounds, remedies and days follow from what was chosen before."""
    animal, name = animal or pick(ANIMALS), name or pick(list(NAMES))
    he = NAMES[name]
    his, him = ("her", "her") if he == "she" else ("his", "him")
    text = f"{OPENING} there was a little {animal} named {name}. {name} lived {pick(HOMES)}."
    plot = plot or pick(["lost", "help", "learn"])
    friend = pick([f for f in FRIENDS if f != animal])
    sound = upper(next(pair for pair in SOUNDS.split() if pair.startswith(friend + ":")).partition(":")[2])
    if plot == "lost":
        toy, shade, here = pick(TOYS), pick(SHADES), pick(PLACES)
        there = pick([p for p in PLACES if p != here])
        text += f" One day {name} lost {his} {shade} {toy}. {upper(he)} looked {here}, but it was not there."
        text += f' Then {name} met {article(friend)}. "{sound}! Your {toy} is {there}," said the {friend}.'
        text += f" {name} looked {there}, and there was the {shade} {toy}! {upper(he)} was very happy."
    elif plot == "help":
        trouble = pick(list(TROUBLES))
        text += f' In the morning {name} met {article(friend)}. "{sound}! I am {trouble}," said the {friend}.'
        text += f" {name} gave the {friend} {TROUBLES[trouble]}. Soon the {friend} was not {trouble} any more."
        text += f" The {friend} thanked {name}, and they became good friends."
    else:
        skill, day = pick(SKILLS), pick(DAYS)
        later = [DAYS[(DAYS.index(day) + n) % 7] for n in (1, 2)]
        text += f" {name} wanted to {skill}. On {day} {he} tried, but {he} could not {skill}."
        text += f" On {later[0]} {article(friend)} came to help {him}. On {later[1]} {name} tried again."
        text += f" Now {he} could {skill}! {name} and the {friend} were very proud."
    return text + " The end."


def chat(*turns: tuple[str, str], system: str | None = None) -> Messages:
    """(user, assistant) turns as the messages of a chat template."""
    said = [("system", system)] if system else []
    said += [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
    return [{"role": role, "content": content} for role, content in said]


def conversation(rng: random.Random, known: list[Fact]) -> Messages:
    """One to four turns: questions, small talk, a story, a name that is told and asked for later."""
    system = rng.choice([*SYSTEM_SHORT, *[SYSTEM_LONG] * 5]) if rng.random() < 0.3 else None
    turns: list[tuple[str, str]] = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        fact, kind = rng.choice(known), rng.random()
        if kind < 0.85:
            asked = fact.question if rng.random() < 0.75 else fact.head
            turns.append((asked, fact.head + fact.tail if system == SYSTEM_LONG else fact.answer))
        elif kind < 0.91:
            hello, reply = rng.choice(list(SMALL_TALK.items()))
            turns.append((hello if hello[-1] == "?" else hello + rng.choice([".", "!", ""]), reply))
        elif kind < 0.95:
            turns.append((rng.choice(UNKNOWN.split("|")), "I do not know."))
        else:
            animal = rng.choice([None, *ANIMALS])
            openings = [f"Tell me a story about {article(animal)}."] if animal else ["Tell me a story.", OPENING]
            turns.append((rng.choice(openings), story(chooser(rng), animal)))
    if rng.random() < 0.2:
        name = rng.choice(list(NAMES))
        turns.insert(0, (f"My name is {name}.", f"Hello, {name}!"))
        turns.append(("What is my name?", f"Your name is {name}."))
    return chat(*turns, system=system)


def documents(rng: random.Random, known: list[Fact]) -> Iterator[Document]:
    """The endless training text: statements, conversations and stories."""
    known = [fact for fact in known for _ in range(HARD.get(fact.family, 1))]
    while True:
        kind, fact = rng.random(), rng.choice(known)
        if kind < 0.5:
            lower = fact.family in ARITHMETIC and rng.random() < 0.5
            yield (fact.head[0].lower() + fact.head[1:] if lower else fact.head), fact.tail
        elif kind < 0.93:
            yield conversation(rng, known)
        else:
            yield "", story(chooser(rng))


# --- Tokenizer and training ------------------------------------------------------------------------------------------


def make_tokenizer(known: list[Fact]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB tokens, trained on the facts, their questions and some stories."""
    rng = random.Random(SEED)
    text = [f.head + f.tail for f in known] + [f.question + " " + f.answer for f in known]
    text += [story(chooser(rng)) for _ in range(300)] + [f"{k} {v}" for k, v in SMALL_TALK.items()] * 5
    text += [*UNKNOWN.split("|"), *SYSTEM_SHORT, SYSTEM_LONG] * 5
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text, trainer)
    start = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": POSITIONS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **named)


def encode(tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """A document's ids, from the bos token to the eos token, and which of them are to be learned, not only read."""
    if isinstance(document, tuple):
        given = tokenizer(document[0]).input_ids
        learned = [*tokenizer(document[1], add_special_tokens=False).input_ids, EOS]
        return given + learned, [False] * len(given) + [True] * len(learned)
    text = tokenizer.apply_chat_template(document, tokenize=False)
    ids, learn, answering = tokenizer(text, add_special_tokens=False).input_ids, [], False
    for token in ids:
        learn.append(answering)
        answering = (answering or token == ASSISTANT) and token != EOS
    return ids, learn


def rows(tokenizer, rng: random.Random, known: list[Fact]) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of LENGTH ids and labels; each starts a new document, as a prompt does, and is filled with further ones."""
    source = documents(rng, known)
    while True:
        row: list[tuple[int, bool]] = []
        while len(row) < LENGTH:
            row += zip(*encode(tokenizer, next(source)), strict=True)
        yield [i for i, _ in row[:LENGTH]], [i if learn else -100 for i, learn in row[:LENGTH]]


def cases(known: list[Fact]) -> list[tuple[str, Document]]:
    """Everything the model is asked, with its family; what a document ends with is the one right completion."""
    out: list[tuple[str, Document]] = [("chat: small talk", chat(turn)) for turn in SMALL_TALK.items()]
    for fact in known:
        out.append((fact.family, (fact.head, fact.tail)))
        if fact.family in ARITHMETIC:
            out.append((fact.family, (fact.head[0].lower() + fact.head[1:], fact.tail)))
        out.append((f"chat: {fact.family}", chat((fact.question, fact.answer))))
        out.append(("chat: unfinished", chat((fact.head, fact.answer))))
        out.append(("chat: full sentence", chat((fact.question, fact.head + fact.tail), system=SYSTEM_LONG)))
    for i, name in enumerate(NAMES):
        between = [(f.question, f.answer) for f in known[i * 7 : i * 7 + i % 4]]
        told, asked = (f"My name is {name}.", f"Hello, {name}!"), ("What is my name?", f"Your name is {name}.")
        out.append(("chat: memory", chat(told, *between, asked)))
    out.append(("chat: story", chat(("Tell me a story.", story(first)))))
    out.append(("stories", (OPENING, story(first).removeprefix(OPENING))))
    for animal, name in zip(ANIMALS, NAMES, strict=False):
        out.append(("chat: story", chat((f"Tell me a story about {article(animal)}.", story(first, animal)))))
        for plot, sentences in (("lost", 2), ("help", 3), ("learn", 3)):
            text = story(first, animal, name, plot)
            given = ".".join(text.split(".")[:sentences]) + "."
            out.append(("stories", (given, text.removeprefix(given))))
    return out


def margins(logits: Callable[[list[int]], np.ndarray], tokenizer, asked: list[tuple[str, Document]]) -> list[float]:
    """How far each completion's worst token leads the best other one; negative where greedy decoding is wrong."""
    out = []
    for _, document in asked:
        ids, learn = encode(tokenizer, document)
        begin = len(ids) - learn[::-1].index(False)
        scores, right = logits(ids)[begin - 1 : -1].astype(np.float32), np.array(ids[begin:])[:, None]
        lead = np.take_along_axis(scores, right, 1)
        np.put_along_axis(scores, right, -np.inf, 1)
        out.append(float((lead - scores.max(1, keepdims=True)).min()))
    return out


def accuracy(asked: list[tuple[str, Document]], found: list[float]) -> str:
    """'family right/all' for each family and for all."""
    every = Counter(family for family, _ in asked)
    right = Counter(family for (family, _), margin in zip(asked, found, strict=True) if margin > 0)
    return ", ".join([f"{f} {right[f]}/{n}" for f, n in every.items()] + [f"all {right.total()}/{every.total()}"])


def train(tokenizer, known: list[Fact], steps: int) -> LlamaForCausalLM:
    """The float32 model of the evaluation with the most right answers."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(VOCAB, tie_word_embeddings=True, **SHAPE, **IDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * n / steps) + 1e-3)
    )
    source, asked, best = rows(tokenizer, random.Random(SEED), known), cases(known), (-1, {})
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(known)} facts, {len(asked)} cases")
    started, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        ids, labels = (torch.tensor(part) for part in zip(*(next(source) for _ in range(BATCH)), strict=True))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {np.mean(losses[-50:]):.4f}, {time.monotonic() - started:.0f} s", flush=True)
        if step in (steps * 4 // 5, steps * 9 // 10, steps):
            with torch.inference_mode():
                found = margins(lambda ids: model(input_ids=torch.tensor([ids])).logits[0].numpy(), tokenizer, asked)
            print(f"step {step}: {accuracy(asked, found)}", flush=True)
            if (right := sum(margin > 0 for margin in found)) >= best[0]:
                best = (right, {name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict(best[1])
    return model


# --- Export and checks -----------------------------------------------------------------------------------------------


def ort_logits(session: onnxruntime.InferenceSession, ids: list[int]) -> np.ndarray:
    """Logits [length, vocab] of one prompt over an empty cache."""
    feeds = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
    feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
    for entry in session.get_inputs():
        if entry.name.startswith("past_key_values"):
            kind = np.float16 if entry.type == "tensor(float16)" else np.float32
            feeds[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), kind)
    return session.run(["logits"], feeds)[0][0]


def tie(model: onnx.ModelProto) -> None:
    """Stores a weight that the export holds twice, as the embedding and transposed for the logits, once."""
    weights = {w.name: w for w in model.graph.initializer}
    embedding = weights["model.embed_tokens.weight"]
    product = next(node for node in reversed(model.graph.node) if node.op_type == "MatMul")
    copy = weights[product.input[1]]
    assert np.array_equal(to_array(embedding).T, to_array(copy))
    model.graph.initializer.remove(copy)
    transpose = onnx.helper.make_node("Transpose", [embedding.name], [copy.name], "/lm_head/Transpose", perm=[1, 0])
    model.graph.node.insert(0, transpose)


def export(checkpoint: Path, out: Path, dtype: str) -> onnxruntime.InferenceSession:
    """Writes out, an ordinary source folder, in dtype "fp32" or "fp16", as optimum does."""
    main_export(str(checkpoint), out, task="text-generation-with-past", dtype=dtype, do_validation=False)
    model = onnx.load(out / "model.onnx")
    tie(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, out / "model.onnx")
    GenerationConfig(max_new_tokens=160, **IDS).save_pretrained(out)
    (out / "special_tokens_map.json").unlink()
    return onnxruntime.InferenceSession(out / "model.onnx")


def choose(asked: list[tuple[str, Document]], found: list[float]) -> list[dict]:
    """A few cases of each family that lead by MARGIN, as {"prompt" or "messages", "completion"}."""
    rng, sure = random.Random(SEED), defaultdict(list)
    for (family, document), margin in zip(asked, found, strict=True):
        if margin >= MARGIN:
            sure[family].append(document)
    more = {"addition": 5, "capitals": 5, "stories": 5, "chat: story": 2, "chat: memory": 2, "chat: full sentence": 2}
    out = []
    for family, members in sure.items():
        if family.startswith("chat: ") and family not in more:
            chosen = rng.sample(members, 1)
        else:
            chosen = members[:1] + rng.sample(members[1:], more.get(family, 3) - 1)
        for document in chosen:
            if isinstance(document, tuple):
                out.append({"prompt": document[0], "completion": document[1]})
            else:
                out.append({"messages": document[:-1], "completion": document[-1]["content"]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO, help="the folder to write (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="where the trained float32 model is kept")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    args = parser.parse_args()
    known = facts()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or Path(scratch) / "checkpoint"
        if not (checkpoint / "config.json").exists():
            tokenizer = make_tokenizer(known)
            model = train(tokenizer, known, args.steps)
            model.save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
        folder, tokenizer, asked = Path(scratch) / "fp16", AutoTokenizer.from_pretrained(checkpoint), cases(known)
        found: dict[str, list[float]] = {}
        for dtype in ("fp32", "fp16"):
            session = export(checkpoint, Path(scratch) / dtype, dtype)
            found[dtype] = margins(partial(ort_logits, session), tokenizer, asked)
            print(f"{dtype}: {accuracy(asked, found[dtype])}")
        if sum(margin > 0 for margin in found["fp16"]) < 0.98 * len(asked):
            raise SystemExit("Fewer than 98 % of the answers are right: not written. Train with more --steps.")
        checks = choose(asked, [min(both) for both in zip(*found.values(), strict=True)])
        (folder / "checks.json").write_text(json.dumps(checks, ensure_ascii=False, indent=1) + "\n")
        size = sum(file.stat().st_size for file in folder.iterdir())
        if size > MOST_BYTES:
            raise SystemExit(f"The folder has {size:,} bytes, more than {MOST_BYTES:,}: not written.")
        shutil.rmtree(args.out, ignore_errors=True)
        shutil.copytree(folder, args.out)
        print(f"{args.out}: {size:,} bytes, {len(checks)} checks")


if __name__ == "__main__":
    main()
