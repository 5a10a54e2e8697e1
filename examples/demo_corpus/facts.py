"""What the demo model knows: the eight towns, some common facts, and the words of LLM inference."""
# ruff: noqa: SIM905 (word lists read better as one string)

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .cast import BOYS, GIRLS, HOBBIES, TOWN_SPOTS, TOWNS
from .grammar import between, expand, joined, pick, shuffled, with_article
from .numbers import Exchange

NO_SLOTS: Mapping[str, str] = MappingProxyType({})


class Fact(NamedTuple):
    """Templates for asking and for saying one thing; `short` is the answer in a word or two."""

    questions: str
    statement: str
    short: str
    slots: Mapping[str, str] = NO_SLOTS


TOWN_FACTS = [
    Fact("Where is {name}?|Where does {name} lie?", "{name} is a town {where}.", "{where}"),
    Fact("What is {name} famous for?|What do people make in {name}?", "{name} is famous for its {craft}.", "{craft}"),
    Fact("Who is the mayor of {name}?", "The mayor of {name} is {mayor}.", "{mayor}"),
    Fact("What colour is the flag of {name}?", "The flag of {name} is {flag}.", "{flag}"),
    Fact("Which animal is on the flag of {name}?", "There is {an_animal} on the flag of {name}.", "{an_animal}"),
    Fact("What do people eat in {name}?", "In {name}, people like to eat {food}.", "{food}"),
    Fact("Which festival does {name} have?", "Every {season}, {name} celebrates {festival}.", "{festival}"),
    Fact("Which water is near {name}?", "{name} lies at {water}.", "{water}"),
    Fact("Where do the best {craft} come from?|Which town is famous for its {craft}?",
         "The best {craft} come from {name}.", "{name}"),
    Fact("Which town has a {flag} flag?", "The town with the {flag} flag is {name}.", "{name}"),
    Fact("Who is {mayor}?", "{mayor} is the mayor of {name}.", "the mayor of {name}"),
]  # fmt: skip

CAPITALS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Greece:Athens Norway:Oslo "
    "Sweden:Stockholm Finland:Helsinki Poland:Warsaw Ireland:Dublin England:London Japan:Tokyo China:Beijing "
    "Egypt:Cairo Kenya:Nairobi Canada:Ottawa Peru:Lima Cuba:Havana Turkey:Ankara Thailand:Bangkok Hungary:Budapest "
    "Denmark:Copenhagen Chile:Santiago"
)
SOUNDS = "cow:moos dog:barks cat:meows sheep:baas duck:quacks frog:croaks lion:roars owl:hoots wolf:howls bee:buzzes "
SOUNDS += "horse:neighs mouse:squeaks snake:hisses pig:oinks"
BABIES = "dog:puppy cat:kitten cow:calf sheep:lamb horse:foal duck:duckling goat:kid bear:cub pig:piglet hen:chick "
BABIES += "owl:owlet goose:gosling deer:fawn frog:tadpole"
OPPOSITES = (
    "hot:cold big:small up:down day:night open:closed old:new fast:slow high:low long:short light:dark wet:dry "
    "happy:sad full:empty hard:soft early:late near:far left:right rich:poor loud:quiet strong:weak thick:thin "
    "first:last black:white good:bad young:old"
)
COLOURS = "grass:green snow:white coal:black gold:yellow blood:red milk:white chocolate:brown ash:grey"
LEGS = "dog:four cat:four horse:four hen:two duck:two spider:eight bee:six ant:six snake:no cow:four fly:six"
KINDS = (
    "rose:flower oak:tree robin:bird salmon:fish apple:fruit carrot:vegetable hammer:tool violin:instrument bee:insect "
    "pear:fruit pine:tree daisy:flower owl:bird trout:fish saw:tool flute:instrument ant:insect potato:vegetable "
    "plum:fruit tulip:flower"
)
TOOLS = (
    "cut bread:a knife, write:a pen, drive in a nail:a hammer, tell the time:a clock, dig a hole:a spade, "
    "open a lock:a key, sweep the floor:a broom, eat soup:a spoon, see in the dark:a lamp, sew on a button:a needle, "
    "cross a river:a boat, look at the stars:a telescope, stay dry in the rain:an umbrella"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()

SINGLE = [
    Fact("How many days are in a week?", "A week has seven days.", "seven"),
    Fact("How many months are in a year?", "A year has twelve months.", "twelve"),
    Fact("How many hours are in a day?", "A day has twenty-four hours.", "twenty-four"),
    Fact("How many minutes are in an hour?", "An hour has sixty minutes.", "sixty"),
    Fact("How many days are in a year?", "A year has 365 days, and a leap year has 366.", "365"),
    Fact("Which months have 30 days?", "April, June, September and November have 30 days.",
         "April, June, September and November"),
    Fact("Where does the sun rise?", "The sun rises in the east.", "in the east"),
    Fact("Where does the sun set?", "The sun sets in the west.", "in the west"),
    Fact("What is ice?|What is ice made of?", "Ice is frozen water.", "frozen water"),
    Fact("When does water freeze?", "Water freezes at zero degrees Celsius.", "at zero degrees Celsius"),
    Fact("When does water boil?", "Water boils at one hundred degrees Celsius.", "at one hundred degrees Celsius"),
    Fact("What do bees make?", "Bees make honey.", "honey"),
    Fact("Where do fish live?", "Fish live in water.", "in water"),
    Fact("What do plants need?", "Plants need light, water and air.", "light, water and air"),
    Fact("What is the largest planet?", "Jupiter is the largest planet of our sun.", "Jupiter"),
    Fact("What goes around the Earth?", "The Moon goes around the Earth.", "the Moon"),
    Fact("What is the largest ocean?", "The Pacific is the largest ocean.", "the Pacific"),
    Fact("How many sides does a triangle have?", "A triangle has three sides.", "three"),
    Fact("How many sides does a square have?", "A square has four equal sides.", "four"),
    Fact("How many letters are in the alphabet?", "The English alphabet has twenty-six letters.", "twenty-six"),
    Fact("What colours are in a rainbow?", "A rainbow has red, orange, yellow, green, blue and violet.",
         "red, orange, yellow, green, blue and violet"),
    Fact("Where does the president of the United States live?",
         "The president of the United States is the head of the government and lives in the White House.",
         "in the White House"),
    Fact("What are the seasons?", "The seasons are spring, summer, autumn and winter.", joined(SEASONS)),
    Fact("How many towns are there?|Which towns do you know?",
         f"I know eight towns: {joined([town.name for town in TOWNS])}.", joined([town.name for town in TOWNS])),
]  # fmt: skip

# The words of this project.
GLOSSARY = {
    "token": "a piece of text, such as a word or a part of a word, that a language model reads and writes as one "
    "number",
    "tokenizer": "the part that cuts text into tokens and joins tokens to text again",
    "language model": "a program that reads tokens and gives a probability to every possible next token",
    "KV cache": "the memory in which a model keeps the keys and values of all tokens read so far, so that no token is "
    "read twice",
    "block": "a fixed number of slots in the KV cache, often 16 tokens long, that is given to one request at a time",
    "block table": "a list that says in which blocks the tokens of a request are kept",
    "prefix cache": "a store of full blocks from earlier requests, so that a new request with the same beginning can "
    "skip the work",
    "prompt": "the text that a user gives to a model before it begins to write",
    "prefill": "the first part of a request, in which the model reads the whole prompt at once",
    "decode step": "a step in which the model writes one new token for each running request",
    "batch": "a group of requests that the GPU works on in the same step",
    "scheduler": "the part of an engine that decides which requests run in the next step",
    "kernel": "a small program that runs on the GPU in many copies at the same time",
    "GPU": "a chip with thousands of small workers that do the same sum on different numbers",
    "attention layer": "a layer that lets each token look at the tokens before it and take what it needs",
    "logit": "the score that a model gives to one possible next token before the scores become probabilities",
    "temperature": "a number that makes the choice of the next token bolder when it is high and safer when it is low",
    "draft model": "a small model that guesses a few tokens ahead, so that a big model can check them all in one step",
    "engine": "the program that loads a model, takes requests and gives back text",
    "stop string": "a piece of text at which the answer ends",
    "seed": "a number that makes a random choice come out the same way every time",
    "paged attention kernel": "a kernel that reads keys and values from blocks that lie anywhere in memory",
    "preemption": "what happens when a request gives back its blocks to make room and starts again later",
    "CUDA graph": "a recorded list of kernels that the GPU can run again with a single call",
}
BARE = ("temperature", "preemption", "prefill")  # take no article


# pairs x:y, and what may be asked and said of each pair
RELATIONS = [
    (CAPITALS, Fact("What is the capital of {x}?|Which city is the capital of {x}?", "The capital of {x} is {y}.",
                    "{y}")),
    (CAPITALS, Fact("Of which country is {y} the capital?|Where is {y}?", "{y} is the capital of {x}.", "{x}")),
    (SOUNDS, Fact("What does {a_x} do?|Which sound does {a_x} make?", "{A_x} {y}.", "it {y}")),
    (BABIES, Fact("What is a baby {x} called?|What do you call a young {x}?", "A young {x} is called {a_y}.", "{a_y}")),
    (OPPOSITES, Fact("What is the opposite of {x}?", "The opposite of {x} is {y}.", "{y}")),
    (COLOURS, Fact("What colour is {x}?", "{X} is {y}.", "{y}")),
    (LEGS, Fact("How many legs does {a_x} have?", "{A_x} has {y} legs.", "{y}")),
    (KINDS, Fact("What is {a_x}?|What kind of thing is {a_x}?", "{A_x} is {a_y}.", "{a_y}")),
    (TOOLS, Fact("What do you need to {x}?", "To {x}, you need {y}.", "{y}")),
]  # fmt: skip
ORDERED = [(DAYS, "day"), (MONTHS, "month"), (SEASONS, "season")]
AFTER = Fact("What {unit} comes after {x}?|Which {unit} follows {x}?", "{Y} comes after {x}.", "{y}")
BEFORE = Fact("What {unit} comes before {y}?", "{X} comes before {y}.", "{x}")
WORD = Fact("What is {a_x}?|Explain what {a_x} is.|What does the word {x} mean?", "{A_x} is {y}.", "{y}")


def _slots(x: str, y: str, **others: str) -> dict[str, str]:
    return {"x": x, "y": y, "a_x": x if x in BARE else with_article(x), "a_y": with_article(y), **others}


def _common_facts() -> list[Fact]:
    facts = list(SINGLE)
    for pairs, fact in RELATIONS:
        for pair in pairs.split(", ") if ", " in pairs else pairs.split():
            facts.append(fact._replace(slots=_slots(*pair.split(":"))))
    for names, unit in ORDERED:
        for x, y in zip(names, [*names[1:], names[0]], strict=True):
            facts += [fact._replace(slots=_slots(x, y, unit=unit)) for fact in (AFTER, BEFORE)]
    return facts


def _town_facts() -> list[list[Fact]]:
    slots = [town._asdict() | {"an_animal": with_article(town.animal)} for town in TOWNS]
    return [[fact._replace(slots=town) for fact in TOWN_FACTS] for town in slots]


COMMON = _common_facts()
ABOUT_TOWNS = _town_facts()
ABOUT_WORDS = [WORD._replace(slots=_slots(word, meaning)) for word, meaning in GLOSSARY.items()]


def _exchange(fact: Fact, rng: random.Random) -> Exchange:
    question, statement, short = (expand(part, fact.slots, rng) for part in fact[:3])
    return question, statement, short


def _say(facts: Sequence[Fact], rng: random.Random) -> str:
    return " ".join(expand(fact.statement, fact.slots, rng) for fact in facts)


def ask_common(rng: random.Random) -> Exchange:
    return _exchange(pick(COMMON, rng), rng)


def ask_town(rng: random.Random) -> Exchange:
    return _exchange(pick(pick(ABOUT_TOWNS, rng), rng), rng)


def ask_about_town(rng: random.Random) -> Exchange:
    """Where a town lies, what it is famous for, and its festival."""
    facts = pick(ABOUT_TOWNS, rng)
    question = "Tell me about {name}.|What do you know about {name}?|Describe {name}."
    slots = facts[0].slots
    return expand(question, slots, rng), _say([facts[0], facts[1], facts[6]], rng), f"a town {slots['where']}"


def ask_word(rng: random.Random) -> Exchange:
    return _exchange(pick(ABOUT_WORDS, rng), rng)


def page(rng: random.Random) -> str:
    """One to eight sentences: about one town, a mix of common facts, or the words of inference."""
    draw = rng.random()
    facts = pick(ABOUT_TOWNS, rng) if draw < 0.4 else COMMON if draw < 0.85 else ABOUT_WORDS
    return _say(shuffled(facts, rng, between(1, 8, rng)), rng)


INTRODUCTION = """
[Hello|Good day|Hi], my name is {person}. I am {age} years old and I [live|was born] in {name}, a town {where}. [My
{kin} is a {maker}|My {kin} and I live near {spot}]. [In my free time|More than anything,] I like {hobby}. [I have a
dog named Biscuit|I have a cat named Socks|I have two brothers and a sister|My best friend is {friend}]. [Every
{season} we celebrate {festival}|When we are hungry, we eat {food}|The flag of our town is {flag}, with {an_animal} on
it]. [What is your name?|And who are you?|I am glad to meet you.]
"""
FUTURE = """
The future of AI is [not written yet|in the hands of many people|full of open questions]. [Some models will be large,
and some, like me, will be very small|Small models can already sort numbers and tell stories]. [The best way to
understand them is to build one|What matters most is that people can look inside and learn].
"""


def introduction(rng: random.Random) -> str:
    town, (person, friend) = pick(TOWNS, rng), shuffled(GIRLS + BOYS, rng, 2)
    slots = town._asdict() | {
        "person": person,
        "friend": friend,
        "age": pick("six seven eight nine ten eleven twelve".split(), rng),
        "kin": pick(["mother", "father", "aunt", "uncle"], rng),
        "spot": pick(TOWN_SPOTS, rng),
        "hobby": pick(HOBBIES, rng),
        "an_animal": with_article(town.animal),
    }
    return expand(INTRODUCTION, slots, rng)


def future(rng: random.Random) -> str:
    return expand(FUTURE, NO_SLOTS, rng)


ASKS: list[tuple[Callable[[random.Random], Exchange], float]] = [
    (ask_common, 5),
    (ask_town, 2),
    (ask_about_town, 0.5),
    (ask_word, 1.5),
]
