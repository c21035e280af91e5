"""Text to hide something in: sentences of many kinds from slots and a seed; no two haystacks are alike.

Genres in ``UNSEEN`` are left out when selection is tuned: what is reported covers text of kinds that nothing
was fitted to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# ruff: noqa: SIM905 - a hundred quoted words are harder to read
NAMES = """
Marta Lena Tomas Ruth Oskar Nadia Viktor Elsa Hugo Clara Pavel Irene Jonas Mira Anton Greta Felix Dora
Simon Vera
""".split()
TOWNS = """
Alden Brookfield Carnmore Dunwick Eastham Farrow Glenside Hartley Inverby Kelford Lorne Milbury Norwood
Oakhurst Penrith Ravensby Selkirk Thornton Upton Westbrook
""".split()
PLACES = (
    "harbour office|old mill|city library|north tower|glass factory|railway station|music school|post office"
    "|boat house|wine cellar|town museum|fire station|flower market|stone bridge inn|summer house|court house"
    "|printing shop|grain store|bell tower|tea room"
).split("|")
FRUIT = "apple pear plum cherry quince fig melon orange lemon peach grape apricot".split()
COLOURS = "red green blue yellow purple orange brown silver golden violet white black".split()

_SLOTS: dict[str, Sequence[str]] = {
    "name": NAMES,
    "town": TOWNS,
    "place": PLACES,
    "fruit": FRUIT,
    "colour": COLOURS,
    "season": ("spring", "summer", "autumn", "winter"),
    "way": ("north", "south", "east", "west"),
    "animal": ("sheep", "geese", "cattle", "goats", "horses", "bees"),
    "crop": ("barley", "rye", "hops", "flax", "oats", "beans"),
    "job": ("baker", "doctor", "clerk", "painter", "teacher", "carpenter", "sailor", "gardener"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "part": ("roof", "pump", "gate", "boiler", "floor", "window frame", "staircase", "chimney"),
    "mood": ("quiet", "windy", "cold", "bright", "grey", "mild", "humid", "clear"),
}

GENRES: dict[str, tuple[str, ...]] = {
    "gazetteer": (
        "{town} lies about {n} kilometres {way} of {town}, on the old road to the coast.",
        "Farmers around {town} keep {animal} and grow {crop}, as they have for generations.",
        "The market square of {town} was paved after the great fire and is now closed to traffic.",
        "In {season} the footpath along the canal near {town} is popular with walkers.",
        "A small museum in {town} shows tools that were used by local weavers.",
        "The parish church has a wooden ceiling and a bell that came from {town}.",
        "Most people in {town} work in the dairy, at the quarry, or in the nearby city.",
    ),
    "letters": (
        "Dear {name}, the weather here has been {mood} since {day}, and we stay indoors a good deal.",
        "Your aunt sends her love and asks whether the {fruit} jam arrived safely.",
        "Yesterday {name} came to tea and told us about the journey to {town}.",
        "The dog has learned to open the kitchen door, which makes {name} laugh every time.",
        "We have painted the fence {colour}, though the neighbours would have liked another colour.",
        "I read the book you lent me twice and still think about its ending.",
        "Please write soon and tell us how the choir is getting on.",
    ),
    "minutes": (
        "{name} reported that the {part} will be repaired before the end of {season}.",
        "The committee thanked {name} for looking after the accounts during the holidays.",
        "It was agreed to move the next meeting to a {day} because of the fair in {town}.",
        "A member asked whether the new chairs could be delivered to the side entrance.",
        "{name} offered to speak to the {job} about the noise in the mornings.",
        "The proposal to plant {fruit} trees along the drive was put off until {season}.",
        "There were no further questions, and the chair moved on to the next item.",
    ),
    "fieldnotes": (
        "The morning was {mood}, with a light wind from the {way} and little cloud.",
        "We counted few birds on the lake, though {animal} grazed on the far bank.",
        "Water in the stream was lower than in {season}, and the stones were covered with moss.",
        "A {colour} butterfly rested on the thistles near the path to {town}.",
        "The soil under the {fruit} trees was dry, so the samples were taken deeper down.",
        "After lunch {name} walked the ridge and made sketches of the rock layers.",
        "By evening the rain had reached us and we packed up the instruments.",
    ),
    "shipping": (
        "The barge from {town} was late on {day} because the lock was being cleaned.",
        "Crates of {fruit} were unloaded first and taken to the {colour} shed.",
        "{name} checked the ropes and found that two of them needed to be replaced.",
        "Fog held up the ferry for most of the morning, and passengers waited in the hall.",
        "The crane was out of order again until a {job} from {town} came to see to it.",
        "Barrels of {crop} were stored dry and covered with canvas for the night.",
        "The tide was with us, so we passed the lighthouse well before dark.",
    ),
    "cookery": (
        "Wash the {fruit} well, cut it into quarters and leave it to stand in a cool place.",
        "Stir the dough with a wooden spoon until it no longer sticks to the bowl.",
        "In {season} most cooks in {town} add a little honey instead of sugar.",
        "Let the soup simmer gently, and do not put the lid on before the beans are soft.",
        "{name} always keeps a jar of pickled {fruit} at the back of the cupboard.",
        "Bread of {crop} needs a hotter oven and a longer rest than wheat bread.",
        "Serve it on a {colour} plate with plenty of fresh herbs and butter.",
    ),
}
UNSEEN = ("shipping", "cookery")


def sentence(chance: random.Random, template: str) -> str:
    """A template with each slot filled anew."""
    said = template
    for slot, values in _SLOTS.items():
        while f"{{{slot}}}" in said:
            said = said.replace(f"{{{slot}}}", chance.choice(values), 1)
    return said.replace("{n}", str(chance.randint(2, 90)))


def paragraphs(chance: random.Random, tokens: int, count: Callable[[str], int], *, tuning: bool) -> list[str]:
    """Paragraphs of three to seven sentences in one or two genres, of about ``tokens`` together."""
    genres = [genre for genre in GENRES if not (tuning and genre in UNSEEN)]
    chosen = chance.sample(genres, chance.choice((1, 2)))
    said: list[str] = []
    left = tokens
    while left > 0:
        pool = GENRES[chance.choice(chosen)]
        paragraph = " ".join(sentence(chance, t) for t in chance.sample(pool, chance.randint(3, len(pool))))
        said.append(paragraph)
        left -= count(paragraph) + 1
    return said


def hidden(chance: random.Random, hay: list[str], needle: str, depth: float) -> None:
    """Put a sentence between two of the sentences at about ``depth`` (0 front, 1 back) of ``hay``."""
    at = min(len(hay) - 1, int(depth * len(hay)))
    sentences = hay[at].split(". ")
    place = chance.randint(0, len(sentences))
    if place == len(sentences):
        hay[at] = f"{hay[at]} {needle}"
    else:
        sentences[place] = f"{needle} {sentences[place]}"
        hay[at] = ". ".join(sentences)
