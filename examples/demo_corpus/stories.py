"""Short stories: a cast, an opening, one of the plots and a closing line."""

import random

from .adventures import ADVENTURES
from .cast import (
    ANIMALS,
    BOYS,
    DAYS,
    GIRLS,
    HE_ANIMALS,
    HOBBIES,
    SHE_ANIMALS,
    TOWN_ELDERS,
    TOWN_SPOTS,
    TOWNS,
    TRAIT_SHOWN,
    TRAITS,
    WOOD_ELDERS,
    WOOD_SPOTS,
    WOODS,
)
from .everyday import EVERYDAY, NEWCOMER
from .grammar import expand, pick, shuffled, with_article

PLOTS = [*ADVENTURES, *EVERYDAY]

SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
HE = {"he": "he", "him": "him", "his": "his", "himself": "himself"}

OPENING = """
[Once upon a time|Once upon a time|Long ago|Once|Many years ago] there was {intro} who lived in {place}, {where}.
{Mind}|
[Once upon a time|Once upon a time|Long ago], in {place}, {where}, there lived {intro}. {Mind}|
In {place}, {where}, lived {intro}. {Mind}|
There was once {intro}. {He} lived with {his} {kin} in {home}, not far from {spot1} in {place}. {Mind}|
{Hero} was {kind_intro} who lived in {home} in {place}, {where}. {Mind}
"""
MIND = """
{shown} {Friend_line}|
{He} loved {hobby}. {Friend_line}|
{He} loved {hobby}, most of all with {friend}, {flook}.
"""
FRIEND_LINE = "[{His} best friend was|Next door lived|{He} had a good friend,] {flook} named {friend}."
MIND_ALONE = "{shown} And {he} loved {hobby}.|{shown}"

CLOSING = """
|||That night, the moon shone over {place}, and {hero} fell asleep with a smile.|
And if you come to {place}, {hero} will tell you the story.|
The end.|The end.|And so the day ended well.|
When {he} told {his} {kin} about it that evening, {his} {kin} smiled and said, "I am proud of you."
"""

# what a reader may ask for: a phrase for the request, and what it fixes
TOPICS = "Tell me a story about {about}.|Please tell me a story about {about}.|Write a short story about {about}."


def _person(rng: random.Random, female: bool) -> dict[str, str]:
    name, kind = pick(GIRLS if female else BOYS, rng), "girl" if female else "boy"
    home = pick(["a small house", "a house with a green door", "a little cottage", "a room above a shop"], rng)
    look = pick(["tall", "dark-haired", "red-haired", "cheerful", "barefoot", "freckled"], rng)
    return {"name": name, "kind": kind, "look": f"a {look} {kind}", "home": home} | (SHE if female else HE)


def _animal(rng: random.Random, female: bool, not_kind: str = "") -> dict[str, str]:
    kind, look, home = pick([animal for animal in ANIMALS if animal[0] != not_kind], rng)
    name = pick(SHE_ANIMALS if female else HE_ANIMALS, rng)
    return {"name": name, "kind": kind, "look": f"a {look} {kind}", "home": f"a {home}"} | (SHE if female else HE)


def scene(rng: random.Random) -> dict[str, str]:
    """The slots that every plot may use: people in one of the towns, or animals in a wood."""
    in_town, female = rng.random() < 0.5, rng.random() < 0.5
    if in_town:
        town = pick(TOWNS, rng)
        hero, friend = _person(rng, female), _person(rng, not female)
        place, where = town.name, pick([f"a town {town.where}", f"the town of {town.craft} {town.where}"], rng)
        spots, elder = TOWN_SPOTS, pick([*TOWN_ELDERS, town.maker], rng)
    else:
        hero = _animal(rng, female)
        friend = _animal(rng, not female, not_kind=hero["kind"])
        place, where = pick(WOODS, rng)
        spots, elder = WOOD_SPOTS, pick(WOOD_ELDERS, rng)
    trait = pick(TRAITS, rng)
    slots = hero | {f"f{key}": value for key, value in friend.items()}
    slots |= dict(zip(("spot1", "spot2", "spot3"), shuffled(spots, rng, 3), strict=True))
    return slots | {
        "hero": hero["name"],
        "friend": friend["name"],
        "intro": f"{with_article(trait)} {pick(['little', 'young'], rng)} {hero['kind']} named {hero['name']}",
        "kind_intro": f"{with_article(trait)} {hero['kind']}",
        "shown": TRAIT_SHOWN[trait],
        "hobby": pick(HOBBIES, rng),
        "place": place,
        "where": where,
        "elder": elder,
        "kin": pick(["mother", "father", "grandmother", "grandfather", "aunt", "uncle"], rng),
        "day": pick(DAYS, rng),
        "friend_line": FRIEND_LINE,
    }


def _tell(rng: random.Random) -> tuple[dict[str, str], str]:
    """The slots of a story and its text without a title."""
    slots, plot = scene(rng), pick(PLOTS, rng)
    for names, options in plot.draws.items():
        option = pick(options, rng)
        slots |= dict(zip(names.split(), (option,) if isinstance(option, str) else option, strict=True))
    # the newcomer is the friend, whom nobody knows yet
    slots["mind"] = MIND_ALONE if plot is NEWCOMER else MIND
    slots["title"] = expand(plot.titles, slots, rng)
    text = "\n\n".join(expand(part, slots, rng).strip() for part in (OPENING, plot.text, CLOSING))
    return slots, text.strip()


def story(rng: random.Random) -> str:
    """A story of 200 to 350 words, one time in five with its title above it."""
    slots, text = _tell(rng)
    return f"{slots['title']}\n\n{text}" if rng.random() < 0.2 else text


def story_request(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story that fits it."""
    slots, text = _tell(rng)
    about = [with_article(slots["kind"]), slots["hero"], f"{slots['hero']} and {slots['friend']}", slots["place"]]
    if rng.random() < 0.2:
        return pick(["Tell me a story.", "Please tell me a story.", "Can you tell me a story?"], rng), text
    return expand(TOPICS, {"about": pick(about, rng)}, rng), text
