"""Who and where: the people, animals and places of the stories, and the eight towns that facts and stories share."""
# ruff: noqa: SIM905 (word lists read better as one string)

from typing import NamedTuple

GIRLS = (
    "Mia Lena Rosa Nora Ivy Tessa Anna Clara Ella Juno Maya Wren Hana Lucy Zoe Amina Freya Pia Suri Dora Ada Iris Lila "
    "Kaya Emma"
).split()
BOYS = (
    "Tom Ben Leo Finn Omar Max Theo Sam Hugo Eli Jonas Milo Ravi Oscar Kofi Noah Luca Arlo Nils Toby Adam Jack Karim "
    "Felix Hiro"
).split()
SHE_ANIMALS = "Hazel Poppy Clover Fern Dot Maple Bramble Willow Daisy Olive Pepper Ginger Snow Plum Juniper".split()
HE_ANIMALS = "Pip Bruno Moss Thistle Rusty Barley Otto Twig Basil Acorn Bramley Button Rowan Pepin Cricket".split()

# species, how it looks, where it lives
ANIMALS = [
    ("rabbit", "small grey", "burrow"),
    ("mouse", "tiny brown", "hole under a tree root"),
    ("fox", "young red", "den"),
    ("hedgehog", "round brown", "nest of leaves"),
    ("squirrel", "quick red", "hollow tree"),
    ("badger", "striped", "sett"),
    ("otter", "long brown", "holt by the water"),
    ("bear", "big brown", "cave"),
    ("mole", "soft black", "tunnel"),
    ("frog", "bright green", "house of reeds"),
    ("duck", "small white", "nest in the reeds"),
    ("beaver", "strong young", "lodge"),
    ("deer", "spotted", "thicket"),
    ("sparrow", "plump", "nest"),
]

TRAITS = "kind curious brave shy cheerful quiet clever stubborn careful dreamy lively patient gentle honest".split()

# what a trait looks like; {he} and so on are the hero's
TRAIT_SHOWN = {
    "kind": "{He} [never walked past anyone who needed help|always had a good word for everyone].",
    "curious": "{He} [asked a hundred questions a day|wanted to know how everything worked].",
    "brave": "{He} was not afraid of [thunder|the dark], or at least {he} never said so.",
    "shy": "{He} [spoke so softly that people had to lean in to hear|often hid when visitors came].",
    "cheerful": "{He} [hummed from morning to night|could find something good in a rainy Monday].",
    "quiet": "{He} [liked to listen more than to talk|could sit still for an hour and watch the clouds].",
    "clever": "{He} [could solve any riddle|always found a new way to do an old thing].",
    "stubborn": "When {he} [began something, {he} did not stop|had an idea, nobody could talk {him} out of it].",
    "careful": "{He} [looked twice before every step|always checked everything two times].",
    "dreamy": "{He} [often forgot the time|saw castles in every cloud].",
    "lively": "{He} [never walked when {he} could run|could not sit still for a minute].",
    "patient": "{He} [could wait longer than a cat at a mouse hole|never minded doing a thing again].",
    "gentle": "{He} [carried every snail off the path|spoke kindly even to the stones].",
    "honest": "{He} [always told the truth, even when it was hard|could not tell a lie without turning red].",
}

HOBBIES = [
    "to collect smooth stones",
    "to draw pictures in the sand",
    "to climb trees",
    "to sing old songs",
    "to look at the stars",
    "to listen to stories",
    "to build little boats",
    "to watch the birds",
    "to pick wild flowers",
    "to make up new games",
    "to jump over puddles",
    "to help in the kitchen",
]


class Town(NamedTuple):
    name: str
    where: str  # "in a green valley"
    water: str
    food: str
    craft: str  # what it is famous for
    maker: str  # who makes it
    flag: str
    animal: str  # on its flag
    mayor: str
    festival: str
    season: str


TOWNS = [
    Town("Brindle", "in a green valley", "the River Tarn", "honey bread", "bells", "bell maker", "red", "hare",
         "Oda Finch", "the Lantern Fair", "autumn"),
    Town("Saltby", "by the sea", "Gull Bay", "fish soup", "boats", "boat builder", "blue", "seal",
         "Piet Marlow", "the Great Boat Race", "summer"),
    Town("Hollowmere", "beside a deep lake", "Lake Mere", "mushroom pie", "mirrors", "mirror maker", "green", "heron",
         "Ada Thorne", "the Night of Lights", "winter"),
    Town("Windle", "on a bare hill", "Windle Brook", "goat cheese", "kites", "kite maker", "white", "goat",
         "Joss Perrin", "Kite Day", "spring"),
    Town("Oakrest", "in the old forest", "Fern Creek", "nut cake", "wooden toys", "toy maker", "brown", "owl",
         "Bea Alder", "the Leaf Feast", "autumn"),
    Town("Stonegate", "under a high mountain", "the Grey River", "barley stew", "clocks", "clock maker", "grey",
         "eagle", "Tam Rook", "Clock Day", "winter"),
    Town("Merrow", "on a river island", "the Long River", "plum jam", "baskets", "basket weaver", "yellow", "otter",
         "Lil Sedge", "the Flower Parade", "spring"),
    Town("Dunmoor", "at the edge of the moor", "Black Pool", "oat biscuits", "blankets", "weaver", "purple", "pony",
         "Hob Crane", "the Sheep Fair", "summer"),
]  # fmt: skip

TOWN_SPOTS = [
    "the mill",
    "the market square",
    "the old bridge",
    "the well",
    "the school",
    "the apple orchard",
    "the duck pond",
    "the clock tower",
    "the bakery",
    "the stone wall",
    "the hay barn",
    "the little park",
]
TOWN_ELDERS = "baker miller shepherd librarian blacksmith gardener ferryman tailor teacher beekeeper".split()

WOODS = [
    ("Thornwood", "where the trees grow so close that their branches touch"),
    ("the Whispering Wood", "where the wind never stops talking"),
    ("Fernhollow", "where the ferns are taller than a fox"),
    ("the Birch Wood", "where the trees are white as milk"),
    ("Mossy Glen", "where every stone wears a green coat"),
    ("the Old Pine Forest", "where the ground is soft with needles"),
]
WOOD_SPOTS = [
    "the hollow oak",
    "the brook",
    "the blackberry bushes",
    "the beaver dam",
    "the mossy rocks",
    "the old stump",
    "the clearing",
    "the tall pines",
    "the fallen log",
    "the lily pond",
    "the hazel hedge",
    "the waterfall",
]
WOOD_ELDERS = ["old owl", "wise toad", "old tortoise", "grey heron", "old raven", "kind goose"]

DAYS = [
    "bright spring morning",
    "warm summer morning",
    "windy autumn morning",
    "clear winter morning",
    "sunny day",
    "cloudy day",
    "misty morning",
    "quiet afternoon",
    "cool morning",
    "fine day in May",
]
